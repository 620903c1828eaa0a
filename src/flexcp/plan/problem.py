"""What is to be planned, and the layouts that there are for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flexcp.errors import FlexCPError, quote
from flexcp.grid import BlockGrid
from flexcp.layout import (
    Layout,
    balanced,
    contiguous,
    head_tail,
    per_document_head_tail,
    ptrr,
    striped,
)
from flexcp.layout.balance.search import elements_that_differ
from flexcp.layout.row_sets import cut
from flexcp.layout.rules import even_edges
from flexcp.layout.work import Work
from flexcp.plan.machine import Machine
from flexcp.plan.mesh import Ranks
from flexcp.plan.shape import AttentionShape

PASSES = 3.0
"""Work of the rest of the model in both passes, over that of forward: gradients of what a matrix
product takes and of its weights are a product each."""
LAYOUTS = ("auto", "contiguous", "head_tail", "striped", "per_document", "ptrr", "balanced")
"""The names of all layouts."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Masks, ranks, shape and machine: all that layouts and schedules are chosen by."""

    grids: Mapping[str, BlockGrid]
    """The block grid of every mask, by name."""
    ranks: Ranks
    """Who shares the sequence."""
    shape: AttentionShape
    """Heads, head dimension, type and batch."""
    machine: Machine
    """What compute and transfers cost."""
    flops_per_token: float = 0.0
    """Floating-point operations per token of the rest of the model, forward."""
    token_slack: float | None = None
    """Share of the mean by which token counts may differ from it; None: by no more than a block."""

    @property
    def seq_len(self) -> int:
        """How many tokens the sequence has."""
        return next(iter(self.grids.values())).q_len

    @property
    def block(self) -> int:
        """Rows of a block."""
        return next(iter(self.grids.values())).block_size[0]

    def pairs_per_row(self, group_size: int = 1) -> float:
        """Pairs, over all heads, that a rank computes while it receives one row of K and V.

        Or a group of ranks that share heads: each its own part, and no less than one kv head.
        """
        heads = -(-self.shape.num_kv_heads // group_size) * group_size
        row = self.shape.kv_bytes(heads) * self.shape.batch
        seconds = row / self.machine.share_of_link(self.ranks.size)
        return seconds * self.machine.flops / self.shape.flops_per_pair

    @property
    def pairs_per_round(self) -> float:
        """Pairs, over all heads, that a rank computes while a first row arrives, in both passes."""
        machine = self.machine
        seconds = 2 * (machine.latency + machine.message + machine.launch)
        return seconds * machine.flops / self.shape.flops_per_pair / (1 + machine.backward)

    @property
    def pairs_per_token(self) -> int:
        """Pairs that take as long as a token in the rest of the model, in both passes."""
        per_pair = self.shape.flops_per_pair * (1 + self.machine.backward)
        return round(self.flops_per_token * PASSES / per_pair)

    def seconds_from_other_nodes(self, rows: float, group_size: int) -> float:
        """What so many rows of K and V take, of which a rank's own node has a share, to arrive.

        `group_size` ranks share the heads, so that each receives its part of them.
        """
        near = min(self.machine.ranks_per_node, self.ranks.size) / self.ranks.size * self.seq_len
        row = self.shape.kv_bytes(-(-self.shape.num_kv_heads // group_size)) * self.shape.batch
        return max(0.0, rows - near) * row / self.machine.share_of_link(self.ranks.size)


def named_layout(name: str, problem: Problem, ranks: int, group_size: int = 1) -> Layout:
    """A layout by its name, for ranks or for groups of ranks; "auto" is the balanced one."""
    grids, length, block = list(problem.grids.values()), problem.seq_len, problem.block
    if name in ("auto", "balanced"):
        return balanced(
            grids,
            ranks,
            pairs_per_row=problem.pairs_per_row(group_size),
            pairs_per_round=problem.pairs_per_round * group_size,
            pairs_per_token=problem.pairs_per_token,
            token_slack=problem.token_slack,
            ranks_per_node=max(1, problem.machine.ranks_per_node // group_size),
        )
    if name == "contiguous":
        return contiguous(length, ranks)
    if name == "head_tail":
        return head_tail(length, ranks)
    if name == "striped":
        return striped(length, ranks, stripe=min(block, max(1, length // ranks)))
    if name in ("per_document", "ptrr"):
        elements = elements_that_differ(grids)
        if elements == 1:
            return _by_work(name, Work.of(grids), ranks)
        works = (Work.of(grids, element) for element in range(elements))
        return Layout.stacked([_by_work(name, work, ranks, exact_counts=True) for work in works])
    raise FlexCPError(
        f"a layout among {', '.join(LAYOUTS)}, or a Layout",
        quote(name),
        "pass one of those names, or a Layout made for this sequence",
    )


def _by_work(name: str, work: Work, ranks: int, *, exact_counts: bool = False) -> Layout:
    """A layout that depends on the masks: for one batch element, or for all together."""
    if name == "ptrr":
        return ptrr(
            work.blocks, work.seq_len, ranks, block_size=work.block, exact_counts=exact_counts
        )
    edges = torch.cat([torch.tensor([0]), work.seams, torch.tensor([work.seq_len])])
    return per_document_head_tail(edges.diff().tolist(), ranks)


def split_groups(groups: Layout, group_size: int) -> Layout:
    """Each group's rows, shared evenly by its ranks in order.

    >>> split_groups(contiguous(8, 2), 2).positions(1)
    tensor([2, 3])
    """
    elements, stop = groups.batch_elements, (groups.stop - groups.start).cumsum(0)
    start = stop - (groups.stop - groups.start)
    sizes = [even_edges(count, group_size).diff() for count in groups.counts.tolist()]
    ends = torch.cat([part for size in sizes for part in [size] * elements]).cumsum(0)
    run, part, begin, end = cut(start, stop, torch.cat([ends.new_zeros(1), ends[:-1]]), ends)
    rank = part // (elements * group_size) * group_size + part % group_size
    order = torch.argsort(rank, stable=True)
    order = order[(end > begin)[order]]
    first, length = groups.start[run] + begin - start[run], end - begin
    return Layout(
        groups.name,
        groups.seq_len,
        groups.ranks * group_size,
        elements,
        rank[order],
        first[order],
        (first + length)[order],
    )
