"""Timeline: what every group of ranks does when, as the price of a plan was computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.plan.cost import price
from flexcp.plan.plan import Plan
from flexcp.plan.work_profile import WorkProfile


@dataclass(frozen=True, eq=False)
class Spans:
    """When one kind of thing happens in one pass, by round and group of ranks."""

    passing: str
    """"forward" or "backward"."""
    kind: str
    """"swap" (rows for heads), "receive" (K and V), "compute" or "return" (gradients)."""
    rounds: tuple[int, ...]
    """The rounds in which it happens, counted on from part to part of the heads."""
    begin: Tensor
    """float64 [rounds, groups] Seconds from the beginning of the pass."""
    end: Tensor
    """float64 [rounds, groups] Seconds from the beginning of the pass; where it equals `begin`,
    nothing happens."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """Both passes of one mask."""

    spans: tuple[Spans, ...]
    """All that happens."""
    forward: float
    """Seconds of the forward pass."""
    backward: float
    """Seconds of the backward pass, which begins when forward is through."""


def timeline(plan: Plan, mask: str | None = None) -> Timeline:
    """What happens when, for one of the plan's masks.

    >>> import flexcp
    >>> plan = flexcp.make_plan(flexcp.masks.causal(), 4096, 4, schedule="exchange")
    >>> found = timeline(plan)
    >>> [(s.passing, s.kind, len(s.rounds)) for s in found.spans][:2]
    [('forward', 'compute', 4), ('forward', 'receive', 3)]
    >>> found.forward == plan.costs[""].forward
    True
    """
    name = plan.mask_name(mask)
    schedule = plan.schedules[name]
    kept: dict[tuple[str, str], list[tuple[int, Tensor, Tensor]]] = {}

    def record(passing: str, kind: str, round_: int, begin: Tensor, end: Tensor) -> None:
        kept.setdefault((passing, kind), []).append((round_, begin, end))

    profile = WorkProfile.of([plan.grids[name]], schedule.groups)
    cost = price(schedule, profile, plan.machine, plan.shape, record)
    spans = []
    for (passing, kind), events in kept.items():
        begin = torch.stack([event[1] for event in events])
        end = torch.stack([event[2] for event in events])
        spans.append(Spans(passing, kind, tuple(r for r, _, _ in events), begin, end))
    return Timeline(tuple(spans), cost.forward, cost.backward)
