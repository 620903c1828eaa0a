"""Row ranges: the keys that each query sees, as a few ranges, read off the mask's own comparisons.

A comparison of something that depends on the query with something that depends on the key and does
not fall along the keys (`q >= kv`, `ids[q] == ids[kv]`, `q - kv <= 4096`) allows one range of keys
for every query. `&`, `|` and `~` of such comparisons allow a few. Then areas, documents and needed
rows are a handful of operations on vectors. A mask of another form has no row ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from flexcp.grid.analysis.indexing import take
from flexcp.grid.analysis.measured import run_mask
from flexcp.grid.columns import MOST_RANGES, Column, intersection, union
from flexcp.grid.grid import BlockGrid
from flexcp.grid.planes import Planes
from flexcp.masks import trace_mask
from flexcp.masks.graph import INPUTS, MaskGraph, Ref

_TOGETHER = 1 << 16
"""Rows looked at together: so few that vectors stay in the processor's cache."""
_EXACT = 1 << 52
"""Values beyond this are not added up: sums might wrap."""

_JOINS = ("bitwise_and", "logical_and", "bitwise_or", "logical_or")
_TRUTHS = (*_JOINS, "bitwise_not", "logical_not")
_MIRRORED = {"ge": "le", "gt": "lt", "le": "ge", "lt": "gt", "eq": "eq", "ne": "ne"}


@dataclass(frozen=True, eq=False)
class KeyColumn:
    """One range of keys for every query, counted within the grid; it may be empty."""

    start: Tensor
    """int64 [Q] First key."""
    stop: Tensor
    """int64 [Q] Key after the last."""

    @cached_property
    def breaks(self) -> Tensor:
        """int64 [n] Queries whose range does not simply go on where that of the one before is.

        Between two of them, queries from a to b together see start[a] to stop[b - 1].
        """
        start, stop, found = self.start.numpy(), self.stop.numpy(), []
        for first in range(0, start.size - 1, _TOGETHER):
            last = min(first + _TOGETHER, start.size - 1)
            begin, end = start[first : last + 1], stop[first : last + 1]
            stays = (begin[1:] >= begin[:-1]) & (end[1:] >= end[:-1]) & (begin[1:] <= end[:-1])
            filled = begin < end
            found.append(np.flatnonzero(~stays | (filled[1:] != filled[:-1])) + first + 1)
        return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *found]))

    @cached_property
    def has_own_keys(self) -> bool:
        """Whether the key at the place of every query is in its range."""
        start, stop = self.start.numpy(), self.stop.numpy()
        for first in range(0, start.size, _TOGETHER):
            at = slice(first, first + _TOGETHER)
            own = np.arange(first, first + start[at].size)
            if (start[at] > own).any() or (stop[at] <= own).any():
                return False
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return self.start.nbytes + self.stop.nbytes


