"""torch.nn.attention.flex_attention under its own names.

`create_block_mask` is built on the block grid: instant and small at any length, on any device.
`flex_attention` runs on CPU as well, backward pass included. Everything that is pure definition
(BlockMask itself, and_masks, ...) is torch's.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_mask,
    noop_mask,
    or_masks,
)
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask

from flexcp.compat._attention import AuxOutput, AuxRequest, FlexKernelOptions, flex_attention
from flexcp.eager import run_eagerly_on_cpu
from flexcp.errors import FlexCPError, check_flags, told, whole_number
from flexcp.graph_handles import GraphOwner, new_graph_handle
from flexcp.grid import build_block_grid
from flexcp.grid.torch_block_mask import as_device
from flexcp.masks import Mask, MaskMod
from flexcp.ops.mask_cache import BLOCK_MASK_FIELDS, in_graph
from flexcp.torch_names import (
    _DEFAULT_SPARSE_BLOCK_SIZE,
    _WARNINGS_SHOWN,
    _apply_kernel_options,
    _compute_dq_write_order_from_block_mask,
    _convert_block_mask_to_mask,
    _convert_mask_to_block_mask,
    _create_empty_block_mask,
    _create_sparse_block_from_block_mask,
    _dense_to_ordered,
    _identity,
    _mask_mod_signature,
    _round_up_to_multiple,
    _score_mod_signature,
    _vmap_for_bhqkv,
    flex_attention_hop,
)

__all__ = [
    "_DEFAULT_SPARSE_BLOCK_SIZE",
    "_WARNINGS_SHOWN",
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "FlexKernelOptions",
    "_apply_kernel_options",
    "_compute_dq_write_order_from_block_mask",
    "_convert_block_mask_to_mask",
    "_convert_mask_to_block_mask",
    "_create_empty_block_mask",
    "_create_sparse_block_from_block_mask",
    "_dense_to_ordered",
    "_identity",
    "_mask_mod_signature",
    "_round_up_to_multiple",
    "_score_mod_signature",
    "_vmap_for_bhqkv",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "flex_attention_hop",
    "noop_mask",
    "or_masks",
]


HAS_DQ_WRITE_ORDER = "dq_write_order" in BLOCK_MASK_FIELDS
"""Whether torch's create_block_mask takes the arguments that came with this field, in 2.13."""


