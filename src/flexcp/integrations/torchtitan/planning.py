"""The plan of a batch, from the masks that torchtitan has made for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexcp.compat._cp_balancers import _HeadTailLoadBalancer, _LoadBalancer, _PTRRLoadBalancer
from flexcp.compat._cp_layout import balanced_layout
from flexcp.errors import FlexCPError
from flexcp.integrations.torchtitan.attention import (
    CAUSAL,
    ParallelModules,
    PlannedMasks,
    VarlenWindow,
)
from flexcp.integrations.torchtitan.names import Names
from flexcp.layout import Layout
from flexcp.masks import Mask, causal, document
from flexcp.ops.packed_masks import Window
from flexcp.plan import Plan, make_plan
from flexcp.plan.problem import LAYOUTS

_ONLY = "mask"
"""Name of a mask that has none."""


@dataclass(frozen=True)
class BatchMasks:
    """The masks of a batch, and how they are given back to the model."""

    masks: Mapping[str, Mask]
    """By name."""
    given: Any
    """As torchtitan has them."""
    by_window: Mapping[VarlenWindow | None, str]

    @classmethod
    def of(
        cls, given: Any, modules: ParallelModules, positions: Tensor, names: Names
    ) -> BatchMasks:
        """From a BlockMask, several by name, VarlenMetadata, or None for causal attention."""
        if isinstance(given, BlockMask):
            return cls({_ONLY: Mask(given.mask_mod)}, given, {None: _ONLY})
        if isinstance(given, names.varlen_metadata):
            ids = _document_ids(given, positions)
            windows = sorted(w for w in modules.windows if w is not None)
            masks = {
                f"window {w}": document(ids) & Window.of(w, is_causal=False).mask(ids.shape[1])
                for w in windows
            }
            return cls(masks, given, {w: f"window {w}" for w in windows})
        if isinstance(given, Mapping) and any(isinstance(x, BlockMask) for x in given.values()):
            strange = {n: x for n, x in given.items() if not isinstance(x, BlockMask | None)}
            if not strange:
                found = {n: Mask(x.mask_mod) for n, x in given.items() if x is not None}
                return cls(found, given, {})
            given = next(iter(strange.values()))
        if given is None and modules.has_sdpa:
            return cls({CAUSAL: causal()}, given, {None: CAUSAL})
        raise FlexCPError(
            "attention_masks as a BlockMask, a dict of them, or VarlenMetadata",
            type(given).__name__,
            "layers with other masks, such as linear attention, can't have their sequence sharded",
        )

    def planned(self, plan: Plan) -> Any:
        """What the model is given in place of its masks."""
        if isinstance(self.given, Mapping):
            return {
                name: None if x is None else PlannedMasks(plan, {None: name})
                for name, x in self.given.items()
            }
        return PlannedMasks(plan, self.by_window)


def plan_of(
    masks: BatchMasks,
    seq_len: int,
    batch: int,
    mesh: Any,
    layout: str | Layout,
    schedule: str,
    machine: Any,
    shape: Mapping[str, Any],
) -> Plan:
    """The plan of a batch; every rank gets as many tokens, as torchtitan's losses assume."""
    return make_plan(
        dict(masks.masks),
        seq_len,
        mesh,
        layout=layout,
        schedule=schedule,
        machine=machine,
        batch=batch,
        token_slack=0,
        **shape,
    )


def layout_of(
    name: str | None, masks: BatchMasks, key: str | None, seq_len: int, ranks: int
) -> Any:
    """The layout that `parallelism.context_parallel_load_balancer` means, as torch orders rows.

    Args:
        name: "headtail", "ptrr", None, or one of flexcp's layouts.
        masks: Of the batch.
        key: `parallelism.context_parallel_ptrr_mask_key`: whose work PTRR shares out.
        seq_len: Tokens of a sequence.
        ranks: How many.
    """
    balancer: _LoadBalancer | None = None
    if name == "headtail":
        balancer = _HeadTailLoadBalancer(seq_len, ranks, "cpu")
    elif name == "ptrr" and not isinstance(masks.given, BlockMask | Mapping):
        return "ptrr"
    elif name == "ptrr":
        balancer = _PTRRLoadBalancer(_mask_named(masks.given, key), ranks)
    elif name is not None:
        if name not in LAYOUTS:
            raise FlexCPError(
                "context_parallel_load_balancer headtail or ptrr, or a layout of flexcp: "
                + ", ".join(LAYOUTS),
                repr(name),
                "choose one of them",
            )
        return name
    return balanced_layout(balancer, seq_len, ranks)


def _mask_named(given: Any, key: str | None) -> BlockMask:
    if isinstance(given, BlockMask):
        return given
    found = given.get(key)
    if not isinstance(found, BlockMask):
        raise FlexCPError(
            f"context_parallel_ptrr_mask_key as one of {', '.join(sorted(given))}",
            repr(key),
            "say whose work is to be shared out evenly, or choose the load balancer 'auto', which "
            "looks at all masks",
        )
    return found


def _document_ids(given: Any, positions: Tensor) -> Tensor:
    """int64 [B, S] from where documents start in all batch elements laid end to end."""
    batch, seq_len = positions.shape
    starts = given.cu_seq_q.to("cpu", torch.int64)
    if given.cu_seq_k is not given.cu_seq_q and not torch.equal(given.cu_seq_k, given.cu_seq_q):
        raise FlexCPError(
            "VarlenMetadata with the same documents for queries and keys",
            "others in cu_seq_k",
            "over ranks, every token is a query and a key",
        )
    rows = torch.arange(batch + 1) * seq_len
    if not bool(torch.isin(rows, starts).all()) or int(starts[-1]) != batch * seq_len:
        raise FlexCPError(
            f"documents within each of {batch} sequences of {seq_len} tokens",
            f"VarlenMetadata whose documents end at {starts.tolist()[:8]}",
            "start a new document with each sequence",
        )
    tokens = torch.arange(batch * seq_len)
    return (torch.searchsorted(starts, tokens, right=True) - 1).view(batch, seq_len)
