"""How the sequence of a group is sharded: remembered per process group, never globally.

PyTorch's functions for sharding, attention and unsharding don't pass the layout from one to the
next. Here each of them asks the group, which knows the layout of every shard that it has made, and
how it was sharded last at these lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from flexcp.comm.agreement import Agreement
from flexcp.comm.gather import gather_shards
from flexcp.comm.process import ProcessTransport
from flexcp.compat._cp_balancers import (
    _create_default_load_balancer,
    _LoadBalancer,
    shard_sizes,
)
from flexcp.compat._cp_options import _RotateMethod
from flexcp.compat._cp_transport import CollectiveTransport, FunctionalTransport
from flexcp.eager import run_eagerly_on_cpu
from flexcp.errors import FlexCPError
from flexcp.layout import Layout
from flexcp.plan import Plan
from flexcp.torch_names import local_tensor_mode_is_on

_MOST_LAYOUTS = 16
"""Layouts that a group remembers."""


@dataclass(frozen=True)
class PlanKey:
    """What calls of attention have in common that one plan serves."""

    layout: str
    """The layout's fingerprint."""
    is_causal: bool
    method: _RotateMethod
    """How K and V travel."""
    batch_and_heads: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


_COUNTS = Agreement(
    "attend to the same sequence",
    "a look at how many rows each rank has",
    {},
    "call attention over the same mesh on every rank",
)


@dataclass(eq=False)
class CPGroup:
    """What is known of one process group: lives as long as the group."""

    mesh: DeviceMesh
    pairs: ProcessTransport
    """For uneven and small messages."""
    sharded: list[Layout] = field(default_factory=list)
    """Layouts that sequences were sharded by, the latest last."""
    shards: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    """The layout of each shard that is still in use."""
    open: list[list[Layout]] = field(default_factory=list)
    """Layouts of each open `context_parallel`, innermost last."""
    plans: dict[PlanKey, Plan] = field(default_factory=dict)
    """The plan of each kind of call; the latest last."""

    @cached_property
    def rounds_as_collectives(self) -> CollectiveTransport:
        """For rounds that tools which count collectives should see."""
        return CollectiveTransport(self.pairs)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.pairs.rank

    @property
    def size(self) -> int:
        """How many ranks."""
        return self.pairs.world_size

    def remember(self, layout: Layout) -> Layout:
        """Notes that a sequence has been sharded like this; the same object for equal layouts."""
        same = next((x for x in self.sharded if x == layout), layout)
        known = [x for x in self.sharded if x is not same]
        self.sharded[:] = [*known, same][-_MOST_LAYOUTS:]
        return same

    def _counts(self, rows: int, device: torch.device) -> Tensor:
        """int64 [ranks] How many rows each rank holds; every rank asks."""
        call = self.pairs.calls.begin(_COUNTS)
        counts = torch.full((self.size, 1), rows, device=device)
        others = [r for r in range(self.size) if r != self.rank]
        own = torch.full((1,), rows, device=device)
        # Pairwise: PyTorch has no such collective, and tools that count them should see none.
        self.pairs.exchange(
            [(r, own) for r in others],
            [(r, counts[r]) for r in others],
            label=call.passing("forward").round("rows", 0),
        ).wait()
        return counts.view(-1).cpu()

    def layout_of(
        self, rows: int, device: torch.device, *tensors: Tensor, last_is_meant: bool = False
    ) -> Layout:
        """The layout of a sequence of which this rank holds so many rows; every rank asks.

        Args:
            rows: Tokens of this rank.
            device: Where messages have to be.
            *tensors: What is sharded; if it is what sharding gave, there is nothing to guess.
            last_is_meant: Whether the layout that was sharded or attended with last is meant, also
                where shards of another are still alive.
        """
        counts = cache(lambda: self._counts(rows, device))
        found = self._known_layout(rows, counts, tensors, last_is_meant)
        if found is not None:
            return found
        seq_len = int(counts().sum())
        layouts = (default_layout(seq_len, self.size), chunked_layout(seq_len, self.size))
        usual = _fitting(layouts, counts())
        if usual:
            return usual[0]
        raise FlexCPError(
            f"shards of one sequence, such as {shard_sizes(seq_len, self.size)} tokens by rank",
            f"{counts().tolist()}",
            "shard with context_parallel or _context_parallel_shard on this mesh, or pass the "
            "load balancer",
        )

    def known_layout_of(self, rows: int, device: torch.device, *tensors: Tensor) -> Layout | None:
        """As `layout_of`, where the sequence was sharded here; None where a user has done it."""
        return self._known_layout(rows, cache(lambda: self._counts(rows, device)), tensors, False)

    def _known_layout(
        self,
        rows: int,
        counts: Callable[[], Tensor],
        tensors: Sequence[Tensor],
        last_is_meant: bool,
    ) -> Layout | None:
        known = _only([x for x in map(self._layout_of_shard, tensors) if x is not None])
        if known is not None and len(tensors) and int(known.counts[self.rank]) == rows:
            return known
        found = _only(_fitting(map(self._layout_of_shard, tensors), counts()))
        if found is not None:
            return found
        contexts = [layout for context in reversed(self.open) for layout in context]
        if _fitting(contexts, counts()):
            return _fitting(contexts, counts())[0]
        # What was sharded last is what is meant, unless shards of another layout are in use too.
        in_use = () if last_is_meant else {id(x): x for x in self.shards.values()}.values()
        return _only([*_fitting(self.sharded, counts())[-1:], *_fitting(in_use, counts())])

    def _layout_of_shard(self, x: Tensor) -> Layout | None:
        """The layout that a tensor, or the one that it is a view of, was sharded by."""
        found: Layout | None = self.shards.get(x)
        if found is None and x._base is not None:
            found = self.shards.get(x._base)
        return found


