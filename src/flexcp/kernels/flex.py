"""The flex kernel: torch's compiled FlexAttention, which is the fastest on CUDA.

It brings its own gradients. Its lse makes sinks a matter of one more term in each denominator.
This kernel has not run on hardware yet: its wiring is tested on torch's eager FlexAttention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from flexcp.eager import outside_of_inference_mode, tensors_to_keep
from flexcp.grid import BlockGrid
from flexcp.kernels.score import ScoreFunction

FlexAttention = Callable[..., tuple[Tensor, AuxOutput]]


@lru_cache(maxsize=1)
def compiled_flex_attention() -> FlexAttention:
    """FlexAttention of torch, compiled on its first call for each kind of input."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: FlexAttention = torch.compile(flex_attention)
    return compiled


def flex_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: BlockGrid | None,
    *,
    scale: float,
    score_mod: ScoreFunction | None = None,
    sinks: Tensor | None = None,
    max_scores: bool = False,
    options: Mapping[str, Any] | None = None,
    attend: FlexAttention | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, lse and the largest scores, differentiable by torch.

    Args:
        q: [B, H, Lq, D].
        k: [B, G, Lkv, D].
        v: [B, G, Lkv, Dv].
        grid: the mask; None allows every pair.
        scale: factor on the scores.
        score_mod: sees global positions, also where the grid begins later.
        sinks: [H] logits.
        max_scores: whether to return each row's largest score.
        options: torch's FlexKernelOptions.
        attend: what to call; torch's compiled FlexAttention by default.
    """
    attend = compiled_flex_attention() if attend is None else attend
    block_mask = None if grid is None else block_mask_for(grid, q.device)
    if grid is not None and score_mod is not None and (grid.q_start or grid.kv_start):
        score_mod = _shifted(score_mod, grid.q_start, grid.kv_start)
    out, aux = attend(
        q,
        k,
        v,
        score_mod,
        block_mask,
        scale,
        q.shape[1] != k.shape[1],
        False,
        None if options is None else dict(options),
        return_aux=AuxRequest(lse=True, max_scores=max_scores),
    )
    lse = aux.lse
    assert lse is not None
    if sinks is not None:
        total = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
        out = (out * (lse - total).exp().unsqueeze(-1)).to(q.dtype)
        lse = total
    return out, lse, aux.max_scores


def block_mask_for(grid: BlockGrid, device: torch.device) -> BlockMask:
    """The grid in torch's form on a device; made once and kept with the grid."""
    kept = grid.derived.once(BlockMasksByDevice, BlockMasksByDevice).block_masks
    found = kept.get(device)
    if found is None:
        with tensors_to_keep():
            found = grid.to_block_mask()
        with outside_of_inference_mode():
            found = found.to(device)
        if type(found.kv_indices) is Tensor:  # nothing that a FakeTensorMode made outlives it
            kept[device] = found
    return found


@dataclass(frozen=True, eq=False)
class BlockMasksByDevice:
    """A grid in torch's form, once for each device that it was asked for on."""

    block_masks: dict[torch.device, BlockMask] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the lists of tiles."""
        return sum(
            x.nbytes
            for block_mask in tuple(self.block_masks.values())
            for x in block_mask.as_tuple(flatten=True)
            if isinstance(x, Tensor)
        )


def _shifted(score_mod: ScoreFunction, q_start: int, kv_start: int) -> ScoreFunction:
    def moved(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score_mod(score, b, h, q_idx + q_start, kv_idx + kv_start)

    return moved
