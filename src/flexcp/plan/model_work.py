"""What a rank has to do in attention and in the rest of the model together."""

from __future__ import annotations

import torch

from flexcp.layout import Layout, area_per_rank
from flexcp.plan.problem import PASSES, Problem
from flexcp.schedule.ulysses import grouped


def model_seconds(problem: Problem, layout: Layout, group_size: int) -> float:
    """Seconds of the slowest rank's own work in both passes, if groups of ranks share heads."""
    machine, shape = problem.machine, problem.shape
    areas = area_per_rank(list(problem.grids.values()), grouped(layout, group_size)).double()
    pairs = torch.repeat_interleave(areas / group_size, group_size)
    attention = pairs * shape.flops_per_pair * (1 + machine.backward)
    rest = layout.counts * shape.batch * problem.flops_per_token * PASSES
    return float((attention + rest).max()) / machine.flops
