"""Running a function on many ranks without many machines."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TypeVar

from flexcp import errors
from flexcp.comm.simulated import SimulatedMesh, SimulatedTransport, World
from flexcp.errors import FlexCPError, quote, whole_shape

T = TypeVar("T")


def simulate(fn: Callable[[SimulatedMesh], T], world_size: int | tuple[int, ...]) -> list[T]:
    """Calls fn(mesh) once per simulated rank, in this process; returns the results by rank.

    Ranks run one at a time, in an order that depends on nothing but the code, and take turns where
    they wait for each other. An exception in one of them ends all, and is raised as a RankError
    that names the rank; it is a FlexCPError too if the exception was one.

    Args:
        fn: The code of one rank, as it would be written for a DeviceMesh.
        world_size: How many ranks, or the shape of a mesh such as (2, 4).

    >>> simulate(lambda mesh: mesh.get_rank() * 10, 3)
    [0, 10, 20]
    """
    require_function(fn)
    shape = mesh_shape(world_size, at_most=_MOST_SIMULATED)
    world = World(prod(shape))
    return world.run(lambda rank: fn(SimulatedMesh(shape, SimulatedTransport(world, rank))))


_MOST_SIMULATED = 4096
"""Each rank is a thread."""


def require_function(fn: object) -> None:
    """Raises unless there is something to call on each rank."""
    errors.require_function(
        "a function of a mesh, to be called on each rank",
        fn,
        1,
        "pass the code of one rank: def rank(mesh): ...",
    )


def mesh_shape(world_size: int | tuple[int, ...], *, at_most: int) -> tuple[int, ...]:
    """Ranks along each dimension; an error if there are none, or too many.

    >>> mesh_shape(3, at_most=8), mesh_shape((2, 4), at_most=8)
    ((3,), (2, 4))
    """
    shape = whole_shape(world_size)
    if not shape or min(shape) < 1 or prod(shape) > at_most:
        raise FlexCPError(
            f"at least 1 rank, and at most {at_most:,}",
            quote(world_size),
            "pass a number of ranks, or a shape such as (2, 4)",
        )
    return shape
