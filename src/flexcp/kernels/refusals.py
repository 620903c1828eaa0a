"""Refusals: why a kernel can't do a call, and the error where it was asked for by name."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.errors import FlexCPError
from flexcp.kernels.fused import CPU_FLASH
from flexcp.kernels.merge import accumulation_dtype
from flexcp.kernels.native.library import TYPES, Library, library
from flexcp.kernels.native.scores import compiled_score
from flexcp.kernels.score import ScoreLike, ScoreMod, examine
from flexcp.kernels.triton.available import (
    is_tested,
    refuses,
    require_device,
    require_triton,
    triton_version,
)
from flexcp.kernels.triton.emit import unknown_step
from flexcp.kernels.triton.tuning import names_every_kernel
from flexcp.kernels.varlen import VarlenOps
from flexcp.torch_names import fake_mode_is_on, is_recorded, is_transformed

_FEWEST_QUERIES = 32
"""Keys are put side by side before the C++ kernel multiplies them, which fewer don't repay."""
FEWEST_SCORES = 1 << 24
"""Scores of a call from which on a new score function is compiled: strips take some 40 ms for so
many, forward, and compiling half a second, once."""


def native_if_faster(q: Tensor, v: Tensor) -> Library | str:
    """The compiled C++ kernel; or why it can't do a call, or is slower for it than fused ops."""
    if q.dtype in TYPES and q.dtype != torch.float32 and CPU_FLASH.multiplies(q.dtype):
        return f"not in C++, which computes in float32: the processor multiplies {q.dtype}"
    if q.shape[2] < _FEWEST_QUERIES:
        return f"not in C++, which needs {_FEWEST_QUERIES} queries to be faster"
    found = native_library(q, v)
    return f"not in C++: {found}" if isinstance(found, str) else found


def native_for_scores(q: Tensor, v: Tensor, score_mod: ScoreLike, scores: int) -> Library | str:
    """The compiled C++ kernel; or why it can't do a call with a score function, or is not worth it.

    `scores` says how many there are to compute, over all heads.
    """
    if q.shape[2] < _FEWEST_QUERIES:
        return f"not in C++, which needs {_FEWEST_QUERIES} queries to be faster"
    if scores < FEWEST_SCORES:
        return f"not in C++, for which {FEWEST_SCORES:,} scores are worth compiling: not {scores:,}"
    found = native_library(q, v)
    if isinstance(found, Library):
        found = _unknown_to_native(score_mod, q, found) or found
    return f"not in C++: {found}" if isinstance(found, str) else found


def _unknown_to_native(score_mod: ScoreLike, q: Tensor, kernel: Library) -> str | None:
    """What of a score function can't be done in C++; None if all of it can."""
    unknown: object = "steps that were not looked at"
    if callable(score_mod):
        try:
            score_mod = examine(score_mod, accumulation_dtype(q.dtype), q.device)
        except Exception as error:  # whatever it does, it can't be written out
            unknown = f"a step that fails ({type(error).__name__}: {error})"
    if isinstance(score_mod, ScoreMod):
        unknown = compiled_score(score_mod, kernel.flags)
    return f"the score_mod has {unknown}" if isinstance(unknown, str) else None


def native_library(q: Tensor, v: Tensor) -> Library | str:
    """The compiled C++ kernel for a call, or why there is none."""
    if q.device.type != "cpu":
        return f"it runs on cpu, not on {q.device.type}"
    if q.dtype not in TYPES:
        return f"it does not take {q.dtype}"
    if fake_mode_is_on() or any(type(x) not in _PLAIN or is_transformed(x) for x in (q, v)):
        return "the tensors have no memory of their own"
    if is_recorded():
        return "operators are being recorded, and it is none"
    found = library()
    if isinstance(found, Library) and q.dtype not in found.dtypes:
        return f"the compiler does not know {q.dtype}"
    return found


_PLAIN = (Tensor, torch.nn.Parameter)


def require_native(q: Tensor, v: Tensor, score_mod: ScoreLike) -> Library:
    """The compiled C++ kernel, or an error that says why it can't do a call."""
    found = native_library(q, v)
    if isinstance(found, Library) and score_mod is not None and score_mod is not False:
        found = _unknown_to_native(score_mod, q, found) or found
    if isinstance(found, str):
        raise FlexCPError("a call that the kernel 'native' can do", found, "leave the kernel out")
    return found


def require_varlen(
    op: VarlenOps, q: Tensor, v: Tensor, score_mod: bool, max_scores: bool, dropout: bool
) -> None:
    """Raises if the variable-length op can't do a call."""
    why_not = op.refuses(q, v)
    needs = {"a score_mod": score_mod, "the largest scores": max_scores, "dropout": dropout}
    for name, given in needs.items():
        if given:
            why_not = f"{op.name} does not do {name} here"
    if why_not is not None:
        raise FlexCPError(
            "tensors and a call that the kernel 'varlen' can do", why_not, "leave the kernel out"
        )


def why_not_triton(q: Tensor, v: Tensor, score_mod: ScoreLike, max_scores: bool) -> str | None:
    """Why the Triton kernels can't do a call; None if they can."""
    version = triton_version()
    if version is None:
        return "not the Triton kernels: Triton is not installed"
    if not is_tested(version):
        return f"not the Triton kernels: they were not tested with Triton {version}"
    refusal = refuses(q.shape[-1], v.shape[-1], q.dtype)
    if refusal is not None:
        return f"not the Triton kernels, which need {refusal.expected}"
    if max_scores:
        return "not the Triton kernels, which don't return the largest scores"
    unknown = unknown_step(score_mod, q.dtype, q.device)
    return None if unknown is None else f"not the Triton kernels: the score_mod has {unknown}"


def require_triton_call(
    q: Tensor,
    v: Tensor,
    score_mod: ScoreLike,
    max_scores: bool,
    wishes: str,
) -> None:
    """Raises if the Triton kernels can't do a call."""
    require_triton(any_version=names_every_kernel(wishes))
    if max_scores:
        raise FlexCPError(
            "a kernel that takes max_scores",
            "kernel 'triton'",
            "ask for 'flash', or leave the kernel out",
        )
    unknown = unknown_step(score_mod, q.dtype, q.device)
    if unknown is not None:
        raise FlexCPError(
            "a kernel that takes score_mod",
            f"kernel 'triton', which can't write it out in Triton: it has {unknown}",
            "ask for 'scored', or leave the kernel out: compiled FlexAttention takes it on one "
            "CUDA device, strips of matrix products elsewhere",
        )
    refusal = refuses(q.shape[-1], v.shape[-1], q.dtype)
    if refusal is not None:
        raise refusal
    require_device(q.device)


def require_flex(q: Tensor) -> None:
    """Raises if compiled FlexAttention can't do a call."""
    if q.device.type != "cuda":
        raise FlexCPError(
            "CUDA tensors for the kernel 'flex'",
            f"tensors on {q.device.type}",
            "leave the kernel out: compiled FlexAttention has no backward pass there",
        )
    if q.dtype == torch.float64:
        raise FlexCPError(
            "float32, bfloat16 or float16 for the kernel 'flex'", "float64", "ask for 'scored'"
        )
