"""From a batch to this rank's part of it: labels shifted, positions and documents made explicit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flexcp.batch import begins
from flexcp.errors import FlexCPError
from flexcp.masks import ids_from_lengths
from flexcp.ops.arguments import shape_text
from flexcp.plan import Plan

NAMES_OF_DOCUMENTS = ("document_ids", "seq_idx")
"""Under which a batch says which document a token belongs to."""
_OF_FLASH_ATTENTION = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
IGNORED = -100
"""The label of what is not scored, as in Transformers."""


def shape_of(batch: Mapping[str, Any]) -> tuple[int, int]:
    """B, S."""
    for name in ("input_ids", "inputs_embeds"):
        x = batch.get(name)
        if isinstance(x, Tensor) and x.dim() == (2 if name == "input_ids" else 3):
            return x.shape[0], x.shape[1]
    raise FlexCPError(
        "a batch with input_ids [B, S], or inputs_embeds [B, S, hidden size]",
        ", ".join(f"{n} {shape_text(x)}" for n, x in batch.items()) or "an empty batch",
        "pass the whole batch of tokens, as for one process",
    )


def document_ids(
    batch: Mapping[str, Any], documents: Tensor | Sequence[int] | None, shape: tuple[int, int]
) -> Tensor | None:
    """int64 [B, S] The document of every token, if the caller or the batch names documents."""
    found = documents
    for name in NAMES_OF_DOCUMENTS:
        found = batch.get(name) if found is None else found
    if found is None and batch.get("cu_seq_lens_q") is not None:
        found = batch["cu_seq_lens_q"].diff().tolist()
    if found is None:
        return None
    ids = found
    if not isinstance(ids, Tensor) or ids.is_nested or ids.dim() not in (1, 2):
        ids = ids_from_lengths(found)
    ids = ids if ids.dim() == 2 else ids[None]
    if ids.shape[1] != shape[1] or ids.shape[0] not in (1, shape[0]):
        raise FlexCPError(
            f"documents that cover the batch: ids [{shape[0]}, {shape[1]}] or [{shape[1]}], or "
            f"lengths that add up to {shape[1]}",
            f"ids of shape {tuple(ids.shape)}",
            "name a document for every token, padding included",
        )
    return ids.long().expand(shape)


def shifted_labels(batch: Mapping[str, Any], unscored_starts: Tensor | None) -> Tensor | None:
    """int64 [B, S] For every token, the label of the token after it; None without labels.

    Args:
        batch: With "labels", in the place of their own token, or with "shift_labels".
        unscored_starts: [B, S] ids of documents whose first tokens are not to be predicted from the
            document before them; None if all labels count, as in one process.
    """
    if batch.get("shift_labels") is not None:
        given: Tensor = batch["shift_labels"]
        return given
    labels = batch.get("labels")
    if labels is None:
        return None
    if unscored_starts is not None:
        labels = labels.masked_fill(begins(unscored_starts.to(labels.device)), IGNORED)
    return torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]


def local_part(
    batch: Mapping[str, Any],
    plan: Plan,
    shape: tuple[int, int],
    position_ids: Tensor,
    labels: Tensor | None,
    parts: int,
) -> dict[str, Any]:
    """What the model is called with on this rank.

    Args:
        batch: The whole batch.
        plan: Whose tokens are whose.
        shape: B, S.
        position_ids: [B, S] of the whole batch.
        labels: [B, S] shifted, of the whole batch.
        parts: 1 if the ranks' gradients are summed; the number of ranks if they are averaged.
    """
    replaced = ("labels", "shift_labels", "position_ids", "use_cache")
    dropped = {*replaced, *NAMES_OF_DOCUMENTS, *_OF_FLASH_ATTENTION}
    whole = {name: x for name, x in batch.items() if name not in dropped}
    whole["position_ids"] = position_ids
    if labels is not None:
        scored = (labels != IGNORED).sum()
        items = whole.get("num_items_in_batch")
        items = scored if items is None else torch.as_tensor(items, device=labels.device)
        whole["num_items_in_batch"] = items if parts == 1 else items.double() / parts
        whole["shift_labels"] = labels
    local = {name: plan.shard(x, 1) if _is_sequence(x, shape) else x for name, x in whole.items()}
    if labels is not None:
        local["labels"] = local["shift_labels"]  # without labels, models compute no loss
    return local


def _is_sequence(x: Any, shape: tuple[int, int]) -> bool:
    return isinstance(x, Tensor) and x.dim() >= 2 and x.shape[:2] == shape
