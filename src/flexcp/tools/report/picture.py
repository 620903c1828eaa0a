"""Picture: a grid seen from afar, for the terminal, as PNG and as SVG."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch
from torch import Tensor

from flexcp.errors import FlexCPError, as_whole, quote, require, whole_number, writing
from flexcp.grid import BlockGrid
from flexcp.grid.picture import as_text, coverage
from flexcp.layout import Layout
from flexcp.layout.needed_rows import Pieces
from flexcp.tools.report.palette import hexadecimal, rank_colours

EMPTY = (246, 247, 249)
SPARSE = (176, 206, 240)
DENSE = (36, 98, 178)
FULL = (13, 45, 96)
_FAINTEST = 0.3
"""Strength of a rank's colour where hardly anything is allowed: it must still be seen."""
_SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, eq=False)
class Picture:
    """How much of each pixel of an attention matrix is allowed; queries downwards, keys across."""

    share: Tensor
    """float64 [height, width] 0 is empty, 1 is full."""
    title: str
    """What it shows."""
    paint: Tensor | None = None
    """float64 [height, width, 3] 0 to 255: the colour of each pixel if all of it were allowed; the
    mean of the ranks that compute it. Without, shades of blue."""
    owner: Tensor | None = None
    """int64 [height] The rank that computes most of a line, if pixels are painted by rank."""

    def to_text(self, *, colour: bool | int = False) -> str:
        """Lines for a terminal.

        Args:
            colour: With colour, a character shows two pixels: True or 24 for 24-bit colours, 8 for
                the 256 colours of older terminals. Without, blocks of shade; or, painted by rank,
                a digit or letter for each rank.
        """
        if not isinstance(colour, bool) and as_whole(colour) not in (8, 24):
            raise FlexCPError(
                "colour to be True, False, 24 or 8", quote(colour), "pass how many bits it has"
            )
        if colour:
            empty = self.share <= 1e-9
            return _half_blocks(self.pixels(), empty, 8 if int(colour) == 8 else 24)
        if self.owner is None or int(self.owner.max()) >= len(_SYMBOLS):
            return as_text(self.share)
        lines = []
        for owner, row in zip(self.owner.tolist(), self.share.tolist(), strict=True):
            lines.append("".join(_SYMBOLS[owner] if x > 1e-9 else " " for x in row).rstrip())
        return "\n".join(lines)

    def save_png(self, path: str | Path, *, scale: int = 1) -> Path:
        """Writes a PNG file in which each pixel is `scale` wide."""
        scale = whole_number("scale", scale, at_least=1, at_most=256, fix="pass scale=1 or more")
        pixels = self.pixels().repeat_interleave(scale, 0).repeat_interleave(scale, 1)
        return write_png(pixels, path)

    def save_svg(self, path: str | Path, *, size: int = 512) -> Path:
        """Writes an SVG file: one rectangle for each stretch of equal pixels in a line."""
        height, width = self.share.shape
        size = whole_number("size", size, at_least=1, at_most=_MOST_PIXELS, fix="pass size=512")
        text = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{size}" '
            f'height="{size * height // width}" viewBox="0 0 {width} {height}" '
            f'shape-rendering="crispEdges"><title>{escape(self.title)}</title>'
            + self.svg_shapes()
            + "</svg>\n"
        )
        with writing(path) as file:
            file.write_text(text, encoding="utf-8")
        return file

    def svg_shapes(self) -> str:
        """SVG rectangles on a background, one unit to a pixel."""
        height, width = self.share.shape
        shapes = [f'<rect width="{width}" height="{height}" fill="{hexadecimal(EMPTY)}"/>']
        for y, line in enumerate(self.pixels().tolist()):
            x = 0
            while x < width:
                end = x
                while end < width and line[end] == line[x]:
                    end += 1
                if tuple(line[x]) != EMPTY:
                    fill = hexadecimal(tuple(line[x]))
                    shapes.append(
                        f'<rect x="{x}" y="{y}" width="{end - x}" height="1" fill="{fill}"/>'
                    )
                x = end
        return "".join(shapes)

    def pixels(self) -> Tensor:
        """uint8 [height, width, 3] The picture in colour."""
        empty, sparse, dense, full = (
            torch.tensor(c, dtype=torch.float64) for c in (EMPTY, SPARSE, DENSE, FULL)
        )
        share = self.share[..., None]
        if self.paint is not None:
            strength = torch.where(share > 1e-9, _FAINTEST + (1 - _FAINTEST) * share, 0.0)
            return (empty + (self.paint - empty) * strength).round().to(torch.uint8)
        # Any allowed pair must be seen, so the first shade is well apart from the background.
        colour = sparse + (dense - sparse) * share
        colour = torch.where(share <= 1e-9, empty, colour)
        colour = torch.where(share >= 1 - 1e-9, full, colour)
        return colour.round().to(torch.uint8)


