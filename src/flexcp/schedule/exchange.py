"""Exchange: exactly the rows that are needed, straight from owner to user, nothing twice.

Ranks fetch in the order of ring distance: at any time each sends to one and receives from one, so
nobody waits in a queue. In one round every rank receives at most as many rows as the largest rank
owns: that bounds the memory. Under a full mask this is the ring's volume;
under a window a halo exchange.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.layout.row_sets import expand
from flexcp.schedule.needs import Needs
from flexcp.schedule.tables import Pass, Tasks, Transfers


def exchange(needs: Needs, *, at_once: bool = False, few_rounds: bool = False) -> tuple[Pass, Pass]:
    """Forward and backward. All ranks fetch from the same ring distances in a round.

    Args:
        needs: Who needs what.
        at_once: Fetch everything in one round before any work, as an all-gather does.
        few_rounds: Every rank fills its rounds by itself, so that there are as few as memory
            allows, and nobody waits for who has more to fetch.
    """
    layout = needs.layout
    limit = max(1, int(layout.counts.max()) * layout.batch_elements)
    user, owner, start, stop = needs.by_owner
    distance = (user - owner) % max(layout.ranks, 1)
    if at_once:
        number = torch.zeros_like(distance)
    elif few_rounds:
        which, number, start, stop = _filled(user, distance, start, stop, limit)
        user, owner = user[which], owner[which]
    else:
        number = _rounds(distance, user, stop - start, layout.ranks, limit)[distance]
    moves = Transfers.ordered(number, owner, user, start, stop)
    work = Tasks.after(moves, Tasks.of_layout(layout))
    count = int(moves.round.max()) + 1 if len(moves) else 1
    return Pass(count, moves, work), Pass(count, moves, work, moves.reversed())


def _filled(
    user: Tensor, distance: Tensor, start: Tensor, stop: Tensor, limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stretches, cut where a user's round is full: which they are of, round, start and stop."""
    order = torch.argsort(
        user * (int(distance.max()) + 1 if len(user) else 1) + distance, stable=True
    )
    user, start, stop = user[order], start[order], stop[order]
    ends = (stop - start).cumsum(0)
    first = torch.ones_like(user, dtype=torch.bool)
    first[1:] = user.diff() != 0
    begins = ends - (stop - start)
    base = begins[first][first.long().cumsum(0) - 1] if len(user) else begins
    low, high = begins - base, ends - base  # counted within what the user receives
    parts = torch.div(high - 1, limit, rounding_mode="floor") - torch.div(
        low, limit, rounding_mode="floor"
    )
    which, place = expand(parts + 1)
    number = torch.div(low[which], limit, rounding_mode="floor") + place
    cut_low = torch.maximum(low[which], number * limit)
    cut_high = torch.minimum(high[which], (number + 1) * limit)
    shift = start[which] - low[which]
    return order[which], number + 1, cut_low + shift, cut_high + shift


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
