"""The program of a plane: its slabs cut into pieces, in the order in which they run.

A piece is either a large rectangle, which a fused op computes whole, or a strip: at most 512 rows
and one range of keys, with the few forbidden pairs at its edges, which batched matrix products
compute. Triangles are halved until they are small, so that what is not a rectangle is a thin
staircase along the diagonal. Where the fused op's own causal mode is faster, though it computes up
to 512 keys too many per row, a triangle is one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from flexcp.kernels.cuts import (
    BAND_ROWS,
    STRIP_ROWS,
    Strip,
    bands_of,
    cut_out,
    extra_keys,
    is_causal_square,
    stacked,
    strips_of,
)
from flexcp.kernels.interface import Plane, Slab

_STRIP_PAIRS = STRIP_ROWS * 2048
"""A strip with more pairs is cut into several ranges of keys."""
_PIECE_BYTES = 400
"""What a piece takes, as an object with ten fields."""
_PADDING = 16
"""Added to rows of 256, 512, ... scores: the columns of such rows share a few cache lines."""


@dataclass(frozen=True, eq=False)
class Forbidden:
    """Columns of a piece, counted from its first, in which some pairs may not attend."""

    c0: int
    c1: int
    pairs: Tensor
    """bool [rows, c1 - c0] True where the pair may not attend."""
    biases: dict[tuple[torch.dtype, torch.device], Tensor] = field(default_factory=dict)
    """What to add to scores of a type on a device, as far as it has been asked for."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A rectangle [q0, q1) x [k0, k1) to compute in one go."""

    q0: int
    q1: int
    k0: int
    k1: int
    fused: bool
    """Whether a fused op computes it; then nothing in it is forbidden, but what `causal` says."""
    first_write: bool
    """Whether no piece before it writes to any of its rows, so that it need not merge."""
    forbidden: tuple[Forbidden, ...] = ()
    has_fully_masked_rows: bool = False
    """Whether some row sees nothing in this piece."""
    causal: bool = False
    """Whether it is a square whose i-th row sees its first i + 1 keys, by the op's own mode."""
    blocks: int = 1
    """Of a band: its blocks of equally many rows, each of which sees a range of keys that begins as
    many keys after that of the block before; what is `forbidden` is so in each."""
    rows: int = field(init=False)
    """How many query rows."""
    keys: int = field(init=False)
    """How many keys."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", self.q1 - self.q0)
        object.__setattr__(self, "keys", self.k1 - self.k0)

    @property
    def computed(self) -> int:
        """Pairs that are computed, the forbidden ones among them included."""
        return self.rows * (self.keys if self.blocks == 1 else self.forbidden[0].c1)


@dataclass(frozen=True, eq=False)
class StripSizes:
    """How large the strips of a program are, which is what their workspace has to hold."""

    rows: int
    """Rows of the highest strip."""
    keys: int
    """Keys of the widest strip."""
    padded_pairs: int
    """Pairs of the largest strip, its rows as long as they are in memory."""
    typical_pairs: int
    """Pairs of the strip that a pair is in, on average."""
    q_span: tuple[int, int]
    """The first row of any strip, and one past the last."""
    k_span: tuple[int, int]
    """The first key of any strip, and one past the last."""

    @classmethod
    def of(cls, strips: tuple[Piece, ...]) -> StripSizes:
        """The sizes of some strips; zeros if there are none."""
        if not strips:
            return cls(0, 0, 0, 0, (0, 0), (0, 0))
        pairs = [p.rows * p.keys for p in strips]
        return cls(
            max(p.rows for p in strips),
            max(p.keys for p in strips),
            max(p.rows * row_stride(p.keys) for p in strips),
            sum(size * size for size in pairs) // sum(pairs),
            (min(p.q0 for p in strips), max(p.q1 for p in strips)),
            (min(p.k0 for p in strips), max(p.k1 for p in strips)),
        )


@dataclass(frozen=True, eq=False)
class Program:
    """All pieces of a plane: together they cover each allowed pair once."""

    pieces: tuple[Piece, ...]
    """Rectangles first, then strips."""
    writes_every_row: bool
    """Whether each row's first piece is a first write; then results may start uninitialised."""
    rectangles: tuple[Piece, ...] = field(init=False)
    """The pieces that a fused op computes."""
    strips: tuple[Piece, ...] = field(init=False)
    """The pieces that batched matrix products compute."""
    strip_sizes: StripSizes = field(init=False)
    """What the strips need of memory."""
    rectangles_meet_strips: bool = field(init=False)
    """Whether a rectangle is in rows between the first and the last of any strip."""
    nbytes: int = field(init=False)
    """Bytes of the pieces, and of their forbidden pairs as bits and as float32 biases, about."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rectangles", tuple(p for p in self.pieces if p.fused))
        object.__setattr__(self, "strips", tuple(p for p in self.pieces if not p.fused))
        object.__setattr__(self, "strip_sizes", StripSizes.of(self.strips))
        q0, q1 = self.strip_sizes.q_span
        meet = any(p.q0 < q1 and q0 < p.q1 for p in self.rectangles)
        object.__setattr__(self, "rectangles_meet_strips", meet)
        edges = {id(edge): edge.pairs.numel() for p in self.pieces for edge in p.forbidden}
        nbytes = _PIECE_BYTES * len(self.pieces) + (1 + 4) * sum(edges.values())
        object.__setattr__(self, "nbytes", nbytes)

    @property
    def computed(self) -> int:
        """Pairs that are computed, the forbidden ones among them included."""
        return sum(p.computed for p in self.pieces)


@lru_cache(maxsize=1024)
def row_stride(keys: int) -> int:
    """How far apart the rows of a strip's scores are in memory, in scores.

    >>> row_stride(100), row_stride(512)
    (100, 528)
    """
    return keys if keys % 256 else keys + _PADDING


def make_program(
    plane: Plane,
    q_len: int,
    *,
    fused: bool,
    causal_rows: int | None = None,
    bands: bool = False,
    kv_len: int | None = None,
) -> Program:
    """The pieces of a plane. Without `fused`, all of them are strips.

    From `causal_rows` on, a triangle is one piece for the fused op's causal mode; with `bands`, a
    sliding window is one piece for its calls with a bias. With `kv_len`, the number of keys that
    there are, strips are widened to even numbers of keys.

    >>> from flexcp.kernels.interface import causal_shapes
    >>> program = make_program(causal_shapes(4096).planes[0], 4096, fused=True)
    >>> [(p.q0, p.q1, p.k0, p.k1) for p in program.pieces if p.fused]
    [(1024, 2048, 0, 1024), (2048, 4096, 0, 2048), (3072, 4096, 2048, 3072)]
    >>> len([p for p in program.pieces if not p.fused])
    32
    """
    rectangles: list[Slab] = []
    squares: list[Slab] = []
    strips: list[Strip] = []
    banded, slabs = bands_of(plane.slabs) if bands else ([], plane.slabs)
    for stack in stacked(slabs):
        if causal_rows is not None and is_causal_square(stack, causal_rows):
            squares.append(stack.slabs[0])
            continue
        for rectangle, part in cut_out(stack) if fused else [(None, stack)]:
            if rectangle is not None:
                rectangles.append(rectangle)
            else:
                strips.extend(strips_of(part))
    covered = torch.zeros(q_len, dtype=torch.bool)
    written = torch.zeros(q_len, dtype=torch.bool)
    pieces: list[Piece] = []

    def add(q0: int, q1: int, k0: int, k1: int, **details: object) -> None:
        first_write = not bool(covered[q0:q1].any())
        covered[q0:q1] = True
        if first_write:
            written[q0:q1] = True
        pieces.append(Piece(q0, q1, k0, k1, first_write=first_write, **details))  # type: ignore[arg-type]

    for r in sorted(rectangles, key=lambda s: (s.q0, s.k0)):
        add(r.q0, r.q1, r.k0, r.k1, fused=True)
    for s in sorted(squares, key=lambda s: (s.q0, s.k0)):
        add(s.q0, s.q1, s.k0, s.k0 + s.rows, fused=True, causal=True)
    for s in sorted(banded, key=lambda s: (s.q0, s.k0)):
        before, after = extra_keys(*s.bounds, s.k1 - s.k0 + BAND_ROWS - 1, kv_len)
        edges = (_band_edges(s.k1 - s.k0, before, after),)
        k0, k1 = s.bounds[0] - before, s.bounds[1] + after
        add(s.q0, s.q1, k0, k1, fused=True, blocks=s.rows // BAND_ROWS, forbidden=edges)
    known: dict[object, list[tuple[int, int, tuple[Forbidden, ...], bool]]] = {}
    for strip in (strip.widened(kv_len) for strip in _joined_if_cheaper(strips)):
        for c0, c1, forbidden, fully_masked in _edges(strip, known):
            add(
                strip.q0,
                strip.q1,
                strip.k0 + c0,
                strip.k0 + c1,
                fused=False,
                forbidden=forbidden,
                has_fully_masked_rows=fully_masked,
            )
    for q0, q1, k0, k1, bits in _tile_runs(plane):
        forbidden, fully_masked = forbidden_columns(bits)
        add(q0, q1, k0, k1, fused=False, forbidden=forbidden, has_fully_masked_rows=fully_masked)
    return Program(tuple(pieces), bool(written.all()))


def _joined_if_cheaper(strips: list[Strip]) -> list[Strip]:
    """Small neighbours (short documents, say) computed together where that costs less."""
    result: list[Strip] = []
    for strip in sorted(strips, key=lambda s: (s.q0, s.k0)):
        if result:
            last = result[-1]
            both = Strip(
                min(last.q0, strip.q0),
                max(last.q1, strip.q1),
                min(last.k0, strip.k0),
                max(last.k1, strip.k1),
                last.slabs + strip.slabs,
            )
            if both.q1 - both.q0 <= STRIP_ROWS and both.cost <= last.cost + strip.cost:
                result[-1] = both
                continue
        result.append(strip)
    return result


def _edges(
    strip: Strip, known: dict[object, list[tuple[int, int, tuple[Forbidden, ...], bool]]]
) -> list[tuple[int, int, tuple[Forbidden, ...], bool]]:
    """Ranges of columns of the strip, each with what is forbidden in it.

    Strips that differ only in where they are share their edges.
    """
    key = (
        strip.q1 - strip.q0,
        strip.k1 - strip.k0,
        tuple(
            (
                s.q0 - strip.q0,
                s.q1 - strip.q0,
                s.k0 - strip.k0,
                s.k1 - strip.k0,
                s.k0_step,
                s.k1_step,
            )
            for s in strip.slabs
        ),
    )
    if key not in known:
        allowed = torch.zeros(strip.q1 - strip.q0, strip.k1 - strip.k0, dtype=torch.bool)
        column = torch.arange(strip.k0, strip.k1)
        for s in strip.slabs:
            i = torch.arange(s.rows)[:, None]
            inside = (column >= s.k0 + i * s.k0_step) & (column < s.k1 + i * s.k1_step)
            allowed[s.q0 - strip.q0 : s.q1 - strip.q0] |= inside
        width = max(1, _STRIP_PAIRS // allowed.shape[0])
        known[key] = [
            (c0, min(c0 + width, allowed.shape[1]), *forbidden_columns(allowed[:, c0 : c0 + width]))
            for c0 in range(0, allowed.shape[1], width)
        ]
    return known[key]


def _band_edges(keys: int, before: int, after: int) -> Forbidden:
    """What is forbidden in a block of a band whose rows see so many keys each, of some more."""
    column = torch.arange(before + keys + BAND_ROWS - 1 + after)
    first = before + torch.arange(BAND_ROWS)[:, None]
    return Forbidden(0, column.numel(), (column < first) | (column >= first + keys))


def forbidden_columns(allowed: Tensor) -> tuple[tuple[Forbidden, ...], bool]:
    """What may not attend, by ranges of columns; and whether some row sees nothing at all."""
    some = (~allowed.all(dim=0)).nonzero()[:, 0]
    if some.numel() == 0:
        return (), False
    breaks = (some.diff() > STRIP_ROWS).nonzero()[:, 0]
    first = torch.cat([some[:1], some[breaks + 1]]).tolist()
    last = torch.cat([some[breaks], some[-1:]]).tolist()
    ranges = tuple(
        Forbidden(c0, c1 + 1, (~allowed[:, c0 : c1 + 1]).contiguous())
        for c0, c1 in zip(first, last, strict=True)
    )
    return ranges, not bool(allowed.any(dim=1).all())


def _tile_runs(plane: Plane) -> Iterator[tuple[int, int, int, int, Tensor]]:
    """Tiles side by side, joined up to the size of a strip."""
    tiles = sorted(plane.tiles, key=lambda t: (t.q0, t.k0))
    at = 0
    while at < len(tiles):
        run = [tiles[at]]
        while at + len(run) < len(tiles):
            after = tiles[at + len(run)]
            if (after.q0, after.q1, after.k0) != (run[0].q0, run[0].q1, run[-1].k1):
                break
            if (after.q1 - after.q0) * (after.k1 - run[0].k0) > _STRIP_PAIRS:
                break
            run.append(after)
        bits = torch.cat([t.bits for t in run], dim=1)
        yield run[0].q0, run[0].q1, run[0].k0, run[-1].k1, bits
        at += len(run)
