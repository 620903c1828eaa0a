"""Which exponential suits the scores of some queries and keys, by how large they can be."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flexcp.torch_names import is_recorded

_LARGE_SCORE = 256.0
"""From here on, rounding to another base shows in weights: by a factor of 1e-5, or more."""
_SMALL_SCORE = 48 * math.log(2.0)
"""Up to here, exponentials of the scores as they are neither overflow nor vanish, nor do sums of
their products with values between 1e-23 and 1e+16."""


def exponential_for(q: Tensor, k: Tensor, scale: float) -> tuple[float, bool]:
    """The base of the exponential for the scores of q and k, and whether all of them are small.

    The base is 2, or e if some may be large. On a GPU that would have to be waited for: there it is
    2, and nothing is said of their size. What `make_fx` records runs on other tensors too, of which
    nothing is known: the base is e.

    >>> exponential_for(torch.ones(1, 1), torch.ones(1, 1), 1.0)
    (2.0, True)
    """
    if is_recorded():
        return math.e, False
    if type(q) is not Tensor or q.device.type != "cpu" or not q.numel() or not k.numel():
        return 2.0, False
    of_q, of_k = (float(torch.linalg.vector_norm(x, dim=-1).amax()) for x in (q, k))
    most = of_q * of_k * abs(scale)
    return (math.e if most > _LARGE_SCORE else 2.0), most <= _SMALL_SCORE