@dataclass(frozen=True, eq=False)
class RowRanges:
    """The keys that every query of every plane sees, if they are known."""

    planes: tuple[tuple[KeyColumn, ...], ...] | None
    """Ranges of a row are disjoint, in no order. None: unknown."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(column.nbytes for plane in self.planes or () for column in plane)


def row_ranges(grid: BlockGrid) -> RowRanges:
    """The row ranges of a grid that was built from a mask, worked out on first use.

    >>> import flexcp
    >>> grid = flexcp.build_block_grid(flexcp.masks.causal() & flexcp.masks.chunked(3), 5)
    >>> row_ranges(grid).planes[0][0].start
    tensor([0, 0, 0, 3, 3])
    """
    return grid.derived.once(RowRanges, lambda: _of_grid(grid))


def _of_grid(grid: BlockGrid) -> RowRanges:
    if grid.effort is None:  # its tiles may overrule the mask
        return RowRanges(None)
    graph = trace_mask(grid.mask.mask_mod)
    q = range(grid.q_start, grid.q_start + grid.q_len)
    kv = range(grid.kv_start, grid.kv_start + grid.kv_len)
    return read_row_ranges(graph, grid.planes, q, kv)


def read_row_ranges(graph: MaskGraph, planes: Planes, queries: range, keys: range) -> RowRanges:
    """The row ranges of a mask, if they can be read off its graph."""
    kv, size = torch.arange(keys.start, keys.stop), len(queries)
    every = []
    for b, h in zip(planes.b, planes.h, strict=True):
        reader = _RangeReader(graph, b, h, kv)
        found: dict[int, KeyColumn] = {}
        for first in range(0, size, _TOGETHER):
            at = slice(first, min(first + _TOGETHER, size))
            q = torch.arange(queries.start + at.start, queries.start + at.stop)
            columns = reader.allowed(graph.output, q)
            if columns is None:
                return RowRanges(None)
            for i, (start, stop) in enumerate(columns):
                if i in found or bool((start < stop).any()):
                    if i not in found:
                        found[i] = KeyColumn(*torch.empty(2, size, dtype=torch.int64))
                        found[i].start[: at.start], found[i].stop[: at.start] = 0, 0
                    found[i].start[at], found[i].stop[at] = start, stop
            for i in range(len(columns), max(found, default=-1) + 1):
                if i in found:
                    found[i].start[at], found[i].stop[at] = 0, 0
        every.append(tuple(found[i] for i in sorted(found)))
    return RowRanges(tuple(every))


class _RangeReader:
    """Reads the ranges of one plane off the graph of its mask, some queries at a time."""

    def __init__(self, graph: MaskGraph, b: Tensor, h: Tensor, kv: Tensor) -> None:
        self._graph, self._b, self._h, self._kv = graph, b, h, kv
        self._sides: dict[int, _Comparison | None] = {}

    def allowed(self, index: int, q: Tensor) -> list[Column] | None:
        """Where a truth holds, or None if that is not a few ranges for certain."""
        known: dict[int, list[Column]] = {}
        for truth in sorted(self._truths(index)):  # operands first
            found = self._where(truth, q, known)
            if found is None:
                return None
            known[truth] = found
        return known[index]

    def _truths(self, index: int) -> set[int]:
        """A truth and all that it is joined of: there may be thousands, one inside the other."""
        found: set[int] = set()
        pending = [index]
        while pending:
            index = pending.pop()
            node = self._graph.nodes[index]
            if index not in found and {"q", "kv"} <= node.reads and node.name in _TRUTHS:
                pending.extend(ref.node for ref in node.args if isinstance(ref, Ref))
            found.add(index)
        return found

    def _where(
        self, index: int, q: Tensor, known: Mapping[int, list[Column]]
    ) -> list[Column] | None:
        node = self._graph.nodes[index]
        if node.dtype != torch.bool or node.shape != ():
            return None
        if "kv" not in node.reads:
            values = self._values(index, "q", q)
            if values is None:
                return None
            return [(torch.tensor(0), torch.where(values, self._kv.numel(), 0))]
        if "q" not in node.reads:
            return self._by_key(index)
        operands = [ref.node for ref in node.args if isinstance(ref, Ref)]
        if node.name in ("bitwise_not", "logical_not"):
            return self._complement(known[operands[0]])
        if node.name in _MIRRORED and not node.compute_dtype.is_floating_point:
            if index not in self._sides:
                self._sides[index] = self._comparison(node.args)
            return self._compared(node.name, self._sides[index], q)
        if node.name not in _JOINS or len(operands) != 2:
            return None
        sides = (known[operands[0]], known[operands[1]])
        return (intersection if node.name.endswith("and") else union)(*sides)

    def _values(self, index: int, axis: str, positions: Tensor) -> Tensor | None:
        """A node that reads no more than one axis, at positions of it that follow each other."""
        node = self._graph.nodes[index]
        if node.op is None and node.reads:
            return positions
        if node.name == "index":  # ids[q] is a part of ids
            table = self._graph.nodes[node.args[0].node].value
            first, count = int(positions[0]), positions.numel()
            if (
                table is not None
                and [ref.node for ref in node.args[1] if ref] == [INPUTS.index(axis)]
                and table.dim() == 1
                and first + count <= table.numel()
            ):
                part: Tensor = table[first : first + count]
                return part
        if not self._graph.is_pointwise_beyond((index,), ()):
            return None
        zero = torch.zeros((), dtype=torch.int64)
        q, kv = (positions, zero) if axis == "q" else (zero, positions)
        wanted = (index,)
        found = run_mask(
            lambda: self._graph.evaluate_nodes(wanted, self._b, self._h, q, kv)[0],
        )
        return found.expand(positions.shape)

    def _by_key(self, index: int) -> list[Column] | None:
        values = self._values(index, "kv", self._kv)
        if values is None:
            return None
        edges = torch.nn.functional.pad(values.to(torch.int8), (1, 1)).diff()
        starts, stops = (torch.nonzero(edges == sign).squeeze(1) for sign in (1, -1))
        if starts.numel() > MOST_RANGES:
            return None
        return list(zip(starts.unbind(), stops.unbind(), strict=True))

    def _comparison(self, args: Sequence[object]) -> _Comparison | None:
        """A comparison in the form f(q) <= g(kv) or the like."""
        of_q: list[tuple[int, int | Tensor]] = []
        of_kv: list[Tensor] = []
        pending = [(args[0], 1), (args[1], -1)]
        while pending:
            side, sign = pending.pop()
            if isinstance(side, int) and not isinstance(side, bool):
                of_q.append((sign, torch.tensor(side)))
                continue
            if not isinstance(side, Ref):
                return None
            node = self._graph.nodes[side.node]
            if node.shape != () or node.dtype.is_floating_point or node.dtype == torch.bool:
                return None
            if "kv" not in node.reads:
                of_q.append((sign, side.node))
            elif "q" not in node.reads:
                values = self._values(side.node, "kv", self._kv)
                if values is None or not (values is self._kv or _is_small(values)):
                    return None
                of_kv.append(-values if sign > 0 else values)
            elif node.name in ("add", "sub") and node.dtype == torch.int64 and not node.kwargs:
                pending += [(node.args[0], sign)]
                pending += [(node.args[1], sign if node.name == "add" else -sign)]
            else:
                return None
        keys = of_kv[0].to(torch.int64) if len(of_kv) == 1 else torch.stack(of_kv).sum(0)
        return _Comparison(tuple(of_q), keys, keys is self._kv)

    def _compared(self, name: str, found: _Comparison | None, q: Tensor) -> list[Column] | None:
        if found is None:
            return None
        of_q = torch.tensor(0)
        for sign, term in found.of_q:
            values = self._values(term, "q", q) if isinstance(term, int) else term
            if values is None or not (values is q or _is_small(values)):
                return None
            of_q = of_q + values if sign > 0 else of_q - values
        of_q = of_q.expand(q.shape)
        if name in ("eq", "ne"):
            same = found.equal_to(of_q)
            return same if name == "eq" else self._complement(same)
        if found.direction == 0:
            return None
        if found.direction < 0:
            of_q, name = -of_q, _MIRRORED[name]
        # f >= g and f > g allow the first keys, f <= g and f < g the last ones.
        edge = found.keys_before(of_q, right=name in ("ge", "lt"))
        if name in ("ge", "gt"):
            return [(torch.tensor(0), edge)]
        return [(edge, torch.tensor(self._kv.numel()))]

    def _complement(self, columns: list[Column] | None) -> list[Column] | None:
        if columns is None:
            return None
        zero, end = torch.tensor(0), torch.tensor(self._kv.numel())
        found: list[Column] | None = [(zero, end)]
        for start, stop in columns:
            empty = start >= stop
            around = [(zero, torch.where(empty, end, start)), (torch.where(empty, end, stop), end)]
            found = None if found is None else intersection(found, around)
        return found


@dataclass(frozen=True, eq=False)
class _Comparison:
    """Something that depends on the query, beside something that depends on the key."""

    of_q: tuple[tuple[int, int | Tensor], ...]
    """Signs and terms (a node, or a number) that add up to the query's side."""
    of_kv: Tensor
    """int64 [KV] The key's side."""
    is_position: bool
    """Whether that is the key's position itself."""

    @cached_property
    def direction(self) -> int:
        """1 if the key's side never falls, -1 if it never rises, else 0."""
        if self.is_position:
            return 1
        steps = self.of_kv.diff()
        return 1 if bool((steps >= 0).all()) else -1 if bool((steps <= 0).all()) else 0

    @cached_property
    def _rising(self) -> Tensor:
        return self.of_kv if self.direction > 0 else -self.of_kv

    @cached_property
    def _first(self) -> int | None:
        """The key's side of the first key, if it rises by one from key to key."""
        by_one = self.is_position or bool((self._rising.diff() == 1).all())
        return int(self._rising[0]) if by_one else None

    def keys_before(self, values: Tensor, *, right: bool) -> Tensor:
        """int64 How many keys are smaller than each value, or with `right` no larger."""
        if self._first is not None:
            return (values + (int(right) - self._first)).clamp_(0, self.of_kv.numel())
        return _per_stretch(values, lambda x: torch.searchsorted(self._rising, x, right=right))

    @cached_property
    def _alike(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Values of the key's side, ascending, with the range of keys that have each."""
        begin = _stretches(self.of_kv)
        stop = torch.cat([begin[1:], torch.tensor([self.of_kv.numel()])])
        values, order = torch.sort(take(self.of_kv, begin))
        if bool((values.diff() == 0).any()):
            return None
        return values, take(begin, order), take(stop, order)

    def equal_to(self, of_q: Tensor) -> list[Column] | None:
        """Keys of the same value, if those are side by side."""
        if self._alike is None:
            return None
        values, begin, stop = self._alike

        def range_of(x: Tensor) -> Tensor:
            at = torch.searchsorted(values, x).clamp(max=values.numel() - 1)
            same = take(values, at) == x
            return torch.stack([torch.where(same, take(of, at), 0) for of in (begin, stop)])

        start, end = _per_stretch(of_q, range_of)
        return [(start, end)]


def _is_small(values: Tensor) -> bool:
    """Whether sums of such values can't wrap."""
    least, most = torch.aminmax(values)
    return max(abs(int(least)), abs(int(most))) <= _EXACT


def _stretches(values: Tensor) -> Tensor:
    """Where values begin to be others than before."""
    of = values.numpy()
    return torch.from_numpy(np.concatenate([[0], np.flatnonzero(of[1:] != of[:-1]) + 1]))


def _per_stretch(values: Tensor, found: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of values, or several as rows, worked out once for equal neighbours."""
    begin = _stretches(values)
    if begin.numel() * 4 > values.numel():
        return found(values)
    sizes = np.diff(begin.numpy(), append=values.numel())
    return torch.from_numpy(np.repeat(found(take(values, begin)).numpy(), sizes, axis=-1))
