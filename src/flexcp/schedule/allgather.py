"""All-gather: everybody gets all of K and V at once, computes, and keeps them for backward."""

from __future__ import annotations

import torch

from flexcp.layout import Layout
from flexcp.schedule.needs import everything
from flexcp.schedule.tables import Pass, Tasks, Transfers


def allgather(layout: Layout) -> tuple[Pass, Pass]:
    """Forward and backward; backward only sends gradients home, as a reduce-scatter would."""
    user, owner, start, stop = everything(layout)
    moves = Transfers.ordered(torch.zeros_like(user), owner, user, start, stop)
    users = torch.nonzero(layout.counts > 0).squeeze(1)
    zero = torch.zeros_like(users)
    work = Tasks(zero, users, zero, torch.full_like(users, layout.rows))
    return Pass(1, moves, work), Pass(1, Transfers.none(), work, moves.reversed())
