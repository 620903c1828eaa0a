"""Agreement: before data moves, ranks compare what they are about to do."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor

from flexcp.comm import Transport
from flexcp.eager import planning
from flexcp.errors import FlexCPError
from flexcp.masks.digest import mask_digest
from flexcp.plan import Plan

EXTRAS = "optional arguments"
"""The name of one of the facts."""
_DIGEST = 16
"""Bytes that every rank sends to every other before each call."""


def facts_of(
    plan: Plan, mask: str, q: Tensor, k: Tensor, v: Tensor, scale: float | None, extras: str
) -> dict[str, str]:
    """What all ranks have to do alike in a call of attention."""
    return {
        **_facts_of_plan(plan, mask),
        "batch": str(q.shape[0]),
        "query heads": str(q.shape[1]),
        "kv heads": str(k.shape[1]),
        "head dim": f"{q.shape[3]} and {v.shape[3]}",
        "dtype": str(q.dtype),
        "scale": str(scale),
        EXTRAS: extras or "none",
    }


def agree(transport: Transport, facts: Mapping[str, str]) -> None:
    """Raises on every rank if the ranks' facts differ, saying what differs between whom."""
    mine = "\n".join(f"{name}={value}" for name, value in facts.items())
    short = hashlib.sha256(mine.encode()).digest()[:_DIGEST]
    if len(set(transport.all_bytes(short))) == 1:
        return
    every = [
        dict(line.split("=", 1) for line in text.split("\n")) for text in transport.all_agree(mine)
    ]
    differences = []
    for name in facts:
        by_value: dict[str, list[int]] = {}
        for rank, other in enumerate(every):
            by_value.setdefault(other.get(name, "?"), []).append(rank)
        if len(by_value) > 1:
            told = "; ".join(f"{value} on ranks {ranks}" for value, ranks in by_value.items())
            differences.append(f"{name}: {told}")
    raise FlexCPError(
        "all ranks to make the same call of attention",
        " | ".join(differences),
        "make the plan from the same mask and numbers on every rank, pass the same kind of "
        "tensors, and need gradients on all ranks or on none",
    )


def _facts_of_plan(plan: Plan, mask: str) -> Mapping[str, str]:
    """What is the same in every call with this plan and mask; computed once."""
    kept: dict[str, Mapping[str, str]] = vars(plan).setdefault("_facts", {})
    if mask not in kept:
        kept[mask] = _tell(plan, mask)
    return kept[mask]


@planning
def _tell(plan: Plan, mask: str) -> Mapping[str, str]:
    grid, schedule = plan.grids[mask], plan.schedules[mask]
    # Whole tiles may be alike where pairs are not, so the mask itself is compared as well.
    return {
        "plan": f"{plan.seq_len} tokens, {plan.layout.name} + {schedule.name}, for "
        f"{plan.shape.num_heads} heads ({plan.fingerprint()})",
        "mask": f"{mask!r}, {grid.mask.name} ({mask_digest(grid.mask)})",
    }
