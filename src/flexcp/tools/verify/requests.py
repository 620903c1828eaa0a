"""What may be asked of verify, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from flexcp.errors import FlexCPError
from flexcp.masks import ids_from_lengths
from flexcp.tools.verify.models import random_batch, require_batch


def require(world_size: object, ranks: object, gradients: object, losses: object) -> None:
    """Refuses what no run could honour."""
    shape = world_size if isinstance(world_size, tuple) else (world_size,)
    if not shape or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in shape):
        raise FlexCPError(
            "at least 1 rank", repr(world_size), "pass world_size=2 or more, or a shape as (2, 2)"
        )
    if ranks not in ("simulated", "gloo"):
        raise FlexCPError('ranks to be "simulated" or "gloo"', repr(ranks), "pass one of the two")
    for what, value in (("gradients", gradients), ("losses", losses or gradients)):
        if value not in ("summed", "averaged", "reduced"):
            raise FlexCPError(
                f'{what} to be "summed", "averaged" or "reduced"',
                repr(value),
                "say what your trainer does with those of the ranks",
            )


def require_used(has_step: bool, has_single: bool, gradients: str, given: dict[str, bool]) -> None:
    """Refuses options that nothing would come of."""
    unused = [name for name, is_given in given.items() if is_given and has_step]
    if unused:
        raise FlexCPError(
            f"{unused[0]}= for a model without parallel=",
            "both",
            "say it in your own step, which shards the batch and makes the plan",
        )
    if has_single and not has_step:
        raise FlexCPError(
            "parallel= beside single=", "single= alone", "pass the step of a rank as well"
        )
    if gradients == "reduced" and not has_step:
        raise FlexCPError(
            'gradients="summed" or "averaged", for a model without parallel=',
            '"reduced"',
            "pass the step that reduces them",
        )


def whole_batch(
    model: Any,
    batch: Mapping[str, Any] | None,
    documents: Tensor | Sequence[int] | None,
    shape: tuple[int, int],
    seed: int,
) -> dict[str, Any]:
    """The batch that was given, or a random one, as long as the documents are."""
    if batch is not None:
        return require_batch(batch)
    if isinstance(documents, Tensor):
        shape = (shape[0], documents.shape[-1])
    elif documents is not None:
        shape = (shape[0], int(ids_from_lengths(documents).shape[-1]))
    return random_batch(model, shape, seed)


def document_ids(documents: Tensor | Sequence[int], tokens: Tensor) -> Tensor:
    """int64 [S] or [B, S] from ids or lengths, as long as the batch is."""
    ids = documents
    if not isinstance(ids, Tensor) or ids.shape[-1] != tokens.shape[1]:
        ids = ids_from_lengths(ids)
    if ids.shape[-1] != tokens.shape[1]:
        raise FlexCPError(
            f"documents that cover the {tokens.shape[1]} tokens of the batch",
            f"{ids.shape[-1]} tokens",
            "pass one id per token, or lengths that add up to the sequence's length",
        )
    return ids
