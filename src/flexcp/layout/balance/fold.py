"""Filling ranks from two ends: each takes heavy rows and light rows, so that work and counts agree.

Heavy rows have more work than the mean row, light ones less. A rank that takes only light rows has
too little work, one that takes only heavy rows too much: somewhere between is the mix with exactly
its share of both tokens and work. The rest then has the same mean, so the next rank finds its mix
too, whatever the order. That leaves the order free for locality:

- Ranks work through one group of rows (a document) after the other, the largest first, its heavy
  rows from the end and its light rows from the start. For a causal mask that is the exact zigzag.
- Its light rows are shared evenly by the ranks that work on it, since they have to be sent to all
  of them. Rows of small documents fill up the rest: they need little from elsewhere.
- When a group ends within a rank, a group that needs few rows follows, so that no rank needs the
  rows of two large ones.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flexcp.layout.balance.level import exchanged, with_even_work
from flexcp.layout.balance.repair import repaired
from flexcp.layout.balance.row_groups import RowGroup, make_row_groups
from flexcp.layout.balance.seeds import Filling, Taken
from flexcp.layout.layout import Layout
from flexcp.layout.rules import joined
from flexcp.layout.work import Work

_UNDER = 100
"""A rank at the border of two large groups may stay below its share, as long as that makes the
others' larger by no more than this fraction."""
_SLACK = 50
"""By this fraction ranks may have too much work before small documents are exchanged."""
_WAYS = (
    (False, False, True),
    (True, True, False),
    (False, True, True),
    (False, True, False),
    (False, False, False),
)
"""Ways to deal out documents: whether those that fit are taken whole, and what `Filling` is told.
None of them is best for all packs."""
_WAYS_OF_ROWS = _WAYS[:2]
"""Those that differ where all rows of a document have the same work."""
_MOST_UNITS = 1 << 14
"""No further way is tried once this many pieces have been dealt out."""
_EVEN_TO = 80
"""Work that is off by more than this fraction is uneven."""
_CUTS = 8
"""By this fraction more is taken to be received after exchanges, which cut small documents."""
_FEWER = 8
"""Token counts may be lower by most of a block, and by this fraction of the mean, where work would
otherwise be off by much. Few ranks have rows that heavy, so that the others' counts need to be only
a little higher."""


def fold(work: Work, ranks: int, *, exact_counts: bool = False) -> Layout:
    """The layout with equal token counts and equal work, and little traffic.

    Args:
        work: What each row costs.
        ranks: How many ranks share the rows.
        exact_counts: Token counts depend on nothing but length and ranks, as they must where batch
            elements have layouts of their own; otherwise they may differ by up to a block where
            rows are very heavy.

    >>> import flexcp
    >>> grid = flexcp.build_block_grid(flexcp.masks.causal(), 64, block_size=4)
    >>> layout = fold(Work.of([grid]), 4)
    >>> layout.positions(1)
    tensor([ 8,  9, 10, 11, 12, 13, 14, 15, 48, 49, 50, 51, 52, 53, 54, 55])
    """
    with _no_cycles():
        best = _best(make_row_groups(work, ranks), work, ranks, exact_counts)
        if _badness(best, work, ranks)[0]:
            best = with_even_work(best, work.block, exact_counts=exact_counts)
        pieces = [
            piece
            for rank, own in enumerate(best)
            for piece in sorted((rank, unit.start, unit.stop) for _, unit in own)
        ]
    table = torch.tensor(pieces, dtype=torch.int64).reshape(-1, 3)
    return joined("balanced", work.seq_len, ranks, *table.unbind(1))


@contextmanager
def _no_cycles() -> Iterator[None]:
    """Keeps Python from looking for cycles meanwhile: a third of the time, and there are none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _best(groups: list[RowGroup], work: Work, ranks: int, exact_counts: bool) -> list[list[Taken]]:
    """What each rank gets, dealt out in several ways of which the best is kept."""
    mean, tokens = int(work.before[-1]) // ranks, work.seq_len // ranks
    most = mean * (_UNDER + 1) // _UNDER
    parted = any(g.heavy and g.light for g in groups if not g.small)
    whole = [
        g.number
        for g in groups
        if not g.small and g.tokens * 8 <= tokens * 7 and g.area * 4 <= mean * 3
    ]
    good = (False, max(g.largest_document for g in groups) - tokens + tokens // 8)
    found: list[tuple[tuple[bool, int], list[list[Taken]], list[list[Taken]]]] = []
    ways = [way for way in _WAYS if (whole or not way[0]) and (parted or way in _WAYS_OF_ROWS)]
    for number, (takes_whole, sharp, level) in enumerate(ways, start=1):
        to_fill = [g.copy() for g in groups]
        chosen = [to_fill[i] for i in whole] if takes_whole else []
        filling = Filling(to_fill, chosen, sharp=sharp, level=level)
        parts = _dealt(filling, work, ranks, exact_counts)
        if len(groups) == 1:
            return parts
        found.append((*_judged(repaired(parts, most, 0), most, work, ranks), parts))
        units = sum(len(own) for own in parts)
        if found[-1][0] <= good or units * number > _MOST_UNITS:
            break
    bad, best, parts = min(found, key=lambda one: one[0])
    if bad > good:
        bolder = _judged(repaired(parts, most, mean // _SLACK), most, work, ranks)
        best = min((bad, best), bolder, key=lambda one: one[0])[1]
    return best


def _judged(
    parts: list[list[Taken]], most: int, work: Work, ranks: int
) -> tuple[tuple[bool, int], list[list[Taken]]]:
    """How bad it is, and what each rank gets: made even by exchanges if it was not."""
    bad = _badness(parts, work, ranks)
    if not bad[0]:
        return bad, parts
    parts = exchanged(parts, most)
    uneven, received = _badness(parts, work, ranks)
    return (uneven, received + received // _CUTS), parts


def _dealt(filling: Filling, work: Work, ranks: int, exact_counts: bool) -> list[list[Taken]]:
    """What each rank gets."""
    left, rows = int(work.before[-1]), work.seq_len
    most = left * (_UNDER + 1) // _UNDER // ranks
    even, ceiling = rows // ranks, -(-rows // ranks)
    fewer = 0 if exact_counts else min((work.block - 1) * 7 // 8, even // _FEWER)
    more = min(work.block - 1 - fewer, fewer)
    parts: list[list[Taken]] = []
    for rank in range(ranks):
        rest = ranks - rank - 1
        own = filling.fill(rows // (rest + 1), left // (rest + 1), left - most * rest)
        limits = (
            max(even - fewer, rows - rest * (ceiling + more)),
            min(ceiling + more, rows - rest * (even - fewer)),
        )
        if fewer:
            own = filling.adjust(own, left // (rest + 1), limits)
        left -= sum(unit.area for _, unit in own)
        rows -= sum(unit.tokens for _, unit in own)
        parts.append(own)
    return parts


def _badness(parts: list[list[Taken]], work: Work, ranks: int) -> tuple[bool, int]:
    """Whether work is uneven, and the rows that a rank receives at most, about."""
    most = max(sum(unit.area for _, unit in own) for own in parts)
    received = 0
    for own in parts:
        needed_rows: dict[int, int] = {}
        for group, unit in own:
            needed_rows[group.number] = max(needed_rows.get(group.number, 0), unit.needed_rows)
        rows = sum(unit.tokens for group, unit in own if not group.small)
        needed = sum(
            needed_rows[g.number] for g in {g.number: g for g, _ in own}.values() if not g.small
        )
        received = max(received, needed - rows)
    return most * ranks * _EVEN_TO > int(work.before[-1]) * (_EVEN_TO + 1), received
