"""Gradients of captured tensors: what many pairs have read of a tensor, added up in a fixed order.

A kernel writes to a workspace of limited size which element each pair has read and its gradient.
These are sorted by element, in the order in which they were written where it is the same, and each
element's are added up: no atomics, and the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexcp.kernels.score import deterministic_sums
from flexcp.kernels.triton.available import captured_kernel
from flexcp.kernels.triton.launch import Launch, has_no_numbers

if TYPE_CHECKING:
    from flexcp.kernels.score import ScoreMod
    from flexcp.kernels.triton.emit import Lookup
    from flexcp.kernels.triton.scoring import ScoreArguments

MOST_PAIRS = 1 << 23
"""Pairs that are written to the workspace at a time: 64 MB, and several times that to sort them."""


@dataclass(frozen=True)
class Part:
    """What one launch writes to the workspace."""

    first_program: int
    programs: int
    first_key: int
    width: int
    """Keys; 0 for one number of each query."""


def parts_of(programs: int, rows: int, cols: int, keys: int, by_row: bool) -> Iterator[Part]:
    """Launches that together see every program and key, each within the workspace.

    >>> [(p.first_program, p.programs, p.width) for p in parts_of(3, 64, 64, 1 << 16, False)]
    [(0, 2, 65536), (2, 1, 65536)]
    >>> list(parts_of(3, 64, 64, 0, False))
    []
    """
    if by_row or not keys:
        if programs and keys:
            yield Part(0, programs, 0, 0)
        return
    width = min(keys, max(cols, MOST_PAIRS // rows // cols * cols))
    step = max(1, MOST_PAIRS // (rows * width))
    for first_key in range(0, keys, width):
        for first in range(0, programs, step):
            yield Part(first, min(step, programs - first), first_key, width)


def captured_gradients(
    mod: ScoreMod, score: ScoreArguments, launch: Launch, keys: int
) -> tuple[Tensor, ...]:
    """The gradient of each tensor that a score function captures, in its type.

    `launch` is that of the kernel over all programs, without what to write and where.
    """
    emitted, device = score.emitted, score.given[0].device
    totals = {
        lookup.operand: torch.zeros(
            emitted.operands[lookup.operand].numel() + 1, dtype=torch.float32, device=device
        )
        for lookup in emitted.lookups
    }
    for lookup in () if has_no_numbers(score.given[0]) else emitted.lookups:
        for values, elements in _written(score, lookup, launch, keys):
            add_in_order(totals[lookup.operand], values, elements)
    operands = [emitted.operands[i] for i in totals]
    gradients = [
        total[:-1].view(x.shape).to(x.device, x.dtype)
        for total, x in zip(totals.values(), operands, strict=True)
    ]
    if not operands:
        return tuple(torch.zeros_like(x) for x in mod.captured)
    with deterministic_sums():
        # Through what the function makes of the tensors that it captures before it looks them up.
        found = torch.autograd.grad(
            operands, mod.captured, gradients, retain_graph=True, allow_unused=True
        )
    return tuple(
        torch.zeros_like(x) if grad is None else grad
        for x, grad in zip(mod.captured, found, strict=True)
    )


def _written(
    score: ScoreArguments, lookup: Lookup, launch: Launch, keys: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """What the kernel writes of a lookup, part by part: gradients and elements, both flat."""
    config = launch.config
    for part in parts_of(launch.programs, config.rows, config.cols, keys, lookup.by_row):
        made = launch_part(score, lookup, launch, part)
        made.run(captured_kernel())
        values, elements = made.arguments["values"], made.arguments["elements"]
        if not lookup.by_row and "q" not in lookup.reads:
            # All queries of a tile read the same of a key; those that don't attend read nothing.
            values, elements = values.sum(1), elements.amin(1)
        yield values.flatten(), elements.flatten()


def launch_part(score: ScoreArguments, lookup: Lookup, launch: Launch, part: Part) -> Launch:
    """The launch that writes a part, with the workspace for it."""
    size = score.emitted.operands[lookup.operand].numel()
    device, config = score.given[0].device, launch.config
    index = torch.int32 if size < 2**31 - 1 else torch.int64
    shape = (part.programs, config.rows) + (() if lookup.by_row else (part.width,))
    arguments: dict[str, Any] = {
        **launch.arguments,
        "values": torch.zeros(shape, dtype=torch.float32, device=device),
        "elements": torch.full(shape, size, dtype=index, device=device),
        "first_program": part.first_program, "first_key": part.first_key, "width": part.width,
        "BY_ROW": lookup.by_row, "PULL": score.functions[f"pull_{lookup.number}"],
        "ELEMENT": score.functions[f"element_{lookup.number}"],
    }  # fmt: skip
    return Launch(launch.kernel, part.programs, arguments, config)


def add_in_order(total: Tensor, values: Tensor, elements: Tensor) -> None:
    """Adds `values` to the elements of `total` that `elements` names, in a fixed order.

    The last element of `total` is for values that belong to none, and means nothing.

    >>> total = torch.zeros(4)
    >>> add_in_order(total, torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 0, 2]))
    >>> total[:-1]
    tensor([2., 0., 5.])
    """
    length, most = values.numel(), min(values.numel(), total.numel())
    if length == 0:
        return
    ordered, order = torch.sort(elements, stable=True)
    begins = torch.ones(length, dtype=torch.int64, device=values.device)
    begins[1:] = ordered[1:] != ordered[:-1]
    segment = begins.cumsum(0) - 1
    numbers = torch.arange(most + 1, device=values.device)
    offsets = torch.searchsorted(segment, numbers)
    sums = torch.segment_reduce(values[order], "sum", offsets=offsets, initial=0.0, unsafe=True)
    starts = offsets[:-1]
    target = ordered[starts.clamp(max=length - 1)].to(torch.int64)
    target = torch.where(starts < length, target, total.numel() - 1)
    total.index_put_((target,), total[target] + sums)
