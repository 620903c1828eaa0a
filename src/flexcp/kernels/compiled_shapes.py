"""Compiled shapes: what a kernel runs for a mask, made on first use and kept for the next call."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.eager import outside_of_fake_tensors
from flexcp.grid import BlockGrid
from flexcp.kernels.head_groups import HeadGroup, head_groups_of
from flexcp.kernels.interface import Shapes
from flexcp.kernels.program import Program, make_program
from flexcp.kernels.shapes import shapes_of


class CompiledShapes:
    """Shapes and what calls derive from them: programs, head groups and positions on a device.

    >>> from flexcp.kernels.interface import causal_shapes
    >>> compiled = CompiledShapes(causal_shapes(64))
    >>> compiled.program(0, fused=True) is compiled.program(0, fused=True)
    True
    """

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self._programs: dict[tuple[int, bool], Program] = {}
        self._head_groups: dict[tuple[int, int, int], tuple[HeadGroup, ...]] = {}
        self._positions: dict[tuple[str, torch.device], Tensor] = {}

    def program(self, plane: int, *, fused: bool) -> Program:
        """What runs for the pairs of a plane, with or without fused ops for large rectangles."""
        key = (plane, fused)
        if key not in self._programs:
            with outside_of_fake_tensors():
                made = make_program(self.shapes.planes[plane], self.shapes.q_len, fused=fused)
            self._programs[key] = made
        return self._programs[key]

    def head_groups(self, batch: int, q_heads: int, kv_heads: int) -> tuple[HeadGroup, ...]:
        """The batch elements and heads of tensors of these sizes that run together."""
        key = (batch, q_heads, kv_heads)
        if key not in self._head_groups:
            self._head_groups[key] = head_groups_of(self.shapes, *key)
        return self._head_groups[key]

    def positions(self, which: str, device: torch.device) -> Tensor:
        """int64 [L] Global position of each query row ("q") or key ("kv"), on a device."""
        key = (which, device)
        found = self._positions.get(key)
        if found is None:
            shapes = self.shapes
            given = shapes.q_positions if which == "q" else shapes.kv_positions
            length = shapes.q_len if which == "q" else shapes.kv_len
            found = (torch.arange(length) if given is None else given).to(device)
            if type(found) is Tensor:  # nothing that a FakeTensorMode made outlives it
                self._positions[key] = found
        return found


def compiled_shapes_of(grid: BlockGrid) -> CompiledShapes:
    """The shapes of a grid's mask, compiled once and kept with the grid.

    >>> import flexcp
    >>> grid = flexcp.build_block_grid(flexcp.masks.causal(), 300)
    >>> compiled_shapes_of(grid) is compiled_shapes_of(grid)
    True
    """
    kept = vars(grid).get("_prepared")
    if isinstance(kept, CompiledShapes):
        return kept
    made = CompiledShapes(shapes_of(grid))
    vars(grid)["_prepared"] = made  # as functools.cached_property does; it dies with the grid
    return made
