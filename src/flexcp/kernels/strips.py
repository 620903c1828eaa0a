"""Strips: small pieces computed by batched matrix products, with any score function.

At 128 rows a strip's scores stay in cache, and the time goes into the matrix products, which write
straight to where their result belongs. Softmax is taken to the base 2: that costs a third of the
natural exponential, and the change of base is a factor of a matrix product. But it rounds: where
scores are so large that their last digit counts, the base is e, as in the fused ops, whose lse then
fits to the last digit. Key heads that several query heads share are never repeated: those heads
become further rows.

Letters in names: N batch elements times key heads, R query heads per key head, T rows and U keys
of a strip, L rows or keys, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from flexcp.kernels.dropout import Dropout, drop_, kept_bits_
from flexcp.kernels.merge import merge_into
from flexcp.kernels.program import Forbidden, Piece, StripSizes, row_stride
from flexcp.kernels.score import ScoreMod

LOG2_E = math.log2(math.e)
_LARGE_SCORE = 256.0
"""From here on, rounding to another base shows in weights: by a factor of 1e-5, or more."""
_CHUNK_PER_THREAD = 5 << 17
"""Scores held at a time, per thread: more would not stay in cache."""
_CHUNK_MOST = 1 << 24
_HASHED = 1 << 17
"""Scores whose dropout is hashed at a time, per thread: half of it costs a tenth more."""


@dataclass(frozen=True, eq=False)
class Scoring:
    """How scores come from products of rows and keys."""

    scale: float
    mod: ScoreMod | None
    q_positions: Tensor | None = None
    """int64 [Lq] Global positions, as the score function sees them."""
    kv_positions: Tensor | None = None
    """int64 [Lkv] Global positions of the keys."""
    dropout: Dropout | None = None
    """Of the weights."""
    base: float = 2.0
    """Of the exponential: 2, or e for scores so large that a change of base would show."""

    @property
    def change(self) -> float:
        """What scores are multiplied with for that base."""
        return LOG2_E if self.base == 2.0 else 1.0

    def power_(self, x: Tensor) -> Tensor:
        """The base to the power of x, in place."""
        return x.exp2_() if self.base == 2.0 else x.exp_()

    def logarithm_(self, x: Tensor) -> Tensor:
        """The logarithm of x to the base, in place."""
        return x.log2_() if self.base == 2.0 else x.log_()


def base_for(q: Tensor, k: Tensor, scale: float) -> float:
    """The base of the exponential for the scores of q and k: 2, or e if some may be large.

    On a GPU that would have to be waited for: there it is 2.
    """
    if type(q) is not Tensor or q.device.type != "cpu" or not q.numel() or not k.numel():
        return 2.0
    most = [float(torch.linalg.vector_norm(x, dim=-1).amax()) for x in (q, k)]
    return math.e if most[0] * most[1] * abs(scale) > _LARGE_SCORE else 2.0


def rows_of(x: Tensor, piece: Piece, dim: int = 2) -> Tensor:
    """The query rows of a piece."""
    return x.narrow(dim, piece.q0, piece.rows)


def keys_of(x: Tensor, piece: Piece, dim: int = 2) -> Tensor:
    """The keys of a piece."""
    return x.narrow(dim, piece.k0, piece.keys)


@dataclass(frozen=True, eq=False)
class StripTensors:
    """Q, K and V of a head group, in the accumulation type, laid out for batched products."""

    q_NRLD: Tensor  # noqa: N815
    k_NLD: Tensor  # noqa: N815
    v_NLD: Tensor  # noqa: N815
    b_N: Tensor | None = None  # noqa: N815
    """int64 Batch element of each n; only a score function needs to know."""
    h_NR: Tensor | None = None  # noqa: N815
    """int64 Query head of each n, r; only a score function needs to know."""
    row_NRL: Tensor | None = None  # noqa: N815
    """int32 First hash of each row; only dropout needs to know, as the next two."""
    second_NRL: Tensor | None = None  # noqa: N815
    """int32 Second hash of each row."""
    key_NL: Tensor | None = None  # noqa: N815
    """int32 Hash of each key."""


@dataclass(frozen=True, eq=False)
class StripResults:
    """Where forward strips leave, or merge, what they find; all in the accumulation type."""

    out_NRLD: Tensor  # noqa: N815
    lse_NRL: Tensor  # noqa: N815
    highest_NRL: Tensor | None  # noqa: N815
    """The largest score of each row, if wanted."""


@dataclass(frozen=True, eq=False)
class BackwardInputs:
    """What the backward pass starts from, in the accumulation type."""

    grad_out_NRLD: Tensor  # noqa: N815
    minus_lse_NRL: Tensor  # noqa: N815
    """Minus the *global* lse, to the base of `Scoring`; -inf for rows that see nothing at all."""
    minus_delta_NRL: Tensor  # noqa: N815
    """The gradient of lse, minus the row sums of out * grad_out."""


@dataclass(frozen=True, eq=False)
class GradientSums:
    """Where backward strips add their results, all in the accumulation type."""

    q_NRLD: Tensor  # noqa: N815
    k_NLD: Tensor  # noqa: N815
    v_NLD: Tensor  # noqa: N815
    captured: list[Tensor]
    """One for each captured tensor that needs a gradient."""


_Record = TypeVar("_Record", StripTensors, StripResults, BackwardInputs, GradientSums)


def of_chunk(record: _Record, chunk: slice) -> _Record:
    """The record's tensors at some of their first dimension (N) alone, as views."""
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
    """Memory that the strips of a call use in turn: for a product, for scores, and for dropout.

    Allocating them anew each time would cost as much as a matrix product.
    """

    def __init__(
        self, tensors: StripTensors, sizes: StripSizes, *, scores: int, bits: int = 0
    ) -> None:
        n, r = tensors.q_NRLD.shape[:2]
        budget = min(_CHUNK_PER_THREAD * torch.get_num_threads(), _CHUNK_MOST)
        most = max(1, budget // (r * sizes.typical_pairs))
        self._n = n
        self._step = -(-n // -(-n // most))  # as few groups as that takes, of even size
        dim = max(tensors.k_NLD.shape[-1], tensors.v_NLD.shape[-1])
        self.in_place = torch.get_num_threads() == 1
        """Whether products go straight to where they belong: threads share a batch of products
        only if its result is contiguous."""
        longest = max(r * sizes.rows, sizes.keys)
        most_scores = self._step * r * sizes.padded_pairs
        self._product = tensors.k_NLD.new_empty(self._step * longest * dim)
        self._scores = [tensors.k_NLD.new_empty(most_scores) for _ in range(scores)]
        self._bits = [tensors.k_NLD.new_empty(most_scores, dtype=torch.int32) for _ in range(bits)]

    def chunks(self) -> Iterator[slice]:
        """All n, in groups that are computed together."""
        for first in range(0, self._n, self._step):
            yield slice(first, min(first + self._step, self._n))

    def product(self, *shape: int) -> Tensor:
        """Uninitialised memory for a product [n, rows or keys, D]."""
        return self._product.narrow(0, 0, math.prod(shape)).view(shape)

    def scores(self, which: int, n: int, rows: int, keys: int) -> Tensor:
        """Uninitialised memory for the scores of a strip, [n, rows, keys]."""
        stride = row_stride(keys)
        return self._scores[which].as_strided((n, rows, keys), (rows * stride, stride, 1))

    def hashed_columns(self, rows: int) -> int:
        """How many columns of so many rows are hashed at a time for dropout."""
        return max(16, _HASHED * torch.get_num_threads() // rows)

    def bits(self, which: int, n: int, rows: int, keys: int) -> Tensor:
        """Uninitialised memory for an int32 for each of some columns' scores, [n, rows, keys]."""
        return self._bits[which].narrow(0, 0, n * rows * keys).view(n, rows, keys)


def strip_forward(
    tensors: StripTensors, piece: Piece, scoring: Scoring, work: Workspace, results: StripResults
) -> None:
    """Leaves a strip's share of the result in `results`, merged with what is there already."""
    q = _by_row(tensors.q_NRLD, piece)
    n, r = tensors.q_NRLD.shape[:2]
    k_columns = keys_of(tensors.k_NLD, piece, 1).transpose(1, 2)
    v = keys_of(tensors.v_NLD, piece, 1)
    scores = work.scores(0, n, q.shape[1], piece.keys)
    mod = scoring.mod
    if mod is None:
        scores.baddbmm_(q, k_columns, beta=0, alpha=scoring.scale * scoring.change)
        _forbid(scores, piece)
    else:
        chain = None if mod.chain is None else mod.chain.prepared(scores.dtype, scoring.change)
        factor = 1.0 if chain is None else chain.factor
        scores.baddbmm_(q, k_columns, beta=0, alpha=scoring.scale * factor)
        tile = scores.view(n, r, piece.rows, piece.keys)
        if chain is None:
            modified = mod.apply(tile, *_indices(tensors, piece, scoring))
            scores = work.scores(1, n, q.shape[1], piece.keys)
            torch.mul(modified, scoring.change, out=scores.view(tile.shape))
        else:
            b_N, h_NR, q_at, kv_at = _indices(tensors, piece, scoring)  # noqa: N806
            b_N, h_NR = mod.numbered(b_N, h_NR)  # noqa: N806
            indices = b_N[:, None, None, None], h_NR[:, :, None, None], q_at[:, None], kv_at
            scores = chain.run(tile, *indices).reshape(scores.shape)
        _forbid_modified(scores, piece)
    highest = scores.amax(-1, keepdim=True)
    some_row_is_fully_masked = piece.has_fully_masked_rows or mod is not None
    # A finite stand-in for the largest score of a row that sees nothing makes all its weights 0.
    base = highest.clamp(min=torch.finfo(scores.dtype).min) if some_row_is_fully_masked else highest
    weights = scoring.power_(scores.sub_(base))
    total = weights.sum(-1, keepdim=True)
    divisor = total.masked_fill(total == 0, 1.0) if some_row_is_fully_masked else total
    if scoring.dropout is not None:
        for columns, kept in _kept_by_columns(tensors, piece, scoring.dropout, work):
            drop_(weights[..., columns], kept)
        divisor = divisor * (1.0 - scoring.dropout.p)
    writes = piece.first_write and r == 1 and work.in_place
    target = rows_of(results.out_NRLD, piece)
    out = target.squeeze(1) if writes else work.product(n, q.shape[1], v.shape[-1])
    out.baddbmm_(weights, v, beta=0)
    out.div_(divisor)
    lse = scoring.logarithm_(total).add_(base).div_(scoring.change).view(n, r, piece.rows)
    target_lse = rows_of(results.lse_NRL, piece)
    if piece.first_write:
        if not writes:
            target.copy_(out.view(target.shape))
        target_lse.copy_(lse)
    else:
        merge_into(target, target_lse, out.view(target.shape), lse)
    if results.highest_NRL is not None:
        most = rows_of(results.highest_NRL, piece)
        torch.maximum(most, highest.div_(scoring.change).view(most.shape), out=most)


def strip_backward(
    tensors: StripTensors,
    piece: Piece,
    scoring: Scoring,
    work: Workspace,
    given: BackwardInputs,
    sums: GradientSums,
) -> None:
    """Adds a strip's share of the gradients to `sums`."""
    q = _by_row(tensors.q_NRLD, piece)
    n, r = tensors.q_NRLD.shape[:2]
    k, v = keys_of(tensors.k_NLD, piece, 1), keys_of(tensors.v_NLD, piece, 1)
    grad_out = _by_row(given.grad_out_NRLD, piece)
    minus_lse = _by_row(given.minus_lse_NRL, piece).unsqueeze(-1)
    minus_delta = _by_row(given.minus_delta_NRL, piece).unsqueeze(-1)
    weights = work.scores(0, n, q.shape[1], piece.keys)
    mod, scale = scoring.mod, scoring.scale
    if mod is None:
        torch.baddbmm(minus_lse, q, k.transpose(1, 2), alpha=scale * scoring.change, out=weights)
        _forbid(weights, piece)
    else:
        scores = work.scores(2, n, q.shape[1], piece.keys)
        scores.baddbmm_(q, k.transpose(1, 2), beta=0, alpha=scale)
        # They may be needed to differentiate the score function at them.
        tile = scores.view(n, r, piece.rows, piece.keys).requires_grad_()
        with torch.enable_grad():
            modified = mod.apply(tile, *_indices(tensors, piece, scoring))
        torch.mul(modified.detach(), scoring.change, out=weights.view(tile.shape))
        _forbid_modified(weights, piece)
        weights.add_(minus_lse)
    scoring.power_(weights)
    grad_scores = work.scores(1, n, q.shape[1], piece.keys)
    dropout, factor = scoring.dropout, 1.0
    if dropout is None:
        torch.baddbmm(minus_delta, grad_out, v.transpose(1, 2), out=grad_scores)
        grad_scores.mul_(weights)
    else:
        factor = dropout.factor
        grad_scores.baddbmm_(grad_out, v.transpose(1, 2), beta=0, alpha=factor)
        for columns, kept in _kept_by_columns(tensors, piece, dropout, work):
            part = weights[..., columns]
            drop_(grad_scores[..., columns], kept).add_(minus_delta).mul_(part)
            drop_(part, kept)
    _add_product(keys_of(sums.v_NLD, piece, 1), weights.transpose(1, 2), grad_out, factor, work)
    if mod is not None:
        found = mod.pull_back(tile, modified, grad_scores.view(tile.shape), sums.captured)
        grad_scores = found.reshape(grad_scores.shape)
    _add_product(keys_of(sums.k_NLD, piece, 1), grad_scores.transpose(1, 2), q, scale, work)
    target = rows_of(sums.q_NRLD, piece)
    if r == 1 and work.in_place:
        target.squeeze(1).baddbmm_(grad_scores, k, beta=0 if piece.first_write else 1, alpha=scale)
        return
    grad_q = work.product(*q.shape).baddbmm_(grad_scores, k, beta=0, alpha=scale)
    if piece.first_write:
        target.copy_(grad_q.view(target.shape))
    else:
        target.add_(grad_q.view(target.shape))


def _add_product(target: Tensor, a: Tensor, b: Tensor, factor: float, work: Workspace) -> None:
    """Adds factor * a @ b to target."""
    if work.in_place:
        target.baddbmm_(a, b, alpha=factor)
    else:
        target.add_(work.product(*target.shape).baddbmm_(a, b, beta=0, alpha=factor))


def _by_row(x: Tensor, piece: Piece) -> Tensor:
    """[N, R, L, ...] at the rows of a piece, as [N, R*T, ...]; a view unless heads share keys."""
    return rows_of(x, piece).flatten(1, 2)


def _indices(
    tensors: StripTensors, piece: Piece, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a score function is told of a strip: b [N], h [N, R], positions [T] and [U]."""
    assert tensors.b_N is not None
    assert tensors.h_NR is not None
    assert scoring.q_positions is not None
    assert scoring.kv_positions is not None
    q_at = rows_of(scoring.q_positions, piece, 0)
    return tensors.b_N, tensors.h_NR, q_at, keys_of(scoring.kv_positions, piece, 0)


def _kept_by_columns(
    tensors: StripTensors, piece: Piece, dropout: Dropout, work: Workspace
) -> Iterator[tuple[slice, Tensor]]:
    """Ranges of a strip's columns, each with int32 [n, rows, columns]: 1 where a weight is kept.

    They are as wide as stays in a core's own cache, since eight passes are made over them.
    """
    assert tensors.row_NRL is not None
    assert tensors.second_NRL is not None
    assert tensors.key_NL is not None
    row, second = (_by_row(x, piece).unsqueeze(-1) for x in (tensors.row_NRL, tensors.second_NRL))
    key = keys_of(tensors.key_NL, piece, 1).unsqueeze(1)
    n, rows, threshold = row.shape[0], row.shape[1], dropout.threshold
    width = work.hashed_columns(n * rows)
    for start in range(0, piece.keys, width):
        columns = slice(start, min(start + width, piece.keys))
        sizes = (n, rows, columns.stop - start)
        out, spare = (work.bits(i, *sizes) for i in (0, 1))
        yield columns, kept_bits_(out, spare, row, second, key[..., columns], threshold)


def _forbid(scores: Tensor, piece: Piece) -> None:
    """Sets the scores of forbidden pairs to -inf, by adding it: far faster than filling."""
    if piece.forbidden:
        tile = scores.view(-1, piece.rows, piece.keys)
        for edge in piece.forbidden:
            tile.narrow(2, edge.c0, edge.c1 - edge.c0).add_(
                bias_of(edge, scores.dtype, scores.device)
            )


def bias_of(edge: Forbidden, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What to add to the scores: -inf where the pair may not attend, else 0; made once."""
    found = edge.biases.get((dtype, device))
    if found is None:
        zeros = torch.zeros(edge.pairs.shape, dtype=dtype)
        found = zeros.masked_fill_(edge.pairs, -torch.inf).to(device)
        if type(found) is Tensor:  # nothing that a FakeTensorMode made outlives it
            edge.biases[dtype, device] = found
    return found


def _forbid_modified(scores: Tensor, piece: Piece) -> None:
    """Fills forbidden scores with -inf: a score function may have made them infinite or NaN."""
    if piece.forbidden:
        tile = scores.view(-1, piece.rows, piece.keys)
        for edge in piece.forbidden:
            tile.narrow(2, edge.c0, edge.c1 - edge.c0).masked_fill_(
                edge.pairs.to(scores.device), -torch.inf
            )
