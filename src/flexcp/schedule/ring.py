"""Ring: K and V go round, one neighbour at a time, and every rank sees everything.

In round i a rank works on the rows of the rank i places before it. In backward the gradients of
those rows travel along with them, growing at every stop, until they are back with their owner.
"""

from __future__ import annotations

import torch

from flexcp.layout import Layout
from flexcp.layout.row_sets import expand
from flexcp.schedule.tables import Pass, Tasks, Transfers


def ring(layout: Layout) -> tuple[Pass, Pass]:
    """Forward and backward."""
    ranks = layout.ranks
    sets = layout.owned
    pointer = torch.searchsorted(sets.rank, torch.arange(ranks + 1))
    round_ = torch.arange(1, ranks).repeat_interleave(ranks)
    target = torch.arange(ranks).repeat(max(0, ranks - 1))
    origin = (target - round_) % ranks
    sizes = pointer[origin + 1] - pointer[origin]
    line, place = expand(sizes)
    run = pointer[origin[line]] + place
    start, stop = sets.start[run], sets.stop[run]
    moves = Transfers.ordered(round_[line], (target[line] - 1) % ranks, target[line], start, stop)
    returns = Transfers.ordered(round_[line], target[line], (target[line] + 1) % ranks, start, stop)
    work = Tasks.after(moves, Tasks.of_layout(layout))
    rounds = max(1, ranks)
    return Pass(rounds, moves, work), Pass(rounds, moves, work, returns)
