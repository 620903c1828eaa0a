"""The whole examination: everything is accounted for, whatever happens in between."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tools.doctor.tiny import CPU, TINY, request, soon

from flexcp.kernels.flash import FlashKernel
from flexcp.kernels.registry import KERNELS
from flexcp.plan import PRESETS
from flexcp.tools.doctor import examine as module
from flexcp.tools.doctor.examine import Chart, RanksEnd, examine
from flexcp.tools.doctor.findings import Doing, Finding, hear_nothing
from flexcp.tools.doctor.speed import Timings, speed


@pytest.fixture(autouse=True)
def two_kernels(monkeypatch):
    """Two kernels and one that a CPU can't run: Triton's interpreter has tests of its own."""
    few = {name: KERNELS[name] for name in ("flash", "scored", "flex")}
    monkeypatch.setattr("flexcp.tools.doctor.examine.KERNELS", few)
    monkeypatch.setattr("flexcp.tools.doctor.speed.KERNELS", few)


def right_ranks(request, seconds, *, listen, hear_machine):
    for check in request.rank_checks():
        listen(Finding(check.section, check.name, "passed", "right"))
    hear_machine(PRESETS[0])
    return RanksEnd()


def outcomes(found):
    return {f"{f.section}: {f.name}": f.outcome for f in found.findings}


def test_everything_is_found_and_the_fastest_kernels_come_with_it():
    heard = []
    found = examine(request(), right_ranks, listen=heard.append)
    assert not found.failures
    assert not found.interrupted
    assert found.machine == PRESETS[0]
    assert outcomes(found)["kernels: flash, float32"] == "passed"
    assert outcomes(found)["kernels: flex, float32"] == "not run"
    assert outcomes(found)["speed: window"] == "measured"
    assert {order.kind for order in found.orders} == {
        "full", "causal", "documents", "window", "arbitrary", "score function"
    }  # fmt: skip
    scores = next(order for order in found.orders if order.kind == "score function")
    assert scores.kernels == ("scored",)
    assert [f for f in heard if isinstance(f, Finding)]
    doing = next(event for event in heard if isinstance(event, Doing))
    assert doing.name == "flash, float32"
    assert 0 < doing.seconds <= TINY.seconds


def test_a_wrong_kernel_is_timed_but_never_preferred(monkeypatch):
    right = FlashKernel.forward

    def wrong(self, *args, **kwargs):
        found = right(self, *args, **kwargs)
        return found if self.fused is None else replace(found, out=found.out * 1.01)

    monkeypatch.setattr(FlashKernel, "forward", wrong)
    found = examine(request("kernels", "speed"), right_ranks, listen=hear_nothing)
    assert outcomes(found)["kernels: flash, float32"] == "failed"
    assert "1 FAILED (kernels: flash, float32)" in found.verdict
    assert all("flash" not in order.kernels for order in found.orders)


def test_unchecked_kernels_are_never_preferred():
    found = examine(request("speed"), right_ranks, listen=hear_nothing)
    assert outcomes(found)["speed: causal"] == "measured"
    assert outcomes(found)["kernels: flash, float32"] == "not run"
    assert found.orders == ()


def test_an_interruption_keeps_what_is_done_and_names_the_rest():
    def listen(event):
        if isinstance(event, Doing) and event.name == "scored, float32":
            raise KeyboardInterrupt

    found = examine(request("environment", "kernels", "ranks"), right_ranks, listen=listen)
    assert found.interrupted
    by_name = outcomes(found)
    assert by_name["environment: versions"] == "measured"
    assert by_name["kernels: flash, float32"] == "passed"
    assert by_name["kernels: scored, float32"] == by_name["ranks: transport"] == "not run"
    why = {f.name: f.said for f in found.findings}
    assert why["transport"] == "it was stopped"
    assert why["window"] == "not asked for"
    assert found.verdict.startswith("stopped before its end; all right: 1 checks passed")


def test_ranks_that_were_stopped_end_the_examination():
    found = examine(
        request("ranks", "speed"), lambda *a, **kw: RanksEnd(interrupted=True), listen=hear_nothing
    )
    assert found.interrupted
    assert outcomes(found)["speed: causal"] == "not run"


def test_ranks_that_die_are_blamed_on_the_check_that_ran():
    def dying(request, seconds, *, listen, hear_machine):
        listen(Finding("ranks", "devices", "passed", "right"))
        return RanksEnd("torchrun's exit code is 1")

    found = examine(request("ranks", "links"), dying, listen=hear_nothing)
    assert outcomes(found)["ranks: transport"] == "failed"
    assert "while it ran: torchrun's exit code is 1" in found.failures[0].said
    assert outcomes(found)["ranks: plan by ring"] == "not run"
    assert len(found.failures) == 1


def test_a_check_that_raises_has_failed_and_the_next_one_runs():
    def broken(deadline):
        raise RuntimeError("no such device")

    chart = Chart(request(), hear_nothing)
    fine = Finding("kernels", "b", "passed", "right")
    planned = [("kernels", "a", 1.0, broken), ("kernels", "b", 1.0, lambda deadline: fine)]
    module._one_by_one(chart, planned, soon())
    assert [f.outcome for f in chart.findings] == ["failed", "passed"]
    assert "no such device" in chart.findings[0].said


def test_the_kernel_of_the_rules_stays_unless_it_is_beaten_clearly():
    timings = Timings(TINY, CPU, frozenset(KERNELS))
    timings.defaults |= {"causal": "flash", "window": "flash", "full": "flash"}
    timings.seconds |= {
        "causal": {"flash": 1.04, "scored": 1.0},
        "window": {"flash": 1.2, "scored": 1.0},
        "full": {"flash": 1.2, "scored": 1.0},
    }
    timings.noise["full"] = 0.3
    first = {order.kind: order.kernels[0] for order in timings.orders()}
    assert first == {"causal": "flash", "window": "scored", "full": "flash"}
    busy = replace(timings, certain=False)
    assert {order.kernels[0] for order in busy.orders()} == {"flash"}


def test_sizes_follow_from_the_time_that_there_is():
    short, long = (
        speed("causal", Timings(replace(TINY, longest=1024), CPU), module.Deadline.within(seconds))
        for seconds in (0.001, 60.0)
    )
    assert short.rows[0]["tokens"] == 256
    assert long.rows[0]["tokens"] == 1024
    assert {row["who"] for row in long.rows} >= {"flexcp flash", "SDPA is_causal"}
    assert all(row["forward ms"] > 0 for row in long.rows if "tokens" in row)
