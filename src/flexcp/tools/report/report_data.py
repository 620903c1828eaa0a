"""What the report page shows, as plain data: tiles and layouts as runs, timelines as shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from flexcp.grid import BlockGrid, BlockKind, Runs, build_block_grid
from flexcp.grid.analysis.area import partial_tile_areas
from flexcp.layout.work import Work
from flexcp.plan import Plan
from flexcp.plan.timeline import Spans, timeline
from flexcp.tools.report.packed import pack_shares, pack_whole
from flexcp.tools.report.palette import hexadecimal, rank_colours
from flexcp.tools.report.reasons import bytes_by_node, exposed_seconds, memory_parts, reasons
from flexcp.tools.report.strategies import Strategy

_MOST_RUNS = 300_000
"""Runs of tiles up to which a grid is shown as it is; beyond, larger tiles are shown."""
_MOST_AREAS = 150_000
"""Partial tiles up to which each one's area is told."""
_MOST_VIEWS = 12
"""Patterns (masks, batch elements, heads) that can be looked at."""
_MOST_SEAMS = 20_000
"""Documents whose borders are shown."""
_MOST_SPANS = 8192
"""Spans of one kind in a timeline; with more, only some of the ranks are shown."""


def report_data(found: Sequence[Strategy], *, title: str, notes: Sequence[str]) -> dict[str, Any]:
    """Everything on the page; the first strategy is the one that was chosen."""
    plan = found[0].plan
    shape = asdict(plan.shape)
    shape["dtype"] = str(plan.shape.dtype).removeprefix("torch.")
    return {
        "title": title,
        "tokens": plan.seq_len,
        "ranks": plan.ranks.size,
        "shape": shape,
        "machine": asdict(plan.machine),
        "notes": list(notes),
        "considered": [list(line) for line in plan.considered],
        "colours": [hexadecimal(c) for c in rank_colours(plan.ranks.size)],
        "views": _views(plan),
        "documents": _documents(plan),
        "strategies": [
            _strategy(s, reasons([s, *(o for o in found if o is not s)])) for s in found
        ],
    }


def _views(plan: Plan) -> list[dict[str, Any]]:
    """One for every pattern: by mask, and by batch element and heads where they differ."""
    views: list[dict[str, Any]] = []
    for name, grid in plan.grids.items():
        of = grid.planes.of
        shown = _coarse_enough(grid)
        for plane in range(len(grid.runs)):
            places = torch.nonzero(of == plane)
            if len(views) == _MOST_VIEWS or not len(places):
                continue
            b, h = places[0].tolist()
            if shown is not grid:
                plane_shown = int(shown.planes.of[min(b, shown.batch - 1), min(h, shown.heads - 1)])
            else:
                plane_shown = plane
            label = name or grid.mask.name
            if len(grid.runs) > 1:
                label += f" · batch element {b}, head {h}"
            views.append({"label": label, "mask": name, "element": b, **_tiles(shown, plane_shown)})
    return views


def _coarse_enough(grid: BlockGrid) -> BlockGrid:
    block = grid.block_size
    while sum(len(runs) for runs in grid.runs) > _MOST_RUNS:
        block = (block[0] * 2, block[1] * 2)
        grid = build_block_grid(
            grid.mask, grid.q_len, grid.kv_len, block_size=block, batch=grid.batch, heads=grid.heads
        )
    return grid


def _tiles(grid: BlockGrid, plane: int) -> dict[str, Any]:
    runs = grid.runs[plane]
    partial = runs.kind == BlockKind.PARTIAL
    areas = None
    if int((runs.stop - runs.start)[partial].sum()) <= _MOST_AREAS:
        found = partial_tile_areas(grid.mask, grid.planes, plane, runs, grid.q_axis, grid.kv_axis)
        areas = pack_whole(found)
    return {
        "block": list(grid.block_size),
        "length": [grid.q_len, grid.kv_len],
        "rows": runs.rows,
        "cols": runs.cols,
        "full": runs.count(BlockKind.FULL),
        "partial": runs.count(BlockKind.PARTIAL),
        "tiles": pack_whole(_row_by_row(runs)),
        "areas": areas,
    }


