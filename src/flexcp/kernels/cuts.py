"""Cuts: slabs that continue each other, cut into the largest rectangles and a rest for strips.

A causal triangle, a window, a staircase of blocks and any mixture of them are cut the same way:
the keys that all rows of a stack see are a rectangle; if there are too few, its two halves are
tried.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from flexcp.kernels.interface import Slab

STRIP_ROWS = 128
"""Rows of a strip along an edge: fewer compute fewer forbidden pairs, more make better products."""
_FUSED_ROWS = 768
"""The CPU op works on 256 rows at a time from here on; below, strips are as fast."""
_FUSED_KEYS = 512
_FUSED_SHARE = 0.6
"""Of a stack's pairs: a smaller rectangle is not worth computing its rows in several pieces."""
_EVEN = 64
_VECTOR = 16
"""Scores of a vector, and of a cache line, in float32."""
_WIDENED = 256
"""Keys from which a strip is widened to whole vectors."""
_TRIANGLE = 1024
"""Rows up to which a stack without a large rectangle is computed by strips alone."""
BAND_ROWS = 32
"""Rows of a band's blocks: the fewest that the CPU op works on at a time, since each block
computes as many pairs per row that are forbidden. With a window of 1,024 that takes a quarter less
than strips."""
_BAND_BLOCKS = 8
_BAND_KEYS = range(64, 8193)
"""The shortest band, and the narrowest and the widest, that is computed as such: beyond, most of it
is in large rectangles, and what says where its edges are would take megabytes."""
_CALL = 4096
"""What starting a piece costs, in pairs per head."""
_EFFICIENCY = {512: 1.05, STRIP_ROWS: 1.0, 64: 0.88, 32: 0.7, 16: 0.45}
"""Speed of strips by their rows, relative to the usual ones. The highest are for rectangles: along
an edge that slants they compute too many forbidden pairs."""


@dataclass(frozen=True)
class Stack:
    """Slabs on consecutive rows: each row is in one of them."""

    slabs: tuple[Slab, ...]

    @property
    def q0(self) -> int:
        """First row."""
        return self.slabs[0].q0

    @property
    def q1(self) -> int:
        """One past the last row."""
        return self.slabs[-1].q1

    @property
    def rows(self) -> int:
        """How many rows."""
        return self.q1 - self.q0

    @cached_property
    def area(self) -> int:
        """How many pairs."""
        return sum(s.area for s in self.slabs)

    def cut(self, q0: int, q1: int) -> Stack:
        """The part in rows [q0, q1)."""
        return Stack(
            tuple(
                s.cut(max(s.q0, q0), min(s.q1, q1)) for s in self.slabs if s.q0 < q1 and s.q1 > q0
            )
        )


@dataclass(frozen=True)
class Strip:
    """Rows [q0, q1) and the keys [k0, k1) that any of them sees."""

    q0: int
    q1: int
    k0: int
    k1: int
    slabs: tuple[Slab, ...]

    def widened(self, kv_len: int | None) -> Strip:
        """With as many keys as make rows of whole vectors, if there are that many.

        These are a tenth faster than rows that begin anywhere, and cost a few forbidden pairs.
        """
        if self.k1 - self.k0 < _WIDENED:
            return self
        before, after = extra_keys(self.k0, self.k1, self.k1 - self.k0, kv_len)
        return replace(self, k0=self.k0 - before, k1=self.k1 + after)

    @property
    def cost(self) -> float:
        """In pairs, as if all strips were as fast."""
        return _CALL + (self.q1 - self.q0) * (self.k1 - self.k0)


def extra_keys(k0: int, k1: int, row: int, kv_len: int | None) -> tuple[int, int]:
    """How many keys before k0 and after k1 make a row of so many scores one of whole vectors.

    None, if there are not as many.

    >>> extra_keys(3, 100, 27, kv_len=102), extra_keys(3, 100, 27, kv_len=101)
    ((3, 2), (0, 0))
    """
    short = -row % _VECTOR
    before = min(short, k0)
    after = short - before
    return (before, after) if kv_len is not None and k1 + after <= kv_len else (0, 0)


def stacked(slabs: tuple[Slab, ...]) -> list[Stack]:
    """Slabs whose keys overlap where their rows meet, taken together.

    >>> [len(s.slabs) for s in stacked((Slab(0, 4, 0, 4), Slab(4, 8, 0, 8), Slab(8, 12, 8, 12)))]
    [2, 1]
    """
    done: list[list[Slab]] = []
    ending: dict[int, list[list[Slab]]] = defaultdict(list)
    for slab in sorted(slabs, key=lambda s: (s.q0, s.k0)):
        mine: list[Slab] | None = None
        for stack in ending[slab.q0]:
            k0, k1 = _range(stack[-1], stack[-1].rows - 1)
            if k0 < slab.k1 and slab.k0 < k1:
                mine = stack
                break
        if mine is None:
            mine = []
            done.append(mine)
        else:
            ending[slab.q0] = [stack for stack in ending[slab.q0] if stack is not mine]
        mine.append(slab)
        ending[slab.q1].append(mine)
    return [Stack(tuple(stack)) for stack in done]


def is_causal_square(stack: Stack, least: int) -> bool:
    """Whether a stack is a triangle of so many rows: its i-th sees the first i + 1 of as many keys.

    >>> is_causal_square(Stack((Slab(100, 1400, 100, 101, 0, 1),)), 1024)
    True
    """
    first = stack.slabs[0]
    return (
        len(stack.slabs) == 1
        and stack.rows >= least
        and (first.k1 - first.k0, first.k0_step, first.k1_step) == (1, 0, 1)
    )


