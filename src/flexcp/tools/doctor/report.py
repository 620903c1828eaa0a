"""The report: a diagnosis as text, as JSON and as one HTML page, to attach to a bug."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from flexcp.kernels.preferences import replace_file
from flexcp.plan import save_machine
from flexcp.tools.doctor.findings import SECTIONS, Diagnosis, Finding


def save_reports(found: Diagnosis, folder: Path) -> list[Path]:
    """Writes report.txt, report.json and report.html, and machine.json if there is a machine."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "report.txt": report_text(found),
        "report.json": json.dumps(found.as_data(), indent=1, ensure_ascii=False) + "\n",
        "report.html": report_page(found),
    }
    for name, text in texts.items():
        replace_file(folder / name, text)
    written = [folder / name for name in texts]
    if found.machine is not None:
        save_machine(found.machine, folder / "machine.json")
        written.append(folder / "machine.json")
    return written


def report_text(found: Diagnosis) -> str:
    """Everything as plain text: the verdict first, then each finding with its numbers."""
    lines = [f"flexcp doctor: {found.verdict}", ""]
    lines += [f"{name}: {value}" for name, value in found.environment.items()]
    for section, about in SECTIONS.items():
        lines += ["", f"## {about}", ""]
        for finding in (f for f in found.findings if f.section == section):
            lines.append(finding.line)
            if finding.fix:
                lines.append(f"          what to do: {finding.fix}")
            lines += [f"          {line}" for line in _table_lines(finding.rows)]
    if found.orders:
        lines += ["", "## Kernels by kind of mask, the preferred one first", ""]
        lines += _table_lines([_order_row(order) for order in found.orders])
    lines += ["", *found.notes, f"It took {found.seconds:.0f} s."]
    return "\n".join(lines) + "\n"


def _order_row(order: Any) -> dict[str, Any]:
    return {
        "kind": order.kind,
        "dtype": order.dtype,
        "head dim": order.head_dim,
        "kernels": ", ".join(
            f"{name} {seconds * 1e3:.3g} ms"
            for name, seconds in zip(order.kernels, order.seconds, strict=True)
        ),
    }


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _cell(value: Any) -> str:
    """A value as a table shows it.

    >>> _cell(0.00012345), _cell(None), _cell("out")
    ('0.000123', '', 'out')
    """
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _table_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows of a table, each column as wide as its widest cell; long texts come as they are."""
    names = _columns(rows)
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))] if rows else []
    if any("\n" in cell for line in cells for cell in line):
        return [text for line in cells[1:] for cell in line for text in cell.splitlines()]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (cells if rows else [])
    ]


_STYLE = """
:root { color-scheme: light dark; --good: #18794e; --bad: #c4262e; --soft: #6b7280; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 0 auto; padding: 16px; }
h1 { font-size: 22px; } h2 { font-size: 16px; margin: 28px 0 6px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
td, th { text-align: left; padding: 3px 12px 3px 0; vertical-align: top; }
th { color: var(--soft); font-weight: 500; }
details { border-top: 1px solid #8884; padding: 5px 0; } summary { cursor: pointer; }
details > div { overflow-x: auto; } pre { margin: 4px 0; }
b { display: inline-block; min-width: 76px; } .passed { color: var(--good); }
.failed { color: var(--bad); } .not-run { color: var(--soft); }
"""


def report_page(found: Diagnosis) -> str:
    """One HTML file that needs nothing else; failures are open, the rest opens on a click."""
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>flexcp doctor</title><style>{_STYLE}</style>",
        f"<h1>flexcp doctor: {escape(found.verdict)}</h1>",
        _html_table([{"": name, " ": value} for name, value in found.environment.items()]),
    ]
    for section, about in SECTIONS.items():
        parts.append(f"<h2>{escape(about)}</h2>")
        parts += [_html_finding(f) for f in found.findings if f.section == section]
    if found.orders:
        parts.append("<h2>Kernels by kind of mask, the preferred one first</h2>")
        parts.append(_html_table([_order_row(order) for order in found.orders]))
    notes = [*found.notes, f"It took {found.seconds:.0f} s."]
    parts += [f"<p>{escape(note)}</p>" for note in notes]
    return "\n".join(parts) + "\n"


def _html_finding(finding: Finding) -> str:
    is_open = " open" if finding.outcome == "failed" else ""
    kind = finding.outcome.replace(" ", "-")
    fix = f"<p>What to do: {escape(finding.fix)}</p>" if finding.fix else ""
    return (
        f"<details{is_open}><summary><b class='{kind}'>{finding.outcome}</b> "
        f"{escape(finding.name)}: {escape(finding.said)}</summary>{fix}"
        f"<div>{_html_table(finding.rows)}</div></details>"
    )


def _html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    names = _columns(rows)
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{_html_cell(row.get(name))}</td>" for name in names) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _html_cell(value: Any) -> str:
    text = escape(_cell(value))
    return f"<pre>{text}</pre>" if "\n" in text else text
