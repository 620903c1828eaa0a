"""What all schedules on a layout share: where the work is, and who needs which rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.layout import Layout
from flexcp.plan.load import Load
from flexcp.plan.problem import Problem
from flexcp.schedule import Needs
from flexcp.schedule.ulysses import grouped


@dataclass(frozen=True, eq=False)
class Prepared:
    """A layout, with the work and the needs of every mask."""

    layout: Layout
    inner: int
    """It is worked out for groups of so many consecutive ranks, and of multiples of it."""
    loads: Mapping[str, Load]
    needs: Mapping[str, Needs]
    """Empty for schedules that ask for nothing in particular."""

    @classmethod
    def of(cls, problem: Problem, layout: Layout, schedule: str, inner: int = 1) -> Prepared:
        """Works it out."""
        groups = grouped(layout, inner)
        asks = schedule not in ("ring", "allgather", "ulysses")
        loads = {name: Load.of([grid], groups) for name, grid in problem.grids.items()}
        needs = {n: Needs.of([grid], groups) for n, grid in problem.grids.items() if asks}
        return cls(layout, inner, loads, needs)

    def load_of(self, name: str, inner: int) -> Load:
        """The work of groups of `inner` ranks under a mask."""
        return self.loads[name].grouped(inner // self.inner)

    def needs_of(self, name: str, inner: int) -> Needs:
        """What groups of `inner` ranks need under a mask."""
        if inner == self.inner:
            return self.needs[name]
        return self.needs[name].grouped(grouped(self.layout, inner), inner // self.inner)

    def pairs(self, inner: int) -> Tensor:
        """float64 [groups] Work of each group, over all masks."""
        return torch.stack([self.load_of(name, inner).before[:, -1] for name in self.loads]).sum(0)

    def is_uneven(self, inner: int, limit: float) -> bool:
        """Whether some group has more than `limit` times the mean work."""
        pairs = self.pairs(inner)
        return float(pairs.max()) > limit * float(pairs.mean())

    def asks_for(self, share: float) -> bool:
        """Whether groups need more than such a share of all rows of the others, under all masks."""
        return bool(self.needs) and all(needs.exceed(share) for needs in self.needs.values())
