"""The report page: a plan in one HTML file that needs nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

from flexcp.errors import require, writing
from flexcp.plan import Plan
from flexcp.tools.report.figure import printable
from flexcp.tools.report.report_data import report_data
from flexcp.tools.report.strategies import Strategy, strategies

_SCRIPTS = ("data.js", "common.js", "matrix.js", "charts.js", "timeline.js", "main.js")


def save_report(
    plan: Plan,
    path: str | Path,
    *,
    title: str = "",
    notes: Sequence[str] = (),
    compared: Sequence[Strategy] | None = None,
) -> Path:
    """Writes the page for a plan and returns where.

    Args:
        plan: What was chosen.
        path: The HTML file.
        title: The mask, as the reader knows it; its own name if not given.
        notes: What the reader should know, in the page's last line.
        compared: What can be chosen on the page, the plan itself first; see `strategies`.

    >>> import flexcp, tempfile
    >>> plan = flexcp.make_plan(flexcp.masks.causal(), 2048, 4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_report(plan, f"{folder}/report.html").stat().st_size > 10_000
    True
    """
    with writing(path) as file:
        page = report_page(plan, title=title, notes=notes, compared=compared)
        file.write_text(page, encoding="utf-8")
    return file


def report_page(
    plan: Plan,
    *,
    title: str = "",
    notes: Sequence[str] = (),
    compared: Sequence[Strategy] | None = None,
) -> str:
    """The page's text; see `save_report`."""
    require("plan", plan, Plan, "make one with flexcp.make_plan")
    require("title", title, str, "pass a text, or leave it out")
    require("notes", notes, (list, tuple), "pass a list of texts")
    for note in notes:
        require("each of the notes", note, str, "pass a list of texts")
    if compared is not None:
        require("compared", compared, (list, tuple), "pass what report.strategies returns")
        for strategy in compared:
            require("each strategy", strategy, Strategy, "pass what report.strategies returns")
    title = printable(title) or ", ".join(
        name or grid.mask.name for name, grid in plan.grids.items()
    )
    data = report_data(compared or strategies(plan), title=title, notes=notes)
    data["version"] = _version()
    parts = {
        "title": escape(f"{title} on {plan.ranks.size} ranks · flexcp"),
        "style": _asset("style.css"),
        "script": "\n".join(_asset(name) for name in _SCRIPTS),
        # Within a script element only "</" and "<!--" could end it.
        "data": json.dumps(data, ensure_ascii=False).replace("<", "\\u003c"),
    }
    # All places at once: a title may contain the name of another.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (files("flexcp.tools.report") / "assets" / name).read_text(encoding="utf-8")


def _version() -> str:
    try:
        return version("flexcp")
    except PackageNotFoundError:  # a source tree that was never installed
        return ""
