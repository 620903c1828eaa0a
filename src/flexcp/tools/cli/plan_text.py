"""A plan in the terminal: what was chosen, why, what others would cost, who does how much."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flexcp.tools.cli.plan_code import wrapped_code
from flexcp.tools.report.reasons import bytes_by_node, exposed_seconds, memory_parts
from flexcp.units import format_bytes, format_count, format_seconds, format_size

if TYPE_CHECKING:
    from flexcp.plan import Plan
    from flexcp.tools.report import Strategy

_STEPS = " ▁▂▃▄▅▆▇█"
_PARTS = " ▏▎▍▌▋▊▉█"
_TABLE_RANKS = 16
"""Ranks up to which each has a line."""
_WIDE = 80
"""Columns from which there is room for all of a table."""


def bar(share: float, width: int) -> str:
    """A horizontal bar, to an eighth of a character.

    >>> bar(0.5, 5)
    '██▌'
    """
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return "█" * (eighths // 8) + _PARTS[eighths % 8].strip()


def columns(values: Sequence[float], top: float) -> str:
    """Vertical bars, one character each; what is not zero can be seen.

    >>> columns([0, 1, 4, 8], 8)
    ' ▁▄█'
    """
    return "".join(_STEPS[max(v > 0, min(8, round(8 * v / top)))] if top else " " for v in values)


def print_plan(
    out: Console,
    found: Sequence[Strategy],
    why: Sequence[str],
    title: str,
    *,
    layers: int = 1,
    code: str = "",
) -> None:
    """Everything about the first strategy, how the others compare, and the code that makes it."""
    plan, name = found[0].plan, found[0].name
    stats, shape = plan.stats(), plan.shape
    kv = "" if shape.num_kv_heads == shape.num_heads else f" ({shape.num_kv_heads} kv)"
    dtype = str(shape.dtype).removeprefix("torch.")
    out.print(
        Text.assemble(
            (title, "bold"),
            f"  {format_size(plan.seq_len)} tokens, {plan.ranks.size} ranks, "
            f"{shape.num_heads} heads{kv} of {shape.head_dim}, {dtype}"
            + (f", batch {shape.batch}" if shape.batch > 1 else "")
            + f", {plan.machine.name}",
        )
    )
    out.print()
    out.print(
        Text.assemble(
            (name, "bold green"),
            f"  {format_seconds(stats.predicted_seconds)} predicted: "
            f"{format_seconds(stats.forward_seconds)} forward, "
            f"{format_seconds(stats.backward_seconds)} backward",
        )
    )
    bullets = Table.grid(padding=(0, 1, 0, 0))
    for line in why:
        bullets.add_row("  •", line)
    out.print(bullets)
    if len(found) > 1:
        out.print()
        out.print(_strategies(found, out.width))
    considered = _considered(found)
    if considered is not None:
        out.print()
        out.print(considered)
    out.print()
    out.print(_memory(plan, layers))
    if code:
        out.print()
        code = wrapped_code(code, out.width)
        most = max(map(len, code.splitlines()))
        if most > out.width:
            code = f"--json has the code of this plan; it takes {most} columns here."
        out.print(Text(code))
    out.print()
    out.print(_ranks(plan, out.width))


def _strategies(found: Sequence[Strategy], width: int) -> Table:
    """Without bars where lines are short: a name must not give way to them."""
    wide = width >= _WIDE + 16
    bars = 12 if width >= _WIDE + 40 else 0
    slowest = max(s.plan.stats().predicted_seconds for s in found)
    fastest = found[0].plan.stats().predicted_seconds
    several = found[0].plan.ranks.size > found[0].plan.machine.ranks_per_node
    middle = ("×", "busiest", "waits") if wide else ()
    far = ("far",) if wide and several else ()
    table = _table(
        "strategy", "predicted", *("",) * bool(bars), *middle, "received", *far, "memory"
    )
    table.columns[0].justify = "left"
    for i, one in enumerate(found):
        stats = one.plan.stats()
        cells: list[str | Text] = [one.name, format_seconds(stats.predicted_seconds)]
        if bars:
            table.columns[2].justify = "left"
            colour = "green" if i == 0 else "blue"
            cells.append(Text(bar(stats.predicted_seconds / slowest, bars), colour))
        if wide:
            cells.append(f"{stats.predicted_seconds / fastest:.2f}" if fastest else "1.00")
            cells += [f"{stats.imbalance:.3f} ×", format_seconds(exposed_seconds(one.plan))]
        cells.append(format_bytes(max(stats.bytes_received_per_rank)))
        if far:
            cells.append(format_bytes(max(stats.bytes_received_between_nodes_per_rank)))
        cells.append(format_bytes(max(stats.memory_bytes_per_rank)))
        table.add_row(*cells, style="bold" if i == 0 else None)
    told = ["received, forward, and peak memory of one layer: of the rank with most"]
    told += ["far: received from other nodes"] if far else []
    told += ["busiest: most work over the mean; waits: exposed communication"] if wide else []
    table.caption = "; ".join(told)
    table.caption_justify = "left"
    return table


def _considered(found: Sequence[Strategy]) -> Text | None:
    """The planner's own candidates, the best few that the table above does not have."""
    plan = found[0].plan
    listed = {
        (schedule.name, format_seconds(one.plan.stats().predicted_seconds))
        for one in found
        for schedule in one.plan.schedules.values()
    }
    left = [
        (name, seconds)
        for name, seconds in plan.considered[1:]
        if not any(kind in name and text == format_seconds(seconds) for kind, text in listed)
    ]
    if not left:
        return None
    shown = left[:4]
    rest = len(left) - len(shown)
    text = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in shown)
    text = f"Also priced: {text}" + (f", and {rest} more." if rest > 0 else ".")
    if min(seconds for _, seconds in shown) < plan.considered[0][1]:
        text += " The faster ones move more, or hold more rows of others until the backward pass."
    return Text(text, "dim")


