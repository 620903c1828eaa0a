"""Hierarchical exchange: rows cross between nodes once, and are passed on within the node.

Where several ranks of a node need rows of another node, each of them fetches a part from the
owner, and in the next round passes it on to the others. Gradients take the same ways back: ranks of
the node return theirs to the one that passed the rows on, and it sends the sum home. Within a node,
and where one rank alone needs a row, this is the exchange.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.grid.analysis.indexing import order_of, take
from flexcp.layout import Layout
from flexcp.layout.row_sets import expand
from flexcp.schedule.exchange import OwnWork, even_parts
from flexcp.schedule.needs import Needs
from flexcp.schedule.tables import Pass, Tasks, Transfers


@dataclass(frozen=True, eq=False)
class Relays:
    """Who fetches which rows and who passes them on, and in which rounds."""

    forward: Pass
    fetched: Transfers
    """Rows that come straight from their owner."""
    relayed: Tensor
    """bool [N] Which of those are passed on."""
    passed: Transfers
    """Rows that come from another rank of the node, a round after it fetched them."""

    @classmethod
    def of(cls, ways: Ways, own_work: OwnWork | None = None, few_rounds: int = 1) -> Relays:
        """What moves when: in so many rounds, or in more if memory asks for them.

        The work of every rank's own rows, `own_work`, is spread over rounds.
        """
        layout, heavy = ways.layout, None
        limit = max(1, int(layout.counts.max()) * layout.batch_elements)
        fetched, passed = Transfers.none(), Transfers.none()
        relayed = torch.zeros(0, dtype=torch.bool)
        if own_work and len(ways.user):
            heavy = own_work.heavy(ways.user, ways.owner, ways.start, ways.stop)
        rounds = few_rounds if len(ways.user) else 0
        while rounds:
            distance = (ways.user - ways.owner) % layout.ranks
            which, number, start, stop = even_parts(
                ways.user, distance, ways.start, ways.stop, limit, rounds, heavy
            )
            user, others = take(ways.user, which), take(ways.others, which)
            fetched = Transfers(number, take(ways.owner, which), user, start, stop)
            relayed = others > 0
            part, place = expand(others)
            target = take(ways.other, take(ways.first_other, take(which, part)) + place)
            number, source, start, stop = (take(x, part) for x in (number, user, start, stop))
            passed = Transfers(number + 1, source, target, start, stop)
            most = _most_at_once(fetched, passed, layout.ranks)
            if most <= limit or rounds > few_rounds + layout.ranks:
                break
            tried = int(fetched.round.max())
            rounds = max(rounds + 1, tried + 1, tried * most // limit)
        moves = _joined(fetched, passed)
        count = int(moves.round.max()) + 1 if len(moves) else 1
        own = Tasks.of_layout(layout)
        if own_work and count > 2:
            own = own_work.spread(moves, count, layout.ranks)
        return cls(Pass(count, moves, Tasks.after(moves, own)), fetched, relayed, passed)

    def backward(self, *, keep: bool) -> Pass:
        """The way back of gradients.

        With `keep`, a rank has the rows that it received in forward: then it takes the rounds in
        the other order, so that those who passed rows on come last.
        """
        fetched, passed = self.fetched, self.passed
        count, moves, work = self.forward.rounds, self.forward.moves, self.forward.work
        if keep:
            last = count - 1
            order = order_of(last - work.round)
            columns = (last - work.round, work.rank, work.start, work.stop)
            home = _joined(_back(fetched, last - fetched.round), _back(passed, last - passed.round))
            tasks = Tasks(*(take(x, order) for x in columns))
            return Pass(count, Transfers.none(), tasks, home)
        # What was passed on is computed a round later; its gradients are there a round after that.
        back = _back(fetched, fetched.round + 2 * self.relayed)
        home = _joined(back, _back(passed, passed.round))
        rounds = max(count, int(home.round.max()) + 1) if len(home) else count
        return Pass(rounds, moves, work, home)


@dataclass(frozen=True, eq=False)
class Ways:
    """Stretches of rows that come straight from their owner, and to whom they are passed on."""

    layout: Layout
    """Who owns what."""
    user: Tensor
    owner: Tensor
    start: Tensor
    stop: Tensor
    others: Tensor
    """int64 [N] How many ranks each is passed on to."""
    first_other: Tensor
    """int64 [N] Where those begin in `other`."""
    other: Tensor

    @classmethod
    def of(cls, needs: Needs, ranks_per_node: int) -> Ways:
        """Consecutive `ranks_per_node` ranks are a node; the last may have fewer.

        Ranks of a node that need the same rows of other nodes fetch an equal part of them each.

        All of those rows, one after the other, are cut in as many parts as there are such ranks:
        most stretches come whole, to one of them.
        """
        user, owner, start, stop = needs.by_owner
        node, wide = torch.div(user, ranks_per_node, rounding_mode="floor"), needs.layout.rows + 1
        far = node != torch.div(owner, ranks_per_node, rounding_mode="floor")
        begin, end = (node * wide + start)[far], (node * wide + stop)[far]
        # Segments of rows that the same ranks of a node need, with one line for each of these.
        edges = torch.unique(torch.cat([begin, end]))
        first = torch.searchsorted(edges, begin)
        line, place = expand(torch.searchsorted(edges, end) - first)
        segment = take(first, line) + place
        who, whose = (take(x[far], line) for x in (user, owner))
        order = order_of(segment * needs.layout.ranks + who)
        segment, who, whose = (take(x, order) for x in (segment, who, whose))
        segment, inverse, users = torch.unique_consecutive(
            segment, return_inverse=True, return_counts=True
        )
        opens = users.cumsum(0) - users
        turn = torch.arange(who.numel()) - take(opens, inverse)
        at, size = take(edges, segment), take(edges.diff(), segment)
        # Segments that the same ranks need follow each other; which are the same, their bits tell.
        bits = torch.zeros_like(at).index_add_(0, inverse, 1 << (who % ranks_per_node % 62))
        home = torch.div(at, wide, rounding_mode="floor")
        _, same = torch.unique(torch.stack([home, bits]), dim=1, return_inverse=True)
        low, high = _parts_of_turns(same, size, users, inverse, turn)
        kept = (low < high).nonzero().view(-1)
        everyone = who
        inverse, turn, who, whose, low, high = (
            take(x, kept) for x in (inverse, turn, who, whose, low, high)
        )
        # The others of a segment: all of its lines but the own.
        others = take(users, inverse) - 1
        some, spot = expand(others)
        spot = spot + (spot >= take(turn, some))
        other = take(everyone, take(take(opens, inverse), some) + spot)
        at = take(at - home * wide, inverse)
        near, none = ~far, torch.zeros(int((~far).sum()), dtype=torch.int64)
        return cls(
            needs.layout,
            torch.cat([user[near], who]),
            torch.cat([owner[near], whose]),
            torch.cat([start[near], at + low]),
            torch.cat([stop[near], at + high]),
            torch.cat([none, others]),
            torch.cat([none, others.cumsum(0) - others]),
            other,
        )


def _parts_of_turns(
    same: Tensor, size: Tensor, users: Tensor, segment: Tensor, turn: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows of a segment, from and up to, that a user has in its turn.

    All rows of segments that are the `same`, in their order, are cut into a part for every user.
    """
    order = order_of(same)
    rows = torch.zeros_like(size).index_add_(0, same, size)
    before = torch.zeros_like(size)
    before[order] = take(size, order).cumsum(0) - take(size, order)
    before -= take(rows.cumsum(0) - rows, same)
    many, total, first, most = (take(x, segment) for x in (users, take(rows, same), before, size))
    low, high = (
        torch.minimum(
            (torch.div(total * i, many, rounding_mode="floor") - first).clamp(min=0), most
        )
        for i in (turn, turn + 1)
    )
    return low, high


def _joined(a: Transfers, b: Transfers) -> Transfers:
    names = ("round", "source", "target", "start", "stop")
    return Transfers.ordered(*(torch.cat([getattr(a, n), getattr(b, n)]) for n in names))


def _back(table: Transfers, round_: Tensor) -> Transfers:
    """What was received is sent back, in other rounds."""
    return Transfers(round_, table.target, table.source, table.start, table.stop)


def _most_at_once(fetched: Transfers, passed: Transfers, ranks: int) -> int:
    """Rows that a rank receives in one round, at most."""
    rounds = max(int(x.round.max()) for x in (fetched, passed) if len(x)) + 1
    filled = torch.zeros(rounds * ranks, dtype=torch.int64)
    for moves in (fetched, passed):
        filled.index_add_(0, moves.round * ranks + moves.target, moves.rows)
    return int(filled.max())
