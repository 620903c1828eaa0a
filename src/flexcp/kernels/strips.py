"""Strips: small pieces computed by batched matrix products, with any score function.

Scores of a strip stay in cache, and the time goes into the matrix products, which write straight
to where their result belongs. Softmax is taken to the base 2: that costs a third of the natural
exponential, and the change of base is a factor of a matrix product. But it rounds: where scores are
so large that their last digit counts, the base is e, as in the fused ops, whose lse then fits to
the last digit. Where scores are so small that no exponential overflows, as they are, strips only
add to sums. Key heads that several query heads share are never repeated: those heads become further
rows.

Letters in names: N batch elements times key heads, R query heads per key head, T rows and U keys
of a strip, L rows or keys, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from flexcp.kernels.dropout import Dropout, drop_, droppable, numbers_of
from flexcp.kernels.merge import merge_into
from flexcp.kernels.program import Forbidden, Piece, StripSizes, row_stride
from flexcp.kernels.score import ScoreMod
from flexcp.kernels.strip_scores import changed_scores

LOG2_E = math.log2(math.e)
_CHUNK_PER_THREAD = 5 << 17
"""Scores held at a time, per thread: more would not stay in cache."""
_CHUNK_MOST = 1 << 24


@dataclass(frozen=True, eq=False)
class Scoring:
    """How scores come from products of rows and keys."""

    scale: float
    mod: ScoreMod | None
    q_positions: Tensor | None = None
    """int64 [Lq] Global positions, as the score function sees them."""
    kv_positions: Tensor | None = None
    """int64 [Lkv] Global positions of the keys."""
    consecutive: bool = False
    """Whether those of queries, and those of keys, count up by 1."""
    dropout: Dropout | None = None
    """Of the weights."""
    base: float = 2.0
    """Of the exponential: 2, or e for scores so large that a change of base would show."""
    small: bool = False
    """Whether all scores are so small that none has to be taken from them first."""

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


def rows_of(x: Tensor, piece: Piece, dim: int = 2) -> Tensor:
    """The query rows of a piece."""
    return x.narrow(dim, piece.q0, piece.rows)


def keys_of(x: Tensor, piece: Piece, dim: int = 2) -> Tensor:
    """The keys of a piece."""
    return x.narrow(dim, piece.k0, piece.keys)


def by_row(x: Tensor, piece: Piece) -> Tensor:
    """[N, R, L, ...] at the rows of a piece, as [N, R*T, ...]; a view unless heads share keys."""
    return rows_of(x, piece).flatten(1, 2)


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
        self, tensors: StripTensors, sizes: StripSizes, *, scores: int, dropout: bool
    ) -> None:
        n, r = tensors.q_NRLD.shape[:2]
        budget = min(_CHUNK_PER_THREAD * torch.get_num_threads(), _CHUNK_MOST)
        most = max(1, budget // (r * sizes.typical_pairs))
        self.q_span = sizes.q_span  # the rows that any strip is in
        self._n = n
        self._step = -(-n // -(-n // most))  # as few groups as that takes, of even size
        dim = max(tensors.k_NLD.shape[-1], tensors.v_NLD.shape[-1])
        self.in_place = torch.get_num_threads() == 1
        """Whether products go straight to where they belong, and rows are padded: threads share a
        batch of products only if its result is contiguous."""
        longest = max(r * sizes.rows, sizes.keys)
        most_scores = self._step * r * sizes.padded_pairs
        self._product = tensors.k_NLD.new_empty(self._step * longest * dim)
        self._scores = [tensors.k_NLD.new_empty(most_scores) for _ in range(scores)]
        self._numbers = tensors.k_NLD.new_empty(most_scores if dropout else 0, dtype=torch.int32)

    def chunks(self) -> Iterator[slice]:
        """All n, in groups that are computed together."""
        for first in range(0, self._n, self._step):
            yield slice(first, min(first + self._step, self._n))

    def product(self, *shape: int) -> Tensor:
        """Uninitialised memory for a product [n, rows or keys, D]."""
        return self._product.narrow(0, 0, math.prod(shape)).view(shape)

    def scores(self, which: int, n: int, rows: int, keys: int) -> Tensor:
        """Uninitialised memory for the scores of a strip, [n, rows, keys]."""
        stride = row_stride(keys) if self.in_place else keys
        return self._scores[which].as_strided((n, rows, keys), (rows * stride, stride, 1))

    def numbers(self, n: int, rows: int, keys: int) -> Tensor:
        """Uninitialised memory for an int32 for each score of a strip, [n, rows, keys]."""
        return self._numbers.narrow(0, 0, n * rows * keys).view(n, rows, keys)


@dataclass(frozen=True, eq=False, slots=True)
class StripViews:
    """A strip's own part of everything, looked up before any strip is computed.

    A look-up between two passes over memory finds the interpreter's memory driven out of the cache,
    and takes ten times as long as one after another look-up.
    """

    piece: Piece
    q_NTD: Tensor  # noqa: N815
    """Queries; those of heads that share keys are further rows."""
    k_NUD: Tensor  # noqa: N815
    v_NUD: Tensor  # noqa: N815
    scores: Tensor
    """[N, T, U] Memory for the scores, and then the weights."""
    edges: tuple[tuple[Tensor, Tensor], ...]
    """Scores of columns in which some pairs are forbidden, each with what is added to them."""
    hashes: tuple[Tensor, Tensor, Tensor, Tensor] | None
    """Both hashes of rows, the hashes of keys, and memory for the numbers of weights."""

    @classmethod
    def of(
        cls, tensors: StripTensors, piece: Piece, work: Workspace, *, biased: bool
    ) -> StripViews:
        """Those of one strip; `biased` says whether what is forbidden is added to the scores."""
        q = by_row(tensors.q_NRLD, piece)
        n, rows = q.shape[:2]
        scores = work.scores(0, n, rows, piece.keys)
        tile = scores.view(-1, piece.rows, piece.keys)
        edges = tuple(
            (tile.narrow(2, e.c0, e.c1 - e.c0), bias_of(e, q.dtype, q.device))
            for e in (piece.forbidden if biased else ())
        )
        hashes = None
        if tensors.row_NRL is not None:
            assert tensors.second_NRL is not None
            assert tensors.key_NL is not None
            row, second = (by_row(x, piece) for x in (tensors.row_NRL, tensors.second_NRL))
            key = keys_of(tensors.key_NL, piece, 1).unsqueeze(1)
            numbers = work.numbers(n, rows, piece.keys)
            hashes = row.unsqueeze(-1), second.unsqueeze(-1), key, numbers
        k, v = keys_of(tensors.k_NLD, piece, 1), keys_of(tensors.v_NLD, piece, 1)
        return cls(piece, q, k, v, scores, edges, hashes)

    def forbid(self) -> None:
        """Sets the scores of forbidden pairs to -inf, by adding it: far faster than filling."""
        for scores, bias in self.edges:
            scores.add_(bias)

    def numbers(self) -> Tensor:
        """int32 [N, T, U] The numbers that decide which weights are dropped."""
        assert self.hashes is not None
        return numbers_of(*self.hashes)


def bias_of(edge: Forbidden, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What to add to the scores: -inf where the pair may not attend, else 0; made once."""
    found = edge.biases.get((dtype, device))
    if found is None:
        zeros = torch.zeros(edge.pairs.shape, dtype=dtype)
        found = zeros.masked_fill_(edge.pairs, -torch.inf).to(device)
        if type(found) is Tensor:  # nothing that a FakeTensorMode made outlives it
            edge.biases[dtype, device] = found
    return found