def _fitting(layouts: Iterable[Layout | None], counts: Tensor) -> list[Layout]:
    """Those that give every rank so many rows."""
    return [x for x in layouts if x is not None and torch.equal(x.counts, counts)]


def _only(layouts: Sequence[Layout]) -> Layout | None:
    """The layout, if there is one."""
    if not layouts:
        return None
    first = layouts[0]
    other = next((x for x in layouts if x is not first and x != first), None)
    if other is not None:
        raise FlexCPError(
            "tensors of this length to be sharded in one way, since attention can't see in which",
            f"shards of {first} and of {other} in use",
            "shard all of them with the same load balancer, or delete those of another batch "
            "before attention; context_parallel_unshard can be given the load balancer",
        )
    return first


# Kept by group rather than as a switch: it ends with the group, and groups don't see each other's.
_groups: WeakKeyDictionary[ProcessGroup, CPGroup] = WeakKeyDictionary()


def group_of(mesh: DeviceMesh) -> CPGroup:
    """What is known of the group of a mesh."""
    if not isinstance(mesh, DeviceMesh):
        raise FlexCPError(
            "a DeviceMesh, whose ranks are processes",
            f"{type(mesh).__name__}",
            "pass init_device_mesh(...); for simulated ranks use flexcp.make_plan and attention",
        )
    if local_tensor_mode_is_on():
        raise FlexCPError(
            "ranks that are processes",
            "torch's LocalTensorMode, in which one process stands for all ranks",
            "run it on processes; for simulated ranks use flexcp.testing.simulate",
        )
    if mesh.ndim != 1:
        raise FlexCPError(
            "a mesh of one dimension",
            f"one of shape {tuple(mesh.shape)}",
            "pass the dimension that the sequence is sharded over, such as mesh['cp']",
        )
    process_group = mesh.get_group()
    found = _groups.get(process_group)
    if found is None:
        found = CPGroup(mesh, FunctionalTransport.of_mesh(mesh))
        _groups[process_group] = found
    return found


