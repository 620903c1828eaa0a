"""The mask of packed sequences, from where each of them ends.

It is worked out once for tensors of cumulative lengths, and again if one is changed in place: the
layers of a model all pass the same tensor, and on a GPU a look at it means waiting for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flexcp.caches import Newest
from flexcp.eager import outside_of_fake_tensors, outside_of_transforms, tensors_to_keep
from flexcp.errors import FlexCPError, quote, whole_number
from flexcp.graph_handles import constant_handle
from flexcp.masks import Mask, causal, document, full, sliding_window


@dataclass(frozen=True)
class Window:
    """How far a query sees to both sides, in keys of its own sequence; None is without limit.

    Where a sequence has more keys than queries, its last query is level with its last key.
    """

    left: int | None = None
    right: int | None = None

    @classmethod
    def of(cls, window_size: tuple[int, int], is_causal: bool) -> Window:
        """From what FlashAttention calls window_size, where -1 is without limit.

        >>> Window.of((-1, -1), True), Window.of((1024, 0), False)
        (Window(left=None, right=0), Window(left=1024, right=0))
        """
        if not isinstance(window_size, tuple | list) or len(window_size) != 2:
            raise FlexCPError(
                "window_size as a pair (left, right)",
                quote(window_size),
                "pass how many keys a query sees to the left and to the right; -1 for all",
            )
        fix = "pass a number of keys, or -1 for all"
        sides = [
            whole_number(f"window_size[{i}]", n, at_least=-1, fix=fix)
            for i, n in enumerate(window_size)
        ]
        left, right = (None if n == -1 else n for n in sides)
        return cls(left, 0 if is_causal else right)

    def mask(self, length: int) -> Mask:
        """The mask of one sequence of `length` tokens that are queries and keys."""
        if self.left is None and self.right in (None, 0):
            return full() if self.right is None else causal()
        return sliding_window(
            length if self.left is None else self.left,
            length if self.right is None else self.right,
        )


@dataclass(frozen=True)
class PackedLengths:
    """Sequences one after the other along the first dimension of packed tensors."""

    cu_seqlens: Tensor
    """Integers [sequences + 1]: where each starts among the queries, and where the last ends."""
    cu_seqlens_k: Tensor | None = None
    """The same among the keys, another tensor; None where they are those of the queries."""
    used_k: Tensor | None = None
    """Integers [sequences]: how many keys of each count; None is all of them."""
    allows_padding: bool = False
    """Whether tokens may follow the last sequence: they see nothing and are not seen."""

    def mask(self, q_len: int, kv_len: int, window: Window) -> Mask:
        """Which pairs of the packed tensors attend."""
        others = [x for x in (self.cu_seqlens_k, self.used_k) if x is not None]
        if any(x.is_inference() for x in (self.cu_seqlens, *others)):
            return self._made(q_len, kv_len, window)  # nobody could tell that one has changed
        versions = (self.cu_seqlens._version, *((id(x), x._version) for x in others))
        key = (q_len, kv_len, window, self.allows_padding, self.used_k is None, versions)
        known: Newest[tuple[object, ...], _Known] | None = _masks.get(self.cu_seqlens)
        if known is None:
            known = _masks[self.cu_seqlens] = Newest(_MOST_MASKS)
        found = known.get(key)
        if found is None:
            found = _Known(self._made(q_len, kv_len, window), tuple(others))
            known.add(key, found)
        return found.mask

    def _made(self, q_len: int, kv_len: int, window: Window) -> Mask:
        with tensors_to_keep(), outside_of_transforms(), outside_of_fake_tensors():
            return self._of_numbers(q_len, kv_len, window)

    def _of_numbers(self, q_len: int, kv_len: int, window: Window) -> Mask:
        q_ends = _checked_ends("cu_seqlens", self.cu_seqlens, q_len, self.allows_padding)
        given = self.cu_seqlens if self.cu_seqlens_k is None else self.cu_seqlens_k
        k_ends = _checked_ends("cu_seqlens_k", given, kv_len, self.allows_padding)
        if self.used_k is None and int(q_ends[-1]) == q_len == kv_len and q_ends.equal(k_ends):
            own = document(cu_seqlens=q_ends)
            return own if window == Window() else own & window.mask(q_len)
        if k_ends.numel() != q_ends.numel():
            raise FlexCPError(
                f"cu_seqlens_k of {q_ends.numel() - 1} sequences, as cu_seqlens has",
                f"{k_ends.numel() - 1}",
                "give every sequence its keys; those of one may be none",
            )
        used = k_ends.diff() if self.used_k is None else _checked_used(self.used_k, k_ends.diff())
        return _of_two_packings(q_ends, k_ends, used, q_len, kv_len, window)


@dataclass(frozen=True)
class _Known:
    """A mask, with the tensors by whose identities it is found: no other has them meanwhile."""

    mask: Mask
    others: tuple[Tensor, ...]


_MOST_MASKS = 8
"""Of one tensor of cumulative lengths: for layers with several windows."""
_masks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The masks that were made of the queries' cumulative lengths, while these are alive."""


