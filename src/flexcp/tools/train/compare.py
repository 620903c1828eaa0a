"""Each step again in one process, from the same weights: the loss and every gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from flexcp.testing.tolerance import relative_error, tolerance
from flexcp.tools.train.config import TrainConfig
from flexcp.tools.train.data import PackedBatch
from flexcp.tools.train.events import Compared
from flexcp.tools.train.model import ByteTransformer
from flexcp.tools.train.step import loss_of, rank_batch
from flexcp.tools.train.team import Team

_ROUNDINGS = 16
"""Times the error of one attention: layers add up, and the terms of a gradient cancel. In float32
most gradients agree to 1e-6; those of q and k, which begin small, now and then to 2e-5 only."""


def compare_with_one_process(
    model: ByteTransformer, batch: PackedBatch, config: TrainConfig, number: int, loss: float
) -> Compared:
    """Repeats a step without context parallelism, and leaves the model as it was.

    Args:
        model: With the gradients that the ranks found.
        batch: What they found them for.
        config: The run.
        number: The step.
        loss: That of all ranks.
    """
    from_ranks = _take_gradients(model)
    own_loss = loss_of(model, rank_batch(batch, config, Team()))
    own_loss.backward()
    own = _take_gradients(model)
    for name, parameter in model.named_parameters():
        parameter.grad = from_ranks[name]
    errors = {name: relative_error(from_ranks[name], own[name]) for name in own}
    worst = max(errors, key=lambda name: errors[name])
    return Compared(
        step=number,
        loss=loss,
        one_process_loss=float(own_loss.detach()),
        gradient_norm=_norm(from_ranks),
        one_process_gradient_norm=_norm(own),
        gradient_difference=errors[worst],
        parameter=worst,
        tolerance=_ROUNDINGS * tolerance(getattr(torch, config.autocast or config.dtype)),
    )


def _take_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients by name, which the model no longer has."""
    taken = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        taken[name], parameter.grad = parameter.grad, None
    return taken


def _norm(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
