"""Ulysses: swap rows for heads, so that each rank computes some heads over the whole sequence.

One group holds all ranks. Nothing moves between groups; the swap within the group is not a line of
a table but follows from the head slices: every rank sends each other rank that one's heads of its
own rows, and gets the outputs back the same way.
"""

from __future__ import annotations

import torch

from flexcp.layout import Layout
from flexcp.schedule.tables import Pass, Tasks, Transfers


def grouped(layout: Layout, group_size: int) -> Layout:
    """The layout of groups of `group_size` consecutive ranks.

    >>> from flexcp.layout import contiguous
    >>> grouped(contiguous(8, 4), 2).positions(1)
    tensor([4, 5, 6, 7])
    """
    if group_size == 1:
        return layout
    owner = torch.div(layout.rank, group_size, rounding_mode="floor")
    if layout.batch_elements > 1:  # rows of a group are kept by batch element
        order = torch.argsort(owner * layout.batch_elements + layout.element, stable=True)
    else:
        order = torch.arange(owner.numel())
    return Layout(
        layout.name,
        layout.seq_len,
        layout.ranks // group_size,
        layout.batch_elements,
        owner[order],
        layout.start[order],
        layout.stop[order],
    )


def ulysses(groups: Layout) -> tuple[Pass, Pass]:
    """Forward and backward of one group that has all rows."""
    work = Tasks.of_layout(groups)
    return Pass(1, Transfers.none(), work), Pass(1, Transfers.none(), work)
