"""What is made of a transport's collectives: parts of unequal sizes, and sums in order of rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flexcp.comm.agreement import Agreement
from flexcp.comm.interface import Transport
from flexcp.comm.labels import PassLabel


def gather_parts(
    transport: Transport, x: Tensor, counts: Sequence[int], label: PassLabel
) -> list[Tensor]:
    """The parts of all ranks, by rank; they differ in length along dim 0 alone.

    Each is padded to the longest on its way, so that one all-gather does it on any number of ranks.
    """
    longest, rest = max(counts), x.shape[1:]
    padded = x.new_zeros(longest, *rest) if x.shape[0] < longest else x.contiguous()
    if x.shape[0] < longest:
        padded[: x.shape[0]] = x
    out = x.new_empty(transport.world_size, longest, *rest)
    transport.all_gather(out, padded, label=label.round("rows", 0)).wait()
    return [part[:n] for part, n in zip(out.unbind(0), counts, strict=True)]


def ordered_sum(transport: Transport, x: Tensor) -> Tensor:
    """The sum over all ranks, added up in order of rank: the same bits on every rank.

    Every rank adds up a part, and gets the others: a reduce-scatter and an all-gather.
    """
    size = transport.world_size
    call = transport.calls.begin(_agreement_to_sum(x))
    label = call.passing("forward")
    each = -(-x.numel() // size)
    flat = x.new_zeros(size * each)
    flat[: x.numel()] = x.detach().reshape(-1)
    parts = x.new_empty(size, each)
    takes = [each] * size
    transport.all_to_all(
        parts.view(-1), flat, takes, takes, range(size), label=label.round("gradients", 0)
    ).wait()
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    out = x.new_empty(size, each)
    transport.all_gather(out, total, label=label.round("rows", 1)).wait()
    return out.view(-1)[: x.numel()].view(x.shape)


def _agreement_to_sum(x: Tensor) -> Agreement:
    return Agreement(
        "sum the same kind of tensor",
        "a sum over ranks",
        {"type": str(x.dtype), "shape": str(tuple(x.shape))},
        "pass tensors of one shape and type on every rank",
    )