def bands_of(slabs: tuple[Slab, ...]) -> tuple[list[Slab], tuple[Slab, ...]]:
    """The slabs that are bands, each of whole blocks of rows; and all that is left.

    >>> bands_of((Slab(0, 1000, 0, 300, 1, 1),))
    ([Slab(q0=0, q1=992, k0=0, k1=300, k0_step=1, k1_step=1)], \
(Slab(q0=992, q1=1000, k0=992, k1=1292, k0_step=1, k1_step=1),))
    """
    bands: list[Slab] = []
    others: list[Slab] = []
    for slab in slabs:
        blocks = slab.rows // BAND_ROWS
        is_band = (slab.k0_step, slab.k1_step) == (1, 1) and slab.k1 - slab.k0 in _BAND_KEYS
        if not is_band or blocks < _BAND_BLOCKS:
            others.append(slab)
            continue
        end = slab.q0 + blocks * BAND_ROWS
        bands.append(slab.cut(slab.q0, end))
        if end < slab.q1:
            others.append(slab.cut(end, slab.q1))
    return bands, tuple(others)


def cut_out(stack: Stack) -> Iterator[tuple[Slab | None, Stack]]:
    """Rectangles for a fused op, each as (rectangle, its stack), and rests, as (None, stack)."""
    if stack.rows < _FUSED_ROWS:
        yield None, stack
        return
    ends = [_range(s, i) for s in stack.slabs for i in (0, s.rows - 1)]
    k0, k1 = max(start for start, _ in ends), min(stop for _, stop in ends)
    # Where an edge slants, what is left keeps all rows this way, and begins at an even address.
    if any(start != k0 for start, _ in ends):
        k0 = -(-k0 // _EVEN) * _EVEN
    if any(stop != k1 for _, stop in ends):
        k1 = (k1 - 1) // _EVEN * _EVEN
    rectangle = Slab(stack.q0, stack.q1, k0, k1)
    if k1 - k0 >= _FUSED_KEYS and rectangle.area >= _FUSED_SHARE * stack.area:
        yield rectangle, Stack((rectangle,))
        for rest in (*_before(stack, k0), *_after(stack, k1)):
            yield from cut_out(rest)
    elif stack.rows > _TRIANGLE:
        middle = stack.q0 + -(-stack.rows // (2 * STRIP_ROWS)) * STRIP_ROWS
        yield from cut_out(stack.cut(stack.q0, middle))
        yield from cut_out(stack.cut(middle, stack.q1))
    else:
        yield None, stack


def strips_of(stack: Stack) -> list[Strip]:
    """The stack in strips of the number of rows that costs least, across its slabs or in each."""
    found: list[list[Strip]] = []
    costs: list[float] = []
    for rows, efficiency in _EFFICIENCY.items():
        ways = [[stack]] if len(stack.slabs) == 1 else [[stack], [Stack((s,)) for s in stack.slabs]]
        for way in ways:
            strips = [strip for part in way for strip in _every(part, rows)]
            found.append(strips)
            costs.append(sum(_CALL + (strip.cost - _CALL) / efficiency for strip in strips))
    return found[costs.index(min(costs))]


def _every(stack: Stack, rows: int) -> Iterator[Strip]:
    at = 0
    for q0 in range(stack.q0, stack.q1, rows):
        q1 = min(q0 + rows, stack.q1)
        while stack.slabs[at].q1 <= q0:
            at += 1
        parts = []
        for slab in stack.slabs[at:]:
            if slab.q0 >= q1:
                break
            parts.append(slab.cut(max(slab.q0, q0), min(slab.q1, q1)))
        bounds = [part.bounds for part in parts]
        yield Strip(q0, q1, min(k0 for k0, _ in bounds), max(k1 for _, k1 in bounds), tuple(parts))


def _range(slab: Slab, i: int) -> tuple[int, int]:
    """What the i-th row of a slab sees."""
    return slab.k0 + i * slab.k0_step, slab.k1 + i * slab.k1_step


def _before(stack: Stack, key: int) -> list[Stack]:
    """What rows see before a key that all of them see."""
    kept = []
    for s in stack.slabs:
        first, last = _rows_below(s.k0, s.k0_step, s.rows, key)
        if first < last:
            start = s.k0 + first * s.k0_step
            kept.append(Slab(s.q0 + first, s.q0 + last, start, key, s.k0_step, 0))
    return stacked(tuple(kept))


def _after(stack: Stack, key: int) -> list[Stack]:
    """What rows see from a key on that is the last for some of them."""
    kept = []
    for s in stack.slabs:
        first, last = _rows_below(-s.k1, -s.k1_step, s.rows, -key)
        if first < last:
            stop = s.k1 + first * s.k1_step
            kept.append(Slab(s.q0 + first, s.q0 + last, key, stop, 0, s.k1_step))
    return stacked(tuple(kept))


def _rows_below(value: int, step: int, rows: int, limit: int) -> tuple[int, int]:
    """The range of i in [0, rows) with value + i * step < limit."""
    if step == 0:
        return (0, rows) if value < limit else (0, 0)
    if step > 0:
        return 0, max(0, min(rows, -((value - limit) // step)))
    return max(0, min(rows, (value - limit) // -step + 1)), rows
