"""A figure of a plan for papers: the matrix, the owners of tokens, work and traffic; as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

from flexcp.errors import require, writing
from flexcp.plan import Plan
from flexcp.tools.report.palette import hexadecimal, rank_colours
from flexcp.tools.report.picture import picture_by_rank
from flexcp.units import format_bytes, format_count, format_seconds, format_size

_SIDE, _MARGIN, _TOP, _BARS = 360, 46, 50, 300
_PIXELS = 240
_FONT = "font-family='Helvetica, Arial, sans-serif'"


def printable(title: str) -> str:
    """A title without what no file can contain: control characters, halves of surrogate pairs.

    >>> printable("a\\x00 <b>\\ud800")
    'a\ufffd <b>\ufffd'
    """
    return "".join(
        c if c.isprintable() or c == " " else " " if c.isspace() else "\ufffd" for c in title
    )


def save_figure(plan: Plan, path: str | Path, *, mask: str | None = None, title: str = "") -> Path:
    """Writes the figure of a plan, for one of its masks, and returns where.

    >>> import flexcp, tempfile
    >>> plan = flexcp.make_plan(flexcp.masks.causal(), 2048, 4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_figure(plan, f"{folder}/plan.svg").read_text()[:4]
    '<svg'
    """
    require("plan", plan, Plan, "make one with flexcp.make_plan")
    require("title", title, str, "pass a text, or leave it out")
    name = next(iter(plan.grids)) if mask is None else plan.mask_name(mask)
    grid, schedule, stats = plan.grids[name], plan.schedules[name], plan.stats()
    title = printable(title) or name or grid.mask.name
    width, height = _MARGIN + _SIDE + 48 + _BARS + 12, _TOP + _SIDE + 74
    received = [
        a + b
        for a, b in zip(
            stats.bytes_received_per_rank, stats.backward_bytes_received_per_rank, strict=True
        )
    ]
    picture = picture_by_rank(
        grid,
        plan.layout,
        height=_PIXELS,
        width=_PIXELS,
        group_size=schedule.heads_group_size,
        title=title,
    )
    rows, cols = picture.share.shape
    right = _MARGIN + _SIDE + 48
    summary = (
        f"{plan.considered[0][0]}: {format_seconds(stats.predicted_seconds)} predicted on "
        f"{plan.machine.name}"
    )
    busiest = f"Allowed pairs, {stats.imbalance:.3f} × the mean at most"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" {_FONT} font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(_MARGIN, 18, title, size=14, weight="bold"),
        _text(_MARGIN, 36, summary),
        f'<svg x="{_MARGIN}" y="{_TOP}" width="{_SIDE}" height="{_SIDE}" '
        f'viewBox="0 0 {cols} {rows}" preserveAspectRatio="none" shape-rendering="crispEdges">'
        + picture.svg_shapes()
        + "</svg>",
        *_axis(plan.seq_len),
        _strip(plan),
        _text(_MARGIN, _TOP + _SIDE + 62, f"owners of the tokens: {plan.layout.name} layout"),
        _bars(right, _TOP + 14, stats.area_per_rank, plan.ranks.size, busiest, format_count),
        _bars(
            right, _TOP + _SIDE // 2 + 26, received, plan.ranks.size, "Bytes received", format_bytes
        ),
        "</svg>\n",
    ]
    with writing(path) as file:
        file.write_text("\n".join(parts), encoding="utf-8")
    return file


def _axis(tokens: int) -> list[str]:
    marks = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        label = format_size(round(tokens * share))
        at = share * _SIDE
        anchor = "start" if share == 0 else "end" if share == 1 else "middle"
        marks.append(_text(_MARGIN + at, _TOP + _SIDE + 14, label, anchor=anchor))
        marks.append(_text(_MARGIN - 6, _TOP + max(9, at), label, anchor="end"))
    return marks


def _strip(plan: Plan) -> str:
    """The owner of the middle of each of a thousand cells; of the first batch element, if any."""
    stop, owner = (x.tolist() for x in plan.layout.by_row[1:])
    colours = [hexadecimal(c) for c in rank_colours(plan.ranks.size)]
    cells = min(plan.seq_len, 1080)
    owners, run = [], 0
    for cell in range(cells):
        middle = (cell + 0.5) / cells * plan.seq_len
        while stop[run] <= middle:
            run += 1
        owners.append(owner[run])
    edges = [0, *(i for i in range(1, cells) if owners[i] != owners[i - 1]), cells]
    shapes = [
        f'<rect x="{a}" width="{b - a}" height="1" fill="{colours[owners[a]]}"/>'
        for a, b in pairwise(edges)
    ]
    return (
        f'<svg x="{_MARGIN}" y="{_TOP + _SIDE + 24}" width="{_SIDE}" height="22" '
        f'viewBox="0 0 {cells} 1" preserveAspectRatio="none" shape-rendering="crispEdges">'
        + "".join(shapes)
        + "</svg>"
    )


def _bars(
    x: float, y: float, values: Sequence[int], ranks: int, title: str, formatted: object
) -> str:
    assert callable(formatted)
    high, top = _SIDE / 2 - 46, max(values) or 1
    each = _BARS / ranks
    gap = 0.15 * each
    colours = [hexadecimal(c) for c in rank_colours(ranks)]
    shapes = [_text(x, y - 6, f"{title} ({formatted(max(values))})")]
    for rank, value in enumerate(values):
        size = value / top * high
        shapes.append(
            f'<rect x="{x + rank * each + gap / 2:.2f}" y="{y + high - size:.2f}" '
            f'width="{each - gap:.2f}" height="{size:.2f}" fill="{colours[rank]}"/>'
        )
    mean = sum(values) / ranks / top * high
    line = y + high - mean
    shapes.append(
        f'<line x1="{x}" x2="{x + _BARS}" y1="{line:.2f}" y2="{line:.2f}" stroke="#333333" '
        'stroke-dasharray="4 3"/>'
    )
    every = max(1, -(-ranks * 18 // _BARS))
    for rank in range(0, ranks, every):
        shapes.append(_text(x + (rank + 0.5) * each, y + high + 13, str(rank), anchor="middle"))
    return "\n".join(shapes)


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 11, weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}" fill="#222222">{escape(text)}</text>'
    )
