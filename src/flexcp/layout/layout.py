"""Layout: who owns which tokens, as runs of consecutive tokens per rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flexcp.errors import FlexCPError, as_whole, quote, require, whole_number
from flexcp.layout.row_sets import RowSets, expand, row_sets
from flexcp.packing import reduce_packed


@dataclass(frozen=True, eq=False)
class Layout:
    """Runs of tokens per rank, in the order in which the rank stores them.

    Any length, any number of ranks, ranks without tokens included. A layout is one
    assignment of positions to ranks for the whole batch, or one for each batch element; then every
    rank has as many tokens of each of them. A row is a token of one batch element.

    >>> layout = Layout.of_runs([[(0, 2), (6, 8)], [(2, 6)]])
    >>> layout.positions(0)
    tensor([0, 1, 6, 7])
    >>> x = torch.arange(8) * 10
    >>> layout.shard(x, 0, 1)
    tensor([20, 30, 40, 50])
    >>> layout.unshard([layout.shard(x, 0, r) for r in range(2)], 0)
    tensor([ 0, 10, 20, 30, 40, 50, 60, 70])
    """

    name: str
    """What made it."""
    seq_len: int
    """Tokens of the whole sequence."""
    ranks: int
    """How many ranks there are, with or without tokens."""
    batch_elements: int
    """How many batch elements have an assignment of their own: 1 if all share one, else all."""
    rank: Tensor
    """int64 [N] Owner of each run, never falling."""
    start: Tensor
    """int64 [N] First row of each run: element * seq_len + position."""
    stop: Tensor
    """int64 [N] Row after the last of each run; a run stays within its batch element."""

    def __post_init__(self) -> None:
        _require_partition(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Without what was derived from the runs, and in few bytes."""
        return reduce_packed(self)

    @classmethod
    def of_runs(
        cls,
        runs: Sequence[Sequence[tuple[int, int]]],
        *,
        seq_len: int | None = None,
        name: str = "custom",
    ) -> Layout:
        """From (start, stop) pairs of positions for each rank."""
        try:
            pairs = [(r, as_whole(a), as_whole(b)) for r, own in enumerate(runs) for a, b in own]
            table = [(r, a, b) for r, a, b in pairs if a != b or a is None]
            rank, start, stop = torch.tensor(table, dtype=torch.int64).reshape(-1, 3).unbind(1)
        except Exception:  # torch's own, or of an object's own
            raise FlexCPError(
                "runs as a list of (start, stop) pairs of integers for each rank",
                quote(runs),
                "pass, for two ranks, [[(0, 4)], [(4, 8)]]",
            ) from None
        if seq_len is not None:
            seq_len = whole_number("seq_len", seq_len, at_least=0, fix="pass a number of tokens")
        length = int(stop.max()) if seq_len is None and len(table) else (seq_len or 0)
        return cls(name, length, len(runs), 1, rank.clone(), start.clone(), stop.clone())

    @classmethod
    def of_positions(cls, positions: Sequence[Tensor], *, name: str = "custom") -> Layout:
        """From int64 [L] positions for each rank, or [B, L] where batch elements differ."""
        _require_integers("positions", positions, dims=(1, 2))
        batch_elements = max((p.shape[0] for p in positions if p.dim() == 2), default=1)
        seq_len = sum(p.shape[-1] for p in positions)
        first = torch.arange(batch_elements)[:, None] * seq_len
        rows = [(p.to(torch.int64) + first).reshape(-1) for p in positions]
        return cls.of_rows(rows, seq_len=seq_len, batch_elements=batch_elements, name=name)

    @classmethod
    def of_rows(
        cls, rows: Sequence[Tensor], *, seq_len: int, batch_elements: int = 1, name: str = "custom"
    ) -> Layout:
        """From int64 [batch_elements * L] rows for each rank, element after element."""
        _require_integers("rows", rows, dims=(1,))
        fix = "pass the sizes of the whole sequence and batch"
        seq_len = whole_number("seq_len", seq_len, at_least=0, at_most=2**40, fix=fix)
        batch_elements = whole_number(
            "batch_elements", batch_elements, at_least=1, at_most=2**20, fix=fix
        )
        row = torch.cat([*rows, torch.zeros(0, dtype=torch.int64)])
        owner = torch.repeat_interleave(
            torch.arange(len(rows)), torch.tensor([r.numel() for r in rows], dtype=torch.int64)
        )
        element = torch.div(row, max(seq_len, 1), rounding_mode="floor")
        opens = torch.ones_like(row, dtype=torch.bool)
        opens[1:] = (row.diff() != 1) | (owner.diff() != 0) | (element.diff() != 0)
        rank, start, stop = owner[opens], row[opens], row[opens.roll(-1)] + 1
        return cls(name, seq_len, len(rows), batch_elements, rank, start, stop)

    @classmethod
    def stacked(cls, layouts: Sequence[Layout], *, name: str | None = None) -> Layout:
        """A layout in which every batch element has its own, from a layout for each.

        >>> a = Layout.of_runs([[(0, 2)], [(2, 4)]])
        >>> b = Layout.of_runs([[(2, 4)], [(0, 2)]])
        >>> Layout.stacked([a, b]).positions(0)
        tensor([[0, 1],
                [2, 3]])
        """
        require("layouts", layouts, (list, tuple), "pass a list of layouts")
        for layout in layouts:
            require("each of them", layout, Layout, "make it with Layout.of_runs, or a plan")
        if not layouts:
            raise FlexCPError("a layout for each batch element", "none", "pass at least one layout")
        first = layouts[0]
        same = first.seq_len, first.ranks, 1
        if any((x.seq_len, x.ranks, x.batch_elements) != same for x in layouts):
            raise FlexCPError(
                "layouts of one batch element with the same length and ranks",
                ", ".join(f"{x.seq_len} tokens on {x.ranks} ranks" for x in layouts),
                "make one layout per batch element with the same seq_len and ranks",
            )
        rank = torch.cat([x.rank for x in layouts])
        order = torch.argsort(rank, stable=True)
        start = torch.cat([x.start + b * first.seq_len for b, x in enumerate(layouts)])
        stop = torch.cat([x.stop + b * first.seq_len for b, x in enumerate(layouts)])
        name = first.name if name is None else name
        runs = rank[order], start[order], stop[order]
        return cls(name, first.seq_len, first.ranks, len(layouts), *runs)

    @property
    def rows(self) -> int:
        """Rows: tokens, times the batch elements that have a layout of their own."""
        return self.seq_len * self.batch_elements

    @cached_property
    def counts(self) -> Tensor:
        """int64 [ranks] Tokens of each rank, in each batch element."""
        found = torch.zeros(self.ranks, dtype=torch.int64)
        return found.index_add_(0, self.rank, self.stop - self.start) // self.batch_elements

    @cached_property
    def owned(self) -> RowSets:
        """The rows of each rank as sets, without their order."""
        return row_sets(self.rank, self.start, self.stop)

    @cached_property
    def by_row(self) -> tuple[Tensor, Tensor, Tensor]:
        """int64 [N] Start, stop and owner of all runs, sorted by row."""
        start, order = torch.sort(self.start)
        return start, self.stop[order], self.rank[order]

    def positions(self, rank: int) -> Tensor:
        """int64 [L] Global positions of a rank's tokens; [B, L] if batch elements differ."""
        rows = self.rows_of(rank)
        if self.batch_elements == 1:
            return rows
        return rows.view(self.batch_elements, -1) % self.seq_len

    @cached_property
    def element(self) -> Tensor:
        """int64 [N] The batch element of each run."""
        return torch.div(self.start, max(self.seq_len, 1), rounding_mode="floor")

    def runs_in(self, element: int) -> tuple[Tensor, Tensor, Tensor]:
        """int64 [n] Owner of each run of a batch element, its first position and that after it."""
        inside, offset = self.element == element, element * self.seq_len
        return self.rank[inside], self.start[inside] - offset, self.stop[inside] - offset

    def rows_of(self, rank: int) -> Tensor:
        """int64 [batch_elements * L] Rows of a rank in their order, element after element."""
        known = as_whole(rank)
        if known is None or not 0 <= known < self.ranks:
            raise FlexCPError(
                f"a rank between 0 and {self.ranks - 1}", quote(rank), "see layout.ranks"
            )
        at = self.rank == rank
        run, offset = expand((self.stop - self.start)[at])
        return self.start[at][run] + offset

    @property
    def order(self) -> Tensor:
        """int64 [S] Positions of rank 0, of rank 1, and so on; [B, S] if batch elements differ."""
        return torch.cat([self.positions(r) for r in range(self.ranks)], dim=-1)

    @cached_property
    def restore_index(self) -> Tensor:
        """int64 [S] Where each position is in `order`; [B, S] if batch elements differ."""
        order = self.order
        every = torch.arange(self.seq_len).expand_as(order)
        return torch.empty_like(order).scatter_(-1, order, every)

    def shard(self, x: Tensor, dim: int, rank: int, *, batch_dim: int = 0) -> Tensor:
        """A rank's rows of a full tensor; differentiable."""
        dim = _require_dim(x, dim, self.seq_len, "the layout's sequence length")
        whole_number("batch_dim", batch_dim, at_least=-x.dim(), at_most=x.dim() - 1, fix=_BATCH)
        index = self.positions(rank).to(x.device)
        if self.batch_elements == 1:
            return x.index_select(dim, index)
        return _by_element(x, dim, index, self._require_batch_dim(x, dim, batch_dim))

    def unshard(self, parts: Sequence[Tensor], dim: int, *, batch_dim: int = 0) -> Tensor:
        """The full tensor from the parts of all ranks, in order of rank; differentiable."""
        self._require_parts(parts, dim)
        most = parts[0].dim()
        whole_number("batch_dim", batch_dim, at_least=-most, at_most=most - 1, fix=_BATCH)
        whole = torch.cat(list(parts), dim=dim)
        dim, index = dim % whole.dim(), self.restore_index.to(whole.device)
        if self.batch_elements == 1:
            return whole.index_select(dim, index)
        return _by_element(whole, dim, index, self._require_batch_dim(whole, dim, batch_dim))

    restore = unshard
    """Another name of `unshard`."""

    def _require_parts(self, parts: Sequence[Tensor], dim: int) -> None:
        require("parts", parts, (list, tuple), "pass a list of the ranks' tensors")
        if len(parts) != self.ranks:
            raise FlexCPError(
                f"the parts of all {self.ranks} ranks",
                f"{len(parts)}",
                "pass one part per rank, in order of rank; those without tokens have empty ones",
            )
        for rank, (part, count) in enumerate(zip(parts, self.counts.tolist(), strict=True)):
            at = _require_dim(part, dim, count, f"the tokens of rank {rank}")
            shapes = [list(x.shape) for x in (parts[0], part)]
            if len(shapes[0]) == len(shapes[1]):
                shapes[0][at] = count
            if shapes[0] != shapes[1]:
                raise FlexCPError(
                    f"parts that differ in nothing but their length along dim {dim}",
                    f"shapes {tuple(parts[0].shape)} of rank 0 and {tuple(part.shape)} of rank "
                    f"{rank}",
                    "shard the same tensor on every rank",
                )

    def _require_batch_dim(self, x: Tensor, dim: int, batch_dim: int) -> int:
        batch_dim = batch_dim % x.dim()
        if batch_dim == dim or x.shape[batch_dim] != self.batch_elements:
            raise FlexCPError(
                f"a tensor with {self.batch_elements} batch elements along dim {batch_dim}, since "
                "the layout differs between them",
                f"shape {tuple(x.shape)} to be sharded along dim {dim}",
                "pass the whole batch, and batch_dim if it is not the first dimension",
            )
        return batch_dim

    def fingerprint(self) -> str:
        """A short text that is equal for equal layouts."""
        text = repr((self.seq_len, self.ranks, self.batch_elements)).encode()
        table = torch.stack([self.rank, self.start, self.stop]).reshape(-1).tolist()
        return hashlib.sha256(text + repr(table).encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        """Whether every rank has the same tokens in the same order."""
        return isinstance(other, Layout) and self.fingerprint() == other.fingerprint()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        counts = self.counts
        least, most = int(counts.min()), int(counts.max())
        sizes = str(most) if least == most else f"{least} to {most}"
        elements = f", {self.batch_elements} batch elements" if self.batch_elements > 1 else ""
        return (
            f"Layout({self.name}: {self.seq_len} tokens on {self.ranks} ranks{elements}, "
            f"{sizes} each, {self.rank.numel()} runs)"
        )


def _by_element(x: Tensor, dim: int, index: Tensor, batch_dim: int) -> Tensor:
    """X with its own choice along `dim` for each batch element; index is [B, L]."""
    moved = x.movedim((batch_dim, dim), (0, 1))
    element = torch.arange(index.shape[0], device=x.device)[:, None]
    return moved[element, index].movedim((0, 1), (batch_dim, dim))


def _require_integers(what: str, given: object, *, dims: tuple[int, ...]) -> None:
    """Raises unless there is a tensor of integers for each rank."""
    fix = f"pass a list with a tensor of integers for each rank, {what} of its tokens"
    require(what, given, (list, tuple), fix)
    assert isinstance(given, list | tuple)
    for x in given:
        require(f"{what} of each rank", x, Tensor, fix)
        is_dense = not x.is_nested and x.dim() in dims
        if not is_dense or x.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8):
            told = "a nested tensor" if x.is_nested else f"{x.dtype} of shape {tuple(x.shape)}"
            raise FlexCPError(f"{what} as integers of {dims[-1]} dimensions at most", told, fix)


