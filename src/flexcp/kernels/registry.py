"""The registry: which kernel computes a call, chosen by device, type and need, and why."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flexcp.errors import FlexCPError, finite_number, quote, require
from flexcp.kernels.flash import FlashKernel
from flexcp.kernels.fused import FUSED_OPS, FusedOp
from flexcp.kernels.interface import Kernel
from flexcp.kernels.mask_kinds import KINDS, SCORE_FUNCTION
from flexcp.kernels.native.kernel import NativeKernel
from flexcp.kernels.native.library import Library
from flexcp.kernels.preferences import KernelOrder, preferences_for
from flexcp.kernels.refusals import (
    FEWEST_SCORES,
    native_for_scores,
    native_if_faster,
    require_flex,
    require_native,
    require_triton_call,
    require_varlen,
    why_not_triton,
)
from flexcp.kernels.score import ScoreLike, check_score_mod
from flexcp.kernels.triton.available import arch_of, triton_version
from flexcp.kernels.triton.kernel import TritonKernel
from flexcp.kernels.triton.tuning import Tuning, tuning_for
from flexcp.kernels.varlen import CUDA_VARLEN, VarlenKernel, VarlenOps
from flexcp.kernels.varlen_calls import MOST_CALLS

KERNELS = {
    "flash": "large rectangles on PyTorch's fused ops, the rest in strips of matrix products",
    "native": "in C++ that is compiled for this processor, to which the mask is data",
    "triton": "Triton kernels to which the mask is data, on CUDA and ROCm",
    "varlen": "PyTorch's variable-length FlashAttention op, for masks that a few calls express",
    "scored": "strips of matrix products, with any score_mod",
    "flex": "PyTorch's compiled FlexAttention, on CUDA",
    "reference": "dense and eager, with an S x S matrix; the oracle",
}
"""What can be asked for by name; "triton" with tiles if wanted: "triton: forward=64x64 w4 s2"."""

_ASKED = "it was asked for by name"
_CAUSAL_MODE = "the op's own causal mode, as of this type on this processor"
_CUT = (
    "rectangles and strips, as of float32 on a processor without AVX-512, but one that is all there"
    " is to compute by the op's own causal mode"
)


@dataclass(frozen=True)
class Choice:
    """A kernel and the reasons for it."""

    kernel: str
    fused: FusedOp | None
    """The op for large rectangles; None where all is computed in strips."""
    reasons: tuple[str, ...]
    tuning: Tuning | None = None
    """How the Triton kernels are compiled, if it is those."""
    varlen: VarlenOps | None = None
    """The variable-length op for masks that a few calls of it express."""
    native: Library | None = None
    """The compiled C++ kernel, if it is that."""

    @property
    def runs(self) -> Kernel:
        """What computes partial results: the Triton kernels, or fused ops and strips."""
        assert self.kernel not in ("flex", "reference"), "these return whole results alone"
        if self.kernel == "varlen" and self.varlen is not None:
            return VarlenKernel(self.varlen, None)
        if self.native is not None:
            return NativeKernel(self.native)
        kernel = FlashKernel(self.fused) if self.tuning is None else TritonKernel(self.tuning)
        return kernel if self.varlen is None else VarlenKernel(self.varlen, kernel)

    def __str__(self) -> str:
        return "\n".join(
            [f"{self.kernel}: {KERNELS[self.kernel]}"] + [f"- {r}" for r in self.reasons]
        )


def choose(
    q: Tensor,
    v: Tensor,
    *,
    score_mod: ScoreLike = None,
    max_scores: bool = False,
    is_one_rectangle: bool = False,
    partial: bool = False,
    kernel: str | None = None,
    dropout: bool = False,
    mask_kind: Callable[[], str] | None = None,
    scores: Callable[[], int] | None = None,
) -> Choice:
    """The kernel for a call.

    Args:
        q: [B, H, Lq, D].
        v: [B, G, Lkv, Dv].
        score_mod: a function on the scores, examined or not; True for one that is not known.
        max_scores: whether each row's largest score is wanted.
        is_one_rectangle: whether every query sees every key.
        partial: whether a partial result is wanted, which compiled FlexAttention does not return.
        kernel: a kernel's name, to have that one or an error.
        dropout: whether weights are dropped.
        mask_kind: says which of `mask_kinds.KINDS` the mask is; asked where `flexcp doctor` has
            measured which kernel is the fastest for which kind.
        scores: says how many scores there are to compute, over all heads; asked where a score
            function would have to be compiled. As many as pairs unless given.
    """
    for name, x in (("q", q), ("v", v)):
        if not isinstance(x, Tensor) or x.is_nested or x.dim() != 4:
            raise FlexCPError(
                f"{name} as a tensor [batch, heads, length, head dim]",
                f"shape {tuple(x.shape)}"
                if isinstance(x, Tensor) and not x.is_nested
                else type(x).__name__,
                "pass the tensors of the call",
            )
        if not x.is_floating_point():
            raise FlexCPError(f"{name} of a floating-point type", f"{x.dtype}", "convert it")
    if kernel is not None:
        require("kernel", kernel, str, f"pass one of {', '.join(map(repr, KERNELS))}")
    order = None
    has_score = score_mod is not None and score_mod is not False
    count = scores or (lambda: q.shape[0] * q.shape[1] * q.shape[2] * v.shape[2])
    if kernel is None and not dropout:  # which is not what was measured
        order = _measured_order(q, has_score, mask_kind)
    if order is not None:

        def ask(name: str) -> Choice | None:
            if name == "native" and has_score and count() < FEWEST_SCORES:
                return None
            return choose(
                q,
                v,
                score_mod=score_mod,
                max_scores=max_scores,
                is_one_rectangle=is_one_rectangle,
                partial=partial,
                kernel=name,
            )

        measured = _as_measured(order, ask)
        if measured is not None:
            return measured
    kernel, wishes = (None, "") if kernel is None else _name_and_wishes(kernel)
    if kernel is not None and kernel not in KERNELS:
        raise FlexCPError(
            f"kernel to be one of {', '.join(map(repr, KERNELS))}", quote(kernel), "or leave it out"
        )
    if partial and kernel in ("flex", "reference"):
        raise FlexCPError(
            "a kernel that returns partial results, which ranks and compiled graphs need",
            f"kernel {kernel!r}",
            "ask for 'native', 'triton', 'varlen', 'flash' or 'scored', or leave the kernel out",
        )
    if dropout and (kernel == "flex" or (kernel == "flash" and q.device.type != "cpu")):
        raise FlexCPError(
            "a kernel that drops weights by their global positions",
            f"dropout_p above 0 with kernel {kernel!r}",
            "ask for 'scored', or leave the kernel out",
        )
    if kernel == "reference":
        return Choice("reference", None, (_ASKED,))
    asked: tuple[str, ...] = () if kernel is None else (_ASKED,)
    on_gpu = kernel is None and q.device.type == "cuda"
    on_gpu &= dropout or has_score or not is_one_rectangle
    if kernel == "triton":
        require_triton_call(q, v, score_mod, max_scores, wishes)
        return _triton(q, v, wishes, asked, dropout=dropout, scored=has_score)
    if kernel == "native":
        return Choice("native", None, asked, native=require_native(q, v, score_mod))
    if kernel == "varlen":
        require_varlen(CUDA_VARLEN, q, v, has_score, max_scores, dropout)
        return Choice("varlen", None, asked, varlen=CUDA_VARLEN)
    if on_gpu and (has_score or not max_scores):
        why_not = why_not_triton(q, v, score_mod if has_score else None, max_scores)
        if why_not is None:
            what = "a score_mod written out in Triton" if has_score else "a mask as data"
            reason = f"CUDA tensors, and {what}"
            found = _triton(q, v, "", (reason,), dropout=dropout, scored=has_score)
            return found if dropout or has_score else _with_varlen(q, v, found)
        asked = (why_not,)
    if kernel == "flex" or (on_gpu and not partial and not dropout):
        require_flex(q)
        return Choice("flex", None, (*asked, "CUDA tensors, and a mask or score_mod to compile in"))
    if kernel == "flash" and has_score:
        raise FlexCPError(
            "a kernel that takes a score_mod",
            "kernel 'flash'",
            "ask for 'scored', or leave the kernel out",
        )
    if has_score and kernel is None and q.device.type == "cpu":
        found_native = native_for_scores(q, v, score_mod, count())
        if isinstance(found_native, Library):
            written = (f"{q.dtype} on cpu", "a score_mod written out in C++")
            return Choice("native", None, written, native=found_native)
        asked = (found_native,)
    if has_score or kernel == "scored":
        needed = "a score_mod" if has_score else "strips were asked for"
        if on_gpu:
            needs = "drops no weights" if dropout else "returns no partial results"
            asked = (*asked, f"not compiled FlexAttention, which {needs}")
        return Choice("scored", None, (*asked, needed))
    if kernel is None and q.device.type == "cpu":
        found_native = native_if_faster(q, v)
        if isinstance(found_native, Library):
            return Choice("native", None, (f"{q.dtype} on cpu",), native=found_native)
        asked = (found_native,)
    for given, why in (
        (max_scores, "strips only: fused ops don't return the largest scores"),
        (dropout, "strips only: fused ops don't drop weights by their global positions"),
    ):
        if given:
            return Choice("flash", None, (*asked, why))
    fused, reasons = _fused_op(q, v)
    return Choice("flash", fused, (*asked, *reasons))


def explain(
    q: Tensor,
    v: Tensor,
    *,
    score_mod: object = None,
    max_scores: bool = False,
    is_one_rectangle: bool = False,
    kernel: str | None = None,
    dropout_p: float = 0.0,
    mask_kind: str | None = None,
) -> str:
    """Which kernel is chosen for a call, and why, for a person.

    With `mask_kind` ("full", "causal", "documents", "window" or "arbitrary"), also by what
    `flexcp doctor` has measured on this machine, where it has run.

    >>> x = torch.zeros(1, 4, 8, 16)
    >>> print(explain(x, x, score_mod=lambda s, b, h, q, kv: s))
    scored: strips of matrix products, with any score_mod
    - not in C++, which needs 32 queries to be faster
    - a score_mod
    """
    check_score_mod(score_mod)
    function: Any = score_mod
    require("max_scores", max_scores, bool, "pass True or False")
    require("is_one_rectangle", is_one_rectangle, bool, "pass True or False")
    p = finite_number("dropout_p", dropout_p, fix="pass that of the call", least=0, most=1)
    if mask_kind is not None and not (isinstance(mask_kind, str) and mask_kind in KINDS):
        raise FlexCPError(
            f"mask_kind to be one of {', '.join(map(repr, KINDS))}", quote(mask_kind), "name one"
        )
    choice = choose(
        q,
        v,
        score_mod=function,
        max_scores=max_scores,
        is_one_rectangle=is_one_rectangle,
        kernel=kernel,
        dropout=p > 0,
        mask_kind=None if mask_kind is None else lambda: mask_kind,
    )
    ignored = "" if kernel is not None else preferences_for(q.device).ignored
    return f"{choice}\n- {ignored}" if ignored else str(choice)


def _measured_order(
    q: Tensor, score_mod: bool, mask_kind: Callable[[], str] | None
) -> KernelOrder | None:
    """What the doctor has measured for such a call, if it has."""
    known = preferences_for(q.device)
    if not known.orders or mask_kind is None:
        return None
    kind = SCORE_FUNCTION if score_mod else mask_kind()
    return known.order(kind, q.dtype, q.shape[-1])


def _as_measured(order: KernelOrder, ask: Callable[[str], Choice | None]) -> Choice | None:
    """The fastest kernel that can do a call, with the measurement as the first reason for it.

    The variable-length op comes with the next one, for masks that it can't express.
    """
    varlen: VarlenOps | None = None
    for name in order.kernels:
        with suppress(FlexCPError):  # the next one may be able to
            found = ask(name)
            if found is None:
                continue
            if found.kernel == "varlen":
                varlen = found.varlen
            elif varlen is None or found.kernel != "flex":
                names = f"{order.kind}: the first that can, of {', '.join(order.kernels)}"
                measured = f"with {order.dtype} and head dim {order.head_dim}"
                why = f"{names}, as flexcp doctor has measured {measured}"
                reasons = (why, *(r for r in found.reasons if r != _ASKED))
                return replace(found, reasons=reasons, varlen=varlen)
    return None


def _name_and_wishes(kernel: str) -> tuple[str, str]:
    """A kernel's name, and what follows it: tiles, for "triton"."""
    name, _, wishes = str(kernel).partition(":")
    return (name.strip(), wishes.strip()) if name.strip() == "triton" else (kernel, "")