def strips_forward(
    tensors: StripTensors,
    pieces: Sequence[Piece],
    scoring: Scoring,
    work: Workspace,
    results: StripResults,
    *,
    begun: bool,
) -> None:
    """Leaves the strips' share of the result in `results`, merged with what is there already.

    `begun` says whether something is there, of any row.
    """
    mod = scoring.mod
    views = [StripViews.of(tensors, piece, work, biased=mod is None) for piece in pieces]
    if scoring.small and mod is None and results.highest_NRL is None:
        _add_up(views, scoring, work, results, begun=begun)
        return
    for view in views:
        change, factor = (
            (None, scoring.change) if mod is None else changed_scores(tensors, view, scoring)
        )
        _merge(view, change, factor, scoring, work, results)


def _add_up(
    views: Sequence[StripViews],
    scoring: Scoring,
    work: Workspace,
    results: StripResults,
    *,
    begun: bool,
) -> None:
    """`strips_forward` of small scores: sums of exponentials, which are divided in the end."""
    dropout, factor = scoring.dropout, scoring.scale * scoring.change
    out, total = results.out_NRLD, results.lse_NRL
    own = slice(*work.q_span)
    own_out, own_total = out[:, :, own], total[:, :, own]
    scoring.power_(own_total.mul_(scoring.change))
    if begun:
        own_out.mul_(own_total.unsqueeze(-1))
    in_place = work.in_place and out.shape[1] == 1
    strips = [
        (
            view,
            view.k_NUD.transpose(1, 2),
            view.scores if dropout is None else droppable(view.scores),
            by_row(out, view.piece) if in_place else rows_of(out, view.piece),
            rows_of(total, view.piece),
        )
        for view in views
    ]
    for view, k_columns, weights, target, target_total in strips:
        scores, first = view.scores, view.piece.first_write
        scores.baddbmm_(view.q_NTD, k_columns, beta=0, alpha=factor)
        view.forbid()
        sums = scoring.power_(scores).sum(-1).view(target_total.shape)
        store(target_total, sums, first=first)
        if dropout is not None:
            drop_(weights, view.numbers(), dropout.threshold)
        if in_place:
            target.baddbmm_(scores, view.v_NUD, beta=0 if first else 1)
        else:
            found = work.product(*scores.shape[:2], out.shape[-1])
            found.baddbmm_(scores, view.v_NUD, beta=0)
            store(target, found.view(target.shape), first=first)
    divisor = own_total.masked_fill(own_total == 0, 1.0)
    own_out.div_((divisor if dropout is None else divisor.mul_(1.0 - dropout.p)).unsqueeze(-1))
    scoring.logarithm_(own_total).div_(scoring.change)


