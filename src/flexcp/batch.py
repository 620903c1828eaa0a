"""From a full batch to this rank's part: tokens, shifted labels, positions, and the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from flexcp.errors import FlexCPError, check_flags, require, whole_number
from flexcp.masks import ids_from_lengths
from flexcp.ops.arguments import check_gradients, shape_text
from flexcp.plan import Plan


def shard_batch(
    batch: Mapping[str, Any],
    plan: Plan,
    *,
    documents: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
    restart_positions: bool = False,
    shift_labels: bool = True,
    ignore_index: int = -100,
) -> dict[str, Any]:
    """This rank's part of a batch, with everything that must be done before sharding done.

    Labels are shifted while the whole sequence is there: the label of a token is the token after
    it, whichever rank that is on. The last token of the sequence, of a document, and before
    padding has none.

    Args:
        batch: Tensors [B, S, ...], such as "input_ids", "labels" and "attention_mask" (1 for
            tokens, 0 for padding). What has another shape is passed on as it is, except under
            these names and "position_ids", where it would be a mistake. None is nothing.
        plan: Whose tokens are whose.
        documents: Document ids [S] or [B, S], or the lengths of the documents in order, if
            several are packed into a sequence; lengths as one list, or one per batch element.
        restart_positions: Whether position_ids count from 0 in each document.
        shift_labels: Whether labels are given in the place of their own token, as usual; False if
            they have been shifted already.
        ignore_index: The label of what is not scored.

    Returns:
        The same names with this rank's rows; "labels" shifted; "position_ids"; and
        "num_scored", the number of scored tokens of the whole batch, for `cross_entropy`.

    >>> import flexcp
    >>> tokens = torch.arange(10, 16)[None]
    >>> def rank(mesh):
    ...     plan = flexcp.make_plan(flexcp.masks.causal(), 6, mesh, layout="contiguous")
    ...     part = shard_batch({"input_ids": tokens, "labels": tokens}, plan)
    ...     return part["labels"].tolist(), part["num_scored"]
    >>> flexcp.testing.simulate(rank, 2)
    [([[11, 12, 13]], 5), ([[14, 15, -100]], 5)]
    """
    require("batch", batch, Mapping, 'pass a dict, such as {"input_ids": ..., "labels": ...}')
    require("plan", plan, Plan, "pass what flexcp.make_plan returned")
    check_flags(restart_positions=restart_positions, shift_labels=shift_labels)
    ignore_index = _require_label(ignore_index)
    size = _batch_shape(batch, plan)
    if size is None:
        raise FlexCPError(
            f"a batch with tensors of {plan.seq_len} tokens along dim 1",
            ", ".join(f"{n} {shape_text(x)}" for n, x in batch.items()) or "an empty batch",
            "pass the whole batch, not a part of it, and make the plan for its length",
        )
    ids = None
    if documents is not None:
        ids = _expanded_ids(document_ids(documents, size[1]), size)
    full = {name: x for name, x in batch.items() if x is not None}
    if "position_ids" not in full:
        full["position_ids"] = _positions(ids if restart_positions else None, size)
    _check_known(full, size)
    full["position_ids"] = full["position_ids"].expand(size)
    if "labels" in full:
        labels = full["labels"]
        if shift_labels:
            labels = _shifted(labels, ids, ignore_index)
        if "attention_mask" in full:
            there = full["attention_mask"]
            # Shifted labels may go on behind the sequence: nothing says that padding follows.
            follows = _next(there, 0 if shift_labels else 1)
            labels = labels.masked_fill((there == 0) | (follows == 0), ignore_index)
        full["labels"] = labels
    local = {
        name: plan.shard(x.to(_device(batch)), 1) if _is_sequence(x, plan) else x
        for name, x in full.items()
    }
    if "labels" in full:
        local["num_scored"] = int((full["labels"] != ignore_index).sum())
    return local


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    num_scored: int,
    *,
    gradients: Literal["summed", "averaged"] = "summed",
    ranks: int | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """This rank's part of the loss of one process.

    Args:
        logits: [B, L, vocabulary] of this rank's tokens.
        labels: [B, L], shifted, from `shard_batch`.
        num_scored: Scored tokens of the whole batch, from `shard_batch`.
        gradients: What the trainer does with the ranks' gradients. If it sums them, the losses of
            the ranks add up to the loss of one process. If it averages them (as DDP and FSDP do),
            pass "averaged" and `ranks`: then their mean is that loss.
        ranks: How many ranks are averaged over; has to be said if they are.
        ignore_index: The label of what is not scored.

    >>> logits = torch.zeros(1, 2, 4)
    >>> cross_entropy(logits, torch.tensor([[1, -100]]), num_scored=1)
    tensor(1.3863)
    """
    check_gradients(gradients)
    if gradients == "averaged" and ranks is None:
        raise FlexCPError(
            "the number of ranks, if their gradients are averaged",
            "none",
            "pass ranks=, the size of the group that DDP or FSDP averages over",
        )
    ignore_index = _require_label(ignore_index)
    for name, x in (("logits", logits), ("labels", labels)):
        require(name, x, Tensor, "pass what the model and shard_batch give")
        if x.layout != torch.strided or x.is_nested:
            raise FlexCPError(f"{name} as a dense tensor", f"{x.layout}", "call .to_dense()")
    if logits.dim() < 2 or not logits.is_floating_point() or labels.shape != logits.shape[:-1]:
        raise FlexCPError(
            "logits [..., vocabulary] of a floating-point type, and labels [...] for each",
            f"{logits.dtype} {tuple(logits.shape)} and {labels.dtype} {tuple(labels.shape)}",
            "pass the rows of one rank, labels as shard_batch gives them",
        )
    if labels.dtype not in (torch.int64, torch.int32, torch.uint8):
        raise FlexCPError("labels of integers", f"{labels.dtype}", "pass token numbers")
    fix = 'pass batch["num_scored"], the scored tokens of the whole batch'
    num_scored = whole_number("num_scored", num_scored, at_least=0, fix=fix)
    if ranks is not None:
        fix = "pass how many are averaged over"
        ranks = whole_number("ranks", ranks, at_least=1, at_most=1 << 20, fix=fix)
    try:
        total = functional.cross_entropy(
            logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32)),
            labels.flatten(),
            ignore_index=ignore_index,
            reduction="sum",
        )
    except IndexError as error:  # which a CPU looks for; a GPU's assertion ends the process
        raise FlexCPError(
            f"labels below the vocabulary's size {logits.shape[-1]}, or {ignore_index}",
            str(error),
            "pass token numbers, and ignore_index= if another label is not to be scored",
        ) from None
    times = 1 if ranks is None or gradients == "summed" else ranks
    return total / max(num_scored, 1) * times


def _require_label(ignore_index: object) -> int:
    return whole_number(
        "ignore_index",
        ignore_index,
        at_least=-(2**31),
        at_most=2**31 - 1,
        fix="pass the label of what is not scored",
    )


def _check_known(batch: Mapping[str, Any], size: tuple[int, int]) -> None:
    """Raises if something that belongs to tokens is not [B, S] (or, for positions, [1, S], [S])."""
    for name in ("input_ids", "labels", "attention_mask", "position_ids"):
        x = batch.get(name)
        shapes: list[tuple[int, ...]] = [size]
        if name == "position_ids":
            shapes += [(1, size[1]), (size[1],)]
        given = tuple(getattr(x, "shape", ()))
        if name == "input_ids":  # a token may be several numbers
            given = given[:2]
        if x is not None and given not in shapes:
            raise FlexCPError(
                f"{name} of shape [{size[0]}, {size[1]}], as the batch has tokens",
                shape_text(x),
                "pass the whole batch, with one entry per token",
            )


def _batch_shape(batch: Mapping[str, Any], plan: Plan) -> tuple[int, int] | None:
    sizes = [x.shape[0] for x in batch.values() if _is_sequence(x, plan)]
    return (max(sizes), plan.seq_len) if sizes else None  # positions may be [1, S]


def _is_sequence(x: Any, plan: Plan) -> bool:
    return isinstance(x, Tensor) and x.dim() >= 2 and x.shape[1] == plan.seq_len


def _device(batch: Mapping[str, Any]) -> torch.device:
    return next(x.device for x in batch.values() if isinstance(x, Tensor))


def document_ids(
    documents: Tensor | Sequence[int] | Sequence[Sequence[int]], length: int
) -> Tensor:
    """Integers [S] or [B, S] The documents' ids as they are given, or from their lengths.

    >>> document_ids([2, 1], 3)
    tensor([0, 0, 1])
    """
    if isinstance(documents, Tensor) and documents.dim() in (1, 2) and not documents.is_nested:
        is_whole = not documents.is_floating_point() and not documents.is_complex()
        if documents.shape[-1] == length and is_whole and documents.dtype != torch.bool:
            return documents
    ids = ids_from_lengths(documents)
    if ids.shape[-1] != length:
        raise FlexCPError(
            f"documents that cover the {length} tokens of the batch",
            f"{ids.shape[-1]} tokens",
            "pass one id per token, or lengths that add up to the sequence's length",
        )
    return ids


def _expanded_ids(ids: Tensor, size: tuple[int, int]) -> Tensor:
    if ids.dim() == 2 and ids.shape[0] not in (1, size[0]):
        raise FlexCPError(
            f"documents of {size[0]} batch elements, or of one for all",
            str(ids.shape[0]),
            "pass ids [S] or [B, S], or one list of lengths for each batch element",
        )
    return ids.expand(size)


def _next(x: Tensor, last: int) -> Tensor:
    """Each token's successor."""
    return torch.cat([x[:, 1:], torch.full_like(x[:, :1], last)], dim=1)


def _shifted(labels: Tensor, ids: Tensor | None, ignore_index: int) -> Tensor:
    shifted = _next(labels, ignore_index)
    if ids is None:
        return shifted
    ends = _next(begins(ids), True)
    return shifted.masked_fill(ends.to(labels.device), ignore_index)


def _positions(ids: Tensor | None, size: tuple[int, int]) -> Tensor:
    return torch.arange(size[1]).expand(size) if ids is None else positions_within(ids)


def begins(documents: Tensor) -> Tensor:
    """Bool [B, S] Whether a token is the first of its document, given document ids [B, S].

    >>> begins(torch.tensor([[7, 7, 3]]))
    tensor([[ True, False,  True]])
    """
    first = torch.ones_like(documents[:, :1], dtype=torch.bool)
    return torch.cat([first, documents[:, 1:] != documents[:, :-1]], dim=1)


def positions_within(documents: Tensor) -> Tensor:
    """int64 [B, S] Positions that begin at 0 in every document, given document ids [B, S].

    >>> positions_within(torch.tensor([[7, 7, 7, 3, 3]]))
    tensor([[0, 1, 2, 0, 1]])
    """
    every = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    return every - torch.where(begins(documents), every, 0).cummax(1).values