def _triton(
    q: Tensor,
    v: Tensor,
    wishes: str,
    reasons: tuple[str, ...],
    *,
    dropout: bool,
    scored: bool,
) -> Choice:
    tuning, about = tuning_for(
        arch_of(q.device), q.shape[-1], v.shape[-1], q.dtype, wishes, dropout=dropout, scored=scored
    )
    version = f"Triton {triton_version()}"
    return Choice("triton", None, (*reasons, version, *about), tuning)


def _with_varlen(q: Tensor, v: Tensor, choice: Choice) -> Choice:
    """A choice, with the variable-length op for what it can express."""
    why_not = CUDA_VARLEN.refuses(q, v)
    if why_not is not None:
        return replace(choice, reasons=(*choice.reasons, why_not))
    why = f"{CUDA_VARLEN.name} instead, where at most {MOST_CALLS} calls of it are the whole mask"
    return replace(choice, reasons=(*choice.reasons, why), varlen=CUDA_VARLEN)


def _fused_op(q: Tensor, v: Tensor) -> tuple[FusedOp | None, tuple[str, ...]]:
    refusals: list[str] = []
    for op in FUSED_OPS:
        if op.device != q.device.type:
            continue
        why_not = op.refuses(q, v)
        if why_not is None and _leaves_threads_idle(q):
            why_not = f"{op.name} runs one batch element and head per thread; there are too few"
        if why_not is None:
            found = [*refusals, f"{op.name} takes {q.dtype} on {q.device.type}"]
            used = q.dtype if op.multiplies(q.dtype) else torch.float32
            if used != q.dtype:
                found.append(f"computed in float32: this processor has no products of {q.dtype}")
            if op.causal_forward is not None:
                found.append(f"triangles by {_CAUSAL_MODE if op.causal_rows(used) else _CUT}")
            if op.masked_forward is not None:
                found.append("sliding windows by the op with a bias forward, cut up backward")
            return op, tuple(found)
        refusals.append(why_not)
    if not refusals:
        refusals.append(f"no fused op is known for {q.device.type}")
    return None, (*refusals, "so all is computed in strips")


def _leaves_threads_idle(q: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[0] * q.shape[1] < torch.get_num_threads()
