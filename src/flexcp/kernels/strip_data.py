"""What strips work on: the tensors of a lane by head, and the memory that its strips share.

Letters in names: N batch elements times key heads, R query heads per key head, L rows or keys,
D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from flexcp.kernels.program import Piece, Program
from flexcp.kernels.score import ScoreMod

_CHUNK_PER_THREAD = 5 << 17
"""Scores held at a time, per thread: more would not stay in cache."""
_CHUNK_MOST = 1 << 24
_PADDING = 16
"""Added to rows of 256, 512, ... scores: the columns of such rows share a few cache lines."""


def rows_of(x: Tensor, piece: Piece, dim: int = 2) -> Tensor:
    """The query rows of a piece."""
    return x.narrow(dim, piece.q0, piece.rows)


def keys_of(x: Tensor, piece: Piece, dim: int = 2) -> Tensor:
    """The keys of a piece."""
    return x.narrow(dim, piece.k0, piece.keys)


@dataclass(frozen=True, eq=False)
class Rows:
    """The tensors of a lane, in the accumulation type, with heads laid out for batched products."""

    q_NRLD: Tensor  # noqa: N815
    k_NLD: Tensor  # noqa: N815
    v_NLD: Tensor  # noqa: N815
    b_N: Tensor | None = None  # noqa: N815
    """int64 Batch element of each n; only a score function needs to know."""
    h_NR: Tensor | None = None  # noqa: N815
    """int64 Query head of each n, r; likewise."""


@dataclass(frozen=True, eq=False)
class Scoring:
    """How scores come from products of rows and keys."""

    scale: float
    mod: ScoreMod | None
    q_positions: Tensor | None = None
    """int64 [Lq] Global positions, as the score function sees them."""
    kv_positions: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Results:
    """Where forward strips leave, or merge, what they find; all in the accumulation type."""

    out_NRLD: Tensor  # noqa: N815
    lse_NRL: Tensor  # noqa: N815
    highest_NRL: Tensor | None  # noqa: N815
    """The largest score of each row, if wanted."""


@dataclass(frozen=True, eq=False)
class Incoming:
    """What the backward pass starts from, in the accumulation type."""

    grad_out_NRLD: Tensor  # noqa: N815
    minus_lse_NRL: Tensor  # noqa: N815
    """Minus the *global* lse, to the base 2; -inf for rows that see nothing at all."""
    minus_delta_NRL: Tensor  # noqa: N815
    """The gradient of lse, minus the row sums of out * grad_out."""


@dataclass(frozen=True, eq=False)
class Sums:
    """Where backward strips add their results, all in the accumulation type."""

    q_NRLD: Tensor  # noqa: N815
    k_NLD: Tensor  # noqa: N815
    v_NLD: Tensor  # noqa: N815
    captured: list[Tensor]
    """One for each captured tensor that needs a gradient."""


_Record = TypeVar("_Record", Rows, Results, Incoming, Sums)


def of_chunk(record: _Record, chunk: slice) -> _Record:
    """The same for some of n alone, as views."""
    size = chunk.stop - chunk.start
    if chunk.start == 0 and size == getattr(record, fields(record)[0].name).shape[0]:
        return record
    views: dict[str, Any] = {
        field.name: value.narrow(0, chunk.start, size)
        for field in fields(record)
        if isinstance(value := getattr(record, field.name), Tensor)
    }
    return replace(record, **views)


class Workspace:
    """Blocks of memory, used again by every piece of a call: for a product, and for scores.

    Allocating them anew each time would cost as much as a matrix product.
    """

    def __init__(self, rows: Rows, program: Program, *, scores: int) -> None:
        n, r = rows.q_NRLD.shape[:2]
        budget = min(_CHUNK_PER_THREAD * torch.get_num_threads(), _CHUNK_MOST)
        most = max(1, budget // (r * program.typical_strip))
        self._n = n
        self._step = -(-n // -(-n // most))  # as few groups as that takes, of even size
        dim = max(rows.k_NLD.shape[-1], rows.v_NLD.shape[-1])
        self.in_place = torch.get_num_threads() == 1
        """Whether products go straight to where they belong: threads share a batch of products
        only if its result is contiguous."""
        longest = max(max(r * strip.rows, strip.keys) for strip in program.strips)
        largest = max(strip.rows * _padded(strip.keys) for strip in program.strips)
        self._product = rows.k_NLD.new_empty(self._step * longest * dim)
        self._scores = [rows.k_NLD.new_empty(self._step * r * largest) for _ in range(scores)]

    def chunks(self) -> Iterator[slice]:
        """All n, in groups that are computed together."""
        for first in range(0, self._n, self._step):
            yield slice(first, min(first + self._step, self._n))

    def product(self, *shape: int) -> Tensor:
        """Uninitialised memory for a product [n, rows or keys, D]."""
        return self._product.narrow(0, 0, math.prod(shape)).view(shape)

    def scores(self, which: int, n: int, rows: int, keys: int) -> Tensor:
        """Uninitialised memory for the scores of a strip, [n, rows, keys]."""
        stride = _padded(keys)
        return self._scores[which].as_strided((n, rows, keys), (rows * stride, stride, 1))


def _padded(keys: int) -> int:
    return keys if keys % 256 else keys + _PADDING
