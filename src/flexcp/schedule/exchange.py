"""Exchange: exactly the rows that are needed, straight from owner to user, nothing twice.

Ranks fetch in the order of ring distance: at any time each sends to one and receives from one, so
nobody waits in a queue. As many distances go into one round as leave every rank at most as many
rows to receive as it owns: that bounds the memory. Under a full mask this is the ring's volume;
under a window a halo exchange.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.schedule.needs import Needs
from flexcp.schedule.tables import Pass, Tasks, Transfers


def exchange(needs: Needs, *, at_once: bool = False) -> tuple[Pass, Pass]:
    """Forward and backward.

    Args:
        needs: Who needs what.
        at_once: Fetch everything in one round before any work, as an all-gather does.
    """
    layout = needs.layout
    limit = max(1, int(layout.counts.max()) * layout.batch_elements)
    user, owner, start, stop = needs.by_owner
    distance = (user - owner) % max(layout.ranks, 1)
    rounds_of = _rounds(distance, user, stop - start, layout.ranks, limit)
    number = torch.zeros_like(distance) if at_once else rounds_of[distance]
    moves = Transfers.ordered(number, owner, user, start, stop)
    work = Tasks.after(moves, Tasks.of_layout(layout))
    rounds = int(moves.round.max()) + 1 if len(moves) else 1
    return Pass(rounds, moves, work), Pass(rounds, moves, work, moves.reversed())


def _rounds(distance: Tensor, user: Tensor, rows: Tensor, ranks: int, limit: int) -> Tensor:
    """int64 [ranks] The round, from 1 on, in which rows of each ring distance move."""
    table = torch.zeros(ranks * ranks, dtype=torch.int64)
    table.index_add_(0, distance * ranks + user, rows)
    table = table.view(ranks, ranks)
    used = (table > 0).any(1)
    rounds = torch.zeros(ranks, dtype=torch.int64)
    have = torch.zeros(ranks, dtype=torch.int64)
    number = 0
    for d in range(1, ranks):
        if not bool(used[d]):
            continue
        have = have + table[d]
        if number == 0 or int(have.max()) > limit:
            number, have = number + 1, table[d]
        rounds[d] = number
    return rounds