def _merge(
    view: StripViews,
    change: Callable[[Tensor], None] | None,
    factor: float,
    scoring: Scoring,
    work: Workspace,
    results: StripResults,
) -> None:
    """Merges a strip's result into `results`.

    `change` is done to scores that were multiplied with a factor, given as [N, R, T, U].
    """
    piece, scores, dropout = view.piece, view.scores, scoring.dropout
    target, target_lse = rows_of(results.out_NRLD, piece), rows_of(results.lse_NRL, piece)
    r, may_be_empty = target.shape[1], piece.has_fully_masked_rows or change is not None
    scores.baddbmm_(view.q_NTD, view.k_NUD.transpose(1, 2), beta=0, alpha=scoring.scale * factor)
    if change is None:
        view.forbid()
    else:
        change(scores.view(*target.shape[:3], piece.keys))
    highest = base = scores.amax(-1, keepdim=True)
    if may_be_empty:
        # A finite stand-in for the largest score of a row that sees nothing makes its weights 0.
        base = highest.clamp(min=torch.finfo(scores.dtype).min)
    total = scoring.power_(scores.sub_(base)).sum(-1, keepdim=True)
    divisor = total.masked_fill(total == 0, 1.0) if may_be_empty else total
    if dropout is not None:
        drop_(droppable(scores), view.numbers(), dropout.threshold)
        divisor = divisor * (1.0 - dropout.p)
    writes = piece.first_write and r == 1 and work.in_place
    out = target.squeeze(1) if writes else work.product(*scores.shape[:2], target.shape[-1])
    out.baddbmm_(scores, view.v_NUD, beta=0).div_(divisor)
    lse = scoring.logarithm_(total).add_(base).div_(scoring.change).view(target_lse.shape)
    if piece.first_write:
        if not writes:
            target.copy_(out.view(target.shape))
        target_lse.copy_(lse)
    else:
        merge_into(target, target_lse, out.view(target.shape), lse)
    if results.highest_NRL is not None:
        most = rows_of(results.highest_NRL, piece)
        torch.maximum(most, highest.div_(scoring.change).view(most.shape), out=most)


def store(target: Tensor, found: Tensor, *, first: bool) -> None:
    """Writes to, or adds to, what is there."""
    if first:
        target.copy_(found)
    else:
        target.add_(found)
