"""What a rank has to do in attention and in the rest of the model together."""

from __future__ import annotations

import torch

from flexcp.layout import Layout, area_per_rank
from flexcp.plan.problem import Problem
from flexcp.schedule.ulysses import grouped

_PASSES = 3.0
"""Work of the rest of the model in both passes, over that of forward: gradients of what a matrix
product takes and of its weights are a product each."""


def model_seconds(problem: Problem, layout: Layout, group_size: int) -> float:
    """Seconds of the slowest rank's own work in both passes, if groups of ranks share heads."""
    machine, shape = problem.machine, problem.shape
    areas = area_per_rank(list(problem.grids.values()), grouped(layout, group_size)).double()
    pairs = torch.repeat_interleave(areas / group_size, group_size)
    attention = pairs * shape.flops_per_pair * (1 + machine.backward)
    rest = layout.counts * shape.batch * problem.flops_per_token * _PASSES
    return float((attention + rest).max()) / machine.flops
