"""The kernel contract: which pairs a call covers, and what it takes and returns.

A kernel gets queries [B, H, Lq, D], keys [B, G, Lkv, D] and values [B, G, Lkv, Dv] (H a multiple
of G), and `Shapes`: the pairs to compute, in the rows of these tensors. It returns a partial
result over just these pairs. Partial results over disjoint keys are combined by `merge`; the
backward pass takes the *global* out and lse, so that partial gradients simply add up.

Rows of the tensors need not be consecutive tokens: `Shapes` carries the global position of each,
which is what `score_mod` sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from flexcp.errors import FlexCPError

if TYPE_CHECKING:
    from flexcp.kernels.compiled_shapes import CompiledShapes
    from flexcp.kernels.dropout import Dropout
    from flexcp.kernels.score import ScoreMod


@dataclass(frozen=True)
class Slab:
    """Consecutive rows, each of which sees one range of keys, whose ends move evenly.

    Row `q0 + i` sees the keys `[k0 + i * k0_step, k1 + i * k1_step)`. Steps (0, 0) are a
    rectangle, (0, 1) a causal trapezoid, (1, 1) a band (sliding window).
    """

    q0: int
    q1: int
    k0: int
    """First key that row q0 sees."""
    k1: int
    """One past the last key that row q0 sees."""
    k0_step: int = 0
    k1_step: int = 0

    @property
    def rows(self) -> int:
        """How many rows."""
        return self.q1 - self.q0

    @property
    def is_rectangle(self) -> bool:
        """Whether all rows see the same keys."""
        return self.k0_step == 0 and self.k1_step == 0

    @property
    def area(self) -> int:
        """How many pairs.

        >>> Slab(0, 4, 0, 1, 0, 1).area  # a causal triangle
        10
        """
        n = self.rows
        return n * (self.k1 - self.k0) + (self.k1_step - self.k0_step) * (n * (n - 1) // 2)

    def cut(self, q0: int, q1: int) -> Slab:
        """The part in rows [q0, q1)."""
        i = q0 - self.q0
        return Slab(
            q0,
            q1,
            self.k0 + i * self.k0_step,
            self.k1 + i * self.k1_step,
            self.k0_step,
            self.k1_step,
        )

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest range of keys that holds all that any row sees."""
        last = self.rows - 1
        return (
            min(self.k0, self.k0 + last * self.k0_step),
            max(self.k1, self.k1 + last * self.k1_step),
        )


@dataclass(frozen=True, eq=False)
class BitTile:
    """A rectangle without a pattern: one bit for each pair."""

    q0: int
    q1: int
    k0: int
    k1: int
    bits: Tensor
    """bool [q1 - q0, k1 - k0]; whether the pair may attend."""


@dataclass(frozen=True, eq=False)
class Plane:
    """All allowed pairs of one pattern, each in exactly one slab or tile."""

    slabs: tuple[Slab, ...]
    tiles: tuple[BitTile, ...] = ()

    @cached_property
    def area(self) -> int:
        """How many pairs may attend."""
        return sum(s.area for s in self.slabs) + sum(int(t.bits.sum()) for t in self.tiles)


@dataclass(frozen=True, eq=False)
class Shapes:
    """The pairs that a kernel call covers, in the rows of its tensors."""

    q_len: int
    kv_len: int
    plane_of: tuple[tuple[int, ...], ...]
    """[batch][head] -> index into `planes`; a dimension of 1 stands for any batch or head count."""
    planes: tuple[Plane, ...]
    q_positions: Tensor | None = None
    """int64 [q_len] Global position of each query row; None means 0, 1, 2, ..."""
    kv_positions: Tensor | None = None
    """int64 [kv_len] Global position of each key; None means 0, 1, 2, ..."""

    def __post_init__(self) -> None:
        if not self.plane_of or not self.plane_of[0]:
            raise FlexCPError(
                "shapes for at least one batch element and head",
                f"plane_of={self.plane_of!r}",
                "use ((0,),) for one pattern that all batch elements and heads share",
            )

    @property
    def batch(self) -> int:
        """Batch elements that `plane_of` tells apart."""
        return len(self.plane_of)

    @property
    def heads(self) -> int:
        """Heads that `plane_of` tells apart."""
        return len(self.plane_of[0])

    def area(self, batch: int, heads: int) -> int:
        """Allowed pairs, over all batch elements and heads."""
        return sum(
            self.planes[self.plane_of[b if self.batch > 1 else 0][h if self.heads > 1 else 0]].area
            for b in range(batch)
            for h in range(heads)
        )


@dataclass(frozen=True, eq=False)
class Partial:
    """What a forward pass returns: the result over the pairs that it was given."""

    out: Tensor
    """[B, H, Lq, Dv], float32 (float64 for float64); 0 for rows that saw nothing."""
    lse: Tensor
    """[B, H, Lq], of the same type; natural logarithm; -inf for rows that saw nothing."""
    max_scores: Tensor | None = None
    """[B, H, Lq], of the same type, if asked for: each row's largest score, or -inf."""


