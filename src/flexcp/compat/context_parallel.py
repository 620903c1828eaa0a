"""PyTorch's context parallelism under its own names: change the import, and code runs as it is.

Stands for `torch.distributed.tensor.experimental` and its `_context_parallel`. Any length, any
balancer, CPU too, forward and backward, and nothing global is left switched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import (
    implicit_replication,
    local_map,
    register_sharding,
)
from torch.nn.attention.flex_attention import BlockMask

from flexcp.compat._cp_balancers import (
    _create_default_load_balancer,
    _HeadTailLoadBalancer,
    _LoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
)
from flexcp.compat._cp_block_mask import shard_block_mask
from flexcp.compat._cp_gather import flex_cp_allgather, flex_cp_allgather_backward
from flexcp.compat._cp_layout import CPGroup, balanced_layout, default_layout, dim_of, group_of
from flexcp.compat._cp_layout import shard as _shard
from flexcp.compat._cp_layout import unshard as _unshard
from flexcp.compat._cp_module import (
    _ContextParallel,
    _disable_context_parallel_dispatcher,
    _enable_context_parallel_dispatcher,
    made_styles,
)
from flexcp.compat._cp_options import (
    _CausalBehavior,
    _cp_options,
    _is_causal_behavior,
    _RotateMethod,
    own_switches,
    set_rotate_method,
)
from flexcp.compat._cp_sdpa import ShardedSDPA, patched_for_other_threads
from flexcp.compat.flex_attention import create_block_mask
from flexcp.compat.recomputation import kept_for_recomputation
from flexcp.eager import run_eagerly_on_cpu
from flexcp.errors import FlexCPError, require, whole_number
from flexcp.layout import Layout
from flexcp.masks import Mask, MaskMod

__all__ = [
    "_CausalBehavior",
    "_ContextParallel",
    "_HeadTailLoadBalancer",
    "_LoadBalancer",
    "_PTRRLoadBalancer",
    "_PerDocumentHeadTailLoadBalancer",
    "_RotateMethod",
    "_context_parallel_shard",
    "_cp_options",
    "_create_cp_block_mask",
    "_create_default_load_balancer",
    "_disable_context_parallel_dispatcher",
    "_enable_context_parallel_dispatcher",
    "_is_causal_behavior",
    "context_parallel",
    "context_parallel_unshard",
    "flex_cp_allgather",
    "flex_cp_allgather_backward",
    "implicit_replication",
    "local_map",
    "register_sharding",
    "set_rotate_method",
]


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: list[Tensor] | None = None,
    buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[None]:
    """In its body, `F.scaled_dot_product_attention` runs over a sequence sharded over a mesh.

    On this thread it is seen under any name, however early it was bound; on others by that name, as
    in PyTorch. Contexts nest; each is for its own mesh.

    Args:
        mesh: A DeviceMesh of one dimension.
        buffers: Tensors with a sequence dimension, such as tokens, labels and positions. They hold
            this rank's rows in the body, head-tail unless `_cp_options.enable_load_balance` is
            off, and are whole again after it.
        buffer_seq_dims: The sequence dimension of each buffer.
        no_restore_buffers: Those of `buffers` that may stay sharded.

    >>> from flexcp.testing.processes import spawn
    >>> def rank(mesh):
    ...     x = torch.arange(8.0)
    ...     with context_parallel(mesh, buffers=[x], buffer_seq_dims=[0]):
    ...         inside = x.tolist()
    ...     return inside, len(x)
    >>> spawn(rank, 2)
    [([0.0, 1.0, 6.0, 7.0], 8), ([2.0, 3.0, 4.0, 5.0], 8)]
    """
    _require_lists(
        [] if buffers is None else buffers, [] if buffer_seq_dims is None else buffer_seq_dims
    )
    fix = "pass a set of those buffers"
    if no_restore_buffers is not None:
        require("no_restore_buffers", no_restore_buffers, (set, frozenset, list, tuple), fix)
    buffers = [] if buffers is None else list(buffers)
    dims = [] if buffer_seq_dims is None else list(buffer_seq_dims)
    unrestored = {id(b) for b in (no_restore_buffers or ())}
    _require_buffers(buffers, dims, unrestored)
    group = group_of(mesh)
    layouts: dict[int, Layout] = {}
    shards = []
    with torch.no_grad():
        for buffer, dim in zip(buffers, dims, strict=True):
            length = buffer.shape[dim_of(buffer, dim)]
            if length not in layouts:
                layouts[length] = default_layout(length, group.size)
            shards.append(_shard(buffer, dim, layouts[length], group.rank))
    originals = [None if id(b) in unrestored else b.data for b in buffers]
    for layout in layouts.values():
        group.remember(layout)
    try:
        for buffer, part in zip(buffers, shards, strict=True):
            _hold(buffer, part)
        with (
            own_switches(),
            _sharded_attention(group, list(layouts.values())),
            patched_for_other_threads(mesh),
        ):
            yield
    finally:
        for buffer, original in zip(buffers, originals, strict=True):
            if original is not None:
                _hold(buffer, original)


@contextmanager
def _sharded_attention(group: CPGroup, layouts: list[Layout]) -> Iterator[None]:
    """In the body, attention is that of whole sequences with these layouts.

    Also where what it checkpoints is recomputed: after the context, or on another thread.
    """
    group.open.append(layouts)
    try:
        with (
            kept_for_recomputation(lambda: _sharded_attention(group, layouts)),
            ShardedSDPA(group.mesh, []),
        ):
            yield
    finally:
        group.open.pop()


def _require_lists(buffers: object, dims: object) -> None:
    """Raises unless there are lists, or dicts, of what can be sharded and of dimensions."""
    for name, given in (("buffers", buffers), ("seq_dims", dims)):
        require(name, given, (list, tuple, Mapping), "pass a list with an entry for each buffer")
    assert isinstance(dims, list | tuple | Mapping)
    for dim in dims.values() if isinstance(dims, Mapping) else dims:
        fix = "pass the sequence dimension of each buffer"
        whole_number("each of seq_dims", dim, at_least=-(2**31), fix=fix)


def _require_buffers(buffers: list[Tensor], dims: list[int], unrestored: set[int]) -> None:
    if len(buffers) != len(dims):
        raise ValueError("`seq_dims` must have the same number of elements as `buffers`.")
    if not unrestored <= {id(b) for b in buffers}:
        raise ValueError("`no_restore_buffers` must be a subset of `buffers`.")
    if len({id(b) for b in buffers}) != len(buffers):
        raise FlexCPError("each buffer once", "one that comes twice", "list it once")
    for number, buffer in enumerate(buffers):
        require(f"buffer {number}", buffer, Tensor, "pass tensors")
        if buffer.grad_fn is not None:
            raise FlexCPError(
                "buffers without a gradient history, since they are sharded in place",
                f"buffer {number} of shape {tuple(buffer.shape)}, a result of other tensors",
                "shard it with _context_parallel_shard, which is differentiable, or detach it",
            )


def _hold(buffer: Tensor, data: Tensor) -> None:
    """Gives a tensor other contents, of any shape; what it was saved for must not use it now."""
    buffer.data = data
    torch.autograd.graph.increment_version(buffer)


Buffer = Tensor | BlockMask
"""What can be sharded."""


@overload
def _context_parallel_shard(
    mesh: DeviceMesh,
    buffers: Sequence[Buffer],
    seq_dims: Sequence[int],
    load_balancer: _LoadBalancer | None = None,
) -> Any: ...


@overload
def _context_parallel_shard(
    mesh: DeviceMesh,
    buffers: Mapping[str, Buffer],
    seq_dims: Mapping[str, int],
    load_balancer: _LoadBalancer | None = None,
) -> Any: ...


@run_eagerly_on_cpu
def _context_parallel_shard(
    mesh: DeviceMesh,
    buffers: Sequence[Buffer] | Mapping[str, Buffer],
    seq_dims: Sequence[int] | Mapping[str, int],
    load_balancer: _LoadBalancer | None = None,
) -> Any:
    """This rank's part of tensors and block masks, in a list or dict like the one given.

    Args:
        mesh: A DeviceMesh of one dimension.
        buffers: Tensors, of which it takes the rank's rows; differentiable. And BlockMasks, of
            which it makes the one for the rank's queries and the keys of all ranks in rank order.
        seq_dims: The sequence dimension of each; of no meaning for a BlockMask.
        load_balancer: The order of tokens; contiguous shards without it.

    A `_ContextParallel` that was made before and has been applied to no module is an error here:
    the model would take this rank's rows for the whole sequence.
    """
    _require_lists(buffers, seq_dims)
    if len(buffers) != len(seq_dims):
        raise ValueError("`seq_dims` must have the same number of elements as `buffers`.")
    if isinstance(buffers, Mapping) and isinstance(seq_dims, Mapping):
        if buffers.keys() != seq_dims.keys():
            raise ValueError("`seq_dims` must have the pytree structure as `buffers`.")
        seq_dims = [seq_dims[name] for name in buffers]
    flat = list(buffers.values()) if isinstance(buffers, Mapping) else list(buffers)
    dims = list(seq_dims.values()) if isinstance(seq_dims, Mapping) else list(seq_dims)
    _require_same_device(flat)
    made_styles.require_applied("_context_parallel_shard")
    sharder = _Sharder(mesh, load_balancer)
    parts = [sharder.part(buffer, dim) for buffer, dim in zip(flat, dims, strict=True)]
    if isinstance(buffers, Mapping):
        return dict(zip(buffers, parts, strict=True))
    return tuple(parts) if isinstance(buffers, tuple) else parts


def _require_same_device(buffers: list[Buffer]) -> None:
    for buffer in buffers:
        if not isinstance(buffer, Tensor | BlockMask):
            raise ValueError(f"Unknown buffer type: {type(buffer)}")
    devices = {x.device if isinstance(x, Tensor) else x.kv_num_blocks.device for x in buffers}
    if len(devices) > 1:
        raise AssertionError(
            f"All buffers must be on the same device, got {sorted(map(str, devices))}"
        )


class _Sharder:
    """Makes the layout of each length once, and lets the group remember it."""

    def __init__(self, mesh: DeviceMesh, balancer: _LoadBalancer | None) -> None:
        self._group, self._balancer = group_of(mesh), balancer
        self._layouts: dict[int, Layout] = {}

    def part(self, buffer: Buffer, dim: int) -> Buffer:
        """This rank's part."""
        if isinstance(buffer, Tensor):
            layout = self._layout(buffer.shape[dim_of(buffer, dim)])
            part = _shard(buffer, dim, layout, self._group.rank)
            self._group.shards[part] = layout
            return part
        q_len, kv_len = (int(n) for n in buffer.seq_lengths)
        q_layout, kv_layout = self._layout(q_len), self._layout(kv_len)
        return shard_block_mask(buffer, q_layout, kv_layout, self._group.rank)

    def _layout(self, length: int) -> Layout:
        if length not in self._layouts:
            layout = balanced_layout(self._balancer, length, self._group.size)
            self._layouts[length] = self._group.remember(layout)
        return self._layouts[length]


