"""Scoring: how the scores of strips come from products of rows and keys, and weights from scores.

Softmax is taken to the base 2: that costs a third of the natural exponential, and the change of
base is a factor of a matrix product. But it rounds: where scores are so large that their last digit
counts, the base is e, as in the fused ops, whose lse then fits to the last digit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.kernels.dropout import Dropout
from flexcp.kernels.score import ScoreMod

LOG2_E = math.log2(math.e)
_LARGE_SCORE = 256.0
"""From here on, rounding to another base shows in weights: by a factor of 1e-5, or more."""


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
