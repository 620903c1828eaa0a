"""BlockGrid: which tiles of an attention matrix are empty, partial or full; sparse and exact."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexcp.caches import Derived
from flexcp.eager import run_eagerly_on_cpu
from flexcp.errors import FlexCPError, as_whole, quote
from flexcp.graph_handles import GraphOwner, new_graph_handle
from flexcp.grid.analysis.area import partial_areas
from flexcp.grid.analysis.axis import Axis
from flexcp.grid.analysis.descent import Effort
from flexcp.grid.picture import as_text, coverage
from flexcp.grid.planes import Planes
from flexcp.grid.runs import BlockKind, Runs
from flexcp.masks import Mask, trace_mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True, eq=False, repr=False)
class BlockGrid(GraphOwner):
    """The kinds of all tiles of a mask, and its exact areas on demand.

    Tiles are `block_size[0]` queries by `block_size[1]` keys; the last ones may be smaller. Storage
    is proportional to the number of runs of equal tiles, and planes (batch elements and heads)
    with the same pattern are stored once.

    >>> import flexcp
    >>> grid = flexcp.build_block_grid(flexcp.masks.causal(), 500, block_size=100)
    >>> grid
    BlockGrid(500 x 500 tokens, blocks of 100 x 100, batch 1, heads 1: 10 full, 5 partial, 10 empty)
    ▒
    █▒
    ██▒
    ███▒
    ████▒
    >>> grid.kind(0, 0, 1, 0).name
    'FULL'
    >>> grid.area()
    125250
    """

    q_len: int
    """Number of queries."""
    kv_len: int
    """Number of keys."""
    block_size: tuple[int, int]
    """Queries and keys of a tile."""
    planes: Planes
    """Which batch elements and heads share a pattern."""
    runs: tuple[Runs, ...]
    """The tiles of each plane."""
    mask: Mask
    """Decides the pairs within PARTIAL tiles; full and empty tiles are so whatever it says."""
    q_start: int = 0
    """Global position of the first query."""
    kv_start: int = 0
    """Global position of the first key."""
    effort: Effort | None = field(default=None)
    """What building it took, if it was built from a mask."""
    graph_handle: Tensor | None = field(init=False)
    """Stands for this grid in compiled graphs; not pickled, nor is what was derived."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "graph_handle", new_graph_handle(self))

    def __reduce__(self) -> tuple[type[BlockGrid], tuple[object, ...]]:
        return BlockGrid, tuple(getattr(self, f.name) for f in fields(self) if f.init)

    @cached_property
    def derived(self) -> Derived:
        """What kernels work out from this grid: its compiled shapes, torch's form of it."""
        return Derived()

    @property
    def nbytes(self) -> int:
        """Bytes of the tiles and of what was derived from them; the mask's own are not counted.

        >>> import flexcp
        >>> flexcp.build_block_grid(flexcp.masks.causal(), 500, block_size=100).nbytes
        249
        """
        return self.planes.nbytes + sum(runs.nbytes for runs in self.runs) + self.derived.nbytes

    @cached_property
    def reads(self) -> frozenset[str]:
        """Which of "b" and "h" its mask depends on: one plane is not all planes then."""
        return planes_read(self.mask) or frozenset()

    def require_planes(self, batch: int, heads: int) -> None:
        """Raises unless what it says holds for so many batch elements and heads."""
        sizes = (("batch", "b", self.batch, batch), ("heads", "h", self.heads, heads))
        for name, index, have, want in sizes:
            if have not in (1, want) or (have != want and index in self.reads):
                why = f", since its mask reads {index}" if have == 1 else f", or {name}=1"
                raise FlexCPError(
                    f"a block_mask for {name}={want}{why}",
                    f"{name}={have}",
                    f"build it with {name}={want}",
                )

    @property
    def batch(self) -> int:
        """Number of batch elements."""
        return self.planes.of.shape[0]

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.planes.of.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns, in tiles."""
        return self.runs[0].rows, self.runs[0].cols

    @cached_property
    def q_axis(self) -> Axis:
        """The queries, cut into blocks."""
        return Axis.of_blocks(self.q_len, self.block_size[0], self.q_start)

    @cached_property
    def kv_axis(self) -> Axis:
        """The keys, cut into blocks; the same object as `q_axis` where they are cut alike."""
        same = (self.q_len, self.block_size[0], self.q_start) == (
            self.kv_len,
            self.block_size[1],
            self.kv_start,
        )
        if same:
            return self.q_axis
        return Axis.of_blocks(self.kv_len, self.block_size[1], self.kv_start)

    def plane(self, b: int, h: int) -> Runs:
        """The tiles of one batch element and head."""
        for name, value, size in (("b", b, self.batch), ("h", h, self.heads)):
            _require_inside(name, value, size)
        return self.runs[int(self.planes.of[b, h])]

    @run_eagerly_on_cpu
    def kind(self, b: int, h: int, i: int, j: int) -> BlockKind:
        """The kind of tile row i, column j."""
        for name, value, size in zip("ij", (i, j), self.shape, strict=True):
            _require_inside(name, value, size)
        return BlockKind(int(self.plane(b, h).kinds_at(torch.tensor(i), torch.tensor(j))))

    @run_eagerly_on_cpu
    def counts(self) -> dict[str, int]:
        """How many tiles of each kind there are, over all batch elements and heads."""
        copies = self._copies()
        full, partial = (
            sum(n * runs.count(kind) for n, runs in zip(copies, self.runs, strict=True))
            for kind in (BlockKind.FULL, BlockKind.PARTIAL)
        )
        rows, cols = self.shape
        return {
            "empty": rows * cols * self.batch * self.heads - full - partial,
            "partial": partial,
            "full": full,
        }

    def _copies(self) -> list[int]:
        return torch.bincount(self.planes.of.reshape(-1), minlength=len(self.runs)).tolist()

    @run_eagerly_on_cpu
    def area(self) -> int:
        """The exact number of allowed (query, key) pairs, over all batch elements and heads."""
        return sum(
            n * int(areas.sum()) for n, areas in zip(self._copies(), self._plane_areas, strict=True)
        )

    @run_eagerly_on_cpu
    def row_areas(self) -> Tensor:
        """int64 [batch, heads, rows] Allowed pairs of every row of tiles, exactly."""
        return self._plane_areas[self.planes.of]

    @run_eagerly_on_cpu
    def column_areas(self) -> Tensor:
        """int64 [batch, heads, cols] Allowed pairs of every column of tiles, exactly."""
        return self.transposed().row_areas()

    @cached_property
    def _plane_areas(self) -> Tensor:
        """int64 [planes, rows]."""
        widths = torch.cat([torch.zeros(1, dtype=torch.int64), self.kv_axis.sizes.cumsum(0)])
        areas = torch.zeros(len(self.runs), self.shape[0], dtype=torch.int64)
        for own, runs in zip(areas, self.runs, strict=True):
            full = runs.kind == BlockKind.FULL
            pairs = widths[runs.stop] - widths[runs.start]
            own.index_add_(0, runs.row[full], (pairs * self.q_axis.sizes[runs.row])[full])
        return areas + partial_areas(self.mask, self.planes, self.runs, self.q_axis, self.kv_axis)

    @cached_property
    def _transposed(self) -> BlockGrid:
        return BlockGrid(
            self.kv_len,
            self.q_len,
            (self.block_size[1], self.block_size[0]),
            self.planes,
            tuple(runs.transposed() for runs in self.runs),
            self.mask.transposed(),
            self.kv_start,
            self.q_start,
        )

    @run_eagerly_on_cpu
    def transposed(self) -> BlockGrid:
        """The grid by columns: which rows use a column's keys, as the backward pass asks."""
        return self._transposed

    @run_eagerly_on_cpu
    def window(self, rows: range | None = None, cols: range | None = None) -> BlockGrid:
        """The part within a range of tile rows and columns, without looking at the mask again.

        Positions stay global: the part knows where it begins.

        >>> import flexcp
        >>> grid = flexcp.build_block_grid(flexcp.masks.causal(), 500, block_size=100)
        >>> grid.window(rows=range(3, 5)).counts()
        {'empty': 1, 'partial': 2, 'full': 7}
        """
        rows = _require_range("rows", rows, self.shape[0])
        cols = _require_range("cols", cols, self.shape[1])
        q_first, kv_first = rows.start * self.block_size[0], cols.start * self.block_size[1]
        return BlockGrid(
            min(rows.stop * self.block_size[0], self.q_len) - q_first,
            min(cols.stop * self.block_size[1], self.kv_len) - kv_first,
            self.block_size,
            self.planes,
            tuple(runs.window(rows, cols) for runs in self.runs),
            self.mask,
            self.q_start + q_first,
            self.kv_start + kv_first,
        )

    @run_eagerly_on_cpu
    def to_dense(self) -> Tensor:
        """int8 [batch, heads, rows, cols] The kind of every tile; for small grids."""
        return torch.stack([runs.to_dense() for runs in self.runs])[self.planes.of]

    def to_block_mask(
        self, *, device: torch.device | str = "cpu", separate_full_blocks: bool = True
    ) -> BlockMask:
        """This grid as a torch BlockMask, as `create_block_mask` would have made it."""
        from flexcp.grid.torch_block_mask import to_block_mask

        return to_block_mask(self, device=device, separate_full_blocks=separate_full_blocks)

    @classmethod
    def from_block_mask(cls, block_mask: BlockMask) -> BlockGrid:
        """From a torch BlockMask, whose block lists count: a tile that is not listed is empty."""
        from flexcp.grid.torch_block_mask import from_block_mask

        return from_block_mask(block_mask)

    def __eq__(self, other: object) -> bool:
        """Whether two grids have the same geometry and the same kinds; masks are not compared."""
        if not isinstance(other, BlockGrid):
            return NotImplemented
        if self._geometry != other._geometry:
            return False
        pairs = torch.stack([self.planes.of.reshape(-1), other.planes.of.reshape(-1)])
        return all(
            self.runs[a].equals(other.runs[b]) for a, b in torch.unique(pairs, dim=1).T.tolist()
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def _geometry(self) -> tuple[object, ...]:
        return (
            self.q_len,
            self.kv_len,
            self.block_size,
            self.batch,
            self.heads,
            self.q_start,
            self.kv_start,
        )

    @run_eagerly_on_cpu
    def __repr__(self) -> str:
        counts = self.counts()
        first = f"BlockGrid({self.q_len} x {self.kv_len} tokens, "
        first += f"blocks of {self.block_size[0]} x {self.block_size[1]}, "
        first += f"batch {self.batch}, heads {self.heads}: {counts['full']} full, "
        first += f"{counts['partial']} partial, {counts['empty']} empty)"
        return first + "\n" + as_text(coverage(self.plane(0, 0), 24, 48))


def planes_read(mask: Mask) -> frozenset[str] | None:
    """Which of "b" and "h" a mask depends on; None if it must not be asked: a sliced BlockMask's.

    >>> planes_read(Mask(lambda b, h, q, kv: (q >= kv) & (kv > h)))
    frozenset({'h'})
    """
    try:
        return trace_mask(mask.mask_mod).reads & {"b", "h"}
    except FlexCPError:
        return None


def _require_inside(name: str, value: int, size: int) -> None:
    number = as_whole(value)
    if number is None or not 0 <= number < size:
        raise FlexCPError(
            f"{name} between 0 and {size - 1}",
            quote(value),
            "see grid.shape, grid.batch, grid.heads",
        )


def _require_range(name: str, given: range | None, size: int) -> range:
    if given is None:
        return range(size)
    is_range = isinstance(given, range)
    if not is_range or given.step != 1 or not 0 <= given.start < given.stop <= size:
        raise FlexCPError(
            f"{name} as a range of tiles within range(0, {size})",
            quote(given),
            "pass a range of at least one tile with step 1",
        )
    return given
