"""What a plan knows of the ranks: how many, which one this is, and how to reach the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

from flexcp.comm.interface import Transport
from flexcp.errors import FlexCPError, told, whole_shape


@dataclass(frozen=True, eq=False)
class Ranks:
    """A mesh, reduced to what planning needs."""

    shape: tuple[int, ...]
    """(ranks,) or (groups, ranks of a group)."""
    rank: int | None = None
    """This rank, counted row by row; None if the plan can't be run."""
    transport: Transport | None = None
    """How to reach the others, if that is known already."""
    mesh: Any = None
    """What was given."""
    pickled: bool = False
    """Whether there was a mesh until the plan was pickled: neither it nor the rank travels."""

    @property
    def size(self) -> int:
        """How many ranks."""
        return prod(self.shape)

    def __reduce__(self) -> tuple[Any, ...]:
        """Nothing but the shape: the process that unpickles it may be another rank, or none."""
        return Ranks, (self.shape, None, None, None, self.pickled or self.mesh is not None)

    def connected(self) -> Ranks:
        """The ranks with a way to reach each other, if they are those of a mesh."""
        if self.mesh is None or self.transport is not None:
            return self
        from flexcp.comm.process import ProcessTransport

        return replace(self, transport=ProcessTransport.of_mesh(self.mesh))

    @classmethod
    def of(cls, mesh: Any) -> Ranks:
        """From an int, a shape, a DeviceMesh, or a simulated mesh.

        >>> Ranks.of(8).size, Ranks.of((2, 4)).shape
        (8, (2, 4))
        """
        if isinstance(mesh, Ranks):
            return mesh
        numbers = whole_shape(mesh)
        if numbers is not None:
            return cls(_require_shape(numbers))
        coordinate = getattr(mesh, "get_coordinate", None)
        shape = getattr(mesh, "shape", None) if callable(coordinate) else None
        if shape is None or not callable(coordinate):
            raise FlexCPError(
                "a DeviceMesh, a simulated mesh, a number of ranks, or a shape such as (2, 4)",
                told(mesh),
                "pass init_device_mesh(...), the mesh that testing.simulate gives, or an int",
            )
        sizes = _require_shape(tuple(int(n) for n in shape))
        place = coordinate()
        if place is None:
            raise FlexCPError(
                "a mesh that this process is part of",
                "one without it",
                "call make_plan on the ranks of the mesh only",
            )
        rank = 0
        for at, n in zip(place, sizes, strict=True):
            rank = rank * n + int(at)
        return cls(sizes, rank, getattr(mesh, "transport", None), mesh)


def _require_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    if not 1 <= len(shape) <= 2 or any(n < 1 for n in shape):
        raise FlexCPError(
            "at least 1 rank, in a mesh of one or two dimensions",
            f"{shape[0]} ranks" if len(shape) == 1 else f"a mesh of shape {shape}",
            "pass a world size of 1 or more; for heads and sequence, (groups, ranks of a group)",
        )
    if prod(shape) > _MOST_RANKS:
        raise FlexCPError(
            f"at most {_MOST_RANKS:,} ranks",
            f"a mesh of shape {shape}",
            "pass the size of one mesh",
        )
    return shape


_MOST_RANKS = 2**14
"""A plan has a row for each pair of ranks that exchange something."""
