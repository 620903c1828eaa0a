"""Fixed rules for who owns what: contiguous, head-tail, striped, per-document head-tail, PTRR."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexcp.errors import FlexCPError, whole_number
from flexcp.layout.layout import Layout
from flexcp.layout.row_sets import expand


def require_ranks(ranks: object) -> int:
    """How many ranks there are, or an error.

    >>> require_ranks(4)
    4
    """
    return whole_number("ranks", ranks, at_least=1, fix="pass a world size of 1 or more")


def _require_sizes(seq_len: object, ranks: object) -> tuple[int, int]:
    fix = "pass the number of tokens of the whole sequence"
    return whole_number("seq_len", seq_len, at_least=0, fix=fix), require_ranks(ranks)


def even_edges(total: int, parts: int) -> Tensor:
    """int64 [parts + 1] Where `total` things are cut into parts whose sizes differ by at most one.

    >>> even_edges(10, 4)
    tensor([ 0,  2,  5,  7, 10])
    """
    return torch.arange(parts + 1) * total // parts


def contiguous(seq_len: int, ranks: int) -> Layout:
    """Rank r owns the r-th stretch.

    >>> contiguous(10, 4).positions(1)
    tensor([2, 3, 4])
    """
    seq_len, ranks = _require_sizes(seq_len, ranks)
    edges = even_edges(seq_len, ranks)
    return _of_chunks("contiguous", seq_len, ranks, edges, torch.arange(ranks))


def head_tail(seq_len: int, ranks: int) -> Layout:
    """Rank r owns the r-th stretch from the front and the r-th from the back.

    Under a causal mask this balances the work: an early, cheap stretch and a late, dear one.

    >>> head_tail(16, 4).positions(1)
    tensor([ 2,  3, 12, 13])
    """
    seq_len, ranks = _require_sizes(seq_len, ranks)
    edges = even_edges(seq_len, 2 * ranks)
    return _of_chunks("head_tail", seq_len, ranks, edges, _there_and_back(ranks))


def striped(seq_len: int, ranks: int, *, stripe: int = 128) -> Layout:
    """Stretches of `stripe` tokens are dealt out in turns.

    >>> striped(12, 2, stripe=2).positions(0)
    tensor([0, 1, 4, 5, 8, 9])
    """
    seq_len, ranks = _require_sizes(seq_len, ranks)
    stripe = whole_number("stripe", stripe, at_least=1, fix="pass stripe=128")
    first = torch.arange(0, seq_len, stripe)
    edges = torch.cat([first, torch.full((1,), seq_len)])
    return _of_chunks("striped", seq_len, ranks, edges, torch.arange(first.numel()) % ranks)


def per_document_head_tail(
    lengths: Sequence[int], ranks: int, *, counts: Sequence[int] | None = None
) -> Layout:
    """Head-tail within every document, of any length.

    Ranks take turns in getting the longer parts. Single tokens then move until ranks have as many
    as they should.

    Args:
        lengths: Tokens of each document.
        ranks: How many ranks there are.
        counts: Tokens of each rank; by default, they differ by at most one.

    >>> layout = per_document_head_tail([8, 3], 2)
    >>> layout.positions(0), layout.positions(1)
    (tensor([ 0,  1,  6,  7, 10]), tensor([2, 3, 4, 5, 8, 9]))
    """
    ranks = require_ranks(ranks)
    fix = "pass how many tokens each document has"
    lengths = [whole_number("a length", n, at_least=0, fix=fix) for n in lengths]
    total = sum(lengths)
    size = torch.tensor(list(lengths), dtype=torch.int64)
    first = size.cumsum(0) - size
    chunks = 2 * ranks
    # Cutting at multiples of the whole sequence's grid gives the odd tokens to each rank in turn.
    step = torch.arange(chunks + 1)
    turn = first % chunks
    edges = (step * size[:, None] + turn[:, None] * (step > 0) * (step < chunks)) // chunks
    edges = torch.minimum(edges, size[:, None]) + first[:, None]
    owner = _there_and_back(ranks).expand(size.numel(), -1)
    start, stop, rank = edges[:, :-1].reshape(-1), edges[:, 1:].reshape(-1), owner.reshape(-1)
    rows = torch.repeat_interleave(rank, stop - start)
    if counts is None:
        return with_token_counts("per_document", rows, even_edges(total, ranks).diff().tolist())
    cost = torch.arange(total) - torch.repeat_interleave(first, size)  # under a causal mask
    return with_token_counts("per_document", rows, counts, cost=cost)


def ptrr(
    block_areas: Tensor,
    seq_len: int,
    ranks: int,
    *,
    block_size: int = 128,
    exact_counts: bool = False,
) -> Layout:
    """Blocks sorted by work and dealt out in turns, there and back.

    PTRR is short for processing time and round robin.

    Args:
        block_areas: int64 [blocks] Work of each block of rows.
        seq_len: Tokens of the whole sequence.
        ranks: How many ranks there are.
        block_size: Rows of a block.
        exact_counts: Token counts depend on nothing but length and ranks, as they must where batch
            elements have layouts of their own: a last block that is not whole is dealt out last,
            whatever its work.

    >>> ptrr(torch.tensor([1, 2, 3, 4]), 8, 2, block_size=2).positions(0)
    tensor([0, 1, 6, 7])
    """
    seq_len, ranks = _require_sizes(seq_len, ranks)
    block_size = whole_number("block_size", block_size, at_least=1, fix="pass block_size=128")
    if tuple(block_areas.shape) != (blocks := -(-seq_len // block_size),):
        raise FlexCPError(
            f"the work of each of {blocks} blocks of {block_size} rows, for {seq_len} tokens",
            f"shape {tuple(block_areas.shape)}",
            "pass the areas of all blocks of rows, summed over batch elements and heads",
        )
    order = torch.argsort(block_areas, descending=True, stable=True)
    if exact_counts and seq_len % block_size:
        last = order.numel() - 1
        order = torch.cat([order[order != last], torch.tensor([last])])
    turn = torch.arange(order.numel()) % (2 * ranks)
    owner = torch.empty_like(order).scatter_(0, order, _there_and_back(ranks)[turn])
    first = torch.arange(0, seq_len, block_size)
    edges = torch.cat([first, torch.full((1,), seq_len)])
    return _of_chunks("ptrr", seq_len, ranks, edges, owner)


def _there_and_back(ranks: int) -> Tensor:
    """0, 1, ..., ranks - 1, ranks - 1, ..., 1, 0."""
    there = torch.arange(ranks)
    return torch.cat([there, there.flip(0)])


def _of_chunks(name: str, seq_len: int, ranks: int, edges: Tensor, owner: Tensor) -> Layout:
    """Chunk i, from edges[i] to edges[i + 1], belongs to owner[i]."""
    start, stop = edges[:-1], edges[1:]
    keep = start < stop
    order = torch.argsort(owner[keep], stable=True)
    return joined(name, seq_len, ranks, owner[keep][order], start[keep][order], stop[keep][order])


def joined(
    name: str, seq_len: int, ranks: int, rank: Tensor, start: Tensor, stop: Tensor
) -> Layout:
    """A layout of runs that are sorted by rank and start; those that touch become one."""
    opens = torch.ones_like(rank, dtype=torch.bool)
    opens[1:] = (start[1:] != stop[:-1]) | (rank.diff() != 0)
    return Layout(name, seq_len, ranks, 1, rank[opens], start[opens], stop[opens.roll(-1)])


def with_token_counts(
    name: str, owner: Tensor, counts: Sequence[int], *, cost: Tensor | None = None
) -> Layout:
    """The layout of owners, after moving single tokens so that each rank has its count.

    Args:
        name: What to call it.
        owner: int64 [S] The rank of each token, to begin with.
        counts: Tokens that each rank is to have.
        cost: [S] Work of each token: a rank parts with the cheapest; by default, with its last.

    >>> with_token_counts("uneven", torch.tensor([0, 0, 0, 1]), [2, 2]).positions(1)
    tensor([2, 3])
    """
    have, target = torch.bincount(owner, minlength=len(counts)), torch.tensor(list(counts))
    spare = have - target
    if bool((spare != 0).any()):
        dearest = torch.arange(owner.numel())
        if cost is not None:
            dearest = torch.argsort(cost, descending=True, stable=True)
        order = dearest[torch.argsort(owner[dearest], stable=True)]
        ends = have.cumsum(0)
        giving, give_at = expand(spare.clamp(min=0))
        rows = order[ends[giving] - 1 - give_at]
        taking, _ = expand((-spare).clamp(min=0))
        owner = owner.clone()
        owner[rows] = taking
    rows = torch.argsort(owner, stable=True).split(list(counts))
    return Layout.of_rows(rows, seq_len=owner.numel(), name=name)
