"""Score functions as the C++ kernel calls them: compiled by themselves, and what they are given.

A function is a small library of its own, which takes a fraction of a second to compile; the kernel
calls it on each tile of scores. Sizes, strides, contents of captured tensors and numbers are data.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexcp.kernels.native.build import BuildError, built
from flexcp.kernels.native.score_source import ScoreSource, score_source
from flexcp.kernels.triton.captured_sums import gradients_of_captured
from flexcp.kernels.triton.emit import FIRST_OPERAND, EmittedScore, emitted

if TYPE_CHECKING:
    from flexcp.kernels.compiled_shapes import CompiledShapes
    from flexcp.kernels.score import ScoreMod

TILE = 96
"""Queries and keys of a tile; `tiles.h` says why."""


@dataclass(frozen=True, eq=False)
class CompiledScore:
    """A compiled score function."""

    score: int
    """The address of what changes the scores of a tile."""
    pull_back: int
    """The address of what gives their gradients."""
    sums: int
    """The address of what adds up the gradients of what is read from tensors."""


def compiled_score(mod: ScoreMod, flags: tuple[str, ...]) -> CompiledScore | str:
    """A score function, compiled by the first call with one like it; or why it is not, in words.

    `flags` are those of the kernel that calls it.
    """
    found = _source(mod)
    return found if isinstance(found, str) else _loaded(found.text, flags)


def _source(mod: ScoreMod) -> ScoreSource | str:
    found = emitted(mod)
    return found if isinstance(found, str) else score_source(found, TILE)


@lru_cache(maxsize=256)
def _loaded(text: str, flags: tuple[str, ...]) -> CompiledScore | str:
    try:
        path = built(extra=flags, score=text)
        try:
            loaded = ctypes.CDLL(str(path), mode=os.RTLD_NOW)
        except OSError:  # a file may have been damaged since it was written
            path.unlink(missing_ok=True)
            loaded = ctypes.CDLL(str(built(extra=flags, score=text)), mode=os.RTLD_NOW)
    except (BuildError, OSError) as error:
        return f"steps that could not be compiled: {error}"
    names = ("flexcp_score", "flexcp_pull_back", "flexcp_sums")
    addresses = [ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value for name in names]
    return CompiledScore(*(address or 0 for address in addresses))


@dataclass(frozen=True, eq=False)
class ScoreFields:
    """What a call of the kernel passes on to a score function."""

    fields: dict[str, Any]
    """By the names of the call's fields."""
    alive: tuple[Any, ...]
    """What they are addresses of."""

    @classmethod
    def of(cls, mod: ScoreMod, compiled: CompiledShapes, flags: tuple[str, ...]) -> ScoreFields:
        """Those of a function that the registry lets through."""
        found, code, source = emitted(mod), compiled_score(mod, flags), _source(mod)
        assert isinstance(found, EmittedScore)
        assert isinstance(code, CompiledScore)
        assert isinstance(source, ScoreSource)
        operands = [x.detach().to("cpu").resolve_neg() for x in found.operands]
        numbers = [0, 0, mod.first_batch, mod.first_head, 0]
        assert len(numbers) == FIRST_OPERAND
        for x in operands:
            numbers += (x.data_ptr() if x.numel() else _NOTHING.data_ptr(), x.numel())
            for stride, size in zip(x.stride(), x.shape, strict=True):
                numbers += (stride, size)
        given = (ctypes.c_int64 * len(numbers))(*numbers)
        whole = (ctypes.c_int64 * len(source.whole))(*source.whole)
        real = (ctypes.c_float * len(source.real))(*source.real)
        q, kv = (compiled.tiled_positions(which, TILE) for which in ("q", "kv"))
        fields = {
            "score": code.score,
            "pull_back": code.pull_back,
            "score_given": ctypes.addressof(given),
            "score_whole": ctypes.addressof(whole),
            "score_real": ctypes.addressof(real),
            "q_at": q.positions.data_ptr(),
            "kv_at": kv.positions.data_ptr(),
            "q_consecutive": q.consecutive.data_ptr(),
            "kv_consecutive": kv.consecutive.data_ptr(),
        }
        return cls(fields, (operands, given, whole, real, q, kv))


@dataclass(frozen=True, eq=False)
class LookupSums:
    """Where a backward pass adds up the gradients of what a score function reads."""

    mod: ScoreMod
    emitted: EmittedScore
    sums: Tensor
    """float64, of one operand with a gradient after the other: its elements, and one for none."""
    begins: dict[int, int]
    """Where those of an operand begin."""
    starts: Any
    """Where those of each lookup begin."""

    @classmethod
    def of(cls, mod: ScoreMod) -> LookupSums:
        """Zeros."""
        found = emitted(mod)
        assert isinstance(found, EmittedScore)
        begins, size = dict[int, int](), 0
        for lookup in found.lookups:
            if lookup.operand not in begins:
                begins[lookup.operand] = size
                size += found.operands[lookup.operand].numel() + 1
        starts = (ctypes.c_int64 * len(found.lookups))(*(begins[x.operand] for x in found.lookups))
        return cls(mod, found, torch.zeros(size, dtype=torch.float64), begins, starts)

    def fit(self, tasks: int) -> bool:
        """Whether sums for each of some tasks are not too much memory."""
        return self.sums.numel() * tasks <= _MOST_SUMS

    def fields(self, flags: tuple[str, ...]) -> dict[str, Any]:
        """By the names of the call's fields."""
        code = compiled_score(self.mod, flags)
        assert isinstance(code, CompiledScore)
        return {
            "sum_lookups": code.sums,
            "lookup_sums": self.sums.data_ptr(),
            "lookup_sums_at": ctypes.addressof(self.starts),
            "lookup_sums_size": self.sums.numel(),
        }

    def gradients(self) -> tuple[Tensor, ...]:
        """Those of the captured tensors, in their types."""
        totals = {
            operand: self.sums[begin : begin + self.emitted.operands[operand].numel() + 1]
            for operand, begin in self.begins.items()
        }
        return gradients_of_captured(self.mod, self.emitted, totals)


_MOST_SUMS = 1 << 26
"""Numbers in the tables of all tasks of a call: 512 MB."""
_NOTHING: Tensor = torch.zeros(1, dtype=torch.float64)
"""What a tensor without elements points to: of lookups that are outside, one place is read."""
