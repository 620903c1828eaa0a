"""Gradients of captured tensors: what many pairs have read of a tensor, added up in a fixed order.

The kernel of `captured.py` adds up what it can; what is left is added here. Nothing is added by
atomics, and the same call gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexcp.kernels.captured_gradients import deterministic_sums, gradients_apart
from flexcp.kernels.triton.available import captured_kernel
from flexcp.kernels.triton.launch import Launch, has_no_numbers

if TYPE_CHECKING:
    from flexcp.kernels.score import ScoreMod
    from flexcp.kernels.triton.emit import EmittedScore, Lookup
    from flexcp.kernels.triton.scoring import ScoreArguments

MOST_PAIRS = 1 << 23
"""Pairs that are written to be sorted at a time: 64 MB, and several times that to sort them."""
MOST_SUMS = 1 << 26
"""Numbers in the programs' own tables at a time: 256 MB."""
ENOUGH_PROGRAMS = 1024
"""More than run at once on any GPU: each has a table of its own, or shares a tile's keys."""


@dataclass(frozen=True)
class Walk:
    """Which query tiles the programs of a launch take, and which keys.

    Tiles are numbered by batch element, head and place. Program p begins at tile
    first_tile + p // lanes * apart + p % lanes, and takes every `step`-th one within `span` of
    first_tile + p // lanes * apart. Each `key_parts` programs share the tiles of one, and see
    `width` keys each, from `first_key` on.
    """

    programs: int
    first_tile: int = 0
    lanes: int = 1
    apart: int = 1
    step: int = 1
    span: int = 1
    first_key: int = 0
    width: int = 2**31 - 1
    key_parts: int = 1
    size: int = 0
    """Numbers in the table of a program."""

    def tiles_of(self, program: int) -> range:
        """The tiles that a program takes.

        >>> [list(Walk(3, lanes=3, apart=8, step=3, span=8).tiles_of(p)) for p in range(3)]
        [[0, 3, 6], [1, 4, 7], [2, 5]]
        """
        begin = self.first_tile + program // self.lanes * self.apart
        return range(begin + program % self.lanes, begin + self.span, self.step)