def _of_two_packings(
    q_ends: Tensor, k_ends: Tensor, used: Tensor, q_len: int, kv_len: int, window: Window
) -> Mask:
    """Queries and keys are packed each in their own way."""
    sequences = torch.arange(used.numel())
    q_sequence = torch.full((q_len,), -1)
    q_sequence[: int(q_ends[-1])] = sequences.repeat_interleave(q_ends.diff())
    k_sequence = torch.full((kv_len,), -2)
    for_each_key = sequences.repeat_interleave(k_ends.diff())
    place = torch.arange(for_each_key.numel()) - k_ends[for_each_key]
    k_sequence[: for_each_key.numel()] = torch.where(place < used[for_each_key], for_each_key, -2)
    shifts = torch.cat([k_ends[:-1] + used - q_ends[1:], torch.zeros(1, dtype=torch.int64)])
    shift = shifts[q_sequence]
    left = kv_len + q_len if window.left is None else window.left
    right = kv_len + q_len if window.right is None else window.right

    def of_own_sequence(_b: Tensor, _h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        level = q_idx + shift[q_idx]
        near = (level - kv_idx <= left) & (kv_idx - level <= right)
        return (q_sequence[q_idx] == k_sequence[kv_idx]) & near

    return Mask(of_own_sequence, name=f"packed({used.numel()} sequences)")


def _checked_ends(what: str, ends: Tensor, length: int, allows_padding: bool) -> Tensor:
    """int64 The cumulative lengths on the CPU."""
    is_dense = isinstance(ends, Tensor) and not ends.is_nested
    if not is_dense or ends.dim() != 1 or ends.dtype not in _INTEGERS:
        given = f"{ends.dtype} {tuple(ends.shape)}" if is_dense else quote(ends)
        raise FlexCPError(
            f"{what} as a tensor of integers [sequences + 1]",
            given,
            "pass where each sequence starts, and then where the last one ends",
        )
    found = ends.detach().to("cpu", torch.int64)
    fits = found.numel() > 1 and int(found[0]) == 0 and bool((found.diff() >= 0).all())
    last = int(found[-1]) if found.numel() else 0
    if not fits or last > length or (last != length and not allows_padding):
        told = str(found.tolist()) if found.numel() < 20 else f"{found.numel()} up to {last}"
        raise FlexCPError(
            f"{what} that start at 0, do not fall, and end at {length}, the number of tokens",
            told,
            "pass where each sequence starts, and then where the last one ends",
        )
    return found


def _checked_used(used: Tensor, most: Tensor) -> Tensor:
    """int64 How many keys of each sequence count, on the CPU."""
    found = used.detach().to("cpu", torch.int64)
    if found.shape != most.shape or bool((found < 0).any()) or bool((found > most).any()):
        raise FlexCPError(
            f"a number of keys for each of {most.numel()} sequences, none above what it has",
            f"shape {tuple(found.shape)}, up to {int(found.max()) if found.numel() else 0}",
            "count the keys of each sequence that are valid",
        )
    return found


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@torch.library.custom_op("flexcp::packed_mask", mutates_args=())
def packed_mask_handle(
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor | None,
    used_k: Tensor | None,
    q_len: int,
    kv_len: int,
    left: int | None,
    right: int | None,
    allows_padding: bool,
) -> Tensor:
    """The graph handle of the mask, made when the compiled graph runs."""
    packed = PackedLengths(cu_seqlens, cu_seqlens_k, used_k, allows_padding)
    return constant_handle(packed.mask(q_len, kv_len, Window(left, right)))


@packed_mask_handle.register_fake
def _(*args: object) -> Tensor:  # noqa: ARG001
    return torch.empty((), dtype=torch.int64, device="cpu")
