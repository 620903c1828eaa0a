"""The compiled C++ kernel as Python sees it: what it is called with, and whether it is right."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexcp.errors import FlexCPError
from flexcp.kernels.interface import causal_shapes
from flexcp.kernels.native.build import BuildError, built
from flexcp.kernels.native.scores import TILE, LookupSums, ScoreFields
from flexcp.kernels.tiles import TileLists, tile_lists

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The numbers of the types that tensors may have."""

_SCORE = (
    "score", "pull_back", "score_given", "score_whole", "score_real", "q_at", "kv_at",
    "q_consecutive", "kv_consecutive", "sum_lookups", "lookup_sums", "lookup_sums_at",
)  # fmt: skip
_LISTS = (
    "full_start", "full_tile", "full_stop", "partial_start", "partial_tile", "partial_pattern",
    "patterns", "plane_of",
)  # fmt: skip


class Rows(ctypes.Structure):
    """A tensor of rows, as `tiles.h` has it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("type", "batch", "head", "row", "element")),
    )

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        """The rows of a tensor [B, H, L, D], or the numbers of one [B, H, L]."""
        steps = x.stride() if x.dim() == 4 else (*x.stride(), 1)
        return cls(x.data_ptr(), TYPES[x.dtype], *steps)


class Call(ctypes.Structure):
    """What a call takes, as `tiles.h` has it."""

    _fields_ = (
        *((name, Rows) for name in (
            "q", "k", "v", "out", "lse", "largest", "grad_out", "delta", "grad_q", "grad_k",
            "grad_v",
        )),
        *((name, ctypes.c_int64) for name in (
            "batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim", "lines",
            "planes_batch", "planes_heads",
        )),
        *((name, ctypes.c_void_p) for name in (*_LISTS, "row_hash", "second_hash", "key_hash")),
        *((name, ctypes.c_int64) for name in ("key_hash_batch", "threshold")),
        *((name, ctypes.c_double) for name in ("factor", "scale")),
        *((name, ctypes.c_int64) for name in ("has_former", "threads")),
        *((name, ctypes.c_void_p) for name in _SCORE),
        ("lookup_sums_size", ctypes.c_int64),
    )  # fmt: skip


@dataclass(frozen=True)
class Hashes:
    """What decides which weights dropout keeps; tensors are int32."""

    row: Tensor
    """[B, H, Lq]."""
    second: Tensor
    """[B, H, Lq]."""
    key: Tensor
    """[1 or B, whole tiles of keys]."""
    threshold: int
    factor: float


@dataclass(frozen=True)
class Library:
    """The compiled kernel."""

    forward: Callable[[Any], int]
    backward: Callable[[Any], int]
    deltas: Callable[[Any], int]
    dtypes: frozenset[torch.dtype]
    """What it takes."""
    flags: tuple[str, ...] = ()
    """What the compiler was told beside the usual."""

    def run(
        self,
        function: Callable[[Any], int],
        tensors: Mapping[str, Tensor | None],
        lists: TileLists,
        *,
        scale: float,
        has_former: bool = False,
        hashes: Hashes | None = None,
        score: ScoreFields | None = None,
        sums: LookupSums | None = None,
    ) -> None:
        """Calls `forward` or `backward` on tensors by the names of the call's fields."""
        q, k, v = (tensors[name] for name in ("q", "k", "v"))
        assert q is not None
        assert k is not None
        assert v is not None
        call = Call(
            batch=q.shape[0], heads=q.shape[1], kv_heads=k.shape[1], q_len=q.shape[2],
            kv_len=k.shape[2], head_dim=q.shape[3], value_dim=v.shape[3], lines=lists.lines,
            planes_batch=lists.plane_of.shape[0], planes_heads=lists.plane_of.shape[1],
            scale=scale, factor=1.0, has_former=has_former, threads=torch.get_num_threads(),
            **{name: Rows.of(x) for name, x in tensors.items() if x is not None},
            **{name: getattr(lists, name).data_ptr() for name in _LISTS},
            **({} if score is None else score.fields),
            **({} if sums is None else sums.fields(self.flags)),
        )  # fmt: skip
        if hashes is not None:
            call.row_hash = hashes.row.data_ptr()
            call.second_hash = hashes.second.data_ptr()
            call.key_hash = hashes.key.data_ptr()
            call.key_hash_batch = hashes.key.stride(0) if hashes.key.shape[0] > 1 else 0
            call.threshold, call.factor = hashes.threshold, hashes.factor
        if function(ctypes.byref(call)) != 0:
            raise _no_memory(f"keys {tuple(k.shape)}")

    def delta(self, grad_out: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor:
        """[B, H, Lq] What the backward pass needs of each row."""
        found = torch.empty(out.shape[:3], dtype=torch.float32)
        call = Call(
            batch=out.shape[0], heads=out.shape[1], q_len=out.shape[2], value_dim=out.shape[3],
            out=Rows.of(out), grad_out=Rows.of(grad_out), delta=Rows.of(found),
            threads=torch.get_num_threads(),
            **({} if grad_lse is None else {"lse": Rows.of(grad_lse)}),
        )  # fmt: skip
        if self.deltas(ctypes.byref(call)) != 0:
            raise _no_memory(f"results {tuple(out.shape)}")
        return found


def _no_memory(what: str) -> FlexCPError:
    return FlexCPError(
        "memory for the tiles of the kernel 'native'",
        f"none left, with {what}",
        "shard the sequence over more ranks, or ask for the kernel 'flash'",
    )


@lru_cache(maxsize=1)
def library() -> Library | str:
    """The compiled kernel, made by the first call; or why there is none.

    In a thread of its own, which has none of the caller's modes, hooks and transforms.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_loaded).result()


def _loaded() -> Library | str:
    try:
        path = built()
        try:
            return load(path)
        except BuildError:  # a file may have been damaged since it was written
            path.unlink(missing_ok=True)
            return load(built())
    except (BuildError, OSError) as error:
        return str(error)


def load(path: Path, flags: tuple[str, ...] = ()) -> Library:
    """A compiled kernel that computes what it should; raises `BuildError`.

    `flags` are those that it was compiled with, beside the usual.
    """
    try:
        loaded = ctypes.CDLL(str(path), mode=os.RTLD_NOW)
    except OSError as error:
        raise BuildError(f"it can't be loaded: {error}") from None
    for name in ("tile", "call_bytes", "has_float16", "forward", "backward", "deltas"):
        getattr(loaded, f"flexcp_{name}").restype = ctypes.c_int64
    own = (TILE, ctypes.sizeof(Call))
    if (loaded.flexcp_tile(), loaded.flexcp_call_bytes()) != own:
        raise BuildError(f"{path} is of another version")
    half = {torch.float16} if loaded.flexcp_has_float16() else set()
    found = Library(
        loaded.flexcp_forward,
        loaded.flexcp_backward,
        loaded.flexcp_deltas,
        frozenset({torch.float32, torch.bfloat16} | half),
        flags,
    )
    worst = _error_of(found)
    if not worst < _TOLERANCE:
        raise BuildError(f"what the compiler made of it is wrong by {worst:.0e} on this processor")
    return found


_TOLERANCE = 1e-4
"""Of the largest error where numbers are about 1: a hundred times that of right results."""


def _error_of(found: Library) -> float:
    """The largest error of a small call with gradients, against the formulas in float64."""
    length, head_dim, scale = 2 * TILE + 5, 20, 0.3
    random = torch.Generator().manual_seed(0)
    q, k, v, grad_out = (
        torch.randn(1, heads, length, head_dim, generator=random) for heads in (2, 1, 1, 2)
    )
    wide_q, wide_k, wide_v, wide_grad = (x.double() for x in (q, k, v, grad_out))
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = (scale * wide_q @ wide_k.mT).masked_fill(later, -torch.inf)
    weights = scores.softmax(-1)
    right = weights @ wide_v
    slopes = wide_grad @ wide_v.mT
    slopes = weights * (slopes - (weights * slopes).sum(-1, keepdim=True)) * scale
    # Both query heads have the same keys.
    wide_dk = (slopes.mT @ wide_q).sum(1, keepdim=True)
    wide_dv = (weights.mT @ wide_grad).sum(1, keepdim=True)
    expected = (right, scores.logsumexp(-1), slopes @ wide_k, wide_dk, wide_dv)
    out, lse, dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32) for x in expected)
    lists = tile_lists(causal_shapes(length), TILE, TILE, "query", runs=True)
    inputs = {"q": q, "k": k, "v": v}
    found.run(found.forward, {**inputs, "out": out, "lse": lse}, lists, scale=scale)
    delta = found.delta(grad_out, out, None)
    more = {"grad_out": grad_out, "delta": delta, "grad_q": dq, "grad_k": dk, "grad_v": dv}
    found.run(found.backward, {**inputs, "lse": lse, **more}, lists, scale=scale)
    pairs = zip((out, lse, dq, dk, dv), expected, strict=True)
    return max(float((a.double() - b).abs().nan_to_num(torch.inf).max()) for a, b in pairs)