def picture_of(
    grid: BlockGrid, *, height: int = 256, width: int = 256, b: int = 0, h: int = 0, title: str = ""
) -> Picture:
    """The picture of one plane of a grid, at most `height` x `width` pixels.

    >>> import flexcp
    >>> grid = flexcp.build_block_grid(flexcp.masks.block_causal(1 << 18), 1 << 20)
    >>> print(picture_of(grid, height=4, width=8).to_text())
    ██
    ████
    ██████
    ████████
    """
    height, width = _require_picture(grid, height, width, title)
    share = coverage(grid.plane(b, h), height, width)
    return Picture(share, title or grid.mask.name)


_MOST_PIXELS = 1 << 14
"""Along a side of a picture."""


def _require_picture(grid: object, height: object, width: object, title: object) -> tuple[int, int]:
    require("grid", grid, BlockGrid, "make one with flexcp.build_block_grid")
    require("title", title, str, "pass what the picture shows")
    fix = "pass a number of pixels"
    high, wide = (
        whole_number(name, value, at_least=1, at_most=_MOST_PIXELS, fix=fix)
        for name, value in (("height", height), ("width", width))
    )
    return high, wide


def picture_by_rank(
    grid: BlockGrid,
    layout: Layout,
    *,
    height: int = 256,
    width: int = 256,
    b: int = 0,
    h: int = 0,
    group_size: int = 1,
    title: str = "",
) -> Picture:
    """The picture of a mask, painted by the rank that computes each tile: the owner of its queries.

    With `group_size` ranks sharing heads, a tile has the colour of the rank in the middle of its
    group.

    >>> import flexcp
    >>> from flexcp.layout import head_tail
    >>> grid = flexcp.build_block_grid(flexcp.masks.causal(), 1 << 10)
    >>> print(picture_by_rank(grid, head_tail(1 << 10, 2)).to_text())
    0
    00
    111
    1111
    11111
    111111
    0000000
    00000000
    """
    height, width = _require_picture(grid, height, width, title)
    require("layout", layout, Layout, "pass plan.layout")
    if layout.seq_len != grid.q_len:
        raise FlexCPError(
            f"a layout of the grid's {grid.q_len} queries",
            f"one of {layout.seq_len} tokens",
            "pass the layout and the grid of one plan",
        )
    fix = "pass how many ranks share heads"
    group_size = whole_number("group_size", group_size, at_least=1, at_most=layout.ranks, fix=fix)
    runs = grid.plane(b, h)
    high, wide = min(height, runs.rows), min(width, runs.cols)
    share = coverage(runs, height, width)
    pieces = Pieces.of(layout, b if layout.batch_elements > 1 else 0, grid.block_size[0])
    size = (pieces.last - pieces.first).double()
    tokens = torch.zeros(runs.rows, dtype=torch.float64).index_add_(0, pieces.block, size)
    group = torch.div(pieces.rank, group_size, rounding_mode="floor")
    shown = (group * group_size + group_size // 2).clamp(max=layout.ranks - 1)
    palette = torch.tensor(rank_colours(layout.ranks), dtype=torch.float64) / 255
    paint = torch.zeros(high, wide, 3, dtype=torch.float64)
    for channel in range(3):
        mean = torch.zeros(runs.rows, dtype=torch.float64)
        mean.index_add_(0, pieces.block, size * palette[shown, channel])
        covered = coverage(runs, height, width, mean / tokens.clamp(min=1))
        paint[..., channel] = covered / share.clamp(min=1e-12)
    most = torch.zeros(high * layout.ranks, dtype=torch.float64)
    line = pieces.block * high // runs.rows
    most.index_add_(0, line * layout.ranks + shown, size)
    owner = most.view(high, layout.ranks).argmax(1)
    return Picture(share, title or grid.mask.name, (paint * 255).clamp(0, 255), owner)


def write_png(pixels: Tensor, path: str | Path) -> Path:
    """Writes uint8 [height, width, 3] as a PNG file."""
    height, width, _ = pixels.shape
    lines = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), pixels.flatten(1)], dim=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(lines.flatten().tolist()), 9)
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")
    with writing(path) as file:
        file.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)
    return file


def _half_blocks(pixels: Tensor, empty: Tensor, bits: int) -> str:
    """Two pixels above each other in one character; the terminal's own background where empty."""
    if pixels.shape[0] % 2:
        pixels = torch.cat([pixels, pixels[-1:]])
        empty = torch.cat([empty, torch.ones_like(empty[-1:])])
    colours, gone = pixels.tolist(), empty.tolist()
    lines = []
    for y in range(0, len(colours), 2):
        cells = []
        for x, (upper, lower) in enumerate(zip(colours[y], colours[y + 1], strict=True)):
            above, below = not gone[y][x], not gone[y + 1][x]
            if above and below:
                cells.append(f"\x1b[38;{_code(upper, bits)};48;{_code(lower, bits)}m▀")
            elif above or below:
                one = upper if above else lower
                cells.append(f"\x1b[0;38;{_code(one, bits)}m{'▀' if above else '▄'}")
            else:
                cells.append("\x1b[0m ")
        lines.append("".join(cells) + "\x1b[0m")
    return "\n".join(lines)


def _code(colour: list[int], bits: int) -> str:
    if bits == 24:
        return f"2;{colour[0]};{colour[1]};{colour[2]}"
    red, green, blue = (round(c / 255 * 5) for c in colour)
    return f"5;{16 + 36 * red + 6 * green + blue}"


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