def default_layout(seq_len: int, ranks: int) -> Layout:
    """The layout where nothing else is said: head-tail, unless that is switched off."""
    balancer = _create_default_load_balancer(seq_len, ranks, "cpu")
    return balanced_layout(balancer, seq_len, ranks)


@run_eagerly_on_cpu
def chunked_layout(seq_len: int, ranks: int) -> Layout:
    """Stretches as `torch.chunk` cuts them."""
    stop = torch.tensor(shard_sizes(seq_len, ranks)).cumsum(0).tolist()
    runs = [[(a, b)] for a, b in zip([0, *stop], stop, strict=False)]
    return Layout.of_runs(runs, seq_len=seq_len, name="contiguous")


@run_eagerly_on_cpu
def balanced_layout(balancer: _LoadBalancer | None, seq_len: int, ranks: int) -> Layout:
    """The layout of a load balancer, or of none."""
    order = None if balancer is None else balancer._generate_indices(restore=False)
    if order is None:
        return chunked_layout(seq_len, ranks)
    if order.ndim != 2:
        raise AssertionError(
            f"load balance index expects shape (1, seq_len) or (B, seq_len) but got {order.shape}."
        )
    if order.shape[1] != seq_len:
        raise FlexCPError(
            f"a sequence of {order.shape[1]} tokens, as {type(balancer).__name__} was made for",
            f"{seq_len}",
            "make the load balancer for the sequence that is sharded",
        )
    order = order.cpu().to(torch.int64)
    parts = order.split(shard_sizes(seq_len, ranks), dim=1)
    positions = [part[0] if order.shape[0] == 1 else part for part in parts]
    return Layout.of_positions(positions, name=type(balancer).__name__)


def dim_of(x: Tensor, dim: int) -> int:
    """A dimension counted from the front."""
    if not -x.dim() <= dim < x.dim():
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-x.dim()}, {x.dim() - 1}], but "
            f"got {dim})"
        )
    return dim % x.dim()


def shard(x: Tensor, dim: int, layout: Layout, rank: int) -> Tensor:
    """A rank's rows; differentiable."""
    dim = dim_of(x, dim)
    if layout.batch_elements > 1 and (dim == 0 or x.shape[0] != layout.batch_elements):
        raise ValueError(
            "Cannot rearrange buffer: load_balance_indices has shape "
            f"{(layout.batch_elements, layout.seq_len)}, but buffer has shape "
            f"{tuple(x.shape)}; the load balancer differs between batch "
            "elements, which must be dim 0."
        )
    return layout.shard(x, dim, rank=rank)


def unshard(x: Tensor, dim: int, layout: Layout, group: CPGroup) -> Tensor:
    """All rows in their original order; differentiable."""
    dim = dim_of(x, dim)
    if layout.batch_elements > 1 and (dim == 0 or x.shape[0] != layout.batch_elements):
        raise ValueError(
            "Cannot restore buffer: restore_indices has shape "
            f"{(layout.batch_elements, layout.seq_len)}, but the buffer has shape "
            f"{tuple(x.shape)}; the load balancer differs between batch "
            "elements, which must be dim 0."
        )
    counts, calls = layout.counts.tolist(), group.pairs.calls
    if x.shape[dim] != counts[group.rank]:
        error = FlexCPError(
            f"{counts[group.rank]} rows along dim {dim} on rank {group.rank}",
            f"shape {tuple(x.shape)}",
            "pass this rank's shard, and the load balancer that it was sharded with",
        )
        calls.refuse("unshard", str(error))
        raise error
    sizes = ["rows" if i == dim else str(n) for i, n in enumerate(x.shape)]
    facts = {
        "type": str(x.dtype),
        "shape": ", ".join(sizes),
        "load balancer": layout.fingerprint(),
    }
    call = calls.begin(
        Agreement(
            "unshard the same",
            "unshard",
            facts,
            "unshard the same kind of tensor with the same load balancer on every rank",
        )
    )
    return layout.unshard(gather_shards(x, dim, counts, group.pairs, call), dim)