class GraphBlockMask(BlockMask, GraphOwner):
    """torch's BlockMask with a graph handle, so that one compiled graph runs all of them."""

    graph_handle: Tensor | None
    """Stands for this mask in compiled graphs; see `flexcp.graph_handles`."""

    @classmethod
    def of(cls, block_mask: BlockMask) -> GraphBlockMask:
        """A copy of a BlockMask, with a graph handle of its own."""
        found = cls(**{name: getattr(block_mask, name) for name in BLOCK_MASK_FIELDS})
        found.graph_handle = new_graph_handle(found)
        return found

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is another mask: its handle must not find the one that it was copied from."""
        for name, value in state.items():
            setattr(self, name, value)
        self.graph_handle, self.own_graph = new_graph_handle(self), ""


def create_block_mask(
    mask_mod: Mask | MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | int | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """Torch's `create_block_mask`: the same BlockMask, without evaluating every pair.

    Inside torch.compile the mask is part of the graph, and evaluated as torch's function does it.

    Args:
        mask_mod: A function of (b, h, q_idx, kv_idx), or a flexcp Mask.
        B: Batch size; None for a mask that is the same for every batch element.
        H: Number of query heads; None for a mask that is the same for every head.
        Q_LEN: Number of queries.
        KV_LEN: Number of keys.
        device: Where the BlockMask's tensors go; the current accelerator, or the CPU.
        BLOCK_SIZE: Tokens of a tile, or a pair (queries, keys).
        _compile: Accepted for compatibility; there is nothing to compile.
        separate_full_blocks: Whether tiles without a forbidden pair are listed apart.
        compute_dq_write_order: Whether to add the metadata of torch's deterministic CUDA backward;
            needs torch 2.13.
        dq_kv_order: The order that this metadata is for: True is descending.

    >>> from flexcp.compat.flex_attention import create_block_mask
    >>> create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 1000, 1000, device="cpu").shape
    (1, 1, 1000, 1000)
    """
    if torch.compiler.is_compiling():
        mod = mask_mod.mask_mod if isinstance(mask_mod, Mask) else mask_mod
        shape = (B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE)
        if HAS_DQ_WRITE_ORDER:
            return in_graph(
                torch_create_block_mask(
                    mod,
                    *shape,
                    separate_full_blocks=separate_full_blocks,
                    compute_dq_write_order=compute_dq_write_order,
                    dq_kv_order=dq_kv_order,
                )
            )
        if compute_dq_write_order:
            raise _no_dq_write_order()
        found = torch_create_block_mask(mod, *shape)
        return in_graph(found if separate_full_blocks else _all_partial(found))
    if not callable(mask_mod):
        raise FlexCPError("a mask_mod", told(mask_mod), "pass a function of (b, h, q_idx, kv_idx)")
    if _takes_a_score(mask_mod):
        raise AssertionError(f"create-block_mask requires a mask_mod function! Got {mask_mod}")
    if not isinstance(dq_kv_order, bool):
        raise ValueError("dq_kv_order must be a bool when using create_block_mask")
    check_flags(
        _compile=_compile,
        separate_full_blocks=separate_full_blocks,
        compute_dq_write_order=compute_dq_write_order,
    )
    if compute_dq_write_order and not HAS_DQ_WRITE_ORDER:
        raise _no_dq_write_order()
    KV_LEN = whole_number("KV_LEN", KV_LEN, at_least=0, fix="pass a number of keys")
    if _compile:
        warnings.warn(
            "_compile does nothing here: flexcp's create_block_mask does not evaluate every pair",
            DeprecationWarning,
            stacklevel=2,
        )
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    block_mask = _from_grid(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, separate_full_blocks)
    if compute_dq_write_order:
        _add_dq_write_order(block_mask, dq_kv_order)
    return block_mask


@run_eagerly_on_cpu
def _from_grid(
    mask_mod: Mask | MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | int,
    BLOCK_SIZE: int | tuple[int, int],
    separate_full_blocks: bool,
) -> GraphBlockMask:
    grid = build_block_grid(
        mask_mod,
        Q_LEN,
        KV_LEN,
        block_size=BLOCK_SIZE,
        batch=1 if B is None else B,
        heads=1 if H is None else H,
    )
    return GraphBlockMask.of(
        grid.to_block_mask(device=as_device(device), separate_full_blocks=separate_full_blocks)
    )


def _all_partial(block_mask: BlockMask) -> BlockMask:
    """The same tiles in one list, as if `separate_full_blocks` had been False."""
    found: BlockMask = _create_sparse_block_from_block_mask(
        (block_mask.to_dense(), None),
        block_mask.mask_mod,
        block_mask.seq_lengths,
        *block_mask.BLOCK_SIZE,
    )
    return found


def _takes_a_score(mod: object) -> bool:
    """Whether a function has five required arguments: a score_mod given for a mask_mod."""
    try:
        parameters = inspect.signature(mod).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return sum(p.default is inspect.Parameter.empty for p in parameters) == 5


def _no_dq_write_order() -> FlexCPError:
    return FlexCPError(
        "torch 2.13 or newer for compute_dq_write_order, which its CUDA kernels read",
        f"torch {torch.__version__}",
        "leave it out, flexcp's kernels are deterministic without it; or update torch",
    )


def _add_dq_write_order(block_mask: BlockMask, dq_kv_order: bool) -> None:
    """Metadata of torch's deterministic CUDA backward, as torch's create_block_mask adds it."""
    order, order_of_full = _compute_dq_write_order_from_block_mask(
        block_mask, dq_kv_order=dq_kv_order
    )
    block_mask.dq_write_order = order
    block_mask.dq_write_order_full = order_of_full
    block_mask.dq_kv_order = None
    block_mask.dq_kv_order_spt = dq_kv_order
