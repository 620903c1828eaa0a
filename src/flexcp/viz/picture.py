"""Picture: a grid seen from afar, for the terminal, as PNG and as SVG."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flexcp.blocks import BlockGrid
from flexcp.blocks.picture import as_text, coverage

_EMPTY = (246, 247, 249)
_SPARSE = (176, 206, 240)
_DENSE = (36, 98, 178)
_FULL = (13, 45, 96)


@dataclass(frozen=True, eq=False)
class Picture:
    """How much of each pixel of an attention matrix is allowed; queries downwards, keys across."""

    share: Tensor
    """float64 [height, width] 0 is empty, 1 is full."""
    title: str
    """What it shows."""

    def to_text(self, *, colour: bool = False) -> str:
        """Lines for a terminal: shades of blocks, or with `colour` two pixels to a character."""
        return _half_blocks(self.pixels()) if colour else as_text(self.share)

    def save_png(self, path: str | Path, *, scale: int = 1) -> Path:
        """Writes a PNG file in which each pixel is `scale` wide."""
        pixels = self.pixels().repeat_interleave(scale, 0).repeat_interleave(scale, 1)
        height, width, _ = pixels.shape
        lines = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), pixels.flatten(1)], dim=1)
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        data = zlib.compress(bytes(lines.flatten().tolist()), 9)
        chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")
        path = Path(path)
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)
        return path

    def save_svg(self, path: str | Path, *, size: int = 512) -> Path:
        """Writes an SVG file: one rectangle for each stretch of equal pixels in a line."""
        height, width, _ = self.pixels().shape
        shapes = []
        for y, line in enumerate(self.pixels().tolist()):
            x = 0
            while x < width:
                end = x
                while end < width and line[end] == line[x]:
                    end += 1
                if tuple(line[x]) != _EMPTY:
                    fill = "#" + "".join(f"{c:02x}" for c in line[x])
                    shapes.append(
                        f'<rect x="{x}" y="{y}" width="{end - x}" height="1" fill="{fill}"/>'
                    )
                x = end
        background = "#" + "".join(f"{c:02x}" for c in _EMPTY)
        path = Path(path)
        path.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{size}" '
            f'height="{size * height // width}" viewBox="0 0 {width} {height}" '
            f'shape-rendering="crispEdges"><title>{_escaped(self.title)}</title>'
            f'<rect width="{width}" height="{height}" fill="{background}"/>'
            + "".join(shapes)
            + "</svg>\n",
            encoding="utf-8",
        )
        return path

    def pixels(self) -> Tensor:
        """uint8 [height, width, 3] The picture in colour."""
        empty, sparse, dense, full = (
            torch.tensor(c, dtype=torch.float64) for c in (_EMPTY, _SPARSE, _DENSE, _FULL)
        )
        share = self.share[..., None]
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
    share = coverage(grid.plane(b, h), height, width)
    return Picture(share, title or grid.mask.name)


def _half_blocks(pixels: Tensor) -> str:
    """Two pixels above each other in one character, in 24-bit colour."""
    if pixels.shape[0] % 2:
        pixels = torch.cat([pixels, pixels[-1:]])
    lines = []
    for upper, lower in zip(pixels[::2].tolist(), pixels[1::2].tolist(), strict=True):
        cells = (
            f"\x1b[38;2;{a[0]};{a[1]};{a[2]}m\x1b[48;2;{b[0]};{b[1]};{b[2]}m▀"
            for a, b in zip(upper, lower, strict=True)
        )
        lines.append("".join(cells) + "\x1b[0m")
    return "\n".join(lines)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
