"""Gradients of a model whose ranks each had a part of the tokens, added up over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from flexcp.comm.summing import sum_in_place
from flexcp.errors import FlexCPError


def sum_gradients(model: nn.Module, mesh: Any) -> None:
    """Replaces the gradients of all parameters by their sums over the ranks of a mesh."""
    found = [p for p in model.parameters() if p.requires_grad]
    for p in found:
        if isinstance(p, DTensor):
            raise FlexCPError(
                "whole parameters on every rank",
                "parameters that FSDP or tensor parallelism has sharded",
                'leave gradients to FSDP, and attach with gradients="averaged"',
            )
        if p.grad is None:  # such as an expert that got no token here
            p.grad = torch.zeros_like(p)
    sum_in_place([p.grad for p in found if p.grad is not None], mesh)
