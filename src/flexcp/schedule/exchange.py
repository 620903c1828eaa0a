"""Exchange: exactly the rows that are needed, straight from owner to user, nothing twice.

Ranks fetch in the order of ring distance: at any time each sends to one and receives from one, so
nobody waits in a queue. In one round every rank receives at most as many rows as the largest rank
owns: that bounds the memory. Under a full mask this is the ring's volume;
under a window a halo exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.grid.analysis.indexing import order_of
from flexcp.layout.row_sets import expand
from flexcp.schedule.needs import Needs
from flexcp.schedule.tables import Pass, Tasks, Transfers


def exchange(
    needs: Needs, *, at_once: bool = False, few_rounds: int = 0, own_work: OwnWork | None = None
) -> tuple[Pass, Pass]:
    """Forward and backward. All ranks fetch from the same ring distances in a round.

    Args:
        needs: Who needs what.
        at_once: Fetch everything in one round before any work, as an all-gather does.
        few_rounds: If not 0: own rows first, then in this many rounds or in as many more as memory
            asks for an equal part of what every pair of ranks exchanges, so that no rank sends or
            receives more in one round than in another.
        own_work: With few rounds: the work of every rank's own rows. A rank for which that is more
            than its share of the first round does the rest where others' rows leave it time, so
            that all ranks are through with a round at the same time, and nobody waits for rows.
    """
    layout = needs.layout
    limit = max(1, int(layout.counts.max()) * layout.batch_elements)
    user, owner, start, stop = needs.by_owner
    distance = (user - owner) % max(layout.ranks, 1)
    if at_once:
        number = torch.zeros_like(distance)
    elif few_rounds and len(user):
        heavy = own_work.heavy(user, owner, start, stop) if own_work else None
        which, number, start, stop = even_parts(
            user, distance, start, stop, limit, few_rounds, heavy
        )
        user, owner = user[which], owner[which]
    else:
        number = _rounds(distance, user, stop - start, layout.ranks, limit)[distance]
    moves = Transfers.ordered(number, owner, user, start, stop)
    count = int(moves.round.max()) + 1 if len(moves) else 1
    own = Tasks.of_layout(layout)
    # With one more round than the first there is nothing that a late rank would hold up.
    if own_work and few_rounds and count > 2:
        own = own_work.spread(moves, count, layout.ranks)
    work = Tasks.after(moves, own)
    return Pass(count, moves, work), Pass(count, moves, work, moves.reversed())


@dataclass(frozen=True, eq=False)
class OwnWork:
    """How much of each rank's work needs no rows of others, and what any keys are to a rank."""

    rank: Tensor
    """int64 [N] Whose rows, never falling."""
    start: Tensor
    """int64 [N] First row of a short stretch that the rank owns."""
    stop: Tensor
    """int64 [N] Row after the last."""
    work: Tensor
    """float64 [N] Work of the rank against this stretch."""
    of_keys: Callable[[Tensor, Tensor, Tensor], Tensor]
    """float64 [N] Work of some ranks against stretches of keys, from and up to."""

    def by_round(self, tasks: Tasks, rounds: int, ranks: int) -> Tensor:
        """float64 [rounds, ranks] Work of some tasks."""
        work = self.of_keys(tasks.rank, tasks.start, tasks.stop)
        found = torch.zeros(rounds * ranks, dtype=torch.float64)
        return found.index_add_(0, tasks.round * ranks + tasks.rank, work).view(rounds, ranks)

    def heavy(self, user: Tensor, owner: Tensor, start: Tensor, stop: Tensor) -> Tensor:
        """Which stretches are more work per row than all that the owner sends the user."""
        _, message = torch.unique(user * (int(owner.max()) + 1) + owner, return_inverse=True)
        of = torch.zeros(int(message.max()) + 1, 2, dtype=torch.float64)
        both = torch.stack([self.of_keys(user, start, stop), (stop - start).double()], dim=1)
        work, rows = of.index_add_(0, message, both)[message].unbind(1)
        return both[:, 0] * rows > work * both[:, 1] * (1 + 1e-9)

    def spread(self, moves: Transfers, rounds: int, ranks: int) -> Tasks:
        """The first round gets its share of a rank's work; the rest fills up the others.

        They have the rows of others to compute with, and are made as even as can be.
        """
        arrived = Tasks(moves.round, moves.target, moves.start, moves.stop)
        others = self.by_round(arrived, rounds, ranks)
        own = torch.zeros_like(others[0]).index_add_(0, self.rank, self.work)
        first = torch.minimum(own, (own + others.sum(0)) / rounds)
        # Water in a vessel whose floor is the others' work: it is as high as the lowest of these.
        counts, floor = torch.arange(1, rounds).unsqueeze(1), others[1:]
        level = ((floor.sort(0).values.cumsum(0) + own - first) / counts).amin(0)
        edges = torch.cat([first.unsqueeze(0), (level - floor).clamp_(min=0.0)]).cumsum(0)
        done = self.work.cumsum(0) - (own.cumsum(0) - own)[self.rank] - self.work / 2
        round_ = (edges[:-1, self.rank] < done).sum(0)
        opens = torch.ones_like(round_, dtype=torch.bool)
        opens[1:] = (
            (round_.diff() != 0) | (self.rank.diff() != 0) | (self.start[1:] != self.stop[:-1])
        )
        closes = torch.ones_like(opens)
        closes[:-1] = opens[1:]
        found = (round_[opens], self.rank[opens], self.start[opens], self.stop[closes])
        order = order_of(found[0])
        return Tasks(*(x[order] for x in found))


