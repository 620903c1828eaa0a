"""Tile lists: a mask as data for kernels that are compiled once, made from `Shapes` on the host.

A kernel's program computes one line of tiles: a query tile against key tiles, or the other way
around for the gradients of keys. Its lists name the tiles that are full, and those that are partial
together with the number of their bit pattern. Patterns are shared: a causal mask has one, a window
two or three. Lists are made in time proportional to the tiles that they name; where full tiles are
named by runs, to the outline of the mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from flexcp.errors import FlexCPError
from flexcp.kernels.interface import Plane, Shapes
from flexcp.kernels.patterns import distinct_patterns, transposed

By = Literal["query", "key"]

MOST_TILES = 2**31 - 1
"""Kernels count tiles in 32 bits."""


@dataclass(frozen=True, eq=False)
class TileLists:
    """The tiles of all planes, as int32 tensors. A line is a query tile, or by "key" a key tile."""

    lines: int
    """How many lines a plane has."""
    full_start: Tensor
    """[planes * lines + 1] Where the full tiles of each line begin."""
    full_tile: Tensor
    """Which key tile (or query tile) is full, ascending in each line; or where each run begins."""
    full_stop: Tensor
    """Where each run of full tiles ends; empty if each tile is named."""
    partial_start: Tensor
    """[planes * lines + 1] Where the partial tiles of each line begin."""
    partial_tile: Tensor
    """Which tile is partial, ascending in each line."""
    partial_pattern: Tensor
    """The pattern of each partial tile."""
    patterns: Tensor
    """[n, words, rows] Bit i of a word says whether the row attends to column 32 * word + i."""
    order: Tensor
    """[planes, lines] The lines of each plane, that with the most tiles first."""
    plane_of: Tensor
    """[batch, heads] The plane of each; a dimension of 1 stands for any number."""

    def to(self, device: torch.device) -> TileLists:
        """The same lists on a device."""
        moved: dict[str, Any] = {
            f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "lines"
        }
        return replace(self, **moved)

    @property
    def nbytes(self) -> int:
        """Bytes of all lists."""
        values = (getattr(self, f.name) for f in fields(self))
        return sum(x.nbytes for x in values if isinstance(x, Tensor))


def tile_lists(shapes: Shapes, rows: int, cols: int, by: By, *, runs: bool = False) -> TileLists:
    """The lists of tiles of `rows` queries and `cols` keys.

    Where the other side of a tile ends beyond the tensor, the tile is partial: by "query" the last
    keys, by "key" the last queries. So full tiles need no bounds. With `runs`, full tiles that
    stand side by side are one entry.

    >>> from flexcp.kernels.interface import causal_shapes
    >>> lists = tile_lists(causal_shapes(256), 64, 64, "query")
    >>> lists.full_tile.tolist(), lists.partial_tile.tolist(), lists.partial_pattern.tolist()
    ([0, 0, 1, 0, 1, 2], [0, 1, 2, 3], [0, 0, 0, 0])
    >>> lists = tile_lists(causal_shapes(256), 64, 64, "query", runs=True)
    >>> lists.full_tile.tolist(), lists.full_stop.tolist()
    ([0, 0, 0], [1, 2, 3])
    """
    across = _Tiling(shapes.q_len, shapes.kv_len, rows, cols)
    planes = len(shapes.planes)
    stretches = _stretches(shapes.planes, across)
    full, partial = _covered(stretches, across, planes, by, runs)
    numbers, patterns = distinct_patterns(
        partial.line.numel(), stretches.on_tiles(partial, across), rows, cols
    )
    if by == "key":
        patterns = transposed(patterns, rows, cols)
        full, (partial, numbers) = full.turned(across), partial.turned_with(numbers, across)
    lines = across.q_tiles if by == "query" else across.kv_tiles
    full_counts, partial_counts = full.counts(planes * lines), partial.counts(planes * lines)
    work = (full_counts + partial_counts).view(planes, lines)
    none = torch.zeros(0, dtype=torch.int32)
    return TileLists(
        lines,
        _starts(torch.bincount(full.line, minlength=planes * lines) if runs else full_counts),
        full.begin.to(torch.int32) if runs else full.expanded(),
        full.end.to(torch.int32) if runs else none,
        _starts(partial_counts),
        partial.tile.to(torch.int32),
        numbers.to(torch.int32),
        patterns.transpose(1, 2).contiguous(),
        work.argsort(dim=1, descending=True, stable=True).to(torch.int32),
        torch.tensor(shapes.plane_of, dtype=torch.int32),
    )


@dataclass(frozen=True)
class _Tiling:
    """How a plane of pairs is cut into tiles."""

    q_len: int
    kv_len: int
    rows: int
    cols: int

    @property
    def q_tiles(self) -> int:
        return -(-self.q_len // self.rows)

    @property
    def kv_tiles(self) -> int:
        return -(-self.kv_len // self.cols)


@dataclass(frozen=True, eq=False)
class _TileSet:
    """Tiles of all planes, each int64 [n]: sorted by line, then by tile."""

    line: Tensor
    """Plane and query tile (or key tile) in one number."""
    tile: Tensor

    def codes(self, across: _Tiling) -> Tensor:
        return self.line * across.kv_tiles + self.tile

    def counts(self, lines: int) -> Tensor:
        """How many there are in each line."""
        return torch.bincount(self.line, minlength=lines)

    def turned_with(self, numbers: Tensor, across: _Tiling) -> tuple[_TileSet, Tensor]:
        """The same tiles by key tile, and what belongs to each in their new order."""
        plane, row = self.line // max(across.q_tiles, 1), self.line % max(across.q_tiles, 1)
        line = plane * across.kv_tiles + self.tile
        order = line.argsort(stable=True)
        return _TileSet(line[order], row[order]), numbers[order]


@dataclass(frozen=True, eq=False)
class _TileRuns:
    """Tiles side by side in a line, [begin, end), each int64 [n]: sorted by line, then by begin."""

    line: Tensor
    """Plane and query tile (or key tile) in one number."""
    begin: Tensor
    end: Tensor

    def counts(self, lines: int) -> Tensor:
        """How many tiles there are in each line."""
        found = torch.zeros(lines, dtype=torch.int64)
        return found.index_add_(0, self.line, self.end - self.begin)

    def expanded(self) -> Tensor:
        """int32 Every tile."""
        lengths = self.end - self.begin
        steps = torch.ones(int(lengths.sum()), dtype=torch.int32)
        steps[lengths.cumsum(0) - lengths] = (
            self.begin - torch.nn.functional.pad(self.end, (1, 0))[:-1] + 1
        ).to(torch.int32)
        if steps.numel():
            steps[0] -= 1
        return steps.cumsum(0, dtype=torch.int32)

    def turned(self, across: _Tiling) -> _TileRuns:
        """The same tiles by key tile: a run begins where a line has a tile that the last lacks."""
        high, wide = across.q_tiles + 1, across.kv_tiles + 1
        line = self.line // max(across.q_tiles, 1) * high + self.line % max(across.q_tiles, 1)
        place = torch.cat(
            [
                (line * wide)[:, None] + torch.stack([self.begin, self.end], 1),
                ((line + 1) * wide)[:, None] + torch.stack([self.end, self.begin], 1),
            ]
        ).flatten()
        place, order = place.sort(stable=True)
        more = (1 - 2 * (order % 2)).cumsum(0)
        ends = []
        for sign in (1, -1):
            changed = (more[:-1] == sign).nonzero()[:, 0]
            _, at = _expanded(place[changed], place[changed + 1])
            row, tile = at // wide, at % wide
            ends.append(((row // high * wide + tile) * high + row % high).sort().values)
        begin, end = ends
        column = begin // high
        return _TileRuns(column // wide * across.kv_tiles + column % wide, begin % high, end % high)


@dataclass(frozen=True, eq=False)
class _Stretches:
    """Consecutive rows of one query tile whose range of keys moves evenly; each int64 [n]."""

    line: Tensor
    """Plane and query tile in one number."""
    first: Tensor
    """First row, in the query tile."""
    rows: Tensor
    start: Tensor
    """First key of the first row."""
    stop: Tensor
    start_step: Tensor
    stop_step: Tensor

    def on_tiles(self, tiles: _TileSet, across: _Tiling) -> Tensor:
        """int64 [7, m], sorted by tile: one entry for each stretch and tile that it touches.

        Which tile; then the stretch's first row, rows, start, stop and steps inside of it.
        """
        t0, t1, _, _ = self.ranges(across)
        codes = tiles.codes(across)
        first = torch.searchsorted(codes, self.line * across.kv_tiles + t0)
        last = torch.searchsorted(codes, self.line * across.kv_tiles + t1)
        of, which = _expanded(first, last)
        left = tiles.tile[which] * across.cols
        found = torch.stack(
            [
                which,
                self.first[of],
                self.rows[of],
                self.start[of] - left,
                self.stop[of] - left,
                self.start_step[of],
                self.stop_step[of],
            ]
        )
        return found[:, which.argsort(stable=True)]

    def ranges(self, across: _Tiling) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Key tiles that some row touches [t0, t1), and that all rows cover [f0, f1).

        The last key tile is covered if all of its keys that exist are.
        """
        last = self.rows - 1
        end_start, end_stop = (
            self.start + last * self.start_step,
            self.stop + last * self.stop_step,
        )
        low, high = torch.minimum(self.start, end_start), torch.maximum(self.stop, end_stop)
        all_low, all_high = torch.maximum(self.start, end_start), torch.minimum(self.stop, end_stop)
        t0 = low.clamp(min=0) // across.cols
        t1 = -(-high.clamp(max=across.kv_len) // across.cols)
        f0 = -(-all_low.clamp(min=0) // across.cols)
        f1 = torch.where(all_high >= across.kv_len, across.kv_tiles, all_high // across.cols)
        none = f0 >= f1
        return t0, t1, torch.where(none, t0, f0), torch.where(none, t0, f1)


def _stretches(planes: Iterable[Plane], across: _Tiling) -> _Stretches:
    """All slabs and bit tiles of all planes, cut at query tiles."""
    found = [torch.zeros(0, 7, dtype=torch.int64)]
    for number, plane in enumerate(planes):
        numbers = [(s.q0, s.q1, s.k0, s.k1, s.k0_step, s.k1_step) for s in plane.slabs]
        slabs = [torch.tensor(numbers, dtype=torch.int64).view(-1, 6), *_bit_runs(plane)]
        every = torch.cat(slabs)
        found.append(torch.cat([torch.full((every.shape[0], 1), number), every], dim=1))
    plane_of, q0, q1, k0, k1, s0, s1 = torch.cat(found).unbind(1)
    of, q_tile = _expanded(q0 // across.rows, -(-q1 // across.rows))
    begin = torch.maximum(q0[of], q_tile * across.rows)
    end = torch.minimum(q1[of], (q_tile + 1) * across.rows)
    into = begin - q0[of]
    return _Stretches(
        plane_of[of] * across.q_tiles + q_tile,
        begin - q_tile * across.rows,
        end - begin,
        k0[of] + into * s0[of],
        k1[of] + into * s1[of],
        s0[of],
        s1[of],
    )


def _bit_runs(plane: Plane) -> list[Tensor]:
    """The runs of set bits of each bit tile, as slabs of one row."""
    found = []
    for tile in plane.tiles:
        edges = torch.nn.functional.pad(tile.bits.to(torch.int8), (1, 1)).diff(dim=1)
        row, start = (edges == 1).nonzero().unbind(1)
        stop = (edges == -1).nonzero()[:, 1]
        zero = torch.zeros_like(row)
        runs = (row + tile.q0, row + tile.q0 + 1, start + tile.k0, stop + tile.k0, zero, zero)
        found.append(torch.stack(runs, dim=1))
    return found


def _covered(
    stretches: _Stretches, across: _Tiling, planes: int, by: By, runs: bool
) -> tuple[_TileRuns, _TileSet]:
    """The full tiles and the partial ones."""
    t0, t1, f0, f1 = stretches.ranges(across)
    wide = across.kv_tiles + 1
    # How many rows of a line cover a key tile changes where a stretch's covered tiles begin or end.
    place = torch.cat([stretches.line * wide + f0, stretches.line * wide + f1])
    change = torch.cat([stretches.rows, -stretches.rows])
    place, order = place.sort(stable=True)
    covering = change[order].cumsum(0)[:-1]
    begin, end = place[:-1], place[1:]
    line = begin // wide
    some = (end > begin) & (covering > 0)
    line, begin, end, covering = line[some], begin[some] % wide, end[some], covering[some]
    end = end - line * wide
    in_tile = (across.q_len - line % max(across.q_tiles, 1) * across.rows).clamp(max=across.rows)
    is_full = covering == in_tile
    if by == "key":
        is_full &= in_tile == across.rows
    ragged = bool(across.kv_len % across.cols) and by == "query"
    whole = end - (ragged & (end == across.kv_tiles)).to(torch.int64)
    some_full = is_full & (whole > begin)
    rest = [
        (line[~is_full], begin[~is_full], end[~is_full]),
        (line[is_full], whole[is_full], end[is_full]),
        (stretches.line, t0, f0),
        (stretches.line, f1, t1),
    ]
    counts = [(last - first).clamp(min=0).sum() for _, first, last in rest]
    full = some_full.sum() if runs else (whole - begin)[some_full].sum()
    _require_countable(int(torch.stack([full, *counts]).sum()), planes, across)
    codes = []
    for lines, first, last in rest:
        of, tile = _expanded(first, last)
        codes.append(lines[of] * across.kv_tiles + tile)
    unique = torch.cat(codes).unique()
    per_line = max(across.kv_tiles, 1)
    return (
        _TileRuns(line[some_full], begin[some_full], whole[some_full]),
        _TileSet(unique // per_line, unique % per_line),
    )


def _expanded(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Every number of some ranges [first, last): which range it is of, and the number."""
    counts = (last - first).clamp(min=0)
    of = torch.repeat_interleave(torch.arange(first.numel()), counts)
    begins = counts.cumsum(0) - counts
    return of, torch.arange(of.numel()) - begins[of] + first[of]


def _starts(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def _require_countable(tiles: int, planes: int, across: _Tiling) -> None:
    lines = planes * max(across.q_tiles, across.kv_tiles)
    if max(tiles, lines) > MOST_TILES:
        raise FlexCPError(
            f"at most {MOST_TILES} tiles of {across.rows} x {across.cols}, which 32 bits can count",
            f"{tiles} for {across.q_len} queries and {across.kv_len} keys",
            "shard the sequence over more ranks, or ask for the kernel 'flash'",
        )
