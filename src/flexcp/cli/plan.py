"""`flexcp plan`: who owns which tokens, what moves when, what it costs, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from flexcp.cli.options import (
    MASK_HELP,
    Batch,
    BlockSize,
    Debug,
    Dtype,
    HeadDim,
    Heads,
    Json,
    KvHeads,
    Ranks,
    Tokens,
)


def plan(
    mask: Annotated[
        str | None, typer.Argument(metavar="MASK", help=MASK_HELP, show_default=False)
    ] = None,
    tokens: Tokens = None,
    ranks: Ranks = 8,
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
        typer.Option(help="What to price it for: cpu-gloo, h100-nvlink, h100-ib, pcie, measure."),
    ] = "h100-ib",
    layout: Annotated[
        str,
        typer.Option(help="auto, contiguous, head_tail, striped, per_document, ptrr or balanced."),
    ] = "auto",
    schedule: Annotated[
        str, typer.Option(help="auto, exchange, ring, allgather, ulysses or hybrid.")
    ] = "auto",
    check: Annotated[
        bool, typer.Option("--check", help="Prove that the schedule is a correct attention.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Decide who owns which tokens and what moves when, and say what it costs.

    Needs no GPU and no process group: a laptop plans a million tokens on 64 ranks.
    """
    from flexcp.cli.masks import read_masks
    from flexcp.cli.output import note

    masks, length, notes = read_masks(mask, named or [], tokens)
    from flexcp.cli.dtypes import dtype_of
    from flexcp.plan import Machine, make_plan

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
        machine=Machine.measure() if machine == "measure" else machine,
    )
    if check:
        made.check()
    if as_json:
        print(made.to_json())
        return
    for line in notes:
        note(line)
    print(made.explain())
