"""The catalogue of masks that models use, each a one-line function of global positions.

Masks made alike are equal (`==`). They copy the tensors that they are given, as int64: what happens
to the original does not change a mask, and ids of any integer type give equal masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexcp.eager import tensors_to_capture
from flexcp.errors import FlexCPError, told, whole_number
from flexcp.masks.mask import Mask, made_by


def full() -> Mask:
    """Every query sees every key.

    >>> full()
    Mask(full)
    """

    def everything(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx == q_idx) & (kv_idx == kv_idx)

    return made_by(full, mask_mod=everything, name="full")


def causal() -> Mask:
    """A query sees the keys up to its own position.

    >>> causal()
    Mask(causal)
    """

    def not_later(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    return made_by(causal, mask_mod=not_later, name="causal")


def sliding_window(left: int, right: int = 0) -> Mask:
    """A query at q sees keys in [q - left, q + right].

    >>> sliding_window(1024)
    Mask(sliding_window(1024, 0))
    """
    left = _require_count("left", left, minimum=0)
    right = _require_count("right", right, minimum=0)

    def within(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx <= left) & (kv_idx - q_idx <= right)

    name = f"sliding_window({left}, {right})"
    return made_by(sliding_window, left, right, mask_mod=within, name=name)


def prefix_lm(length: int | Tensor) -> Mask:
    """Causal, and everyone sees the first `length` keys; a tensor [B] gives one per batch element.

    >>> prefix_lm(128)
    Mask(prefix_lm(128))
    >>> prefix_lm(torch.tensor([5, 9]))
    Mask(prefix_lm([2 lengths]))
    """
    if isinstance(length, Tensor):
        lengths = _own_copy(
            _require_integers("prefix lengths", length, dims=(1,), may_be_meta=True)
        )

        def per_element(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (q_idx >= kv_idx) | (kv_idx < lengths[b])

        name = f"prefix_lm([{lengths.numel()} lengths])"
        return made_by(prefix_lm, lengths, mask_mod=per_element, name=name)
    count = whole_number(
        "length",
        length,
        at_least=0,
        fix="pass a number of tokens, or a tensor [B] with one for each batch element",
    )

    def same_for_all(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) | (kv_idx < count)

    return made_by(prefix_lm, count, mask_mod=same_for_all, name=f"prefix_lm({count})")


def document(
    ids: Tensor | None = None,
    *,
    lengths: Sequence[int] | Sequence[Sequence[int]] | Tensor | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
) -> Mask:
    """Query and key must belong to the same document.

    Args:
        ids: Integers [S], or [B, S] for other documents in each batch element; equal ids are the
            same document, in any order.
        lengths: Instead of ids: the documents' lengths in order, one list or one per batch element.
        cu_seqlens: Instead of ids: integers [documents + 1], where each document starts and where
            the last one ends, from 0 to the length of the sequence.

    >>> document(torch.tensor([0, 0, 1, 1, 1]))
    Mask(document)
    >>> document(lengths=[2, 3]) & causal()
    Mask(document & causal)
    >>> document(cu_seqlens=[0, 2, 5]) == document(lengths=[2, 3])
    True
    """
    if cu_seqlens is not None and (ids is not None or lengths is not None):
        raise FlexCPError(
            "cu_seqlens alone",
            f"cu_seqlens and {'lengths' if ids is None else 'ids'}",
            "call document(cu_seqlens=...), document(ids) or document(lengths=[...])",
        )
    if cu_seqlens is not None:
        with tensors_to_capture():
            lengths = _lengths_from_cu_seqlens(cu_seqlens)
    if (ids is None) == (lengths is None):
        raise FlexCPError(
            "either document ids or lengths",
            "both" if ids is not None else "neither",
            "call document(ids), document(lengths=[...]) or document(cu_seqlens=...)",
        )
    if ids is None:
        assert lengths is not None
        known = ids_from_lengths(lengths)
    else:
        fix = "pass one integer per token, [S] or [B, S]"
        known = _own_copy(
            _require_integers("document ids", ids, dims=(1, 2), fix=fix, may_be_meta=True)
        )

    if known.dim() == 1:

        def same_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return known[q_idx] == known[kv_idx]
    else:

        def same_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return known[b, q_idx] == known[b, kv_idx]

    return made_by(document, known, mask_mod=same_document, name="document")


def chunked(size: int) -> Mask:
    """Query and key must lie in the same chunk of `size` tokens.

    >>> chunked(8192) & causal()
    Mask(chunked(8192) & causal)
    """
    size = _require_count("size", size, minimum=1)

    def same_chunk(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx // size == kv_idx // size

    return made_by(chunked, size, mask_mod=same_chunk, name=f"chunked({size})")


def block_causal(size: int) -> Mask:
    """Causal between chunks of `size` tokens, and everything within a chunk.

    >>> block_causal(256)
    Mask(block_causal(256))
    """
    size = _require_count("size", size, minimum=1)

    def no_later_chunk(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx // size >= kv_idx // size

    return made_by(block_causal, size, mask_mod=no_later_chunk, name=f"block_causal({size})")


def global_tokens(count: int) -> Mask:
    """The first `count` tokens see everything and are seen by everything; nothing else is.

    >>> global_tokens(4) | sliding_window(512, 512)
    Mask(global_tokens(4) | sliding_window(512, 512))
    """
    count = _require_count("count", count, minimum=0)

    def touches_global(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx < count) | (kv_idx < count)

    return made_by(global_tokens, count, mask_mod=touches_global, name=f"global_tokens({count})")


def shared_prefix(prefix: int, lengths: Sequence[int]) -> Mask:
    """One prompt followed by branches: each branch sees the prompt and itself, causally.

    >>> shared_prefix(1000, [200, 300, 250])
    Mask(shared_prefix(1000, [3 branches]))
    """
    prefix = _require_count("prefix", prefix, minimum=0)
    with tensors_to_capture():
        given = _require_integers("document lengths", lengths, dims=(1,)).tolist()
    counts = [prefix, *given]
    branch = ids_from_lengths(counts)

    def own_branch(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & ((kv_idx < prefix) | (branch[q_idx] == branch[kv_idx]))

    name = f"shared_prefix({prefix}, [{len(given)} branches])"
    return made_by(_shared_prefix, *counts, mask_mod=own_branch, name=name)


def _shared_prefix(prefix: int, *lengths: int) -> Mask:
    """`shared_prefix` with its lengths as arguments, each of them a part of the mask's value."""
    return shared_prefix(prefix, lengths)


