"""What benchmarks/distributed.py reports: one row per contender, as a table and as a plot."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

MASKS = ("causal", "documents", "window 1024", "full")
ALONE = "one process"


@dataclass
class Row:
    """One contender under one mask."""

    mask: str
    tokens: int
    ranks: int
    who: str
    seconds: float = 0.0
    """Forward and backward, of the slowest rank, the best of several."""
    cpu_seconds: float = 0.0
    """CPU time likewise."""
    predicted: float | None = None
    """By the cost model, on this machine as measured."""
    received_mb: float = 0.0
    """What the rank that receives most received."""
    promised_mb: float | None = None
    """What the plan said."""
    hidden: float | None = None
    """Share of the time that the transfers alone take that nobody waited for."""
    memory_mb: float = 0.0
    """Most resident memory of a rank beyond that of a fresh process."""
    tensor_mb: float = 0.0
    """Most memory in tensors."""
    of_torch: float | None = None
    """Speed relative to PyTorch's faster ring in the same run; its causal one unless full."""
    area_ratio: float = 1.0
    """How many times fewer pairs the mask has than what PyTorch's ring computes."""
    scaling: float | None = None
    """Speed relative to one process, over the number of ranks."""


def read(path: Path) -> list[Row]:
    """The rows of an earlier run, if there was one."""
    if not path.exists():
        return []
    return [Row(**row) for row in json.loads(path.read_text())["rows"]]


def merged(old: list[Row], new: list[Row]) -> list[Row]:
    """All rows; what was measured again replaces what was there."""
    rows = {_key(row): row for row in old}
    for row in new:
        before = rows.get(_key(row))
        if before is None:
            rows[_key(row)] = row
        elif row.seconds:
            weight = row if row.memory_mb else before
            rows[_key(row)] = replace(row, memory_mb=weight.memory_mb, tensor_mb=weight.tensor_mb)
        else:
            rows[_key(row)] = replace(before, memory_mb=row.memory_mb, tensor_mb=row.tensor_mb)
    return sorted(rows.values(), key=lambda r: (r.tokens, MASKS.index(r.mask), r.ranks))


def _key(row: Row) -> tuple[str, int, int, str]:
    return row.mask, row.tokens, row.ranks, row.who


def line(row: Row) -> str:
    return (
        f"{row.mask:11s} {row.tokens:6d} x{row.ranks} {row.who:20s} {row.seconds:7.2f} s "
        f"(cpu {row.cpu_seconds:.2f}, predicted {number(row.predicted)}), "
        f"{number(row.of_torch)} of torch, scaling {number(row.scaling)}, "
        f"{row.received_mb:.1f} MB (promised {number(row.promised_mb, 1)}), "
        f"hidden {number(row.hidden)}, memory {row.memory_mb:.0f} MB, tensors {row.tensor_mb:.0f}"
    )


def number(x: float | None, digits: int = 2) -> str:
    return "-" if x is None else f"{x:.{digits}f}"


def table(rows: list[Row]) -> str:
    columns = (
        "mask", "tokens", "ranks", "who", "s", "CPU s", "predicted s", "speed, of torch's ring",
        "area ratio", "scaling", "MB received", "MB promised", "hidden", "memory MB", "tensors MB",
    )  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for r in rows:
        cells = (
            r.mask, r.tokens, r.ranks, r.who, number(r.seconds), number(r.cpu_seconds),
            number(r.predicted), number(r.of_torch), number(r.area_ratio), number(r.scaling),
            number(r.received_mb, 1), number(r.promised_mb, 1), number(r.hidden),
            f"{r.memory_mb:.0f}", f"{r.tensor_mb:.0f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], path: Path) -> None:
    """Speed relative to PyTorch's ring at the length with most rows, and memory over lengths."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = Counter(r.tokens for r in rows if r.of_torch)
    shown = max(timed or [0], key=lambda tokens: (timed[tokens], tokens))
    chosen = [r for r in rows if r.tokens == shown and r.of_torch]
    groups = sorted({(r.mask, r.ranks) for r in chosen}, key=lambda g: (g[1], MASKS.index(g[0])))
    who = list(dict.fromkeys(r.who for r in chosen))
    figure, axes = plt.subplots(1, 2, figsize=(14, 4.6), width_ratios=(3, 2))
    width = 0.8 / max(len(who), 1)
    for place, one in enumerate(who):
        bars = [(groups.index((r.mask, r.ranks)), r.of_torch or 0) for r in chosen if r.who == one]
        shift = (place - (len(who) - 1) / 2) * width
        axes[0].bar([x + shift for x, _ in bars], [y for _, y in bars], width, label=one)
    axes[0].axhline(1, color="black", linewidth=0.8)
    axes[0].set_yscale("log")
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[0].yaxis.set_minor_formatter("{x:g}")
    labels = [f"{mask}\n{ranks} ranks" for mask, ranks in groups]
    axes[0].set_xticks(range(len(groups)), labels, fontsize=8)
    axes[0].set_ylim(top=2 * max((r.of_torch or 1 for r in chosen), default=1))  # for the legend
    axes[0].set_title(f"{shown} tokens, forward and backward: speed, PyTorch's ring = 1")
    axes[0].legend(fontsize=7, ncols=4, loc="upper center")
    most = max(r.ranks for r in rows)
    for one in (ALONE, *who):
        points = sorted(
            (r.tokens, r.tensor_mb)
            for r in rows
            if r.mask == "causal" and r.who == one and r.ranks in (1, most) and r.tensor_mb
        )
        if points:
            axes[1].plot(*zip(*points, strict=True), marker="o", label=one)
    if axes[1].lines:
        axes[1].set_title(f"causal, {most} ranks: most MB in tensors of a rank, by tokens")
        axes[1].legend(fontsize=7)
    else:  # memory was left out
        axes[1].remove()
        axes[0].set_position((0.05, 0.12, 0.93, 0.8))
    if axes[1] in figure.axes:
        figure.tight_layout()
    figure.savefig(path)
