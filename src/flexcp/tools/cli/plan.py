"""`flexcp plan`: who owns which tokens, what moves when, what it costs, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexcp.errors import FlexCPError
from flexcp.tools.cli.options import (
    FLAG,
    MASK_HELP,
    Batch,
    BlockSize,
    Debug,
    Dtype,
    Json,
    KvHeads,
    LayoutName,
    Mesh,
    ScheduleName,
    Tokens,
    require_groups,
    unset,
)

if TYPE_CHECKING:
    from flexcp.plan import Machine, Plan
    from flexcp.tools.report import Strategy


def _machine_names() -> list[str]:
    return ["a100", "h100", "h200", "b200", "mi300x", "h100-nvlink", "pcie", "cpu-gloo", "measure"]


def _model_names() -> list[str]:
    from flexcp.tools.cli.model_shapes import MODELS

    return list(MODELS)


def plan(
    mask: Annotated[
        str | None, typer.Argument(metavar="MASK", help=MASK_HELP, show_default=False)
    ] = None,
    tokens: Tokens = None,
    ranks: Mesh = "8",
    model: Annotated[
        str | None,
        unset(
            "NAME|CONFIG",
            "A model whose heads, head dimension and windows are planned for: llama-3-70b, "
            "qwen3-32b, gemma-3-27b, ..., or a Transformers config.json or its folder.",
            autocompletion=_model_names,
        ),
    ] = None,
    heads: Annotated[
        int | None, unset("N", "Query heads; 32 unless --model says otherwise.", min=1)
    ] = None,
    kv_heads: KvHeads = None,
    head_dim: Annotated[
        int | None, unset("N", "Elements of a head; 128 unless --model says otherwise.", min=1)
    ] = None,
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
            help="What to price it for: a100, h100, h200, b200, mi300x (nodes of 8), h100-nvlink "
            "and the like (one node), pcie, cpu-gloo; a file that `flexcp doctor` has written; or "
            "measure for this computer.",
            metavar="NAME|FILE",
            autocompletion=_machine_names,
        ),
    ] = "h100-ib",
    gpus_per_node: Annotated[
        int | None,
        unset("N", "Consecutive ranks with the fast link; the machine's own if not given.", min=1),
    ] = None,
    layout: LayoutName = "auto",
    schedule: ScheduleName = "auto",
    check: Annotated[
        bool,
        typer.Option(
            "--check", metavar=FLAG, help="Prove that the schedule is a correct attention."
        ),
    ] = False,
    html: Annotated[
        Path | None,
        unset("FILE", "Write the report page: one file, no network.", rich_help_panel="Files"),
    ] = None,
    svg: Annotated[
        Path | None,
        unset("FILE", "Write a figure of the plan.", rich_help_panel="Files"),
    ] = None,
    save: Annotated[
        Path | None,
        unset(
            "FILE",
            "Write the plan with every transfer, as JSON: flexcp.load_plan reads it.",
            rich_help_panel="Files",
        ),
    ] = None,
    load: Annotated[
        Path | None,
        unset(
            "FILE",
            "Show a plan that --save has written, instead of making one.",
            rich_help_panel="Files",
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Decide who owns which tokens and what moves when, and say what it costs.

    Needs no GPU and no process group: a laptop plans a million tokens on 64 ranks.
    """
    from flexcp.tools.cli.files import require_ending, writing
    from flexcp.tools.cli.output import console, note, print_json
    from flexcp.tools.cli.progress import progress

    require_ending(html, ".html", ".htm")
    require_ending(svg, ".svg")
    require_groups(schedule, ranks)
    asked = _PlanRequest(mask, named or [], tokens, ranks, heads, kv_heads, head_dim, dtype, batch,
                   block_size, machine, gpus_per_node, layout, schedule)  # fmt: skip
    with progress("reading the mask") as say:
        made = _loaded(load, asked) if load is not None else _planned(asked, model, say)
        notes = made.notes
        if check:
            say("proving the schedule")
            made.plan.check()
            notes += ("proved: every allowed pair is computed once, by a rank that has its rows",)
        from flexcp.tools.report.strategies import strategies

        found = strategies(made.plan, say)
        say("writing files")
        writers: tuple[tuple[Path | None, Callable[[Path], None]], ...] = (
            (html, lambda path: _write_html(found, path, made.title, notes)),
            (svg, lambda path: _write_svg(found, path, made.title)),
            (save, lambda path: _save(found, path)),
        )
        for path, write in writers:
            if path is not None:
                with writing(path):
                    write(path)
    if as_json:
        print_json(_summary(found, made, notes))
        return
    from flexcp.tools.cli.plan_text import print_plan
    from flexcp.tools.report.reasons import reasons

    print_plan(console(), found, reasons(found), made.title, layers=made.layers, code=made.code)
    for line in notes:
        note(line)
    for path in (html, svg, save):
        if path is not None:
            note(f"written: {path}")


@dataclass(frozen=True)
class _PlanRequest:
    """The options that say what to plan."""

    mask: str | None
    named: list[str]
    tokens: int | None
    ranks: Any
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    dtype: str
    batch: int
    block_size: int
    machine: str
    gpus_per_node: int | None
    layout: str
    schedule: str


