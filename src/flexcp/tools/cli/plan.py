"""`flexcp plan`: who owns which tokens, what moves when, what it costs, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexcp.tools.cli.options import (
    FLAG,
    MASK_HELP,
    Batch,
    BlockSize,
    Debug,
    Dtype,
    HeadDim,
    Heads,
    Json,
    KvHeads,
    Mesh,
    Tokens,
    require_groups,
)

if TYPE_CHECKING:
    from flexcp.plan import Machine
    from flexcp.tools.report import Strategy


def plan(
    mask: Annotated[
        str | None, typer.Argument(metavar="MASK", help=MASK_HELP, show_default=False)
    ] = None,
    tokens: Tokens = None,
    ranks: Mesh = "8",
    heads: Heads = 32,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = 128,
    dtype: Dtype = "bfloat16",
    batch: Batch = 1,
    block_size: BlockSize = 128,
    named: Annotated[
        list[str] | None,
        typer.Option(
            "--mask",
            metavar="NAME=MASK",
            help="Instead of MASK: several masks of one model, by name; they share one layout.",
            show_default=False,
        ),
    ] = None,
    machine: Annotated[
        str,
        typer.Option(
            help="What to price it for: cpu-gloo, h100-nvlink, h100-ib, pcie, a file that "
            "`flexcp doctor` has written, or measure for this computer.",
            metavar="NAME|FILE",
        ),
    ] = "h100-ib",
    layout: Annotated[
        str,
        typer.Option(help="auto, contiguous, head_tail, striped, per_document, ptrr or balanced."),
    ] = "auto",
    schedule: Annotated[
        str, typer.Option(help="auto, exchange, ring, allgather, ulysses, hybrid or hierarchical.")
    ] = "auto",
    check: Annotated[
        bool,
        typer.Option(
            "--check", metavar=FLAG, help="Prove that the schedule is a correct attention."
        ),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the report page: one file, no network.", rich_help_panel="Files"),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option(help="Write a figure of the plan.", rich_help_panel="Files"),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Write the plan with every transfer, as JSON.", rich_help_panel="Files"),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Decide who owns which tokens and what moves when, and say what it costs.

    Needs no GPU and no process group: a laptop plans a million tokens on 64 ranks.
    """
    from flexcp.tools.cli.files import require_ending, writing
    from flexcp.tools.cli.masks import read_masks
    from flexcp.tools.cli.output import console, note, print_json

    require_ending(html, ".html", ".htm")
    require_ending(svg, ".svg")
    require_groups(schedule, ranks)
    masks, length, notes = read_masks(mask, named or [], tokens)
    from flexcp.plan import make_plan
    from flexcp.tools.cli.dtypes import dtype_of
    from flexcp.tools.report.strategies import strategies

    made = make_plan(
        masks,
        length,
        ranks,
        layout=layout,
        schedule=schedule,
        block_size=block_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype_of(dtype),
        batch=batch,
        machine=_machine(machine),
    )
    if check:
        made.check()
        notes = (*notes, "proved: every allowed pair is computed once, by a rank that has its rows")
    found = strategies(made)
    title = mask if mask is not None else ", ".join(named or [])
    for path, write in (
        (html, lambda path: _write_html(found, path, title, notes)),
        (svg, lambda path: _write_svg(found, path, title)),
        (save, lambda path: path.write_text(made.to_json() + "\n", encoding="utf-8")),
    ):
        if path is not None:
            with writing(path):
                write(path)
    if as_json:
        print_json(_summary(found, title, notes))
        return
    from flexcp.tools.cli.plan_text import print_plan
    from flexcp.tools.report.reasons import reasons

    print_plan(console(), found, reasons(found), title)
    for line in notes:
        note(line)
    for path in (html, svg, save):
        if path is not None:
            note(f"written: {path}")


def _machine(text: str) -> Machine:
    """A preset, this computer, or a file: what ends in .json, or has a folder in its name."""
    from flexcp.plan import Machine, load_machine

    if text == "measure":
        return Machine.measure()
    if text.endswith(".json") or "/" in text:
        return load_machine(text)
    return Machine.preset(text)


def _write_html(found: list[Strategy], path: Path, title: str, notes: tuple[str, ...]) -> None:
    from flexcp.tools.report.report import save_report

    save_report(found[0].plan, path, title=title, notes=notes, compared=found)


def _write_svg(found: list[Strategy], path: Path, title: str) -> None:
    from flexcp.tools.report.figure import save_figure

    save_figure(found[0].plan, path, title=title)


def _summary(found: list[Strategy], title: str, notes: tuple[str, ...]) -> dict[str, Any]:
    """What a program would ask for; `--save` has every transfer."""
    from dataclasses import asdict

    from flexcp.tools.report.reasons import reasons

    plan = found[0].plan
    return {
        "mask": title,
        "tokens": plan.seq_len,
        "ranks": list(plan.ranks.shape),
        "shape": {**asdict(plan.shape), "dtype": str(plan.shape.dtype).removeprefix("torch.")},
        "machine": asdict(plan.machine),
        "chosen": {
            "name": plan.considered[0][0],
            "layout": plan.layout.name,
            "schedules": {n: s.name for n, s in plan.schedules.items()},
            "heads_shared_by": {n: s.heads_group_size for n, s in plan.schedules.items()},
            "rounds": {n: s.forward.rounds for n, s in plan.schedules.items()},
            "tokens_per_rank": plan.layout.counts.tolist(),
            "stats": asdict(plan.stats()),
            "fingerprint": plan.fingerprint(),
        },
        "why": reasons(found),
        "considered": [{"name": n, "seconds": s} for n, s in plan.considered],
        "strategies": [
            {
                "name": s.name,
                "layout": s.plan.layout.name,
                "seconds": s.plan.stats().predicted_seconds,
                "imbalance": s.plan.stats().imbalance,
                "most_bytes_received": max(s.plan.stats().bytes_received_per_rank),
            }
            for s in found
        ],
        "notes": list(notes),
    }
