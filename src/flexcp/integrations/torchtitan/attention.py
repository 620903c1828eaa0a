"""torchtitan's inner attention modules, answered by the plan that comes in place of their masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from flexcp.errors import FlexCPError
from flexcp.integrations.torchtitan.names import Names
from flexcp.ops.api import attention
from flexcp.plan import Plan

VarlenWindow = tuple[int, int]
"""Keys that a query sees to the left and to the right; -1 is all."""

CAUSAL = "causal"
"""Name of the mask that SDPA's is_causal means."""


@dataclass(frozen=True, eq=False)
class PlannedMasks:
    """Stands for a BlockMask or VarlenMetadata on its way through torchtitan's models."""

    plan: Plan
    """Of the batch that is on its way."""
    by_window: Mapping[VarlenWindow | None, str]
    """Name of the mask for modules with this window_size; None for modules that have none."""


@dataclass(eq=False)
class ParallelModules:
    """What is known of the attention modules over one mesh."""

    windows: set[VarlenWindow | None] = field(default_factory=set)
    """The window_size of each that has one; None if some have none."""
    has_sdpa: bool = False
    shape: dict[str, Any] = field(default_factory=dict)
    """Heads, head dim and type, once a module has run: planning gets better with them."""

    def add(self, module: Any, names: Names) -> None:
        """Makes a module attend over all ranks."""
        window: VarlenWindow | None = None
        if isinstance(module, names.varlen):
            left, right = module.window_size
            window = (left, right)
        elif not isinstance(module, names.flex | names.sdpa):
            raise FlexCPError(
                "FlexAttention, VarlenAttention or ScaledDotProductAttention of torchtitan",
                f"{type(module).__name__}",
                "leave context parallelism off for this model, or call disable()",
            )
        self.windows.add(window)
        self.has_sdpa = self.has_sdpa or isinstance(module, names.sdpa)
        module.forward = _PlannedForward(self, module, window).run


@dataclass(frozen=True, eq=False)
class _PlannedForward:
    """The forward pass of an inner attention module over all ranks."""

    modules: ParallelModules
    module: nn.Module
    window: VarlenWindow | None
    """What the module has as window_size, if it has one."""

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_masks: Any = None,
        score_mod: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: ARG002
        is_causal: bool = True,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **rest: Any,
    ) -> Tensor:
        """As torchtitan's modules; tensors are this rank's rows, [B, L, heads, head dim]."""
        planned = self._planned(attention_masks, is_causal)
        refused = {"score_mod": score_mod, **rest}
        given = [name for name, x in refused.items() if x is not None]
        if given:
            raise FlexCPError(
                "attention without " + ", ".join(given),
                f"{type(self.module).__name__} called with it",
                "torchtitan's own context parallelism refuses it too; leave it out",
            )
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, heads, L, head dim]
        if not self.modules.shape and not torch.compiler.is_compiling():
            self.modules.shape.update(
                num_heads=q.shape[1], num_kv_heads=k.shape[1], head_dim=q.shape[3], dtype=q.dtype
            )
        name = planned.by_window[self.window]
        out, lse = cast(
            tuple[Tensor, Tensor],
            attention(q, k, v, planned.plan, mask=name, scale=scale, return_lse=True),
        )
        out = out.transpose(1, 2)
        return out if out_transform is None else out_transform(out, lse.transpose(1, 2))

    def _planned(self, masks: Any, is_causal: bool) -> PlannedMasks:
        kind = type(self.module).__name__
        if not isinstance(masks, PlannedMasks):
            raise FlexCPError(
                "attention_masks that prepare_context_parallel_input returned, with flexcp enabled",
                f"{kind} called with {type(masks).__name__}",
                "enable flexcp before the trainer is made, and until it has ended; models that "
                "shard their inputs by other means, such as Flux, need disable()",
            )
        if not is_causal:
            raise FlexCPError(
                "causal attention", f"{kind} with is_causal=False", "call disable() for this model"
            )
        return masks
