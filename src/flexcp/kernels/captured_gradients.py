"""Gradients of tensors that a score function captures: each its own, summed in a fixed order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor


def gradients_apart(
    outputs: Sequence[Tensor],
    captured: Sequence[Tensor],
    gradients: Sequence[Tensor],
    leaves: Sequence[Tensor] = (),
) -> list[Tensor | None]:
    """The gradients of captured tensors, as if none were made of another, and of some leaves.

    What a captured tensor was made of gets its share from autograd, outside of the function.

    >>> w = torch.ones(1, requires_grad=True)
    >>> twice = 2 * w
    >>> gradients_apart((w + twice,), (w, twice), (torch.ones(1),))
    [tensor([1.]), tensor([1.])]
    """
    stopped: dict[int, Tensor] = {}

    def stop(i: int) -> Callable[[Tensor], Tensor]:
        def keep(gradient: Tensor) -> Tensor:
            stopped[i] = gradient
            return torch.zeros_like(gradient)

        return keep

    made = [i for i, x in enumerate(captured) if x.grad_fn is not None and len(captured) > 1]
    hooks = [captured[i].register_hook(stop(i)) for i in made]
    try:
        found = torch.autograd.grad(
            outputs, (*captured, *leaves), gradients, retain_graph=True, allow_unused=True
        )
    finally:
        for hook in hooks:
            hook.remove()
    return [stopped.get(i, x) for i, x in enumerate(found)]


@contextlib.contextmanager
def deterministic_sums(*, needed: bool = True) -> Iterator[None]:
    """Scatter-adds in a fixed order: the gradients of captured tensors are made of them."""
    if not needed:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)
