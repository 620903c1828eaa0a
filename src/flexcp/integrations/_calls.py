"""Calls of torch's attention functions, answered by a plan.

A call may repeat what the plan's mask says, or say less. What it says beyond, or what a plan can't
do, is refused: nothing that the caller wrote is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
)

from flexcp.compat._cp_sdpa import refuse_mask, with_heads
from flexcp.eager import run_eagerly_on_cpu
from flexcp.errors import FlexCPError
from flexcp.grid import BlockGrid, BlockKind, build_block_grid
from flexcp.integrations._torch_flex import (
    refuse_max_scores,
    refuse_options,
    require_plain_call,
)
from flexcp.masks import Mask, as_mask, causal
from flexcp.ops.api import attention, attention_of_heads
from flexcp.ops.arguments import Seed
from flexcp.ops.sharded import shifted
from flexcp.plan import Plan
from flexcp.torch_names import unmodified_score

ScoreFunction = Callable[..., Tensor]

_MOST_KEPT = 32
"""Block masks that a plan remembers to have compared."""


@dataclass(frozen=True, eq=False)
class PlannedAttention:
    """Attention under one mask of a plan, by the signatures of torch's functions."""

    plan: Plan
    """Whose rows are whose."""
    mask: str
    """The name of the mask."""
    first_head: int
    """Number of the first query head that this rank has."""
    compared: ComparedMasks
    """What is known of the plan's masks."""

    def sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """As `torch.nn.functional.scaled_dot_product_attention`."""
        refuse_mask(attn_mask)
        if is_causal and not self.compared.is_within_causal(self.plan, self.mask):
            raise FlexCPError(
                "is_causal=False, since the plan's mask lets queries see later keys",
                "is_causal=True",
                "make the plan with masks.causal() & your mask, or drop is_causal",
            )
        lead = query.shape[:-2]
        q, k, v = (with_heads(x) for x in (query, key, value))
        out, _ = self._run(q, k, v, None, scale, enable_gqa, None, dropout_p)
        return out.reshape(*lead, *out.shape[-2:])

    def flex(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: ScoreFunction | None = None,
        block_mask: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options: Mapping[str, Any] | None = None,
        *,
        return_aux: AuxRequest | None = None,
        sinks: Tensor | None = None,
        dropout_p: float = 0.0,
        dropout_seed: Seed | None = None,
    ) -> Any:
        """As `flex_attention`, of torch or of flexcp."""
        if kernel_options:
            refuse_options(str(dict(kernel_options)))
        if return_aux is not None and return_aux.max_scores:
            refuse_max_scores()
        if return_lse and return_aux is not None:
            raise FlexCPError(
                "return_lse or return_aux", "both", "pass return_aux=AuxRequest(lse=True) alone"
            )
        if block_mask is not None:
            _require_repeated(self.compared, self.plan, self.mask, block_mask)
        out, lse = self._run(
            query, key, value, score_mod, scale, enable_gqa, sinks, dropout_p, dropout_seed
        )
        if return_aux is not None:
            return out, AuxOutput(lse if return_aux.lse else None, None)
        return (out, lse) if return_lse else out

    def flex_op(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: ScoreFunction,
        block_mask: tuple[Any, ...],
        scale: float,
        kernel_options: Mapping[str, Any],
        *captured: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As the operator that torch's `flex_attention` ends in: out, lse to base 2, no max_scores.

        `block_mask` and `kernel_options` are as torch fills them in.
        """
        require_plain_call(block_mask, kernel_options, captured)
        mod = None if score_mod is unmodified_score else score_mod
        out, lse = self._run(query, key, value, mod, scale, True, None)
        return out, lse / math.log(2.0), query.new_empty(0)

    def _run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: ScoreFunction | None,
        scale: float | None,
        enable_gqa: bool,
        sinks: Tensor | None,
        dropout_p: float = 0.0,
        dropout_seed: Seed | None = None,
    ) -> tuple[Tensor, Tensor]:
        if not enable_gqa and query.dim() == 4 and query.shape[1] != key.shape[1]:
            raise FlexCPError(
                "as many heads in key and value as in query",
                f"{query.shape[1]} query heads and {key.shape[1]} key heads",
                "pass enable_gqa=True",
            )
        rewrap = _DTensors.of(query, key, value)
        q, k, v = (rewrap.local(x) for x in (query, key, value))
        if score_mod is not None:
            score_mod = shifted(score_mod, 0, self.first_head)
        drops: dict[str, Any] = {"dropout_p": dropout_p, "dropout_seed": dropout_seed}
        if dropout_p and self.first_head:
            out, lse = attention_of_heads(
                q, k, v, self.plan, self.mask, score_mod, scale, sinks, **drops,
                first_head=self.first_head,
            )  # fmt: skip
            return rewrap.whole(out), rewrap.whole(lse)
        out, lse = cast(
            tuple[Tensor, Tensor],
            attention(
                q,
                k,
                v,
                self.plan,
                mask=self.mask,
                score_mod=score_mod,
                scale=scale,
                sinks=sinks,
                return_lse=True,
                **drops,
            ),
        )
        return rewrap.whole(out), rewrap.whole(lse)


@dataclass(frozen=True, eq=False)
class _DTensors:
    """What query, key and value are sharded by beside the sequence, if they are DTensors."""

    mesh: Any
    placements: tuple[Any, ...]

    @classmethod
    def of(cls, *tensors: Tensor) -> _DTensors:
        if not any(isinstance(x, DTensor) for x in tensors):
            return cls(None, ())
        kinds = [(x.device_mesh, x.placements) if isinstance(x, DTensor) else None for x in tensors]
        first = kinds[0]
        allowed = (Shard(0), Shard(1), Replicate())
        if first is None or any(k != first for k in kinds) or not set(first[1]) <= set(allowed):
            told = ", ".join("a plain tensor" if k is None else str(k[1]) for k in kinds)
            raise FlexCPError(
                "query, key and value as plain tensors of this rank's rows, or as DTensors that "
                "are sharded alike along batch or heads",
                told,
                "call .to_local(), or let the projections return local tensors "
                "(use_local_output=True)",
            )
        return cls(*first)

    def local(self, x: Tensor) -> Tensor:
        return x.to_local() if isinstance(x, DTensor) else x

    def whole(self, x: Tensor) -> Tensor:
        if self.mesh is None:
            return x
        return DTensor.from_local(x, self.mesh, self.placements, run_check=False)


@dataclass(frozen=True, eq=False)
class ComparedMasks:
    """How a plan's masks compare with what calls of attention say: worked out once."""

    within_causal: dict[str, bool] = field(default_factory=dict)
    """Whether no query of a mask sees a later key, by name."""
    repeated: dict[tuple[str, int], Any] = field(default_factory=dict)
    """Block masks that allow all that a mask allows, by its name and their id; the latest last."""

    @classmethod
    def of(cls, plan: Plan) -> ComparedMasks:
        """What is known of a plan's masks, the same object for the same plan."""
        return plan.memo.kept(("compared masks",), cls, per_mask=True)

    def is_within_causal(self, plan: Plan, mask: str) -> bool:
        """Whether no query of a plan's mask sees a later key: then `is_causal` only repeats it."""
        if mask not in self.within_causal:
            self.within_causal[mask] = _is_within(plan.grids[mask], causal())
        return self.within_causal[mask]


@run_eagerly_on_cpu
def _require_repeated(compared: ComparedMasks, plan: Plan, mask: str, given: Any) -> None:
    """Raises if a call's block mask forbids a pair that the plan's mask allows."""
    kept = compared.repeated
    if (mask, id(given)) in kept:
        return
    if isinstance(given, BlockMask):
        other: BlockGrid | Mask = BlockGrid.from_block_mask(given)
    elif isinstance(given, BlockGrid):
        other = given
    else:
        other = as_mask(given)
    if isinstance(other, BlockGrid) and (other.q_len, other.kv_len) != (plan.seq_len, plan.seq_len):
        raise FlexCPError(
            f"a block_mask of the whole sequence, {plan.seq_len} x {plan.seq_len}, or none",
            f"one of {other.q_len} x {other.kv_len}",
            "leave block_mask out: the plan's mask holds",
        )
    if not _is_within(plan.grids[mask], other):
        raise FlexCPError(
            "a block_mask that allows every pair that the plan's mask allows",
            "one that forbids some of them",
            "make the plan with this mask, and leave block_mask out",
        )
    while len(kept) >= _MOST_KEPT:
        kept.pop(next(iter(kept)))
    kept[mask, id(given)] = given


@run_eagerly_on_cpu
def _is_within(grid: BlockGrid, other: BlockGrid | Mask) -> bool:
    """Whether `other` allows every pair that a grid allows."""
    if grid is other or grid.mask is other:
        return True
    whole = other if isinstance(other, Mask) else _as_mask(other)
    beyond = build_block_grid(
        _as_mask(grid) & ~whole,
        grid.q_len,
        grid.kv_len,
        block_size=grid.block_size,
        batch=grid.batch,
        heads=grid.heads,
    ).counts()
    return beyond["partial"] + beyond["full"] == 0


def _as_mask(grid: BlockGrid) -> Mask:
    """What a grid allows; its tiles count also where its mask would say otherwise."""
    if grid.effort is not None:  # built from the mask, so that they agree
        return grid.mask
    kinds, (rows, cols), mask_mod = grid.to_dense(), grid.block_size, grid.mask.mask_mod
    batch, heads = grid.batch > 1, grid.heads > 1

    def allowed(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        kind = kinds[b if batch else 0, h if heads else 0, q_idx // rows, kv_idx // cols]
        partial = (kind == BlockKind.PARTIAL) & mask_mod(b, h, q_idx, kv_idx)
        return (kind == BlockKind.FULL) | partial

    return Mask(allowed)
