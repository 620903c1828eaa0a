"""A picture with title, axes and a legend, as a file that explains itself."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch
from torch import Tensor

from flexcp.tools.report.figure import printable
from flexcp.tools.report.glyphs import text_bitmap
from flexcp.tools.report.palette import Colour, hexadecimal, rank_colours
from flexcp.tools.report.picture import DENSE, EMPTY, FULL, SPARSE, Picture, write_png
from flexcp.units import format_size

_TICKS = 4
_INK, _PAPER = (34, 34, 34), (255, 255, 255)
_MOST_SWATCHES = 12
"""Ranks that are named one by one; of more, every so many."""


@dataclass(frozen=True, eq=False)
class AnnotatedPicture:
    """An attention matrix with what a reader has to know of it."""

    picture: Picture
    tokens: int
    """Length of both axes."""
    ranks: int | None
    """By how many ranks it is coloured; None for shades."""

    @property
    def legend(self) -> list[tuple[Colour, str]]:
        """Colours, and what they mean."""
        if self.ranks is None:
            return [
                (EMPTY, "nothing allowed"), (SPARSE, "a few pairs"), (DENSE, "most pairs"),
                (FULL, "every pair allowed"),
            ]  # fmt: skip
        every = -(-self.ranks // _MOST_SWATCHES)
        colours = rank_colours(self.ranks)
        return [(colours[r], f"rank {r}") for r in range(0, self.ranks, every)]

    def ticks(self) -> list[tuple[float, str]]:
        """Places along an axis, as shares of it, and their labels."""
        step = -(-self.tokens // _TICKS)
        return [(t / self.tokens, format_size(t)) for t in range(0, self.tokens + 1, step)]

    def save_svg(self, path: str | Path, *, size: int = 640) -> Path:
        """Writes an SVG file whose units are the picture's pixels."""
        high, wide = self.picture.share.shape
        unit = wide / 100
        left, top, side, tall = 12 * unit, 10 * unit, 0.86 * wide, 0.86 * high - 8 * unit
        title = printable(self.picture.title)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{size}" '
            f'height="{size * high // wide}" viewBox="0 0 {wide} {high}" '
            f'font-family="sans-serif" font-size="{2.6 * unit:g}" role="img">'
            f"<title>{escape(title)}</title>"
            f'<rect width="{wide}" height="{high}" fill="#ffffff"/>',
            f'<svg x="{left:g}" y="{top:g}" width="{side:g}" height="{tall:g}" '
            f'viewBox="0 0 {wide} {high}" preserveAspectRatio="none" '
            f'shape-rendering="crispEdges">{self.picture.svg_shapes()}</svg>',
            _text(left, 3.6 * unit, title, weight="bold"),
            _text(left + side / 2, 6.6 * unit, "key position", anchor="middle"),
            f'<text transform="translate({2.6 * unit:g} {top + tall / 2:g}) rotate(-90)" '
            'text-anchor="middle" fill="#222222">query position</text>',
        ]
        for share, label in self.ticks():
            x, y = left + share * side, top + share * tall
            last = share > 0.97
            parts.append(_text(x, top - 0.8 * unit, label, anchor="end" if last else "middle"))
            parts.append(_text(left - 0.8 * unit, y + 0.9 * unit, label, anchor="end"))
        each = side / len(self.legend)
        for i, (colour, label) in enumerate(self.legend):
            x, y = left + i * each, top + tall + 2.5 * unit
            parts.append(
                f'<rect x="{x:g}" y="{y:g}" width="{2 * unit:g}" height="{2 * unit:g}" '
                f'fill="{hexadecimal(colour)}"/>'
            )
            parts.append(_text(x + 2.6 * unit, y + 1.9 * unit, label.removeprefix("rank ")))
        if self.ranks is not None:
            parts.append(_text(left - unit, top + tall + 4.4 * unit, "rank", anchor="end"))
        path = Path(path)
        path.write_text("".join(parts) + "</svg>\n", encoding="utf-8")
        return path

    def save_png(self, path: str | Path, *, scale: int = 1) -> Path:
        """Writes a PNG file in which each pixel of the matrix is `scale` wide."""
        matrix = self.picture.pixels().repeat_interleave(scale, 0).repeat_interleave(scale, 1)
        high, wide = matrix.shape[:2]
        left, top, bottom = 88, 66, 34
        paper = torch.tensor(_PAPER, dtype=torch.uint8).repeat(
            top + high + bottom, left + wide + 24, 1
        )
        paper[top : top + high, left : left + wide] = matrix
        _write(paper, printable(self.picture.title), left, 8, most=wide)
        _write(paper, "key position", left + wide // 2 - 60, 28)
        _write(paper, "query", 4, top + 3 * high // 8 - 12)
        _write(paper, "position", 4, top + 3 * high // 8 + 2)
        for share, label in self.ticks():
            x, y = left + round(share * (wide - 1)), top + round(share * (high - 1))
            paper[top - 5 : top - 1, x] = torch.tensor(_INK, dtype=torch.uint8)
            paper[y, left - 5 : left - 1] = torch.tensor(_INK, dtype=torch.uint8)
            _write(paper, label, x - 4 * len(label), top - 18)
            _write(paper, label, left - 8 - 8 * len(label), max(0, y - 5))
        each = wide // len(self.legend)
        for i, (colour, label) in enumerate(self.legend):
            x, y = left + i * each, top + high + 12
            paper[y : y + 11, x : x + 11] = torch.tensor(colour, dtype=torch.uint8)
            _write(paper, label.removeprefix("rank "), x + 15, y + 1)
        if self.ranks is not None:
            _write(paper, "rank", left - 44, top + high + 13)
        return write_png(paper, path)


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="#222222">{escape(text)}</text>'
    )


def _write(paper: Tensor, text: str, x: int, y: int, *, most: int = 1 << 20) -> None:
    """Puts text onto an image, cut where the image ends."""
    ink = text_bitmap(text)[:, :most]
    room = paper[y : y + ink.shape[0], max(0, x) : max(0, x) + ink.shape[1]]
    ink = ink[: room.shape[0], : room.shape[1]]
    room[ink] = torch.tensor(_INK, dtype=torch.uint8)