def even_parts(
    user: Tensor,
    distance: Tensor,
    start: Tensor,
    stop: Tensor,
    limit: int,
    rounds: int,
    heavy: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stretches, cut so that each round has as much of every message: which, round, start, stop.

    A message is all that one rank sends to another; or two, if some of its stretches are `heavy`,
    and others are not. The cuts of short ones are staggered, so that the rows of a round are even
    as well. No rank receives more than `limit` rows in one. Every other message of a rank begins
    with its last rows: under a causal mask first rows are more work than last ones, and a rank with
    most of its work in some rounds would hold up the others.
    """
    pair = user * (int(distance.max()) + 1) + distance
    if heavy is not None:
        pair = 2 * pair + ~heavy
    order = order_of(pair)
    user, pair, start, stop = (x[order] for x in (user, pair, start, stop))
    ends = (stop - start).cumsum(0)
    begins = ends - (stop - start)
    opens = torch.ones_like(pair, dtype=torch.bool)
    opens[1:] = pair.diff() != 0
    message = opens.long().cumsum(0) - 1
    first = begins[opens]  # rows of all messages before each
    size = torch.cat([first[1:], ends[-1:]]) - first
    low, high = begins - first[message], ends - first[message]
    whose = user[opens]
    turn = torch.arange(whose.numel()) - torch.searchsorted(whose, whose)
    back = (turn % 2 == 1)[message]
    whole = size[message]
    low, high = torch.where(back, whole - high, low), torch.where(back, whole - low, high)
    received = torch.zeros(int(user.max()) + 1, dtype=torch.int64)
    received.index_add_(0, user, stop - start)
    rounds = max(rounds, -(-int(received.max()) // limit))
    while True:
        # Row t of a message of n rows is in the first round i with (i + 1) * n + s >= (t + 1) * k.
        s, n = (first % rounds)[message], whole
        begin, end = (
            -torch.div(s - (row + 1) * rounds, n, rounding_mode="floor") - 1
            for row in (low, high - 1)
        )
        which, place = expand(end - begin + 1)
        number = begin[which] + place
        edge = torch.div(number * n[which] + s[which], rounds, rounding_mode="floor")
        next_edge = torch.div((number + 1) * n[which] + s[which], rounds, rounding_mode="floor")
        cut_low, cut_high = torch.maximum(low[which], edge), torch.minimum(high[which], next_edge)
        filled = torch.zeros((int(user.max()) + 1) * rounds, dtype=torch.int64)
        filled.index_add_(0, user[which] * rounds + number, cut_high - cut_low)
        if int(filled.max()) <= limit:
            break
        rounds += 1 + rounds // 16  # few trials where many rounds of a few rows are needed
    kept = cut_low < cut_high
    which, number, cut_low, cut_high = (x[kept] for x in (which, number, cut_low, cut_high))
    origin = torch.where(back, stop + low, start - low)[which]
    begin = torch.where(back[which], origin - cut_high, origin + cut_low)
    end = torch.where(back[which], origin - cut_low, origin + cut_high)
    return order[which], number + 1, begin, end


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