def ids_from_lengths(lengths: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> Tensor:
    """Document ids 0, 1, 2, ... from the documents' lengths; [S], or [B, S] from a list of lists.

    >>> ids_from_lengths([2, 1])
    tensor([0, 0, 1])
    >>> ids_from_lengths([[2, 1], [1, 2]])
    tensor([[0, 0, 1],
            [0, 1, 1]])
    """
    with tensors_to_capture():
        return _ids_from_lengths(lengths)


def _ids_from_lengths(lengths: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> Tensor:
    if isinstance(lengths, (list, tuple)) and lengths and isinstance(lengths[0], (list, tuple)):
        each = [_require_integers("document lengths", row, dims=(1,)) for row in lengths]
        rows = [_ids_from_lengths(row) for row in each]
        sizes = {row.numel() for row in rows}
        if len(sizes) > 1:
            raise FlexCPError(
                "document lengths with the same sum in every batch element",
                f"sums {sorted(sizes)}",
                "add the padding as a last document",
            )
        return torch.stack(rows)
    if isinstance(lengths, (list, tuple)) and not lengths:
        lengths = torch.zeros(0, dtype=torch.int64, device="cpu")
    counts = _require_integers("document lengths", lengths, dims=(1, 2))
    if counts.dim() == 2:
        return _ids_from_lengths([row.tolist() for row in counts])
    if counts.numel() == 0 or int(counts.min()) < 0:
        raise FlexCPError(
            "at least one document length, none negative",
            str(counts.tolist()) if counts.numel() < 20 else f"{int(counts.min())} among them",
            "pass the number of tokens of each document",
        )
    total = sum(counts.tolist())  # of Python's integers, which don't overflow
    if total > MOST_TOKENS_OF_DOCUMENTS:
        raise FlexCPError(
            f"at most {MOST_TOKENS_OF_DOCUMENTS:,} tokens of documents",
            f"{total:,}",
            "pass the lengths of one sequence's documents",
        )
    return torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts)


MOST_TOKENS_OF_DOCUMENTS = 1 << 28
"""A mask of documents has a number of 8 bytes for each token."""


def _lengths_from_cu_seqlens(cu_seqlens: Sequence[int] | Tensor) -> Tensor:
    ends = _require_integers("cu_seqlens", cu_seqlens, dims=(1,))
    ascends = ends.numel() >= 2 and int(ends[0]) == 0 and bool((ends.diff() >= 0).all())
    if not ascends:
        raise FlexCPError(
            "cu_seqlens that start at 0 and do not fall, with one entry more than documents",
            str(ends.tolist())
            if ends.numel() < 20
            else f"{ends.numel()} entries from {int(ends[0])} to {int(ends[-1])}",
            "pass where each document starts, and then the length of the sequence",
        )
    return ends.to(torch.int64).diff()


def _own_copy(tensor: Tensor) -> Tensor:
    """int64 The same numbers in memory that only the mask knows of."""
    with tensors_to_capture():
        return tensor.detach().to(torch.int64, copy=True)


def _require_count(name: str, value: object, *, minimum: int) -> int:
    return whole_number(name, value, at_least=minimum, fix=f"pass {name} as a number of tokens")


def _require_integers(
    what: str,
    given: object,
    *,
    dims: tuple[int, ...],
    fix: str = "pass integers",
    may_be_meta: bool = False,
) -> Tensor:
    """The numbers as a tensor; those that were in no tensor are on the CPU."""
    shapes = " or ".join(f"{d}-D" for d in dims)
    try:
        tensor = given if isinstance(given, Tensor) else torch.as_tensor(given, device="cpu")
        if tensor.is_nested or (tensor.is_meta and not may_be_meta):
            raise TypeError
    except Exception:  # torch's own, or of an object's own
        raise FlexCPError(
            f"{what} as a {shapes} tensor of integers",
            told(given),
            fix,
        ) from None
    integral = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if not integral or tensor.dim() not in dims:
        raise FlexCPError(
            f"{what} as a {shapes} tensor of integers",
            f"{tensor.dtype} of shape {tuple(tensor.shape)}",
            fix,
        )
    return tensor
