"""What a plan costs, in numbers: work, rows and bytes of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexcp.grid import BlockGrid
from flexcp.layout import area_per_rank
from flexcp.layout.work import Work
from flexcp.plan.cost import Cost
from flexcp.plan.imbalance_bound import imbalance_bound
from flexcp.plan.shape import AttentionShape
from flexcp.plan.traffic import traffic
from flexcp.schedule import Schedule


@dataclass(frozen=True)
class Stats(Mapping[str, Any]):
    """Numbers of a plan; lists have one entry per rank, sums are over all of its masks.

    They are attributes, and a mapping from their names as well.

    >>> import flexcp
    >>> stats = flexcp.make_plan(flexcp.masks.causal(), 1024, 4).stats()
    >>> stats.imbalance == stats["imbalance"] == dict(stats)["imbalance"]
    True
    >>> "predicted_seconds" in stats
    True
    """

    area_per_rank: tuple[int, ...]
    """Allowed pairs, over batch elements and query heads."""
    imbalance: float
    """Largest over mean area."""
    imbalance_lower_bound: float
    """What no layout with even token counts can be below: none of one for all batch elements, or of
    one for each, as the plan has it."""
    tokens_received_per_rank: tuple[int, ...]
    """Rows of K and V that arrive in forward."""
    bytes_received_per_rank: tuple[int, ...]
    """Everything that arrives in forward: K and V, and with heads split also Q, output and lse.
    (Not the padding of an all-gather of uneven parts.)"""
    backward_bytes_received_per_rank: tuple[int, ...]
    """Everything that arrives in backward."""
    bytes_received_between_nodes_per_rank: tuple[int, ...]
    """Of what arrives in forward, what comes from ranks of other nodes."""
    backward_bytes_received_between_nodes_per_rank: tuple[int, ...]
    """Of what arrives in backward, what comes from ranks of other nodes."""
    bytes_held_per_rank: tuple[int, ...]
    """The memory that what others sent takes at most, for the mask that needs most of it: one
    round's rows and the next's; or all rows, until backward is done, if the schedule keeps them."""
    received_fraction: float
    """The most rows that a rank receives for one mask, relative to what an all-gather brings."""
    predicted_seconds: float
    """Forward and backward, on the plan's machine."""
    forward_seconds: float
    backward_seconds: float
    compute_seconds: float
    """What the slowest rank's work alone would take."""

    def __getitem__(self, name: str) -> Any:
        """A number by its name."""
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        """The names of all numbers."""
        return iter(self.__dataclass_fields__)

    def __len__(self) -> int:
        """How many there are."""
        return len(self.__dataclass_fields__)


def make_stats(
    grids: Mapping[str, BlockGrid],
    schedules: Mapping[str, Schedule],
    costs: Mapping[str, Cost],
    shape: AttentionShape,
    ranks_per_node: int | None = None,
) -> Stats:
    """Adds up what the schedules of all masks do; consecutive `ranks_per_node` ranks are a node."""
    areas = sum(areas_of(grids[name], schedules[name]) for name in grids)
    moved = [traffic(schedules[name], shape, ranks_per_node) for name in grids]
    assert isinstance(areas, Tensor)
    first = next(iter(schedules.values()))
    whole = first.layout.rows - int(first.layout.rows // max(1, first.ranks))
    most = max(int(t.kv_rows.max()) for t in moved)
    mean = float(areas.sum()) / areas.numel()
    return Stats(
        tuple(areas.tolist()),
        float(areas.max()) / mean if mean else 1.0,
        imbalance_bound(_works(grids, first.layout.batch_elements), first.groups.ranks),
        tuple(sum(t.kv_rows for t in moved).tolist()),  # type: ignore[union-attr]
        tuple(sum(t.forward for t in moved).tolist()),  # type: ignore[union-attr]
        tuple(sum(t.backward for t in moved).tolist()),  # type: ignore[union-attr]
        tuple(sum(t.forward_between_nodes for t in moved).tolist()),  # type: ignore[union-attr]
        tuple(sum(t.backward_between_nodes for t in moved).tolist()),  # type: ignore[union-attr]
        tuple(torch.stack([t.held for t in moved]).amax(0).tolist()),
        most / whole if whole else 0.0,
        sum(c.seconds for c in costs.values()),
        sum(c.forward for c in costs.values()),
        sum(c.backward for c in costs.values()),
        sum(c.compute for c in costs.values()),
    )


def _works(grids: Mapping[str, BlockGrid], elements: int) -> list[Work]:
    """The work of the whole batch, or of each batch element that has a layout of its own."""
    every = list(grids.values())
    return [Work.of(every)] if elements == 1 else [Work.of(every, b) for b in range(elements)]


def areas_of(grid: BlockGrid, schedule: Schedule) -> Tensor:
    """int64 [ranks] Exact pairs of each rank, for the heads that it computes."""
    if schedule.heads_group_size == 1:
        return area_per_rank([grid], schedule.layout)
    found = torch.zeros(schedule.groups.ranks, schedule.heads_group_size, dtype=torch.int64)
    known: dict[tuple[int, ...], Tensor] = {}
    for place, heads in enumerate(schedule.heads):
        of = grid.planes.of[:, heads.q.start : heads.q.stop]
        key = tuple(torch.bincount(of.reshape(-1), minlength=len(grid.runs)).tolist())
        if key not in known:
            known[key] = area_per_rank([grid], schedule.groups, heads=heads.q)
        found[:, place] = known[key]
    return found.reshape(-1)
