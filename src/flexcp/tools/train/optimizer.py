"""AdamW with a short warm-up, a falling learning rate and clipped gradients."""

from __future__ import annotations

import math

import torch
from torch import nn

from flexcp.errors import FlexCPError
from flexcp.tools.train.config import TrainConfig

_CLIP = 1.0
_LAST_SHARE = 0.1
"""The last learning rate, as a part of the peak."""


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Weight decay for matrices, none for norms."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(0.9, 0.95),
    )


def learning_rate(step: int, config: TrainConfig) -> float:
    """Of a step, counted from 1: up along a line, then down along a cosine.

    >>> config = TrainConfig(steps=100, lr=1.0)
    >>> [round(learning_rate(step, config), 2) for step in (1, 10, 55, 100)]
    [0.1, 1.0, 0.55, 0.1]
    """
    warm_up = max(1, min(100, config.steps // 10))
    if step <= warm_up:
        return config.lr * step / warm_up
    done = (step - warm_up) / max(config.steps - warm_up, 1)
    share = _LAST_SHARE + (1 - _LAST_SHARE) * (1 + math.cos(math.pi * done)) / 2
    return config.lr * share


def require_finite(what: str, value: float, step: int, config: TrainConfig) -> None:
    """Raises if a number is none: what was saved before is then the last good state."""
    if not math.isfinite(value):
        raise FlexCPError(
            f"a {what} that is finite",
            f"{value} in step {step}",
            f"go on from the last checkpoint in {config.out} with a lower --lr (it has to be "
            "--restart then), or look at the data of that step; nothing of it was saved",
        )


def clip_and_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, config: TrainConfig
) -> float:
    """Applies the gradients, and clears them; returns their norm before clipping.

    Gradients that are not finite are an error: weights stay as they are.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
    require_finite("gradient norm", float(norm), step, config)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, config)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)
