"""`flexcp train`: a small, real training run over packed documents, on any number of ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexcp.errors import FlexCPError
from flexcp.tools.cli.options import (
    FLAG,
    Debug,
    Json,
    LayoutName,
    ScheduleName,
    mesh_of_option,
    require_groups,
    size_of_option,
    unset,
)

if TYPE_CHECKING:
    from flexcp.tools.cli.train_screen import Screen
    from flexcp.tools.train import Finished, TrainConfig

_MODEL, _PLACE = "Model", "Record"


def train(
    ranks: Annotated[
        Any,
        unset(
            "RANKS",
            "Processes that share every sequence: 2 unless given; 2x2 for 2 groups of 2 that "
            "share heads. Under torchrun, as many as it has started.",
            parser=mesh_of_option,
        ),
    ] = None,
    data: Annotated[
        str | None,
        unset("PATH", "A file or a folder of text; Python's standard library unless given."),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, metavar="N", help="Optimizer steps of the run.")
    ] = 100,
    tokens: Annotated[
        int,
        typer.Option(parser=size_of_option, metavar="SIZE", help="Length of a sequence."),
    ] = 4096,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences of a step.")] = 1,
    document_tokens: Annotated[
        int,
        typer.Option(
            parser=size_of_option, metavar="SIZE", help="Longer documents are cut into such parts."
        ),
    ] = 1536,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            metavar=FLAG,
            help="Repeat every step in one process, and compare the loss and all gradients; the "
            "exit code is 1 if they differ by more than rounding.",
        ),
    ] = False,
    lr: Annotated[float, typer.Option(metavar="RATE", help="Peak learning rate.")] = 3e-3,
    seed: Annotated[
        int, typer.Option(metavar="N", help="For weights and the order of documents.")
    ] = 0,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cpu or cuda.")] = "cpu",
    timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Seconds after which a rank that waits for another gives up."
        ),
    ] = 600.0,
    dim: Annotated[int, typer.Option(metavar="N", help="Width.", rich_help_panel=_MODEL)] = 128,
    layers: Annotated[int, typer.Option(metavar="N", help="Layers.", rich_help_panel=_MODEL)] = 4,
    heads: Annotated[
        int, typer.Option(metavar="N", help="Query heads.", rich_help_panel=_MODEL)
    ] = 4,
    kv_heads: Annotated[
        int, typer.Option(metavar="N", help="Key-value heads.", rich_help_panel=_MODEL)
    ] = 2,
    window: Annotated[
        int | None,
        unset("N", "Every other layer sees only so many tokens back.", rich_help_panel=_MODEL),
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="float32 or float64.", rich_help_panel=_MODEL)
    ] = "float32",
    autocast: Annotated[
        str | None,
        unset("TYPE", "bfloat16: compute in it; weights and loss stay as they are."),
    ] = None,
    layout: LayoutName = "auto",
    schedule: ScheduleName = "auto",
    out: Annotated[
        str,
        typer.Option(
            metavar="FOLDER",
            help="For the checkpoint, the metrics and the loss curve. If it has a checkpoint, the "
            "run goes on from there.",
            rich_help_panel=_PLACE,
        ),
    ] = "out/train",
    restart: Annotated[
        bool,
        typer.Option(
            "--restart", metavar=FLAG, help="Begin anew all the same.", rich_help_panel=_PLACE
        ),
    ] = False,
    checkpoint_every: Annotated[
        int, typer.Option(metavar="N", help="Steps between checkpoints.", rich_help_panel=_PLACE)
    ] = 25,
    eval_every: Annotated[
        int, typer.Option(metavar="N", help="Steps between evaluations.", rich_help_panel=_PLACE)
    ] = 25,
    eval_sequences: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Held-out sequences of an evaluation; 0 for none.",
            rich_help_panel=_PLACE,
        ),
    ] = 2,
    stop_after: Annotated[
        int | None,
        unset(
            "STEP",
            "Save and end after this step; the same command without it goes on.",
            rich_help_panel=_PLACE,
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a byte-level transformer on packed documents, each sequence shared by several ranks.

    Ctrl-C saves and ends; the same command goes on from there, with the losses of a run that was
    never stopped. Within torchrun or a cluster that sets RANK and WORLD_SIZE, it joins the ranks
    there.
    """
    from flexcp.tools.launch import started_by_a_launcher
    from flexcp.tools.train import TrainConfig
    from flexcp.tools.train.launch import launch

    require_groups(schedule, ranks)
    groups, head_ranks = ranks if isinstance(ranks, tuple) else (ranks, 1)
    config = TrainConfig(
        data=data, out=out, steps=steps, tokens=tokens, batch=batch, seed=seed, lr=lr, dim=dim,
        document_tokens=document_tokens, layers=layers, heads=heads, kv_heads=kv_heads,
        window=window, dtype=dtype, autocast=autocast, layout=layout, schedule=schedule,
        head_ranks=head_ranks, device=device, checkpoint_every=checkpoint_every,
        eval_every=eval_every, eval_sequences=eval_sequences, stop_after=stop_after,
        compare=compare, restart=restart, timeout=timeout,
    )  # fmt: skip
    from flexcp.tools.cli.output import print_json
    from flexcp.tools.cli.train_screen import Screen, summary

    joined = started_by_a_launcher(os.environ)
    count = int(os.environ["WORLD_SIZE"]) if joined else 2
    if ranks is not None:
        if joined and groups * head_ranks != count:
            raise FlexCPError(
                f"--ranks {count}, as many as the launcher has started",
                f"--ranks {groups * head_ranks}",
                "leave --ranks away",
            )
        count = groups * head_ranks
    with Screen(quiet=as_json or (joined and os.environ["RANK"] != "0")) as screen:
        if joined or count == 1:
            ended = _here(config, screen, joined=joined)
        else:
            ended = launch(
                config, count, listen=screen, when_asked_to_stop=screen.stopping, show_logs=debug
            )
    if as_json and (not joined or os.environ["RANK"] == "0"):
        print_json(summary(screen.started, ended))
    if ended.interrupted:
        raise typer.Exit(130)
    if ended.equal is False:
        raise typer.Exit(1)


def _here(config: TrainConfig, screen: Screen, *, joined: bool) -> Finished:
    """Trains in this process: as a rank of others, or alone."""
    from flexcp.tools.train.loop import train as train_alone
    from flexcp.tools.train.worker import stop_on_signals, train_on_ranks

    run = train_on_ranks if joined else train_alone
    with stop_on_signals() as stop:
        return run(config, listen=screen, should_stop=stop.is_set)
