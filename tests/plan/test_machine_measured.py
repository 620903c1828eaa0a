"""Machine.measure: this computer in the cost model's numbers."""

from __future__ import annotations

import math
import time

import pytest
import torch

from flexcp import FlexCPError, masks
from flexcp.plan import Machine, make_plan


def test_a_machine_is_measured_by_the_attention_that_runs_on_it(monkeypatch):
    clock, operations = [0.0], []

    def attention(q, k, v):
        assert torch.get_num_threads() == 1
        operations.append(4 * q.numel() * k.shape[2])
        clock[0] += 0.5

    monkeypatch.setattr(time, "process_time", lambda: clock[0])
    threads = torch.get_num_threads()
    machine = Machine.measure(seconds=0.01, attention=attention)
    assert machine.flops == operations[0] / 0.5
    assert torch.get_num_threads() == threads
    with pytest.raises(FlexCPError, match=r"attention, a function of q, k and v.*flex_attention"):
        Machine.measure(attention=lambda q: q)


@pytest.mark.parametrize("options", [{}, {"seconds": 0.01}], ids=["defaults", "in short"])
def test_a_machine_can_be_measured(options):
    machine = Machine.measure(**options)
    numbers = (machine.flops, machine.intra_bandwidth, machine.latency, machine.message)
    assert all(math.isfinite(x) and x > 0 for x in numbers)
    assert machine.inter_bandwidth == machine.intra_bandwidth
    plan = make_plan(masks.causal(), 100, 2, machine=machine)
    assert plan.machine is machine
    assert plan.stats().predicted_seconds > 0
