"""What ranks compare before a call of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from flexcp.comm.agreement import Agreement
from flexcp.eager import outside_of_transforms, run_eagerly_on_cpu
from flexcp.masks.digest import mask_digest
from flexcp.plan import Plan

_FIX = (
    "make the plan from the same mask and numbers on every rank, pass the same kind of "
    "tensors, and need gradients on all ranks or on none"
)
_SEEDS = (
    "; pass the same dropout_seed on every rank, or none, with torch's default CPU generators in "
    "the same state (torch.manual_seed)"
)

ScoreModKind = Literal["none", "eager", "traced"]
"""How a score function is run, if there is one."""


@dataclass(frozen=True)
class CallKind:
    """A call of attention over a plan without its tensors: what all ranks have to do alike.

    Calls of one kind run the same programs. (Rows differ between ranks, and are not compared.)
    """

    mask: str | None
    """The name of the mask, as it was given."""
    shape: tuple[int, ...]
    """B, H, G, D, Dv, and the rows of queries and keys."""
    dtype: torch.dtype
    device: torch.device
    scale: float | None
    """As it was given."""
    score_mod: ScoreModKind
    sinks: bool
    gradients: bool
    """Whether a backward pass will follow."""
    kernel: str | None = None
    """The kernel that was asked for by name."""
    dropout_p: float = 0.0
    """The share of weights that are dropped; which of them, a seed says that may change."""
    first_head: int = 0
    """The global number of the first query head, where heads are sharded outside of the plan."""

    def agreement(self, plan: Plan, score_mod: str = "") -> Agreement:
        """What ranks compare before the first call of the kind.

        `score_mod` is a digest of what the score function does, if there is one that is known.
        """
        batch, heads, kv_heads, d, dv, *_ = self.shape
        mask = plan.mask_name(self.mask)
        with outside_of_transforms():
            of_plan = plan.memo.kept(
                ("facts", mask), lambda: _facts_of_plan(plan, mask), per_mask=True
            )
        extras = {"none": [], "eager": ["score_mod"], "traced": ["score_mod", "traced"]}
        given = [*extras[self.score_mod], *(["sinks"] if self.sinks else [])]
        facts = {
            **of_plan,
            "batch": str(batch),
            "query heads": str(heads),
            "kv heads": str(kv_heads),
            "head dim": f"{d} and {dv}",
            "dtype": str(self.dtype),
            "scale": str(self.scale),
            "optional arguments": ", ".join(given) or "none",
            "gradients": "needed" if self.gradients else "not needed",
        }
        if score_mod:
            facts["what score_mod does"] = score_mod
        if self.dropout_p:
            facts["dropout_p"] = str(self.dropout_p)
        if self.first_head:
            facts["first query head"] = str(self.first_head)
        return Agreement(
            "make the same call of attention",
            f"attention under mask {mask!r}" if mask else "attention",
            facts,
            "make the plan from the same mask and numbers on every rank, pass the same kind of "
            "tensors, and need gradients on all ranks or on none"
            + (_SEEDS if self.dropout_p else ""),
        )


@run_eagerly_on_cpu
def _facts_of_plan(plan: Plan, mask: str) -> Mapping[str, str]:
    """What is the same in every call with a plan and mask."""
    grid, schedule = plan.grids[mask], plan.schedules[mask]
    # Whole tiles may be alike where pairs are not, so the mask itself is compared as well.
    return {
        "plan": f"{plan.seq_len} tokens, {plan.layout.name} + {schedule.name}, for "
        f"{plan.shape.num_heads} heads ({plan.fingerprint()})",
        "mask": f"{mask!r}, {grid.mask.name} ({mask_digest(grid.mask)})",
    }
