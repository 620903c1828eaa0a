"""What may attend: masks as functions of global positions, composed with `&`, `|` and `~`."""

from flexcp.masks.catalog import (
    block_causal,
    causal,
    chunked,
    document,
    full,
    global_tokens,
    ids_from_lengths,
    prefix_lm,
    shared_prefix,
    sliding_window,
)
from flexcp.masks.mask import Mask, as_mask
from flexcp.masks.trace import MaskMod, trace_mask

__all__ = [
    "Mask",
    "MaskMod",
    "as_mask",
    "block_causal",
    "causal",
    "chunked",
    "document",
    "full",
    "global_tokens",
    "ids_from_lengths",
    "prefix_lm",
    "shared_prefix",
    "sliding_window",
    "trace_mask",
]
