"""Plan: masks, layout, schedules and their price; and what a rank does with its tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flexcp.comm.agreement import Agreement
from flexcp.comm.gather import gather_shards
from flexcp.comm.interface import Transport
from flexcp.comm.labels import CallLabel
from flexcp.errors import FlexCPError, quote, require, whole_number
from flexcp.graph_handles import GraphOwner, numbered_handle
from flexcp.grid import BlockGrid
from flexcp.layout import Layout
from flexcp.plan import shard_ops
from flexcp.plan.cost import Cost
from flexcp.plan.explain import explain, plan_as_data
from flexcp.plan.machine import Machine
from flexcp.plan.memo import PlanMemo
from flexcp.plan.mesh import Ranks
from flexcp.plan.rank_sizes import RankSizes, number_as_shape
from flexcp.plan.shape import AttentionShape
from flexcp.plan.stats import Stats, make_stats
from flexcp.plan.styles import UnappliedStyles
from flexcp.schedule import Schedule, check_schedule
from flexcp.torch_names import mark_varying


@dataclass(frozen=True, eq=False)
class Plan(GraphOwner):
    """Who owns which tokens, what moves when, and what it costs; the same on every rank.

    >>> import flexcp
    >>> from flexcp.plan import make_plan
    >>> plan = make_plan(flexcp.masks.causal(), 1024, 4, block_size=64)
    >>> plan.positions(0)[:3], plan.positions(0)[-3:]
    (tensor([0, 1, 2]), tensor([1021, 1022, 1023]))
    >>> plan.stats().imbalance
    1.0
    >>> plan.check()
    """

    grids: Mapping[str, BlockGrid]
    """The block grid of every mask, by name; a single mask has the name ""."""
    layout: Layout
    """Who owns which tokens."""
    schedules: Mapping[str, Schedule]
    """What moves when, for every mask."""
    costs: Mapping[str, Cost]
    """Predicted seconds, for every mask."""
    shape: AttentionShape
    """Heads, head dimension, type and batch that were planned for."""
    machine: Machine
    """What the price was computed for."""
    ranks: Ranks
    """The mesh."""
    considered: tuple[tuple[str, float], ...]
    """Layout and schedule of all that was priced, and predicted seconds: the chosen one, then the
    others, cheapest first."""
    rows: int | None = field(init=False, repr=False)
    """How many rows this rank owns; None if the plan was made from numbers."""
    sizes: Mapping[str, RankSizes] = field(init=False, repr=False)
    """What this rank holds during attention under every mask; empty if the plan was
    made from numbers."""
    _rows_as_shape: Tensor | None = field(init=False, repr=False)
    """`number_as_shape` of `rows`."""
    length_as_shape: Tensor = field(init=False, repr=False)
    """`number_as_shape` of the length of the sequence."""
    _varies: bool = field(init=False, repr=False)
    """Whether the next step's plan will give ranks other rows: a mask holds tensors, or rows are
    shared out unevenly."""
    graph_handle: Tensor = field(init=False, repr=False)
    """Stands for the plan inside compiled graphs; see `flexcp.graph_handles`."""
    memo: PlanMemo = field(init=False, repr=False)
    """What running the plan takes and is worked out once: programs of ranks, facts to agree on."""
    unapplied_styles: UnappliedStyles = field(
        init=False, repr=False, default_factory=UnappliedStyles
    )
    """Parallel styles that were made with this plan and that no module has yet."""

    def __post_init__(self) -> None:
        rank, heads = self.ranks.rank, (self.shape.num_heads, self.shape.num_kv_heads)
        sizes = {}
        if rank is not None:
            sizes = {name: RankSizes.of(s, rank, *heads) for name, s in self.schedules.items()}
        found = {
            "rows": None if rank is None else int(self.layout.counts[rank]),
            "sizes": sizes,
            "_rows_as_shape": None
            if rank is None
            else number_as_shape(int(self.layout.counts[rank])),
            "length_as_shape": number_as_shape(self.layout.seq_len),
            "_varies": any(grid.mask.nbytes for grid in self.grids.values())
            or bool((self.layout.counts != self.layout.counts[0]).any()),
            "graph_handle": numbered_handle(self),
            "memo": PlanMemo(),
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """All that was decided travels; the mesh, the rank and what was worked out do not."""
        return Plan, tuple(getattr(self, f.name) for f in fields(self) if f.init)

    def __copy__(self) -> Plan:
        """The plan itself: it never changes."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        """The plan itself: a copied module goes on with the mesh of the original."""
        return self

    def on(self, mesh: Any) -> Plan:
        """This plan, to be run on a mesh: if it was pickled, or made for a number of ranks.

        Args:
            mesh: A DeviceMesh, or the mesh that `testing.simulate` gives, of as many ranks as were
                planned for.

        >>> import flexcp
        >>> plan = flexcp.make_plan(flexcp.masks.causal(), 8, 2, layout="head_tail")
        >>> flexcp.testing.simulate(lambda mesh: plan.on(mesh).positions().tolist(), 2)
        [[0, 1, 6, 7], [2, 3, 4, 5]]
        """
        if mesh is self.ranks.mesh and mesh is not None:
            return self
        ranks = Ranks.of(mesh)
        if ranks.size != self.ranks.size:
            raise FlexCPError(
                f"a mesh of {self.ranks.size} ranks, as was planned for",
                f"one of {ranks.size}",
                "make the plan for the number of ranks that it will run on",
            )
        return replace(self, ranks=ranks.connected())

    @property
    def seq_len(self) -> int:
        """Tokens of the whole sequence."""
        return self.layout.seq_len

    @property
    def schedule(self) -> Schedule | Mapping[str, Schedule]:
        """The schedule; by name of the mask, if there are several."""
        return self.schedules if len(self.schedules) > 1 else next(iter(self.schedules.values()))

    def schedule_of(self, mask: str | None = None) -> Schedule:
        """The schedule of one mask, by its name."""
        return self.schedules[self.mask_name(mask)]

    def mask_name(self, mask: str | None = None) -> str:
        """The key of a mask in `grids` and `schedules`."""
        if mask is None and len(self.grids) == 1:
            return next(iter(self.grids))
        if not isinstance(mask, str) or mask not in self.grids:
            raise FlexCPError(
                f"one of this plan's masks: {', '.join(map(repr, self.grids))}",
                quote(mask),
                "pass mask= with the name that the plan was made with",
            )
        return mask

    def positions(self, rank: int | None = None) -> Tensor:
        """int64 [L] Global positions of a rank's rows; [B, L] if batch elements differ."""
        if rank is None:  # this rank's own: to shard a tensor by
            self.unapplied_styles.require_applied("plan.positions")
        return self.layout.positions(self._rank(rank))

    def shard(self, x: Tensor, dim: int, *, rank: int | None = None, batch_dim: int = 0) -> Tensor:
        """This rank's rows of a full tensor; differentiable.

        A ContextParallel that was made with the plan has to be applied to a module before.
        """
        if torch.compiler.is_compiling() and rank is None and self._rows_as_shape is not None:
            where = (dim % x.dim(), self._rank(None), batch_dim)
            # A shape, and not the number: that would tie the graph to it.
            rows = self._rows_as_shape.shape[0] - 2
            local: Tensor = shard_ops.shard(x, self.graph_handle, *where, rows)
            return local
        self.unapplied_styles.require_applied("plan.shard")
        found = self.layout.shard(x, dim, rank=self._rank(rank), batch_dim=batch_dim)
        if self._varies:
            mark_varying(found, dim % x.dim())
        return found

    def unshard(self, x: Tensor, dim: int, *, batch_dim: int = 0) -> Tensor:
        """All rows in their original order, on every rank; differentiable.

        Every rank gets the same tensor, and is taken to do the same with it: the gradient of a
        rank's rows is what that rank's own backward pass says of them, as for a sequence that was
        never sharded.
        """
        self.require_mesh()
        if torch.compiler.is_compiling():
            where = (dim % x.dim(), self._rank(None), batch_dim)
            length = self.length_as_shape.shape[0] - 2
            full: Tensor = shard_ops.unshard(x, self.graph_handle, *where, length)
            return full
        dim = self._dim_to_unshard(x, dim, batch_dim)
        call = self._agree_to_unshard(x, dim)
        parts = gather_shards(x, dim, self._counts, self.transport, call)
        return self.layout.unshard(parts, dim, batch_dim=batch_dim)

    def _dim_to_unshard(self, x: Tensor, dim: int, batch_dim: int) -> int:
        """The dimension of the rows, counted from the front; else it raises on all ranks."""
        try:
            require("what is put together", x, Tensor, "pass this rank's rows")
            if x.is_nested or x.dim() == 0:
                raise FlexCPError("a dense tensor with a dimension of rows", "another", "pad it")
            fix, dims = "pass a dimension of the tensor", x.dim()
            for name, given in (("batch_dim", batch_dim), ("dim", dim)):
                at = whole_number(name, given, at_least=-dims, at_most=dims - 1, fix=fix)
        except FlexCPError as error:
            self.transport.calls.refuse("unshard", str(error))
            raise
        return at % dims

    def _agree_to_unshard(self, x: Tensor, dim: int) -> CallLabel:
        """The call, if all ranks pass rows of the same kind of tensor; else it raises on all."""
        rank, calls = self._rank(None), self.transport.calls
        if x.shape[dim] != self.rows:
            error = FlexCPError(
                f"{self.rows} rows along dim {dim}, as rank {rank} owns",
                f"shape {tuple(x.shape)}",
                "pass the rows that plan.shard gives this rank",
            )
            calls.refuse("unshard", str(error))
            raise error
        sizes = tuple(-1 if i == dim else n for i, n in enumerate(x.shape))
        agreement = self.memo.kept(
            ("unshard", x.dtype, sizes),
            lambda: Agreement(
                "unshard the same",
                "unshard",
                {
                    "type": str(x.dtype),
                    "shape": ", ".join("rows" if n < 0 else str(n) for n in sizes),
                    "layout": self._layout_text,
                },
                "call plan.unshard with the same plan and the same kind of tensor on every rank",
            ),
        )
        return calls.begin(agreement)

    @cached_property
    def _counts(self) -> list[int]:
        """The rows of every rank."""
        counts: list[int] = self.layout.counts.tolist()
        return counts

    @property
    def transport(self) -> Transport:
        """How this rank reaches the others; raises as `require_mesh` does if it can't."""
        self.require_mesh()
        assert self.ranks.transport is not None
        return self.ranks.transport

    def require_mesh(self) -> None:
        """Raises if the plan was made from numbers, or pickled: there is nobody to run it with."""
        if self.ranks.rank is None or self.ranks.transport is None:
            pickled, numbers = "pickled, which drops the mesh", "made from numbers"
            raise FlexCPError(
                "a plan that was made with a mesh",
                f"one for {self.ranks.size} ranks that was "
                + (pickled if self.ranks.pickled else numbers),
                "call flexcp.make_plan, or plan.on, with a DeviceMesh or with the mesh that "
                "testing.simulate gives",
            )

    def _rank(self, rank: int | None) -> int:
        if rank is not None:
            return rank
        if self.ranks.rank is None:
            pickled = "pickled, which drops the rank"
            numbers = "made for a number of ranks and not for one of them"
            raise FlexCPError(
                f"a rank, since the plan was {pickled if self.ranks.pickled else numbers}",
                "none",
                "pass rank=, make the plan with a mesh, or put it on one: plan.on(mesh)",
            )
        return self.ranks.rank

    def stats(self) -> Stats:
        """Work, rows, bytes and predicted seconds."""
        return self._stats

    @cached_property
    def _layout_text(self) -> str:
        return self.layout.fingerprint()

    @cached_property
    def _stats(self) -> Stats:
        return make_stats(
            self.grids, self.schedules, self.costs, self.shape, self.machine.ranks_per_node
        )

    def check(self) -> None:
        """Raises FlexCPError if a schedule is not a correct attention."""
        if set(self.schedules) != set(self.grids):
            raise FlexCPError(
                f"a schedule for each of the masks {sorted(self.grids)}",
                f"schedules for {sorted(self.schedules)}",
                "make the plan with make_plan",
            )
        for name, schedule in self.schedules.items():
            if schedule.layout is not self.layout and schedule.layout != self.layout:
                raise FlexCPError(
                    f"a schedule on the plan's layout, {self.layout!r}",
                    f"one on {schedule.layout!r}" + (f" for mask {name!r}" if name else ""),
                    "make the plan with layout=, instead of putting another layout into one",
                )
            heads, kv_heads = self.shape.num_heads, self.shape.num_kv_heads
            check_schedule(schedule, [self.grids[name]], num_heads=heads, num_kv_heads=kv_heads)

    def explain(self) -> str:
        """What was chosen, why, and what it costs, for a person."""
        return explain(self)

    def to_json(self) -> str:
        """Everything about the plan but the masks' own code."""
        return json.dumps(plan_as_data(self))

    def fingerprint(self) -> str:
        """A short text that is equal on all ranks that made the same plan."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        data = {
            "layout": self._layout_text,
            "shape": str(asdict(self.shape)),
            "schedules": {
                n: (s.name, s.heads_group_size, len(s.forward.moves), *_if_several(s.head_parts))
                for n, s in self.schedules.items()
            },
            "runs": {
                n: [[int(_mixed(x)) for x in (r.row, r.start, r.stop, r.kind)] for r in g.runs]
                for n, g in self.grids.items()
            },
        }
        return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        what = ", ".join(dict.fromkeys(s.name for s in self.schedules.values()))
        return f"Plan({self.layout!r}, {what}, on {self.machine.name})"


def _if_several(parts: int) -> tuple[int, ...]:
    """Nothing for one part, as in the fingerprints of plans that know of no others."""
    return (parts,) if parts > 1 else ()


def _mixed(x: Tensor) -> Tensor:
    """A sum to which every entry adds in its own way, so that their order counts."""
    return (x.long() * (2 * torch.arange(x.numel()) + 1)).sum()
