"""Adding up tensors over the ranks of a mesh, in few messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.comm.collectives import ordered_sum


def sum_in_place(tensors: Sequence[Tensor], mesh: Any) -> None:
    """Replaces each tensor by its sum over the ranks; one message per type and dimension."""
    replace_by_sums(tensors, lambda x: _sum(x, mesh))


def replace_by_sums(tensors: Sequence[Tensor], total: Callable[[Tensor], Tensor]) -> None:
    """Replaces tensors by what `total` makes of all those of one type, laid end to end.

    >>> x, y = torch.ones(2, 2), torch.ones(3)
    >>> replace_by_sums([x, y], lambda flat: 2 * flat)
    >>> y
    tensor([2., 2., 2.])
    """
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for x in tensors:
        kinds.setdefault(x.dtype, []).append(x)
    for same in kinds.values():
        flat = total(torch.cat([x.reshape(-1) for x in same]))
        for x, part in zip(same, flat.split([x.numel() for x in same]), strict=True):
            x.copy_(part.view_as(x))


def _sum(x: Tensor, mesh: Any) -> Tensor:
    transport = getattr(mesh, "transport", None)
    if transport is not None:
        return ordered_sum(transport, x)
    for axis in range(mesh.ndim):
        dist.all_reduce(x, group=mesh.get_group(axis))
    return x
