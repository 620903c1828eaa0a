"""Compiled shapes: what a kernel runs for a mask, made on first use and kept for the next call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flexcp.eager import outside_of_inference_mode, tensors_to_keep
from flexcp.errors import FlexCPError
from flexcp.grid import BlockGrid
from flexcp.kernels.head_groups import HeadGroup, head_groups_of
from flexcp.kernels.interface import Shapes
from flexcp.kernels.mask_kinds import mask_kind
from flexcp.kernels.program import Program, make_program
from flexcp.kernels.shapes import shapes_of
from flexcp.kernels.tiles import By, TileLists, tile_lists
from flexcp.kernels.varlen_calls import VarlenCall, varlen_calls

_MOST_POSITIONS = 2**30 - 2**10
"""So that sums of two fit into 32 bits, also a tile further on."""
_SLAB_BYTES = 250
"""What a slab takes, as an object with six integers."""


@dataclass(frozen=True, eq=False)
class TiledPositions:
    """Global positions of queries or keys, in whole tiles: a last one counts on."""

    positions: Tensor
    """int32 [whole tiles]."""
    consecutive: Tensor
    """uint8 [tiles] Whether those of a tile count up by 1."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.positions.nbytes + self.consecutive.nbytes


class CompiledShapes:
    """Shapes and what calls derive from them: programs, tile lists, head groups, positions.

    >>> from flexcp.kernels.interface import causal_shapes
    >>> compiled = CompiledShapes(causal_shapes(64))
    >>> compiled.program(0, fused=True) is compiled.program(0, fused=True)
    True
    """

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self._shapes_nbytes = sum(
            _SLAB_BYTES * len(plane.slabs) + sum(tile.bits.nbytes for tile in plane.tiles)
            for plane in shapes.planes
        )
        self._programs: dict[tuple[int, bool, int | None, bool], Program] = {}
        self._head_groups: dict[tuple[int, int, int], tuple[HeadGroup, ...]] = {}
        self._positions: dict[tuple[str, torch.device], Tensor] = {}
        self._tiled_positions: dict[tuple[str, int], TiledPositions] = {}
        self._tile_lists: dict[tuple[int, int, By, torch.device, bool], TileLists] = {}
        self._varlen_calls: dict[tuple[int, torch.device], tuple[VarlenCall, ...] | None] = {}

    @cached_property
    def kind(self) -> str:
        """Which of `mask_kinds.KINDS` the mask is."""
        return mask_kind(self.shapes)

    def program(
        self, plane: int, *, fused: bool, causal_rows: int | None = None, bands: bool = False
    ) -> Program:
        """What runs for the pairs of a plane, with or without fused ops for large rectangles.

        `causal_rows` says from how many rows on triangles are for the op's own causal mode, `bands`
        that sliding windows are for its calls with a bias.
        """
        key = (plane, fused, causal_rows, bands)
        if key not in self._programs:
            with tensors_to_keep():
                made = make_program(
                    self.shapes.planes[plane],
                    self.shapes.q_len,
                    fused=fused,
                    causal_rows=causal_rows,
                    bands=bands,
                    kv_len=self.shapes.kv_len,
                )
            self._programs[key] = made
        return self._programs[key]

    def tile_lists(
        self, rows: int, cols: int, by: By, device: torch.device, *, runs: bool = False
    ) -> TileLists:
        """The pairs as lists of tiles of `rows` queries and `cols` keys, on a device."""
        key = (rows, cols, by, device, runs)
        found = self._tile_lists.get(key)
        if found is None:
            with tensors_to_keep():
                made = tile_lists(self.shapes, rows, cols, by, runs=runs)
            with outside_of_inference_mode():
                found = made.to(device)
            if type(found.order) is Tensor:  # nothing that a FakeTensorMode made outlives it
                self._tile_lists[key] = found
        return found

    def varlen_calls(self, batch: int, device: torch.device) -> tuple[VarlenCall, ...] | None:
        """The calls of a variable-length op for the pairs, on a device; None if a few can't."""
        key = (batch, device)
        if key not in self._varlen_calls:
            with tensors_to_keep():
                made = varlen_calls(self.shapes, batch)
            with outside_of_inference_mode():
                found = None if made is None else tuple(call.to(device) for call in made)
            if found and type(found[0].q_ends) is not Tensor:
                return found  # nothing that a FakeTensorMode made outlives it
            self._varlen_calls[key] = found
        return self._varlen_calls[key]

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
            with outside_of_inference_mode():
                found = (torch.arange(length) if given is None else given).to(device)
            if type(found) is Tensor:  # nothing that a FakeTensorMode made outlives it
                self._positions[key] = found
        return found

    def tiled_positions(self, which: str, tile: int) -> TiledPositions:
        """The global positions of queries ("q") or keys ("kv") by tiles, on the CPU."""
        key = (which, tile)
        found = self._tiled_positions.get(key)
        if found is None:
            at = self.positions(which, torch.device("cpu"))
            if at.numel() and int(at.max()) >= _MOST_POSITIONS:
                raise FlexCPError(
                    f"positions below {_MOST_POSITIONS:,} for a score_mod in C++",
                    f"{int(at.max()):,}",
                    "ask for the kernel 'scored'",
                )
            with outside_of_inference_mode():
                last = at[-1:] + 1 + torch.arange(-at.numel() % tile)
                positions = torch.cat([at, last]).to(torch.int32).view(-1, tile)
                even = (positions.diff(dim=1) == 1).all(1).to(torch.uint8)
            found = TiledPositions(positions.flatten(), even)
            self._tiled_positions[key] = found
        return found

    @cached_property
    def are_apart(self) -> bool:
        """Whether no two queries, and no two keys, have the same global position."""
        given = (self.shapes.q_positions, self.shapes.kv_positions)
        return all(x is None or x.unique().numel() == x.numel() for x in given)

    @property
    def nbytes(self) -> int:
        """Bytes of the shapes and programs, about."""
        programs = sum(program.nbytes for program in tuple(self._programs.values()))
        positions = sum(tensor.nbytes for tensor in tuple(self._positions.values()))
        lists = sum(lists.nbytes for lists in tuple(self._tile_lists.values()))
        tiled = sum(tiled.nbytes for tiled in tuple(self._tiled_positions.values()))
        return self._shapes_nbytes + programs + positions + lists + tiled


def compiled_shapes_of(grid: BlockGrid) -> CompiledShapes:
    """The shapes of a grid's mask, compiled once and kept with the grid.

    >>> import flexcp
    >>> grid = flexcp.build_block_grid(flexcp.masks.causal(), 300)
    >>> compiled_shapes_of(grid) is compiled_shapes_of(grid)
    True
    """
    return grid.derived.once(CompiledShapes, lambda: _compiled(grid))


def _compiled(grid: BlockGrid) -> CompiledShapes:
    with tensors_to_keep():
        return CompiledShapes(shapes_of(grid))
