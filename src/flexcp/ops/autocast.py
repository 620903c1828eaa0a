"""Attention casts inside an autocast region, as torch's own does."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast(*tensors: Tensor) -> list[Tensor]:
    """The tensors in the type of the autocast region, if there is one.

    float64 stays, and so does what is no tensor of floats: that is for checks to refuse.

    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     [x.dtype for x in autocast(torch.ones(2), torch.ones(2, dtype=torch.float64))]
    [torch.bfloat16, torch.float64]
    """
    return [_cast(x) for x in tensors]


def _cast(x: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return x
    if not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))
