"""What the model calls instead of its own attention, and instead of making masks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from flexcp.errors import FlexCPError
from flexcp.integrations.transformers.global_masks import (
    MaskKind,
    known_before_it_runs,
    mask_kind,
    require_known,
    separates_documents,
)
from flexcp.integrations.transformers.traced_functions import asked_while_traced
from flexcp.ops import attention, flex_attention
from flexcp.plan import Plan
from flexcp.torch_names import break_graph

IMPLEMENTATION = "flexcp"
"""The name of this attention, and of its masks, in Transformers' registries."""


class Sharding:
    """How one batch was sharded. It travels with the batch, from `shard` to the model's layers.

    Not a dataclass: wrappers such as FSDP copy dataclasses that they find among the arguments of a
    model, looking for tensors.
    """

    def __init__(
        self,
        plan: Plan,
        names: Mapping[MaskKind, str],
        last_position: Tensor | None,
        infers_documents: bool,
        local_jumps: bool,
    ) -> None:
        self.plan = plan
        """Who owns which tokens, under the mask of every layer type."""
        self.names = names
        """The name in the plan of every kind of mask that the model makes."""
        self.last_position = last_position
        """int64 [] The largest position of the whole batch, for models that must know.

        A tensor, since a compiled graph is for one number, but for any tensor.
        """
        rows = plan.positions()
        self.rows = rows if rows.dim() == 2 else rows[None]
        """int64 [1, L], or [B, L] where they differ: this rank's tokens in the sequence."""
        self.whole = plan.ranks.size == 1 and bool((rows.diff() == 1).all())
        """Whether this rank has every token, in order."""
        self.infers_documents = infers_documents
        """Whether the model takes jumps in positions for documents."""
        self.local_jumps = local_jumps
        """Whether it will find any in this rank's."""

    def to(self, *_: Any, **__: Any) -> Sharding:
        """Itself: batches are moved to a device by calling this on everything in them."""
        return self

    def __repr__(self) -> str:
        return f"Sharding({self.plan!r})"


class ForwardPass:
    """The forward pass that a thread is in, if it is in one."""

    sharding: Sharding | None = None


class _UnderWay(threading.local):
    """One for every thread; not a ContextVar, which torch.compile can't follow."""

    def __init__(self) -> None:
        self.forward_pass = ForwardPass()  # an object: what dynamo sets of a local itself, it loses


UNDER_WAY = _UnderWay()
"""Has the sharding of the forward pass that this thread is in.

Transformers asks for masks without saying for which batch, so it can't be an argument. It is set
and cleared by the attached model, around its own forward pass.
"""


@dataclass(frozen=True, eq=False)
class LayerMask:
    """What stands for a mask between the model and its layers.

    A layer that is computed again in the backward pass gets the one of its own forward pass.
    """

    sharding: Sharding
    """Of the forward pass that the layer is in."""
    kind: MaskKind
    """What the model wants. It may ask for masks that none of its layers uses."""

    @property
    def name(self) -> str:
        """Of the mask in the plan; raises if `shard` has not planned it."""
        return require_known(self.kind, self.sharding.names)


def name_the_mask(*, q_length: int, mask_function: Any, **_: Any) -> LayerMask:
    """For `AttentionMaskInterface`: recognises the mask that the model wants for some layers."""
    sharding = UNDER_WAY.forward_pass.sharding
    if sharding is None:
        raise FlexCPError(
            "a forward pass of the attached model on what cp.shard(batch) returned",
            "a call of one of its parts",
            "call the model itself, or attach to the part",
        )
    known = None
    if torch.compiler.is_compiling():
        known = asked_while_traced(known_before_it_runs, mask_function)
        if known is None:
            break_graph()
    if known is None:
        _require_own_rows(q_length, sharding)
        known = mask_kind(mask_function), separates_documents(mask_function)
        certain = sharding.local_jumps
    else:  # rows are compared when the graph runs
        certain = sharding.infers_documents
    kind, separates = known
    _require_documents(separates, certain, sharding.infers_documents)
    return LayerMask(sharding, kind)


