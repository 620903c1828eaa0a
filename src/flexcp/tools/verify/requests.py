"""What may be asked of verify, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from flexcp.batch import document_ids
from flexcp.errors import FlexCPError, finite_number, quote, told, whole_number, whole_shape
from flexcp.masks import ids_from_lengths
from flexcp.plan.make import require_names
from flexcp.tools.verify.models import random_batch, require_batch


def require(world_size: object, ranks: object, gradients: object, losses: object) -> None:
    """Refuses what no run could honour."""
    shape = whole_shape(world_size)
    if not shape or min(shape) < 1 or prod(shape) > _MOST_RANKS:
        few = not shape or min(shape) < 1
        raise FlexCPError(
            "at least 1 rank" if few else f"at most {_MOST_RANKS} ranks",
            quote(world_size),
            "pass world_size=2 or more, or a shape as (2, 2)",
        )
    if not isinstance(ranks, str) or ranks not in ("simulated", "gloo"):
        raise FlexCPError('ranks to be "simulated" or "gloo"', quote(ranks), "pass one of the two")
    for what, value in (
        ("gradients", gradients),
        ("losses", gradients if losses is None else losses),
    ):
        if not isinstance(value, str) or value not in ("summed", "averaged", "reduced"):
            raise FlexCPError(
                f'{what} to be "summed", "averaged" or "reduced"',
                quote(value),
                "say what your trainer does with those of the ranks",
            )


_MOST_RANKS = 256
"""Each takes a copy of the model."""


def require_sizes(seq_len: object, batch_size: object, seed: object, timeout: object) -> None:
    """Refuses sizes of a random batch, and times, that nothing can be done with."""
    fix = "pass the size of a small batch: mistakes don't depend on size"
    whole_number("seq_len", seq_len, at_least=1, at_most=1 << 20, fix=fix)
    whole_number("batch_size", batch_size, at_least=1, at_most=1 << 20, fix=fix)
    whole_number("seed", seed, at_least=-(2**63), fix="pass an integer of 64 bits")
    finite_number("timeout", timeout, fix="pass seconds", least=1e-3, most=1e7)


def require_kinds(
    parallel: object, single: object, dtype: object, layout: Any, schedule: Any
) -> None:
    """Refuses what is no step, type, layout or schedule."""
    for name, step in (("parallel", parallel), ("single", single)):
        if step is not None and not callable(step):
            raise FlexCPError(f"{name} as a function that returns a loss", told(step), "pass one")
    is_type = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    if not is_type and not (dtype is None or (isinstance(dtype, str) and dtype == "auto")):
        raise FlexCPError(
            'dtype to be a floating-point type of torch, None or "auto"',
            quote(dtype),
            "pass the type to convert the model to; None leaves it",
        )
    if parallel is None:
        require_names(layout, schedule)


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
    if documents is not None:
        by_token = isinstance(documents, Tensor) and not documents.is_nested
        by_token = by_token and documents.dim() in (1, 2)  # type: ignore[union-attr]
        length = documents.shape[-1] if by_token else 0  # type: ignore[union-attr]
        ids = ids_from_lengths(documents) if not length else document_ids(documents, length)
        shape = (shape[0], int(ids.shape[-1]))
    return random_batch(model, shape, seed)
