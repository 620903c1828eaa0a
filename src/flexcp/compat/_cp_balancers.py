"""PyTorch's load balancers: which order of tokens, cut into equal parts, gives ranks equal work.

Where PyTorch defines an order, it is the same here. Lengths that it refuses work too: an order is
always cut as `torch.chunk` cuts, so ranks differ in length only at the end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexcp.compat._cp_options import _cp_options
from flexcp.eager import run_eagerly_on_cpu
from flexcp.errors import FlexCPError, require, whole_number
from flexcp.grid.torch_block_mask import as_device
from flexcp.layout import per_document_head_tail
from flexcp.layout.rules import with_token_counts


def shard_sizes(seq_len: int, ranks: int) -> list[int]:
    """Tokens of each rank, as `torch.chunk` cuts; late ranks may have fewer, or none.

    >>> shard_sizes(10, 4), shard_sizes(9, 4)
    ([3, 3, 3, 1], [3, 3, 3, 0])
    """
    step = -(-seq_len // ranks)
    return [max(0, min(step, seq_len - rank * step)) for rank in range(ranks)]


def _require_size(world_size: object) -> int:
    fix = "pass the size of the mesh"
    return whole_number("world_size", world_size, at_least=1, at_most=1 << 20, fix=fix)


class _LoadBalancer(ABC):
    """An order of tokens. Subclasses say which."""

    @abstractmethod
    def _generate_indices(self, restore: bool = False) -> Tensor | None:
        """[1, S] or [B, S]: x[indices] is the order to cut into shards.

        Args:
            restore: Whether to return the way back instead: x[indices][restored] is x.
        """


class _HeadTailLoadBalancer(_LoadBalancer):
    """Rank r gets the r-th stretch from the front and the r-th from the back: for causal masks.

    >>> _HeadTailLoadBalancer(8, 2, "cpu")._generate_indices()
    tensor([[0, 1, 6, 7, 2, 3, 4, 5]], dtype=torch.int32)
    >>> _HeadTailLoadBalancer(7, 2, "cpu")._generate_indices()
    tensor([[0, 1, 5, 6, 2, 3, 4]], dtype=torch.int32)
    """

    def __init__(self, seq_length: int, world_size: int, device: str | torch.device):
        self.seq_length = whole_number(
            "seq_length", seq_length, at_least=0, fix="pass the tokens of the sequence"
        )
        self.world_size = _require_size(world_size)
        self.device = as_device(device)

    def _generate_indices(self, restore: bool = False) -> Tensor:
        """[1, S] The order, or the way back."""
        front, back, parts = 0, self.seq_length, []
        for size in shard_sizes(self.seq_length, self.world_size):
            tail = size // 2
            parts.append(torch.arange(front, front + size - tail, dtype=torch.int32))
            parts.append(torch.arange(back - tail, back, dtype=torch.int32))
            front, back = front + size - tail, back - tail
        order = torch.cat(parts)
        return (torch.argsort(order) if restore else order).unsqueeze(0).to(self.device)


def _create_default_load_balancer(
    seq_length: int, world_size: int, device: str | torch.device
) -> _LoadBalancer | None:
    """The balancer where none is said: head-tail for any length, unless that is switched off."""
    if not _cp_options.enable_load_balance:
        return None
    return _HeadTailLoadBalancer(seq_length, world_size, device)


class _PerDocumentHeadTailLoadBalancer(_LoadBalancer):
    """Every rank gets a head and a tail of every document: for packed documents.

    >>> _PerDocumentHeadTailLoadBalancer([[4, 8]], 2, "cpu")._generate_indices()
    tensor([[ 0,  3,  4,  5, 10, 11,  1,  2,  6,  7,  8,  9]])
    """

    def __init__(
        self,
        seq_length_per_doc: list[list[int]],
        world_size: int,
        device: str | torch.device,
    ):
        fix = "pass a list of document lengths for each batch element"
        require("seq_length_per_doc", seq_length_per_doc, (list, tuple), fix)
        for lengths in seq_length_per_doc:
            require("the lengths of each batch element", lengths, (list, tuple), fix)
            for length in lengths:
                whole_number("a document's length", length, at_least=0, fix=fix)
        self.seq_length_per_doc = seq_length_per_doc
        self.world_size = _require_size(world_size)
        self.device = as_device(device)

    def _generate_indices(self, restore: bool = False) -> Tensor:
        """[1, S], or [B, S] with documents for each batch element: the order, or the way back."""
        totals = [sum(lengths) for lengths in self.seq_length_per_doc]
        if not totals or len(set(totals)) > 1 or min(map(min, self.seq_length_per_doc)) < 0:
            raise FlexCPError(
                "seq_length_per_doc with document lengths that sum to the same length for every "
                "batch element",
                f"sums {totals}",
                "count padding as a document of its own",
            )
        order = torch.stack([self._order(lengths) for lengths in self.seq_length_per_doc])
        return (torch.argsort(order, dim=1) if restore else order).to(self.device)

    def _order(self, lengths: Sequence[int]) -> Tensor:
        ranks = self.world_size
        counts = shard_sizes(sum(lengths), ranks)
        return per_document_head_tail([n for n in lengths if n], ranks, counts=counts).order


class _PTRRLoadBalancer(_LoadBalancer):
    """Rows of blocks by work, dealt to ranks there and back: for any BlockMask.

    PTRR is short for processing time and round robin.
    """

    def __init__(self, block_mask: BlockMask, world_size: int):
        require("block_mask", block_mask, BlockMask, "make one with create_block_mask")
        self.block_mask = block_mask
        self.world_size = _require_size(world_size)

    @staticmethod
    def ptrr_scheduling(process_time: Tensor, group_size: int) -> Tensor:
        """[group_size, n / group_size] Tasks of each group, from [n] times.

        >>> _PTRRLoadBalancer.ptrr_scheduling(torch.tensor([1, 2, 3, 4]), 2)
        tensor([[0, 3],
                [1, 2]])
        """
        if process_time.ndim != 1:
            raise AssertionError(f"process_time must have 1 dimension, got {process_time.ndim}")
        tasks = process_time.shape[0]
        if tasks % group_size:
            raise NotImplementedError(
                f"num_tasks {tasks} must be divisible by group_size {group_size}"
            )
        return torch.stack(_dealt(process_time, group_size))

    @run_eagerly_on_cpu
    def _generate_indices(self, restore: bool = False) -> Tensor:
        """[1, S], or [B, S] if the mask has a batch: the order, or the way back."""
        mask = self.block_mask
        work = mask.kv_num_blocks
        if mask.full_kv_num_blocks is not None:
            work = work + mask.full_kv_num_blocks
        device, length, size = work.device, int(mask.seq_lengths[0]), int(mask.BLOCK_SIZE[0])
        rows = work.cpu().view(-1, *work.shape[-2:]).sum(1)[:, : -(-length // size)]
        counts = shard_sizes(length, self.world_size)
        orders = []
        for times in rows:
            owner = torch.empty(times.numel(), dtype=torch.int64)
            for rank, blocks in enumerate(_dealt(times, self.world_size)):
                owner[blocks] = rank
            # Where blocks don't come out even, tokens move: shards are cut by these counts.
            owner, cost = (x.repeat_interleave(size)[:length] for x in (owner, times))
            orders.append(with_token_counts("ptrr", owner, counts, cost=cost).order)
        order = torch.stack(orders)
        return (torch.argsort(order, dim=1) if restore else order).to(device)


def _dealt(times: Tensor, groups: int) -> list[Tensor]:
    """Tasks of each group in ascending order: the longest first, there and back."""
    order = torch.argsort(times, descending=True, stable=True)
    place = torch.arange(order.numel(), device=order.device)
    turn, seat = place // groups, place % groups
    group = torch.where(turn % 2 == 0, seat, groups - 1 - seat)
    return [order[group == g].sort().values for g in range(groups)]
