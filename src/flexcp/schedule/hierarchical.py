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

from flexcp.grid.analysis.indexing import take
from flexcp.layout.row_sets import expand
from flexcp.schedule.exchange import OwnWork, even_parts
from flexcp.schedule.needs import Needs
from flexcp.schedule.tables import Pass, Tasks, Transfers


@dataclass(frozen=True, eq=False)
class Relays:
    """Who fetches which rows and who passes them on, in as many rounds as memory asks for."""

    forward: Pass
    fetched: Transfers
    """Rows that come straight from their owner."""
    relayed: Tensor
    """bool [N] Which of those are passed on."""
    passed: Transfers
    """Rows that come from another rank of the node, a round after it fetched them."""

    @classmethod
    def of(cls, needs: Needs, ranks_per_node: int, own_work: OwnWork | None = None) -> Relays:
        """Consecutive `ranks_per_node` ranks are a node; the last may have fewer.

        The work of every rank's own rows, `own_work`, is spread over rounds.
        """
        layout = needs.layout
        ways = _Ways.of(needs, ranks_per_node)
        limit = max(1, int(layout.counts.max()) * layout.batch_elements)
        fetched, passed = Transfers.none(), Transfers.none()
        relayed = torch.zeros(0, dtype=torch.bool)
        rounds = 1 if len(ways.user) else 0
        while rounds:
            distance = (ways.user - ways.owner) % layout.ranks
            which, number, start, stop = even_parts(
                ways.user, distance, ways.start, ways.stop, limit, rounds
            )
            user, others = take(ways.user, which), take(ways.others, which)
            fetched = Transfers(number, take(ways.owner, which), user, start, stop)
            relayed = others > 0
            part, place = expand(others)
            target = take(ways.other, take(ways.first_other, take(which, part)) + place)
            number, source, start, stop = (take(x, part) for x in (number, user, start, stop))
            passed = Transfers(number + 1, source, target, start, stop)
            most = _most_at_once(fetched, passed, layout.ranks)
            if most <= limit or rounds > layout.ranks:
                break
            tried = int(fetched.round.max())
            rounds = max(rounds + 1, tried + 1, tried * most // limit)
        moves = _joined(fetched, passed)
        count = int(moves.round.max()) + 1 if len(moves) else 1
        own = own_work.spread(count) if own_work and count > 2 else Tasks.of_layout(layout)
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
            order = torch.argsort(last - work.round, stable=True)
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
class _Ways:
    """Stretches of rows that come straight from their owner, and to whom they are passed on."""

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
    def of(cls, needs: Needs, ranks_per_node: int) -> _Ways:
        """Every user of a row that comes from another node fetches an equal part of it."""
        user, owner, start, stop = needs.by_owner
        node, wide = torch.div(user, ranks_per_node, rounding_mode="floor"), needs.layout.rows + 1
        far = node != torch.div(owner, ranks_per_node, rounding_mode="floor")
        begin, end = (node * wide + start)[far], (node * wide + stop)[far]
        # Segments of rows that the same ranks of a node need, with one line for each of these.
        edges = torch.unique(torch.cat([begin, end]))
        first = torch.searchsorted(edges, begin)
        line, place = expand(torch.searchsorted(edges, end) - first)
        segment = first[line] + place
        order = torch.argsort(segment * needs.layout.ranks + user[far][line])
        segment, who, whose = segment[order], user[far][line][order], owner[far][line][order]
        offset = (node * wide)[far][line][order]
        _, inverse, users = torch.unique_consecutive(
            segment, return_inverse=True, return_counts=True
        )
        turn = torch.arange(segment.numel()) - (users.cumsum(0) - users)[inverse]
        a, size, many = edges[segment], (edges[1:] - edges[:-1])[segment], users[inverse]
        low = torch.div(size * turn, many, rounding_mode="floor")
        high = torch.div(size * (turn + 1), many, rounding_mode="floor")
        # The others of a segment: all of its lines but the own.
        some, spot = expand(many - 1)
        spot = spot + (spot >= turn[some])
        other = who[(users.cumsum(0) - users)[inverse][some] + spot]
        near, none = ~far, torch.zeros(int((~far).sum()), dtype=torch.int64)
        filled = low < high
        return cls(
            torch.cat([user[near], who[filled]]),
            torch.cat([owner[near], whose[filled]]),
            torch.cat([start[near], (a - offset + low)[filled]]),
            torch.cat([stop[near], (a - offset + high)[filled]]),
            torch.cat([none, (many - 1)[filled]]),
            torch.cat([none, ((many - 1).cumsum(0) - (many - 1))[filled]]),
            other,
        )


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
