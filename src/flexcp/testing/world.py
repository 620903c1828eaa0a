"""Running a function on many ranks without many machines."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TypeVar

from flexcp.comm.simulated import SimulatedMesh, SimulatedTransport, World
from flexcp.errors import FlexCPError, whole_shape

T = TypeVar("T")


def simulate(fn: Callable[[SimulatedMesh], T], world_size: int | tuple[int, ...]) -> list[T]:
    """Calls fn(mesh) once per simulated rank, in this process; returns the results by rank.

    Ranks run one at a time, in an order that depends on nothing but the code, and take turns where
    they wait for each other. An exception in one of them ends all, and is raised as a RankError
    that names the rank; it is a FlexCPError too if the exception was one.

    Args:
        fn: The code of one rank, as it would be written for a DeviceMesh.
        world_size: How many ranks, or the shape of a mesh such as (2, 4).

    >>> import flexcp
    >>> simulate(lambda mesh: flexcp.make_plan(flexcp.masks.causal(), 10, mesh).rows, 3)
    [4, 3, 3]
    """
    shape = mesh_shape(world_size)
    world = World(prod(shape))
    return world.run(lambda rank: fn(SimulatedMesh(shape, SimulatedTransport(world, rank))))


def mesh_shape(world_size: int | tuple[int, ...]) -> tuple[int, ...]:
    """Ranks along each dimension; an error if there are none.

    >>> mesh_shape(3), mesh_shape((2, 4))
    ((3,), (2, 4))
    """
    shape = whole_shape(world_size)
    if not shape or min(shape) < 1:
        raise FlexCPError(
            "at least 1 rank", repr(world_size), "pass a number of ranks, or a shape such as (2, 4)"
        )
    return shape