def _create_cp_block_mask(
    mask_mod: Mask | MaskMod,
    B: int,
    H: int,
    Q_LEN: int,
    KV_LEN: int,
    *given: Any,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    device_mesh: DeviceMesh | None = None,
    load_balancer: _LoadBalancer | None = None,
) -> BlockMask:
    """The BlockMask of this rank's queries against the keys of all ranks; of any length.

    Args:
        mask_mod: A function of (b, h, q_idx, kv_idx) on positions in the whole sequence.
        B: Batch size.
        H: Number of query heads.
        Q_LEN: Queries of all ranks.
        KV_LEN: Keys of all ranks.
        given: Block size, mesh and balancer by position; torch before 2.15 has no block size there.
        BLOCK_SIZE: Tokens of a tile, or a pair (queries, keys).
        device_mesh: A DeviceMesh of one dimension.
        load_balancer: The order of tokens; as `context_parallel` orders them without it.
    """
    names = ["BLOCK_SIZE", "device_mesh", "load_balancer"]
    if given and isinstance(given[0], DeviceMesh):
        names.remove("BLOCK_SIZE")
    by_name = dict(zip(names, given, strict=False))
    block_size = by_name.get("BLOCK_SIZE", BLOCK_SIZE)
    mesh: DeviceMesh | None = by_name.get("device_mesh", device_mesh)
    load_balancer = by_name.get("load_balancer", load_balancer)
    if mesh is None:
        raise TypeError("_create_cp_block_mask needs a device_mesh")
    ranks = mesh.size()
    balancer = load_balancer or _create_default_load_balancer(Q_LEN, ranks, "cpu")
    whole = create_block_mask(
        mask_mod, B, H, Q_LEN, KV_LEN, device=mesh.device_type, BLOCK_SIZE=block_size
    )
    q_layout, kv_layout = (balanced_layout(balancer, n, ranks) for n in (Q_LEN, KV_LEN))
    return shard_block_mask(whole, q_layout, kv_layout, mesh.get_local_rank())


