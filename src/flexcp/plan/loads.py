"""What all schedules on a layout share: how much work each rank has, and which KV rows it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexcp.grid import BlockGrid
from flexcp.grid.analysis.indexing import take
from flexcp.grid.rows import runs_of_rows
from flexcp.layout import Layout, area_per_rank
from flexcp.layout.needed_rows import Pieces, joined_sets
from flexcp.layout.row_sets import row_sets, without
from flexcp.plan.problem import Problem
from flexcp.plan.work_profile import WorkProfile
from flexcp.schedule import Needs
from flexcp.schedule.ulysses import grouped


@dataclass(frozen=True, eq=False)
class LayoutLoads:
    """The load that a layout gives its ranks under every mask: work, and KV rows to receive."""

    layout: Layout
    grids: Sequence[BlockGrid]
    """The masks."""
    group_size: int
    """Consecutive ranks of the smallest group that work and needs are known for; also known for
    multiples of it."""
    work: Mapping[str, WorkProfile]
    """By mask."""
    needs: Mapping[str, Needs]
    """By mask; empty for schedules that move all KV rows, whoever needs them."""
    of_groups: dict[tuple[str, int], Needs] = field(default_factory=dict)
    """What groups of more ranks need, once that was asked for; by mask and ranks of a group."""

    @classmethod
    def of(
        cls, problem: Problem, layout: Layout, schedule: str, group_size: int = 1
    ) -> LayoutLoads:
        """Measures the work, and finds the KV rows that are needed, of one layout."""
        groups = grouped(layout, group_size)
        asks = schedule not in ("ring", "allgather", "ulysses")
        work = {name: WorkProfile.of([grid], groups) for name, grid in problem.grids.items()}
        needs = {n: Needs.of([grid], groups) for n, grid in problem.grids.items() if asks}
        return cls(layout, tuple(problem.grids.values()), group_size, work, needs)

    def work_of(self, name: str, group_size: int) -> WorkProfile:
        """The work of groups of `group_size` ranks under a mask."""
        return self.work[name].grouped(group_size // self.group_size)

    def needs_of(self, name: str, group_size: int) -> Needs:
        """What groups of `group_size` ranks need under a mask."""
        if group_size == self.group_size:
            return self.needs[name]
        key = (name, group_size)
        if key not in self.of_groups:
            groups, times = grouped(self.layout, group_size), group_size // self.group_size
            self.of_groups[key] = self.needs[name].grouped(groups, times)
        return self.of_groups[key]

    def imbalance(self, group_size: int, layout: Layout | None = None) -> float:
        """Largest over mean work of groups of `group_size` ranks, on this or another layout."""
        areas = area_per_rank(self.grids, grouped(layout or self.layout, group_size)).double()
        return float(areas.max()) / max(float(areas.mean()), 1e-9)

    def asks_for(self, share: float) -> bool:
        """Whether groups need more than such a share of all rows of the others, under all masks."""
        return bool(self.needs) and all(needs.exceed(share) for needs in self.needs.values())

    def seconds_of_rows(
        self, problem: Problem, name: str, group_size: int, *, relayed: bool = False
    ) -> Tensor:
        """float64 [2, groups] What the rows that each needs under a mask take at least, once.

        Those of its own node, and those of others, which come at the same time. With `relayed`,
        what several groups of a node need of others comes to one of them, and as much to each.
        """
        machine, shape, needs = problem.machine, problem.shape, self.needs_of(name, group_size)
        user, owner, start, stop = needs.by_owner
        row = shape.kv_bytes(-(-shape.num_kv_heads // group_size))
        row *= shape.batch if self.layout.batch_elements == 1 else 1
        node = torch.arange(needs.layout.ranks) * group_size // machine.ranks_per_node
        far = take(node, user) != take(node, owner)
        bandwidths = machine.intra_bandwidth, machine.inter_bandwidth
        if machine.ranks_per_node % group_size and group_size % machine.ranks_per_node:
            bandwidths = (max(bandwidths),) * 2  # where the ends of a message are depends on heads
        found = [
            torch.bincount(user, (stop - start) * at, needs.layout.ranks) * (row / bandwidth)
            for at, bandwidth in zip((~far, far), bandwidths, strict=True)
        ]
        if relayed:
            once = row_sets(take(node, user[far]), start[far], stop[far])
            counts = once.counts(int(node[-1]) + 1) / torch.bincount(node)
            found[1] = torch.minimum(found[1], take(counts, node) * (row / bandwidths[1]))
        return torch.stack(found)

    def seconds_received(self, problem: Problem) -> float:
        """What the rows take that a rank needs of others, under all masks, if none share heads."""
        found = torch.zeros(self.layout.ranks, dtype=torch.float64)
        for name in self.needs:
            found += self.seconds_of_rows(problem, name, 1).sum(0)
        return float(found.max())

    def share_rows(self, problem: Problem) -> bool:
        """Whether ranks of one node need the same rows of other nodes, under some mask."""
        ranks_per_node = problem.machine.ranks_per_node
        for needs in self.needs.values() if ranks_per_node > 1 else ():
            user, owner, start, stop = needs.by_owner
            node, home = (
                torch.div(x, ranks_per_node, rounding_mode="floor") for x in (user, owner)
            )
            far = node != home
            once = row_sets(node[far], start[far], stop[far])
            if int((once.stop - once.start).sum()) < int((stop - start)[far].sum()):
                return True
        return False


def rows_in_tiles(grids: Sequence[BlockGrid], layout: Layout) -> Tensor:
    """int64 [ranks] Rows of others in tiles that a rank's queries look into: no fewer than needed.

    For a layout that is the same for all batch elements.
    """
    found = []
    for grid in grids:
        pieces, size = Pieces.of(layout, 0, grid.block_size[0]), grid.block_size[1]
        for runs in grid.runs:
            at, run = runs_of_rows(runs, pieces.block)
            stop = (runs.stop[run] * size).clamp(max=grid.kv_len)
            found.append(row_sets(pieces.rank[at], runs.start[run] * size, stop))
    return without(joined_sets(found), layout.owned).counts(layout.ranks)