_BATCH = "pass batch_dim, the dimension of the batch, if it is not the first"


def _require_dim(x: Tensor, dim: int, size: int, meaning: str) -> int:
    require("what is sharded", x, Tensor, "pass a tensor with a dimension of tokens")
    if x.is_nested:
        raise FlexCPError("a dense tensor", "a nested tensor", "pad it, or pack it as documents")
    dim = whole_number("dim", dim, at_least=-x.dim(), fix="pass the dimension of the sequence")
    if not -x.dim() <= dim < x.dim() or x.shape[dim] != size:
        raise FlexCPError(
            f"a tensor with {size} along dim {dim}, {meaning}",
            f"shape {tuple(x.shape)}",
            "pass the dimension of the sequence, and a tensor of the length that was planned for",
        )
    return dim % x.dim()


def _require_partition(layout: Layout) -> None:
    require("name", layout.name, str, "pass what to call the layout")
    if layout.ranks < 1 or layout.batch_elements < 1:
        raise FlexCPError(
            "a layout for at least 1 rank, with at least 1 batch element",
            f"{layout.ranks} ranks, {layout.batch_elements} batch elements",
            "pass a world size of 1 or more, and one layout for each batch element",
        )
    start, order = torch.sort(layout.start)
    stop = layout.stop[order]
    edges = torch.cat([torch.zeros(1, dtype=torch.int64), stop])
    whole = torch.cat([start, torch.full((1,), layout.rows)])
    if not torch.equal(edges, whole) or bool((start >= stop).any()):
        wrong = int(torch.nonzero(edges != whole)[0]) if not torch.equal(edges, whole) else 0
        raise FlexCPError(
            f"runs that hold each of {layout.rows} rows once",
            f"runs that leave out or repeat rows near {int(edges[wrong])}",
            "make the layout for the sequence length that it is used with, every token on one rank",
        )
    least, most = (int(x) for x in layout.rank.aminmax()) if layout.rank.numel() else (0, 0)
    if not 0 <= least <= most < layout.ranks:
        raise FlexCPError(
            f"owners between 0 and {layout.ranks - 1}",
            f"{least} to {most}",
            "give the layout as many ranks as own tokens",
        )
    if bool((layout.rank.diff() < 0).any()):
        raise FlexCPError(
            "runs sorted by rank",
            f"owners {layout.rank.tolist()}" if layout.rank.numel() < 64 else "others",
            "make the layout with Layout.of_runs or Layout.of_positions, which sort them",
        )
    if layout.batch_elements > 1:
        sizes = torch.zeros(layout.ranks * layout.batch_elements, dtype=torch.int64)
        place = layout.rank * layout.batch_elements + layout.element
        sizes.index_add_(0, place, layout.stop - layout.start)
        per_element = sizes.view(layout.ranks, layout.batch_elements)
        if bool((per_element != per_element[:, :1]).any()):
            raise FlexCPError(
                "as many tokens of each batch element on a rank",
                f"{per_element.tolist()}" if per_element.numel() < 64 else "different counts",
                "let the ranks' token counts be the same for every batch element",
            )