@dataclass(frozen=True)
class _PlanOfRequest:
    """A plan with what is said about it."""

    plan: Plan
    title: str
    notes: tuple[str, ...]
    layers: int
    """How many layers the model has that was named; else 1."""
    code: str
    """Python that gives this plan."""


def _planned(asked: _PlanRequest, model: str | None, say: Callable[[str], None]) -> _PlanOfRequest:
    """Makes the plan that was asked for."""
    from flexcp.plan import Ranks
    from flexcp.plan.make import require_names
    from flexcp.tools.cli.dtypes import dtype_of
    from flexcp.tools.cli.masks import read_masks
    from flexcp.tools.cli.model_shapes import model_shape

    shape = None if model is None else model_shape(model)
    Ranks.of(asked.ranks)
    require_names(asked.layout, asked.schedule)
    dtype, machine = dtype_of(asked.dtype), _machine(asked.machine, asked.gpus_per_node)
    mask, named = asked.mask, asked.named
    notes: tuple[str, ...] = ()
    if shape is not None:
        notes = (shape.note,) if shape.note else ()
        if mask is None and not named:
            mask, named = shape.masks
    masks, length, more = read_masks(mask, named, asked.tokens)
    from flexcp.plan import make_plan
    from flexcp.tools.cli.plan_code import plan_code

    say("choosing a layout and a schedule")
    made = make_plan(
        masks,
        length,
        asked.ranks,
        layout=asked.layout,
        schedule=asked.schedule,
        block_size=asked.block_size,
        num_heads=asked.heads or (32 if shape is None else shape.heads),
        num_kv_heads=asked.kv_heads or (None if shape is None else shape.kv_heads),
        head_dim=asked.head_dim or (128 if shape is None else shape.head_dim),
        dtype=dtype,
        batch=asked.batch,
        machine=machine,
    )
    texts = {"": mask} if mask else dict(item.partition("=")[::2] for item in named)
    code = plan_code(made, masks, texts, layout=asked.layout, schedule=asked.schedule)
    title = mask if mask is not None else ", ".join(named)
    if shape is not None:
        title = f"{shape.name}: {title}"
    return _PlanOfRequest(made, title, (*notes, *more), 1 if shape is None else shape.layers, code)


def _loaded(path: Path, asked: _PlanRequest) -> _PlanOfRequest:
    """The plan of a file."""
    from flexcp.plan import load_plan

    if asked.mask is not None or asked.named:
        raise FlexCPError(
            "--load alone", "--load and a mask", "leave out the mask: the plan has its own"
        )
    made = load_plan(path)
    title = ", ".join(f"{n}={g.mask.name}" if n else g.mask.name for n, g in made.grids.items())
    code = f"import flexcp\n\nplan = flexcp.load_plan({str(path)!r})  # then plan.on(mesh)"
    return _PlanOfRequest(made, title, (), 1, code)


def _save(found: list[Strategy], path: Path) -> None:
    from flexcp.plan import save_plan

    save_plan(found[0].plan, path)


def _machine(text: str, gpus_per_node: int | None) -> Machine:
    """A preset, this computer, or a file: what ends in .json, or has a folder in its name."""
    from flexcp.ops import flex_attention
    from flexcp.plan import Machine, load_machine

    if text == "measure":
        found = Machine.measure(attention=flex_attention)
    elif text.endswith(".json") or "/" in text:
        found = load_machine(text)
    else:
        found = Machine.preset(text)
    return found if gpus_per_node is None else replace(found, ranks_per_node=gpus_per_node)


def _write_html(found: list[Strategy], path: Path, title: str, notes: tuple[str, ...]) -> None:
    from flexcp.tools.report.report import save_report

    save_report(found[0].plan, path, title=title, notes=notes, compared=found)


def _write_svg(found: list[Strategy], path: Path, title: str) -> None:
    from flexcp.tools.report.figure import save_figure

    save_figure(found[0].plan, path, title=title)


def _summary(found: list[Strategy], made: _PlanOfRequest, notes: tuple[str, ...]) -> dict[str, Any]:
    """What a program would ask for; `--save` has every transfer."""
    from flexcp.tools.report.reasons import bytes_by_node, exposed_seconds, memory_parts, reasons

    plan = found[0].plan
    return {
        "mask": made.title,
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
            "memory_bytes": memory_parts(plan),
            "bytes_within_nodes": bytes_by_node(plan)[0],
            "bytes_between_nodes": bytes_by_node(plan)[1],
            "exposed_seconds": exposed_seconds(plan),
        },
        "layers": made.layers,
        "code": made.code,
        "why": reasons(found),
        "considered": [{"name": n, "seconds": s} for n, s in plan.considered],
        "strategies": [
            {
                "name": s.name,
                "layout": s.plan.layout.name,
                "schedules": {n: one.name for n, one in s.plan.schedules.items()},
                "seconds": s.plan.stats().predicted_seconds,
                "imbalance": s.plan.stats().imbalance,
                "most_bytes_received": max(s.plan.stats().bytes_received_per_rank),
                "bytes_between_nodes": bytes_by_node(s.plan)[1],
                "exposed_seconds": exposed_seconds(s.plan),
                "most_memory_bytes": max(s.plan.stats().memory_bytes_per_rank),
            }
            for s in found
        ],
        "notes": list(notes),
    }
