"""A short text that tells masks apart by what they compute, not by their tiles."""

from __future__ import annotations

import hashlib
from typing import Any

from flexcp.masks.graph import MaskGraph, Ref
from flexcp.masks.mask import Mask
from flexcp.masks.trace import trace_mask
from flexcp.packing import tensor_bytes


def mask_digest(mask: Mask) -> str:
    """Equal for masks that were made alike: the same steps, numbers and captured tensors.

    Masks that allow the same pairs for different reasons may have different digests.

    >>> from flexcp import masks
    >>> mask_digest(masks.sliding_window(5)) == mask_digest(masks.sliding_window(5))
    True
    >>> mask_digest(masks.sliding_window(5)) == mask_digest(masks.sliding_window(6))
    False
    """
    graph = trace_mask(mask.mask_mod)
    found = hashlib.blake2b(digest_size=8)
    order = {index: place for place, index in enumerate(graph.needed((graph.output,)))}
    for index in order:
        found.update(repr(_told(graph, index, order)).encode())
        value = graph.nodes[index].value
        if value is not None:
            found.update(tensor_bytes(value))
    return found.hexdigest()


def _told(graph: MaskGraph, index: int, order: dict[int, int]) -> tuple[Any, ...]:
    """A node without the contents of its tensor; inputs are told by their index."""
    node = graph.nodes[index]
    if node.op is None:
        return (index if node.value is None else "captured", str(node.dtype), node.shape)
    named = sorted(node.kwargs.items())
    return (str(node.op), _operands(node.args, order), _operands(named, order))


def _operands(value: Any, order: dict[int, int]) -> Any:
    if isinstance(value, Ref):
        return f"node {order[value.node]}"
    if isinstance(value, (tuple, list)):
        return [_operands(item, order) for item in value]
    return value
