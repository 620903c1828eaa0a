"""scaled_dot_product_attention over a sharded sequence."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.overrides import get_overridable_functions

from flexcp.compat._cp_graph import graph_sdpa
from flexcp.compat._cp_layout import CPGroup, group_of
from flexcp.compat._cp_plan import plan_for
from flexcp.compat._cp_transport import CollectiveTransport, backward_in_step
from flexcp.compat.intercept import SDPA, Interception
from flexcp.eager import run_eagerly_on_cpu
from flexcp.errors import FlexCPError
from flexcp.graph_handles import constant_handle, numbered_handle
from flexcp.ops.api import attention
from flexcp.ops.arguments import as_dropout_p, as_scale, autocast, needs_gradients
from flexcp.ops.dropout import traced_seed
from flexcp.torch_names import constant_in_graphs, function_mode_is_on


class ShardedSDPA(Interception):
    """Attention over a sequence that is sharded over a mesh, in place of torch's.

    Args:
        mesh: What the sequence is sharded over.
        answered: Is given the name of every function that was answered.
    """

    def __init__(self, mesh: DeviceMesh, answered: list[str]) -> None:
        super().__init__()
        self.mesh = mesh
        self.answered = answered
        self.graph_handle = numbered_handle(self)

    def sdpa(self, *args: Any, **kwargs: Any) -> Any:
        """Attention of this rank's queries to the keys of all ranks."""
        if torch.compiler.is_compiling():
            return _traced_sdpa(self.graph_handle, *args, **kwargs)
        self.answered.append("scaled_dot_product_attention")
        return sharded_sdpa(self.mesh, *args, **kwargs)

    def weights(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        """Refuses: weights between the ranks' own rows are not those of the sequence."""
        raise FlexCPError(
            "multi-head attention without weights, which a sharded sequence can return",
            "need_weights=True",
            "pass need_weights=False",
        )


class DTensorSDPA(Interception):
    """Attention that knows DTensors whose sequence is sharded, and leaves all else as it was."""

    looks_into_layers = False

    def sdpa(self, *args: Any, **kwargs: Any) -> Any:
        """Over the mesh of the query, if that is such a DTensor."""
        query = args[0] if args else kwargs.get("query")
        if not (isinstance(query, DTensor) and _is_sequence(query)):
            return SDPA(*args, **kwargs)
        mesh = query.device_mesh
        if torch.compiler.is_compiling():
            (handle,) = _constant_handle(mesh)
            args = tuple(x.to_local() if isinstance(x, DTensor) else x for x in args)
            kwargs = {n: x.to_local() if isinstance(x, DTensor) else x for n, x in kwargs.items()}
            out = _traced_sdpa(handle, *args, **kwargs)
        else:
            out = sharded_sdpa(mesh, *args, **kwargs)
        return DTensor.from_local(out, mesh, query.placements, run_check=False)


@constant_in_graphs
def _constant_handle(mesh: DeviceMesh) -> tuple[Tensor]:
    """What stands for a mesh in a graph that is being made for DTensors of this mesh alone."""
    return (constant_handle(ShardedSDPA(mesh, [])),)


@run_eagerly_on_cpu
def sharded_sdpa(
    mesh: DeviceMesh,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` for tensors whose sequence is sharded over a mesh."""
    refuse_mask(attn_mask)
    shards = [_local(x, mesh) for x in (query, key, value)]
    return _attend(group_of(mesh), shards, is_causal, scale, enable_gqa, dropout_p)


@contextmanager
def patched_for_other_threads(mesh: DeviceMesh) -> Iterator[None]:
    """`F.scaled_dot_product_attention` by that name is the sharded one on every thread.

    As in PyTorch. A mode is on for one thread alone, where it sees the call under any name.
    """
    # torch.compile asks which functions modes see, once, and goes by what the names stand for then.
    get_overridable_functions()
    before = functional.scaled_dot_product_attention
    home = threading.get_ident()
    answering = ShardedSDPA(mesh, [])

    @run_eagerly_on_cpu
    def run(*args: Any, **kwargs: Any) -> Tensor:
        if threading.get_ident() == home and function_mode_is_on():
            found: Tensor = SDPA(*args, **kwargs)
            return found
        return sharded_sdpa(mesh, *args, **kwargs)

    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            found: Tensor = answering.sdpa(*args, **kwargs)
            return found
        return run(*args, **kwargs)

    functional.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before


def _is_sequence(x: DTensor) -> bool:
    return x.device_mesh.ndim == 1 and x.placements == (Shard(x.dim() - 2),)


def _local(x: Tensor, mesh: DeviceMesh) -> Tensor:
    if not isinstance(x, DTensor):
        return x
    if x.device_mesh != mesh or not _is_sequence(x):
        raise AssertionError(
            f"a DTensor must be sharded as Shard({x.dim() - 2}) over the mesh of the sequence, got "
            f"{x.placements} over {x.device_mesh}"
        )
    return x.to_local()


def refuse_mask(attn_mask: Tensor | None) -> None:
    """Raises if a call has a dense mask, which is not sharded."""
    if attn_mask is not None:
        raise FlexCPError(
            "attn_mask=None, since a dense mask over the whole sequence is not sharded",
            "an attn_mask",
            "say is_causal, or make a plan with flexcp.make_plan, which takes any mask by its rule",
        )


def _attend(
    group: CPGroup,
    shards: Sequence[Tensor],
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    dropout_p: float,
) -> Tensor:
    lead = shards[0].shape[:-2]
    query, key, value = _fitting(shards, enable_gqa)
    plan = plan_for(group, query, key, is_causal, shards)
    out = cast(Tensor, attention(query, key, value, plan, scale=scale, dropout_p=dropout_p))
    transport = plan.ranks.transport
    if isinstance(transport, CollectiveTransport) and out.requires_grad:
        out = backward_in_step(out, transport)
    return out.reshape(*lead, *out.shape[-2:])


def _traced_sdpa(
    handle: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`sharded_sdpa` as part of a compiled graph; `handle` stands for a `ShardedSDPA`."""
    refuse_mask(attn_mask)
    lead = query.shape[:-2]
    query, key, value = _fitting((query, key, value), enable_gqa)
    p = as_dropout_p(dropout_p)
    found: tuple[Tensor, Tensor, Tensor] = graph_sdpa(
        query, key, value, handle, is_causal, as_scale(scale), needs_gradients(query, key, value),
        p, traced_seed(None) if p > 0 else None,
    )  # fmt: skip
    return found[0].reshape(*lead, *found[0].shape[-2:])


def _fitting(shards: Sequence[Tensor], enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """[B, H, L, D] query, key and value of one sequence, in the types that are computed with."""
    query, key, value = (with_heads(x) for x in autocast(*shards))
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise FlexCPError(
            "as many heads in key and value as in query",
            f"{query.shape[1]} query heads and {key.shape[1]} key heads",
            "pass enable_gqa=True",
        )
    if key.shape[2] != query.shape[2]:
        raise FlexCPError(
            "queries and keys of the same sequence",
            f"{query.shape[2]} rows of query and {key.shape[2]} of key on this rank",
            "shard query, key and value alike; for other sequences use one process",
        )
    return query, key, value


def with_heads(x: Tensor) -> Tensor:
    """[B, H, L, D], whatever comes before L and D."""
    if x.dim() == 4:
        return x
    if x.dim() < 3:
        raise FlexCPError(
            "tensors of 3 or more dimensions, the sequence before the last",
            f"shape {tuple(x.shape)}",
            "add a batch dimension",
        )
    return x.flatten(0, -3).unsqueeze(1) if x.dim() == 3 else x.flatten(0, -4)