@run_eagerly_on_cpu
def context_parallel_unshard(
    mesh: DeviceMesh,
    buffers: list[Tensor],
    seq_dims: list[int],
    load_balancer: _LoadBalancer | None = None,
) -> list[Tensor]:
    """The whole tensors, in their original order, on every rank; differentiable.

    The gradient of a rank's rows is what its own backward pass says of them: every rank is taken to
    do the same with the whole tensor.

    Args:
        mesh: A DeviceMesh of one dimension.
        buffers: This rank's shards.
        seq_dims: The sequence dimension of each.
        load_balancer: What they were sharded with. Without it, shards are put back as they were
            sharded, and other tensors as this mesh sharded a sequence of their length, or attended
            over one, last; or else as `context_parallel` would.
    """
    _require_lists(buffers, seq_dims)
    if len(buffers) != len(seq_dims):
        raise ValueError("`seq_dims` must have the same number of elements as `buffers`.")
    for number, buffer in enumerate(buffers):
        require(f"buffer {number}", buffer, Tensor, "pass this rank's shards")
    group = group_of(mesh)
    whole = []
    given = None if load_balancer is None else load_balancer._generate_indices(restore=False)
    for x, dim in zip(buffers, seq_dims, strict=True):
        if given is not None:
            layout = balanced_layout(load_balancer, given.shape[-1], group.size)
        else:
            layout = group.layout_of(x.shape[dim_of(x, dim)], x.device, x, last_is_meant=True)
        whole.append(_unshard(x, dim, layout, group))
    return whole
