"""Helpers for tests of code that uses flexcp, and of flexcp itself."""

from flexcp.testing.processes import spawn
from flexcp.testing.world import simulate

__all__ = ["simulate", "spawn"]
