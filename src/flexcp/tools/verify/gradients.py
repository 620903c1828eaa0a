"""The check of gradients: every parameter's, as the trainer will have it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexcp.tools.verify.evidence import Evidence, not_observed
from flexcp.tools.verify.verdict import Check

_SMALL = 1e-2
"""A parameter whose gradients are smaller than this, relative to the largest of all, is compared
relative to this: the gradient of a key's bias is zero but for rounding."""


def check_gradients(evidence: Evidence) -> Check:
    """Every parameter's gradient, after the trainer has put the ranks' together."""
    expected = {n: g.double() for n, g in evidence.alone.gradients.items() if g is not None}
    if not expected:
        return not_observed("gradients", "the loss of one process has none")
    floor = _SMALL * max(float(g.abs().max()) for g in expected.values() if g.numel())
    floor = max(floor, 1e-300)
    limit, size = evidence.loss_precision, evidence.size
    worst, worst_name = 0.0, next(iter(expected))
    for name, whole in expected.items():
        parts = [_part(one.gradients.get(name), whole) for one in evidence.together]
        scale = max(float(whole.abs().max()) if whole.numel() else 0.0, floor)
        error, rank = _error(parts, whole, evidence.gradients, scale)
        if error > limit:
            off = sum(
                _error(
                    [_part(one.gradients.get(n), g) for one in evidence.together],
                    g,
                    evidence.gradients,
                    max(float(g.abs().max()), floor),
                )[0]
                > limit
                for n, g in expected.items()
            )
            on = f", rank {rank}" if rank is not None else ""
            cause, fix = _cause(
                parts, whole, evidence.gradients, scale, limit, off == len(expected)
            )
            return Check(
                "gradients",
                "failed",
                f"those of {off} of {len(expected)} parameters differ, {evidence.gradients}",
                error,
                limit,
                f"parameter {name}{on}",
                cause,
                fix,
            )
        if error > worst:
            worst, worst_name = error, name
    found = f"{len(expected)} parameters agree, {evidence.gradients} over {size} ranks"
    where = f"largest deviation in {worst_name}"
    return Check("gradients", "passed", found, worst, limit, where)


def _part(gradient: Tensor | None, whole: Tensor) -> Tensor:
    if gradient is None or gradient.shape != whole.shape:
        return torch.zeros_like(whole)
    return gradient.double()


def _error(
    parts: Sequence[Tensor], whole: Tensor, way: str, scale: float
) -> tuple[float, int | None]:
    if not whole.numel():
        return 0.0, None
    if way == "reduced":
        errors = [_largest(part - whole) / scale for part in parts]
        return max(errors), errors.index(max(errors))
    total = torch.stack(list(parts)).sum(0) / (1 if way == "summed" else len(parts))
    return _largest(total - whole) / scale, None


def _largest(x: Tensor) -> float:
    return float(x.abs().max().nan_to_num(nan=torch.inf))


def _cause(
    parts: Sequence[Tensor], whole: Tensor, way: str, scale: float, limit: float, all_off: bool
) -> tuple[str, str]:
    """The way of putting gradients together that would have been right."""
    size = len(parts)
    if way != "reduced" and _error(parts, whole, "reduced", scale)[0] <= limit:
        return (
            "every rank has the whole gradient already",
            'pass gradients="reduced" if the step reduces them, or leave the reduction out',
        )
    if way == "reduced" and _error([p * size for p in parts], whole, way, scale)[0] <= limit:
        return (
            "gradients are averaged over ranks instead of summed",
            "sum them, or multiply the loss by the number of ranks: "
            'flexcp.cross_entropy(..., gradients="averaged", ranks=world_size)',
        )
    for other in ("summed", "averaged"):
        if other == way or _error(parts, whole, other, scale)[0] > limit:
            continue
        if way == "reduced":
            which = "gradients are" if all_off else "this parameter's gradient is"
            return (
                f"{which} not reduced: each rank has its own part, to be {other}",
                "reduce the gradients of all parameters over the ranks, and of each just once",
            )
        return (
            f"gradients are to be {other}, but the trainer has them {way}",
            f'pass gradients="{other}" if that is what your trainer does',
        )
    if _error([p * size for p in parts], whole, way, scale)[0] <= limit:
        return (
            f"gradients are divided by the number of ranks, {size}, once too often",
            "leave the division out: the losses of the ranks add up already",
        )
    if _error([p / size for p in parts], whole, way, scale)[0] <= limit:
        return (
            f"gradients are {size} times too large: summed where they are to be averaged, or "
            "reduced twice",
            "reduce them once, and scale the loss for it",
        )
    if way != "reduced" and all(float(p.abs().max()) == 0 for p in parts):
        return "no gradient arrives at this parameter", "look for a detach or no_grad on its way"
    return (
        "this parameter's gradient misses what other ranks have to say, or has it twice",
        "look for a detach, a collective without a gradient, or a copy of the parameter on its way",
    )