@dataclass(frozen=True, eq=False)
class PartialGradients:
    """What a backward pass returns: the contribution of the pairs that it was given."""

    q: Tensor
    """[B, H, Lq, D], float32 (float64 for float64)."""
    k: Tensor
    """[B, G, Lkv, D], of the same type."""
    v: Tensor
    """[B, G, Lkv, Dv], of the same type."""
    captured: tuple[Tensor, ...] = ()
    """One for each tensor that the score function captures, in its order and type."""


class Kernel(Protocol):
    """One way to compute partial results and their gradients."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        compiled: CompiledShapes,
        *,
        scale: float,
        score_mod: ScoreMod | None = None,
        max_scores: bool = False,
        former: Partial | None = None,
        dropout: Dropout | None = None,
    ) -> Partial:
        """The partial result over the pairs of `compiled`.

        Args:
            q: [B, H, Lq, D].
            k: [B, G, Lkv, D].
            v: [B, G, Lkv, Dv].
            compiled: which pairs to compute.
            scale: factor on the scores.
            score_mod: a function on the scores.
            max_scores: whether to return each row's largest score.
            former: a result over other keys, to be merged with: its tensors then hold both.
            dropout: of the weights, after softmax: the lse is without it.
        """
        ...

    def delta(self, grad_out: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor | None:
        """What `backward` needs of each row, if it can be worked out once for all rounds."""
        ...

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        compiled: CompiledShapes,
        *,
        scale: float,
        score_mod: ScoreMod | None = None,
        grad_lse: Tensor | None = None,
        delta: Tensor | None = None,
        grad_q: Tensor | None = None,
        grad_kv: tuple[Tensor, Tensor] | None = None,
        dropout: Dropout | None = None,
    ) -> PartialGradients:
        """The gradients' share of the pairs of `compiled`.

        Args:
            grad_out: [B, H, Lq, Dv] gradient of the global out.
            q: [B, H, Lq, D].
            k: [B, G, Lkv, D].
            v: [B, G, Lkv, Dv].
            out: [B, H, Lq, Dv] the *global* result, over all keys that any call sees.
            lse: [B, H, Lq] the global lse.
            compiled: which pairs to compute.
            scale: factor on the scores.
            score_mod: the function on the scores.
            grad_lse: [B, H, Lq] gradient of the global lse.
            delta: what `delta` gave for these rows; None works it out.
            grad_q: the queries' gradient from other keys, to be added to: it then holds both.
            grad_kv: where to write the gradients of k and v, in any strides; new tensors if None.
            dropout: of the weights, as in the forward pass.
        """
        ...


def full_shapes(q_len: int, kv_len: int) -> Shapes:
    """Every pair.

    >>> full_shapes(2, 3).area(batch=1, heads=4)
    24
    """
    slabs = (Slab(0, q_len, 0, kv_len),) if q_len and kv_len else ()
    return Shapes(q_len, kv_len, ((0,),), (Plane(slabs),))


def causal_shapes(length: int) -> Shapes:
    """Each query sees itself and all keys before it.

    >>> causal_shapes(3).area(batch=1, heads=1)
    6
    """
    slabs = (Slab(0, length, 0, 1, 0, 1),) if length else ()
    return Shapes(length, length, ((0,),), (Plane(slabs),))


def allowed_pairs(shapes: Shapes, plane: int = 0) -> Tensor:
    """The pairs of one plane as a dense bool [q_len, kv_len], to look at and to test with.

    >>> allowed_pairs(causal_shapes(2)).int()
    tensor([[1, 0],
            [1, 1]], dtype=torch.int32)
    """
    found = pairs_within(shapes.planes[plane], 0, shapes.q_len, 0, shapes.kv_len)
    assert int(found.sum()) == shapes.planes[plane].area, "a pair is covered twice"
    return found


def pairs_within(plane: Plane, q0: int, q1: int, k0: int, k1: int) -> Tensor:
    """Bool [q1 - q0, k1 - k0]: where a pair of these rows and columns may attend."""
    allowed = torch.zeros(q1 - q0, k1 - k0, dtype=torch.bool)
    column = torch.arange(k0, k1)
    for slab in plane.slabs:
        if slab.q0 < q1 and slab.q1 > q0:
            s = slab.cut(max(slab.q0, q0), min(slab.q1, q1))
            i = torch.arange(s.rows)[:, None]
            inside = (column >= s.k0 + i * s.k0_step) & (column < s.k1 + i * s.k1_step)
            allowed[s.q0 - q0 : s.q1 - q0] |= inside
    for t in plane.tiles:
        if t.q0 < q1 and t.q1 > q0:
            rows = slice(max(t.q0, q0), min(t.q1, q1))
            part = t.bits[rows.start - t.q0 : rows.stop - t.q0]
            allowed[rows.start - q0 : rows.stop - q0, t.k0 - k0 : t.k1 - k0] |= part
    return allowed
