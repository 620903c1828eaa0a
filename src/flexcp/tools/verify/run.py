"""Running a step on one process and on ranks, with a list of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flexcp.testing import simulate, spawn
from flexcp.tools.verify.observe import AttentionCall, Observation, observe

Batch = Mapping[str, Any]
Parallel = Callable[[nn.Module, dict[str, Any], Any], Any]
"""A rank's step: (its own model, the whole batch, mesh) -> the loss of its tokens."""
Single = Callable[[nn.Module, dict[str, Any]], Any]
"""The step of one process: (model, the whole batch) -> loss."""


@dataclass(frozen=True, eq=False)
class Job:
    """One batch to run, and how much of it to keep."""

    batch: Batch
    """The whole batch."""
    keep: Literal["all", "integers", "logits"] = "all"
    """"all" runs the backward pass as well."""


@dataclass(frozen=True, eq=False)
class StepRunner:
    """A model and the two ways to run it."""

    model: nn.Module
    """Copied for every run, so that nothing that a step does to it stays."""
    single: Single | None
    """What is right; None takes the ranks' own step, on one rank."""
    parallel: Parallel
    """What is put to the test."""
    world_size: int | tuple[int, ...]
    """How many ranks, or the shape of a mesh."""
    ranks: Literal["simulated", "gloo"]
    """Ranks that take turns in this process, or processes."""
    seed: int
    """For whatever is random in a step; the n-th job has the n-th seed from here."""
    timeout: float
    """Seconds that a gloo rank waits for another."""

    def alone(self, jobs: Sequence[Job]) -> list[Observation]:
        """What one process does with each batch."""
        if self.single is None:
            one = 1 if isinstance(self.world_size, int) else (1,) * len(self.world_size)
            return [by_rank[0] for by_rank in self.together(jobs, world_size=one)]
        return [self._one(self.single, jobs, i) for i in range(len(jobs))]

    def together(
        self, jobs: Sequence[Job], *, world_size: int | tuple[int, ...] | None = None
    ) -> list[list[Observation]]:
        """What the ranks do with each batch: by job, then by rank."""
        size = self.world_size if world_size is None else world_size

        def rank(mesh: Any) -> list[Observation]:
            def step(model: nn.Module, batch: dict[str, Any]) -> Any:
                return self.parallel(model, batch, mesh)

            return [
                self._one(step, jobs, i, travels=self.ranks == "gloo") for i in range(len(jobs))
            ]

        if self.ranks == "simulated":
            by_rank = simulate(rank, size)
        else:
            by_rank = spawn(rank, size, timeout=self.timeout)
        return [[mine[i] for mine in by_rank] for i in range(len(jobs))]

    def _one(
        self, step: Single, jobs: Sequence[Job], number: int, *, travels: bool = False
    ) -> Observation:
        job = jobs[number]
        torch.manual_seed(self.seed + number)
        batch = {
            n: x.clone() if isinstance(x, Tensor) else deepcopy(x) for n, x in job.batch.items()
        }
        seen = observe(lambda m: step(m, batch), deepcopy(self.model), backward=job.keep == "all")
        return _lean(seen, job, travels=travels)


def _lean(seen: Observation, job: Job, *, travels: bool) -> Observation:
    """Without what nobody will look at: it may have to travel between processes."""
    if job.keep == "integers":
        return Observation(integers=seen.integers)
    if job.keep == "logits":
        return Observation(loss=seen.loss, logits=seen.logits)
    calls = [
        AttentionCall(
            c.function,
            *((c.q, c.k, c.v) if i == 0 else (c.q[..., :0], c.k[..., :0], c.v[..., :0])),
            out=c.out,
            positions=c.positions,
            options={} if travels else c.options,
        )
        for i, c in enumerate(seen.calls)
    ]
    seen.calls = calls
    return seen