def _row_by_row(runs: Runs) -> Tensor:
    """For each row how many runs it has; then for each run the gap before it, and length and kind.

    The last two are one number: twice the length, plus one if the tiles are partial.
    """
    counts = torch.bincount(runs.row, minlength=runs.rows)
    before = torch.zeros_like(runs.start)
    before[1:] = torch.where(runs.row[1:] == runs.row[:-1], runs.stop[:-1], 0)
    length = (runs.stop - runs.start) * 2 + (runs.kind == BlockKind.PARTIAL)
    return torch.cat([counts, torch.stack([runs.start - before, length], dim=1).reshape(-1)])


def _documents(plan: Plan) -> list[list[int]]:
    """For every layout's batch element, where documents begin; none if there are too many."""
    grids = list(plan.grids.values())
    elements = plan.layout.batch_elements
    works = [Work.of(grids)] if elements == 1 else [Work.of(grids, b) for b in range(elements)]
    seams: list[list[int]] = [work.seams.tolist() for work in works]
    return [found if len(found) <= _MOST_SEAMS else [] for found in seams]


def _strategy(strategy: Strategy, why: Sequence[str]) -> dict[str, Any]:
    plan = strategy.plan
    near, far = bytes_by_node(plan)
    first = next(iter(plan.schedules.values()))
    start, stop, owner = plan.layout.by_row
    return {
        "name": strategy.name,
        "about": strategy.about,
        "layout": plan.layout.name,
        "schedules": {n: s.name for n, s in plan.schedules.items()},
        "rounds": {n: s.forward.rounds for n, s in plan.schedules.items()},
        "group_sizes": {n: s.heads_group_size for n, s in plan.schedules.items()},
        "heads": {n: [[h.q.start, h.q.stop] for h in s.heads] for n, s in plan.schedules.items()},
        "why": list(why),
        "memory": memory_parts(plan),
        "near": near,
        "far": far,
        "exposed": exposed_seconds(plan),
        "batch_elements": first.layout.batch_elements,
        "tokens": plan.layout.counts.tolist(),
        "stats": asdict(plan.stats()),
        "runs": pack_whole(torch.stack([stop - start, owner], dim=1)),
        "timelines": {name: _timeline(plan, name) for name in plan.schedules},
    }


def _timeline(plan: Plan, name: str) -> dict[str, Any]:
    found = timeline(plan, name)
    groups, group_size = plan.schedules[name].groups.ranks, plan.schedules[name].heads_group_size
    most = max(len(s.rounds) for s in found.spans)
    shown = _some_groups(found.spans, groups, max(8, _MOST_SPANS // most))
    totals = {"forward": found.forward, "backward": found.backward}
    return {
        "forward": found.forward,
        "backward": found.backward,
        "group_size": group_size,
        "groups": shown.tolist(),
        "of": groups,
        "spans": [
            {
                "passing": s.passing,
                "kind": s.kind,
                "rounds": list(s.rounds),
                "begin": pack_shares(s.begin[:, shown] / max(totals[s.passing], 1e-30)),
                "end": pack_shares(s.end[:, shown] / max(totals[s.passing], 1e-30)),
            }
            for s in found.spans
        ],
    }


def _some_groups(spans: Sequence[Spans], groups: int, most: int) -> Tensor:
    """All groups, or some evenly spread ones and the busiest."""
    if groups <= most:
        return torch.arange(groups)
    busy = sum((s.end - s.begin).sum(0) for s in spans if s.kind == "compute")
    assert isinstance(busy, Tensor)
    even = torch.linspace(0, groups - 1, most - 1).round().to(torch.int64)
    shown: Tensor = torch.unique(torch.cat([even, busy.argmax()[None]]))
    return shown
