"""A timeline is the price of a plan, played through."""

from __future__ import annotations

import pytest
import torch

from flexcp import make_plan, masks
from flexcp.plan.timeline import timeline

CASES = [
    ("exchange", 5, "auto"),
    ("ring", 5, "contiguous"),
    ("allgather", 4, "head_tail"),
    ("ulysses", 4, "contiguous"),
    ("hybrid", (3, 2), "balanced"),
]


def plan_for(schedule, mesh, layout):
    return make_plan(
        masks.causal(), 5000, mesh, layout=layout, schedule=schedule, num_heads=4, head_dim=32
    )


@pytest.mark.parametrize(("schedule", "mesh", "layout"), CASES)
def test_passes_end_when_their_price_says(schedule, mesh, layout):
    plan = plan_for(schedule, mesh, layout)
    found = timeline(plan)
    price = plan.costs[""]
    assert [found.forward, found.backward] == pytest.approx([price.forward, price.backward], 1e-12)
    for passing, seconds in (("forward", found.forward), ("backward", found.backward)):
        ends = [float(s.end.max()) for s in found.spans if s.passing == passing]
        assert max(ends) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(("schedule", "mesh", "layout"), CASES)
def test_nothing_happens_twice_at_once_on_a_channel(schedule, mesh, layout):
    plan = plan_for(schedule, mesh, layout)
    for passing in ("forward", "backward"):
        for channel in (("compute",), ("receive", "return")):
            spans = [s for s in timeline(plan).spans if s.passing == passing and s.kind in channel]
            if not spans:
                continue
            begin = torch.cat([s.begin for s in spans])
            end = torch.cat([s.end for s in spans])
            for group in range(begin.shape[1]):
                there = end[:, group] > begin[:, group]
                order = begin[there, group].argsort()
                starts, stops = begin[there, group][order], end[there, group][order]
                assert bool((starts[1:] >= stops[:-1] - 1e-12).all())


def test_work_waits_for_its_rows():
    found = timeline(plan_for("exchange", 5, "contiguous"))
    compute, receive = (
        next(s for s in found.spans if (s.passing, s.kind) == ("forward", kind))
        for kind in ("compute", "receive")
    )
    for row, at in enumerate(receive.rounds):
        works = compute.rounds.index(at)
        there = (receive.end[row] > receive.begin[row]) & (
            compute.end[works] > compute.begin[works]
        )
        assert bool((compute.begin[works] >= receive.end[row] - 1e-12)[there].all())
