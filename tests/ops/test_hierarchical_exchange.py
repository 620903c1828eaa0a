"""Rows that are passed on within a node give the results of one process, and its gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flexcp import Machine, make_plan, masks, testing
from tests.ops.test_parity_over_ranks import MASKS, compare


@pytest.mark.parametrize("name", ["causal", "documents", "window", "full"])
@pytest.mark.parametrize(("ranks", "per_node"), [(4, 2), (6, 3), (5, 2)])
@pytest.mark.parametrize("layout", ["head_tail", "balanced"])
def test_passing_rows_on_gives_the_result_of_one_process(name, ranks, per_node, layout):
    machine = replace(Machine.preset("h100-ib"), ranks_per_node=per_node)
    worst = compare(
        testing.simulate,
        ranks,
        MASKS[name],
        203,
        layout=layout,
        schedule="hierarchical",
        machine=machine,
    )
    assert worst < 1e-10


@pytest.mark.parametrize("name", ["causal", "full"])
def test_rows_that_auto_keeps_for_backward_are_passed_on_too(name):
    machine = replace(Machine.preset("h100-ib"), ranks_per_node=3, inter_bandwidth=1e6)
    options = {"layout": "head_tail", "machine": machine}
    shape = {"num_heads": 1, "head_dim": 8, "dtype": torch.float64, "batch": 2, "block_size": 16}
    schedule = make_plan(MASKS[name], 203, 6, **options, **shape).schedules[""]
    assert schedule.name == "hierarchical"
    assert schedule.keeps_kv
    heads = {"heads": 1, "kv_heads": 1}
    assert (
        compare(testing.simulate, 6, MASKS[name], 203, schedule="auto", **options, **heads) < 1e-10
    )


def test_elements_of_a_batch_with_layouts_of_their_own_pass_rows_on():
    machine = replace(Machine.preset("h100-ib"), ranks_per_node=2)
    mask = masks.document(lengths=[[40, 60], [70, 30]]) & masks.causal()
    assert compare(testing.simulate, 4, mask, 100, schedule="hierarchical", machine=machine) < 1e-10
