"""`flexcp verify`: does a model compute on ranks what it computes in one process?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shutil import get_terminal_size
from typing import Annotated, Any

import typer

from flexcp.errors import FlexCPError, quote, require_function
from flexcp.tools.cli.options import FLAG, FUNCTION, Debug, Json, Tokens, unset


def verify(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="`package.module:factory`, a function that builds the model; or, of Transformers, "
            "a model type such as `llama` or `qwen3` (a tiny random one is made), or a folder "
            "with a config.json.",
            show_default=False,
        ),
    ],
    tokens: Tokens = None,
    ranks: Annotated[
        int, typer.Option(min=1, metavar="N", help="Ranks that share the sequence.")
    ] = 2,
    mask: Annotated[
        str | None,
        unset("MASK", "What may attend, as for `flexcp plan`. By default what the model says."),
    ] = None,
    documents: Annotated[
        str | None,
        unset("LENGTHS", "Packed documents, such as 40,25,32; positions start again in each."),
    ] = None,
    step: Annotated[
        str | None, unset(FUNCTION, "Your code of one rank: (model, batch, mesh) -> loss.")
    ] = None,
    single: Annotated[
        str | None,
        unset(
            FUNCTION,
            "Your code of one process: (model, batch) -> loss. By default --step on one rank.",
        ),
    ] = None,
    batch: Annotated[
        str | None,
        unset(FUNCTION, "A function that returns the whole batch; random tokens by default."),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Sequences of a random batch.")
    ] = 1,
    gradients: Annotated[
        str,
        typer.Option(
            metavar="WAY", help="What becomes of the ranks' gradients: summed, averaged or reduced."
        ),
    ] = "summed",
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="Type to convert the model to; `model` leaves it.")
    ] = "auto",
    layout: Annotated[
        str, typer.Option(metavar="NAME", help="As for `flexcp plan`; without --step.")
    ] = "auto",
    schedule: Annotated[
        str, typer.Option(metavar="NAME", help="As for `flexcp plan`; without --step.")
    ] = "auto",
    real: Annotated[
        bool,
        typer.Option("--real", metavar=FLAG, help="Ranks are processes over gloo, not simulated."),
    ] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="For weights and tokens.")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare a model on ranks with one process, and name the first thing that is wrong.

    Loss, logits and every gradient are compared. Single tokens are changed, to see who notices.
    Tokens, positions, labels and the weight of each token in the loss are looked at on every rank.

    Exit code 0 if all checks passed, 1 if one failed.
    """
    lengths = _lengths(documents)
    if tokens is not None and lengths and sum(lengths) != tokens:
        raise FlexCPError(
            f"documents of {tokens} tokens, as --tokens says",
            f"{sum(lengths)}",
            "leave --tokens out",
        )
    from flexcp.tools.cli.dtypes import dtype_of
    from flexcp.tools.cli.masks import read_mask
    from flexcp.tools.import_by_name import import_name
    from flexcp.tools.verify import verify as run

    whole = None
    if batch is not None:
        made_by = import_name(batch)
        require_function("--batch as a function without arguments", made_by, 0, "name another")
        whole = made_by()
    tokens = _length_of(whole, tokens)
    rule: Any = None
    if mask is not None:
        read = read_mask(mask, tokens or sum(lengths) or None)
        rule, tokens = read.mask, read.tokens
    types: dict[str, Any] = {"auto": "auto", "model": None}
    size: dict[str, Any] = {} if tokens is None else {"seq_len": tokens}
    verdict = run(
        model,
        whole,
        parallel=None if step is None else import_name(step),
        single=None if single is None else import_name(single),
        mask=rule,
        documents=lengths or None,
        restart_positions=bool(lengths),
        world_size=ranks,
        ranks="gloo" if real else "simulated",
        gradients=gradients,  # type: ignore[arg-type]
        batch_size=batch_size,
        dtype=types[dtype] if dtype in types else dtype_of(dtype),
        layout=layout,
        schedule=schedule,
        seed=seed,
        **size,
    )
    columns = get_terminal_size((120, 24)).columns
    print(verdict.to_json() if as_json else verdict.to_text(columns))
    if verdict.error is not None and debug:
        raise verdict.error
    if not verdict.passed:
        raise typer.Exit(1)


def _length_of(batch: Any, asked: int | None) -> int | None:
    """The tokens of a sequence of the batch, if there is one; raises if --tokens says another."""
    if not isinstance(batch, Mapping):
        return asked
    from torch import Tensor

    from flexcp.tools.verify.probes import tokens_name

    ids = batch[tokens_name(batch)]
    length = int(ids.shape[1]) if isinstance(ids, Tensor) and ids.dim() > 1 else asked
    if asked is not None and length != asked:
        raise FlexCPError(
            f"a batch of {asked} tokens, as --tokens says", f"{length}", "leave --tokens out"
        )
    return length


def _lengths(text: str | None) -> Sequence[int]:
    """Document lengths as people type them.

    >>> _lengths("40,25, 32")
    [40, 25, 32]
    """
    if text is None:
        return []
    parts = text.replace("[", "").replace("]", "").split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise FlexCPError("lengths of documents", quote(text), "such as --documents 40,25,32")
    return [int(part) for part in parts]
