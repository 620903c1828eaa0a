"""Team: the ranks of a run, and the few things they do together besides attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from flexcp.comm.faults import answered
from flexcp.comm.summing import replace_by_sums

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Team:
    """One process, or all processes of a mesh."""

    mesh: Any = None
    """A DeviceMesh that holds all processes of the job; None for one process by itself."""

    @property
    def size(self) -> int:
        """How many ranks."""
        return 1 if self.mesh is None else int(self.mesh.size())

    @property
    def leads(self) -> bool:
        """Whether this is the rank that writes files and reports."""
        return self.mesh is None or dist.get_rank() == 0

    def sum_(self, x: Tensor) -> None:
        """Replaces x by its sum over the ranks; the same bits on all of them."""
        if self.mesh is not None:
            with answered(_everybody(), "adding up over all ranks"):
                dist.all_reduce(x)

    def sum_gradients_(self, model: nn.Module) -> None:
        """Every rank has the gradients of its own rows; after this, all have those of the batch."""
        if self.mesh is None:
            return
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        replace_by_sums(gradients, self._summed)

    def _summed(self, x: Tensor) -> Tensor:
        self.sum_(x)
        return x

    def share(self, x: T) -> T:
        """What rank 0 passes, on every rank; an exception there must be passed as a value."""
        if self.mesh is None:
            return x
        box = [x]
        with answered(_everybody(), "hearing from rank 0"):
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def wait_for_all(self) -> None:
        """Returns once all ranks have come here."""
        if self.mesh is not None:
            with answered(_everybody(), "the end of the run"):
                dist.barrier()


def _everybody() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "a mesh without a process group"
    return group