def _require_documents(separates: bool, certain: bool, possible: bool) -> None:
    """Raises unless a mask separates documents as the model's code says.

    Args:
        separates: Whether it does.
        certain: Whether it must: there are jumps, or they were not looked for, as in traced code.
        possible: Whether it may.
    """
    if (certain and not separates) or (separates and not possible):
        raise FlexCPError(
            "documents to be inferred from position_ids "
            + ("as most models do" if certain else "never, as the model's code says"),
            "a mask that says otherwise",
            "pass on the position_ids of cp.shard(batch) as they are; if you do, name documents "
            "by document_ids, and give an attention_mask of ones",
        )


def _require_own_rows(q_length: int, sharding: Sharding) -> None:
    rows = sharding.plan.rows
    if q_length != rows:
        raise FlexCPError(
            f"the {rows} tokens of this rank, as cp.shard(batch) gives them",
            f"{q_length}",
            "pass on the tensors of cp.shard(batch) as they are",
        )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """For `AttentionInterface`: this rank's queries over the whole sequence.

    Args:
        module: The layer.
        query: [B, H, L, D], the rows of this rank.
        key: [B, G, L, D].
        value: [B, G, L, Dv].
        attention_mask: The `LayerMask` that `mask_function` returned.
        dropout: Share of attention weights that are dropped. The seed comes from torch's default
            CPU generator, whose state must be the same on all ranks.
        scaling: Factor on the scores.
        softcap: Scores are bounded to this by a tanh, as in Gemma 2.
        s_aux: [H] sinks, as in gpt-oss.
        position_bias: Refused.

    Returns:
        [B, L, H, Dv], and None in place of attention weights.
    """
    layer = type(module).__name__
    if attention_mask is None:
        raise FlexCPError(
            "layers that are given the masks that the model has asked for",
            f"none in {layer}",
            "if Accelerate was told a cp_size, which takes masks away to share out sequences "
            "itself, leave it out of the ParallelismConfig; else run this model without context "
            "parallelism",
        )
    if not isinstance(attention_mask, LayerMask):
        raise FlexCPError(
            "layers that get their masks from Transformers' AttentionMaskInterface",
            f"{type(attention_mask).__name__} in {layer}",
            "a mask that is made elsewhere covers a part of the sequence only; run this model "
            "without context parallelism",
        )
    if position_bias is not None:
        raise FlexCPError(
            "no position_bias", f"one in {layer}", "run this model without context parallelism"
        )
    sharding, name = attention_mask.sharding, attention_mask.name
    plan = sharding.plan
    query = _tuned(module, query, sharding.rows)
    score_mod = None if softcap is None else _softcapped(softcap)
    if sharding.whole:  # nothing to exchange, so nothing to pack for the way either
        out = flex_attention(
            query,
            key,
            value,
            score_mod,
            plan.grids[name],
            scaling,
            enable_gqa=True,
            sinks=s_aux,
            dropout_p=dropout,
        )
    else:
        out = attention(
            query, key, value, plan, mask=name, score_mod=score_mod, scale=scaling, sinks=s_aux,
            dropout_p=dropout,
        )  # fmt: skip
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous(), None


def _tuned(module: nn.Module, query: Tensor, rows: Tensor) -> Tensor:
    """Queries of Llama 4's layers without RoPE, scaled by global instead of local positions.

    The layer has scaled them already, counting the tokens that it was given.
    """
    tuning: Any = module
    if not getattr(module, "attn_temperature_tuning", False) or tuning.use_rope:
        return query

    def scale(positions: Tensor) -> Tensor:
        steps = torch.floor((positions.to(query.device).float() + 1.0) / tuning.floor_scale)
        return torch.log1p(steps) * float(tuning.attn_scale) + 1.0

    ratio = scale(rows) / scale(torch.arange(query.shape[2]))
    return (query * ratio[:, None, :, None]).to(query.dtype)


def _softcapped(bound: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, *_: Tensor) -> Tensor:
        return bound * torch.tanh(score / bound)

    return score_mod


AttentionInterface.register(IMPLEMENTATION, attend)
AttentionMaskInterface.register(IMPLEMENTATION, name_the_mask)
