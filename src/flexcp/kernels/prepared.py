"""Prepared shapes: the programs and lanes of a mask, made on first use and kept with it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from flexcp.grid import BlockGrid
from flexcp.kernels.interface import Shapes
from flexcp.kernels.lanes import Lane, lanes_of
from flexcp.kernels.program import Program, make_program
from flexcp.kernels.shapes import shapes_of


def outside_of_fake_tensors() -> AbstractContextManager[object]:
    """Masks are looked at for real, also where the tensors have shapes and no numbers."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
        return nullcontext()
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


class Prepared:
    """Shapes, with everything derived from them that the next call can use again.

    >>> from flexcp.kernels.interface import causal_shapes
    >>> prepared = Prepared(causal_shapes(64))
    >>> prepared.program(0, fused=True) is prepared.program(0, fused=True)
    True
    """

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self._programs: dict[tuple[int, bool], Program] = {}
        self._lanes: dict[tuple[int, int, int], tuple[Lane, ...]] = {}
        self._positions: dict[tuple[str, torch.device], Tensor] = {}

    def program(self, plane: int, *, fused: bool) -> Program:
        """The pieces of a plane, with or without fused ops."""
        key = (plane, fused)
        if key not in self._programs:
            with outside_of_fake_tensors():
                made = make_program(self.shapes.planes[plane], self.shapes.q_len, fused=fused)
            self._programs[key] = made
        return self._programs[key]

    def lanes(self, batch: int, q_heads: int, kv_heads: int) -> tuple[Lane, ...]:
        """The batch elements and heads that run together."""
        key = (batch, q_heads, kv_heads)
        if key not in self._lanes:
            self._lanes[key] = lanes_of(self.shapes, *key)
        return self._lanes[key]

    def positions(self, which: str, device: torch.device) -> Tensor:
        """int64 Global positions of the rows of "q" or "kv"."""
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


def prepared_for(grid: BlockGrid) -> Prepared:
    """What a grid's mask takes to compute; derived once and kept with the grid.

    >>> import flexcp
    >>> grid = flexcp.build_block_grid(flexcp.masks.causal(), 300)
    >>> prepared_for(grid) is prepared_for(grid)
    True
    """
    kept = vars(grid).get("_prepared")
    if isinstance(kept, Prepared):
        return kept
    made = Prepared(shapes_of(grid))
    vars(grid)["_prepared"] = made  # as functools.cached_property does; it dies with the grid
    return made
