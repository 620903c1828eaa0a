"""What ranks compare before a call of attention, and how one that can't make it tells others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor

from flexcp.comm import Transport
from flexcp.comm.agreement import agree
from flexcp.eager import run_eagerly_on_cpu
from flexcp.masks.digest import mask_digest
from flexcp.plan import Plan

EXTRAS = "optional arguments"
"""The name of one of the facts."""


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


def agree_on_call(transport: Transport, facts: Mapping[str, str]) -> None:
    """Raises on every rank if the ranks' calls differ, saying what differs between whom."""
    agree(
        transport,
        "make the same call of attention",
        facts,
        "make the plan from the same mask and numbers on every rank, pass the same kind of "
        "tensors, and need gradients on all ranks or on none",
    )


@contextmanager
def refusing(plan: Plan) -> Iterator[None]:
    """Tells the other ranks if this one can't make the call that they make."""
    try:
        yield
    except Exception as error:
        transport: Any = plan.ranks.transport if isinstance(plan, Plan) else None
        if transport is not None:
            with suppress(Exception):  # what went wrong here matters more
                transport.refuse(f"{type(error).__name__}: {error}")
        raise


def _facts_of_plan(plan: Plan, mask: str) -> Mapping[str, str]:
    """What is the same in every call with this plan and mask; computed once."""
    kept: dict[str, Mapping[str, str]] = vars(plan).setdefault("_facts", {})
    if mask not in kept:
        kept[mask] = _tell(plan, mask)
    return kept[mask]


@run_eagerly_on_cpu
def _tell(plan: Plan, mask: str) -> Mapping[str, str]:
    grid, schedule = plan.grids[mask], plan.schedules[mask]
    # Whole tiles may be alike where pairs are not, so the mask itself is compared as well.
    return {
        "plan": f"{plan.seq_len} tokens, {plan.layout.name} + {schedule.name}, for "
        f"{plan.shape.num_heads} heads ({plan.fingerprint()})",
        "mask": f"{mask!r}, {grid.mask.name} ({mask_digest(grid.mask)})",
    }