def _memory(plan: Plan, layers: int) -> Table:
    """What a rank's memory holds, and where its bytes come from."""
    parts, (near, far) = memory_parts(plan), bytes_by_node(plan)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    rows = [
        ("memory, peak", parts["peak"], "of one layer's attention, in its backward pass"),
        ("  own", parts["own"], "Q, K, V, output and lse of the rank's own tokens"),
        ("  received", parts["received"], "rows of other ranks, at a time"),
        ("  kept", parts["kept"], "rows of others until the backward pass, swapped heads included"),
    ]
    if layers > 1:
        whole = layers * (parts["own"] + parts["kept"])
        rows.append(
            (
                "all layers",
                whole,
                f"own and kept of {layers} layers, at most, if nothing is recomputed",
            )
        )
    rows += [
        ("within nodes", near, "received by all ranks, forward and backward"),
        ("between nodes", far, "received by all ranks, forward and backward"),
    ]
    for name, size, about in rows:
        table.add_row(name, format_bytes(size), Text(about, "dim"))
    return table


def _ranks(plan: Plan, width: int) -> Table:
    stats, tokens = plan.stats(), plan.layout.counts.tolist()
    received = [
        a + b
        for a, b in zip(
            stats.bytes_received_per_rank, stats.backward_bytes_received_per_rank, strict=True
        )
    ]
    if plan.ranks.size > _TABLE_RANKS:
        return _compact(
            (
                ("tokens", tokens, _exact),
                ("work, pairs", stats.area_per_rank, format_count),
                ("received*", received, format_bytes),
            ),
            64 if width >= 108 else 32 if width >= 72 else 16 if width >= 56 else 8,
        )
    bars = 16 if width >= _WIDE else max(0, min(16, (width - 44) // 2))
    table = _table("rank", "tokens", "work, pairs", "", "received*", "")
    table.columns[3].justify = table.columns[5].justify = "left"
    _explain_received(table)
    most_work, most_bytes = max(stats.area_per_rank) or 1, max(received) or 1
    for rank, area in enumerate(stats.area_per_rank):
        table.add_row(
            str(rank),
            f"{tokens[rank]:,}",
            format_count(area),
            Text(bar(area / most_work, bars), "blue"),
            format_bytes(received[rank]),
            Text(bar(received[rank] / most_bytes, bars), "magenta"),
        )
    return table


def _compact(rows: Sequence[tuple[str, Sequence[int], object]], per_line: int) -> Table:
    """A character for each rank."""
    table = _table("by rank", "", "least", "mean", "most")
    table.columns[0].justify = table.columns[1].justify = "left"
    for name, values, formatted in rows:
        assert callable(formatted)
        top = max(values)
        lines = [columns(values[i : i + per_line], top) for i in range(0, len(values), per_line)]
        table.add_row(
            name,
            Text("\n".join(lines), "blue"),
            formatted(min(values)),
            formatted(sum(values) / len(values)),
            formatted(top),
        )
    _explain_received(table)
    return table


def _exact(count: float) -> str:
    return f"{count:,.0f}"


def _explain_received(table: Table) -> None:
    table.caption = "* forward and backward"
    table.caption_justify = "left"


def _table(*header: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in header:
        table.add_column(name, justify="right", no_wrap=True)
    table.columns[0].no_wrap = False  # the only one that may give way where lines are short
    return table