def pair_walk(batch: int, heads: int, tiles: int, keys: int, cols: int, apart: set[str]) -> Walk:
    """One program for all batch elements and heads whose pairs may read the same.

    `apart` has "b" if no two batch elements do, and "h" if no two heads.

    >>> walk = pair_walk(2, 3, 4, 64, 32, {"h"})
    >>> walk.programs // walk.key_parts, list(walk.tiles_of(5))
    (12, [5, 17])
    """
    groups = (batch if "b" in apart else 1) * (heads if "h" in apart else 1)
    apart_by, step = (tiles, heads * tiles) if "h" in apart else (heads * tiles, tiles)
    span = apart_by if "b" in apart else batch * heads * tiles
    parts = max(1, min(ENOUGH_PROGRAMS // max(1, groups * tiles), keys // cols))
    width = -(-keys // cols // parts) * cols
    return Walk(groups * tiles * parts, 0, tiles, apart_by, step, span, 0, width, parts)


def table_walks(batch: int, heads: int, tiles: int, size: int) -> Iterator[Walk]:
    """Programs that have tables of `size` numbers of their own, as many as fit at a time.

    >>> [(w.programs, w.lanes, w.first_tile) for w in table_walks(1, 2, 40, 1 << 25)]
    [(2, 1, 0)]
    """
    every = batch * heads
    lanes = max(1, min(tiles, ENOUGH_PROGRAMS // max(1, every), MOST_SUMS // (every * size)))
    together = max(1, MOST_SUMS // (lanes * size))
    for first in range(0, every, together):
        programs = min(together, every - first) * lanes
        yield Walk(programs, first * tiles, lanes, tiles, lanes, tiles, size=size)


def sorted_walks(programs: int, rows: int, cols: int, keys: int) -> Iterator[Walk]:
    """Launches that together see every program and key, each within the workspace.

    >>> [(w.first_tile, w.programs, w.width) for w in sorted_walks(3, 64, 64, 1 << 16)]
    [(0, 2, 65536), (2, 1, 65536)]
    """
    width = min(keys, max(cols, MOST_PAIRS // rows // cols * cols))
    step = max(1, MOST_PAIRS // (rows * width))
    for first_key in range(0, keys, width):
        for first in range(0, programs, step):
            many = min(step, programs - first)
            yield Walk(many, first, first_key=first_key, width=width)


def captured_gradients(
    mod: ScoreMod,
    score: ScoreArguments,
    launch_of: Callable[[str], Launch],
    keys: int,
    *,
    apart: bool = True,
) -> tuple[Tensor, ...]:
    """The gradient of each tensor that a score function captures, in its type.

    `launch_of` gives the kernel's launch over all query tiles for a kind of sums, without what to
    write and where. `apart` says that no two queries or keys have the same position.
    """
    emitted, device = score.emitted, score.given[0].device
    totals = {
        lookup.operand: torch.zeros(
            emitted.operands[lookup.operand].numel() + 1, dtype=torch.float32, device=device
        )
        for lookup in emitted.lookups
    }
    if keys and not has_no_numbers(score.given[0]):
        with deterministic_sums():
            for lookup in emitted.lookups:
                kind = kind_of(lookup, emitted.operands[lookup.operand].shape, apart=apart)
                total = totals[lookup.operand]
                _LookupSums(score, lookup, kind, launch_of(kind), keys, total).add()
    return gradients_of_captured(mod, emitted, totals)


def gradients_of_captured(
    mod: ScoreMod, emitted: EmittedScore, totals: Mapping[int, Tensor]
) -> tuple[Tensor, ...]:
    """The gradient of each captured tensor, from those of the operands that are made of them.

    `totals` has for an operand the gradient of each element, and one number more.
    """
    operands = [emitted.operands[i] for i in totals]
    gradients = [
        total[:-1].view(x.shape).to(x.device, x.dtype)
        for total, x in zip(totals.values(), operands, strict=True)
    ]
    if not operands:
        return tuple(torch.zeros_like(x) for x in mod.captured)
    with deterministic_sums():
        # Through what the function makes of the tensors that it captures before it looks them up.
        found = gradients_apart(operands, mod.captured, gradients)
    return tuple(
        torch.zeros_like(x) if grad is None else grad
        for x, grad in zip(mod.captured, found, strict=True)
    )


def kind_of(lookup: Lookup, shape: Sequence[int], *, apart: bool) -> str:
    """How a lookup's gradients are added up; "sorted" where a table of each program is too large.

    `shape` is that of the tensor.
    """
    kind = "table" if lookup.kind == "pair" and not apart else lookup.kind
    is_large = _table_size(lookup, shape) > MOST_SUMS // 4
    return "sorted" if kind == "table" and is_large else kind


def _table_size(lookup: Lookup, shape: Sequence[int]) -> int:
    """Elements along the dimensions that queries or keys are an index of."""
    return prod(shape[dim] for dim in lookup.inner)


@dataclass(frozen=True, eq=False)
class _LookupSums:
    """The gradients of what one lookup has read, to be added to those of its tensor."""

    score: ScoreArguments
    lookup: Lookup
    kind: str
    launch: Launch
    keys: int
    total: Tensor
    """[elements + 1] Of the tensor; the last one means nothing."""

    def add(self) -> None:
        """Adds them to `total`."""
        if self.launch.programs == 0:
            return
        if self.kind == "row":
            made = self.run(Walk(self.launch.programs))
            values, elements = made["values"], made["elements"]
            if "q" not in self.lookup.reads:
                # All queries of a tile read the same; rows past the end read nothing.
                values, elements = values.sum(1), elements.amin(1)
            add_in_order(self.total, values.flatten(), elements.flatten())
        elif self.kind == "pair":
            walk = pair_walk(*self.sizes, self.keys, self.launch.config.cols, {*self.lookup.plain})
            self.run(walk, values=self.total)
        elif self.kind == "table":
            self._add_tables()
        else:
            config = self.launch.config
            for walk in sorted_walks(self.launch.programs, config.rows, config.cols, self.keys):
                made = self.run(walk)
                add_in_order(self.total, made["values"].flatten(), made["elements"].flatten())

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Batch elements, heads, and query tiles of each."""
        heads, tiles = (int(self.launch.arguments[name]) for name in ("heads", "tiles"))
        return self.launch.programs // (heads * tiles), heads, tiles

    def run(self, walk: Walk, **given: Tensor) -> dict[str, Any]:
        """Launches the kernel; what it was given to write to is under "values" and "elements"."""
        made = launch_walk(self.score, self.lookup, self.launch, self.kind, walk, **given)
        made.run(captured_kernel())
        return dict(made.arguments)

    def _add_tables(self) -> None:
        table = self.score.emitted.operands[self.lookup.operand]
        inner, size = self.lookup.inner, _table_size(self.lookup, table.shape)
        outer = [dim for dim in range(table.dim()) if dim not in inner]
        if table.numel() == 0:
            return
        sums = self.total.new_zeros(table.numel() // size + 1, size)
        for walk in table_walks(*self.sizes, size):
            made = self.run(walk)
            owners = made["elements"][:: walk.lanes]
            owners = torch.where(owners < 0, sums.shape[0] - 1, owners)
            by_head = made["values"].view(-1, walk.lanes, size).sum(1)
            sums.index_add_(0, owners, by_head)
        shaped = sums[:-1].view([table.shape[dim] for dim in (*outer, *inner)])
        self.total[:-1].view(table.shape).permute(*outer, *inner).add_(shaped)


def launch_walk(
    score: ScoreArguments, lookup: Lookup, launch: Launch, kind: str, walk: Walk, **given: Tensor
) -> Launch:
    """A launch of the kernel, with what it writes to unless that is given."""
    size = score.emitted.operands[lookup.operand].numel()
    device, config = score.given[0].device, launch.config
    index = torch.int32 if size < 2**31 - 1 and kind != "table" else torch.int64
    shape: tuple[int, ...] = (walk.programs, config.rows)
    if kind == "table":
        shape = (walk.programs, walk.size)
    elif kind == "sorted":
        shape = (*shape, walk.width)
    elif kind == "pair":
        shape = (1,)  # which is not read
    many = (walk.programs,) if kind == "table" else shape
    functions = score.functions
    slanted = "q" in lookup.reads
    written = {
        "values": torch.zeros(shape, dtype=torch.float32, device=device),
        "elements": torch.full(many, -1 if kind == "table" else size, dtype=index, device=device),
    } | given
    numbers = asdict(walk)
    programs = numbers.pop("programs")
    which = "inner" if kind == "table" else "element"
    arguments: dict[str, Any] = {
        **launch.arguments, **written, **numbers, "KIND": kind, "SLANTED": slanted,
        "WIDTH": _next_power(config.rows + config.cols - 1) if slanted else config.cols,
        "PULL": functions[f"pull_{lookup.number}"],
        "ELEMENT": functions[f"{which}_{lookup.number}"],
        "OWNER": functions[f"owner_{lookup.number}"] if kind == "table" else None,
    }  # fmt: skip
    return replace(launch, programs=programs, arguments=arguments)


def _next_power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def add_in_order(total: Tensor, values: Tensor, elements: Tensor) -> None:
    """Adds `values` to the elements of `total` that `elements` names, in a fixed order.

    The last element of `total` is for values that belong to none, and means nothing.

    >>> total = torch.zeros(4)
    >>> add_in_order(total, torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 0, 2]))
    >>> total[:-1]
    tensor([2., 0., 5.])
    """
    length, most = values.numel(), min(values.numel(), total.numel())
    if length == 0:
        return
    ordered, order = torch.sort(elements, stable=True)
    begins = torch.ones(length, dtype=torch.int64, device=values.device)
    begins[1:] = ordered[1:] != ordered[:-1]
    segment = begins.cumsum(0) - 1
    numbers = torch.arange(most + 1, device=values.device)
    offsets = torch.searchsorted(segment, numbers)
    sums = torch.segment_reduce(values[order], "sum", offsets=offsets, initial=0.0, unsafe=True)
    starts = offsets[:-1]
    target = ordered[starts.clamp(max=length - 1)].to(torch.int64)
    target = torch.where(starts < length, target, total.numel() - 1)
    total.index_put_((target,), total[target] + sums)
