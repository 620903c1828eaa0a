"""Plans that balance tokens: the rest of the model, and how far counts may differ."""

from __future__ import annotations

import numpy as np
import pytest

from flexcp import make_plan, masks


@pytest.mark.parametrize("slack", [0, 0.05, 0.2])
@pytest.mark.parametrize(("lengths", "ranks"), [([2, 4, 3], 4), ([2, 4, 3, 3, 4, 5], 8)])
def test_few_tokens_per_rank_are_evened_out_one_by_one(lengths, ranks, slack):
    """All that a rank has may be single rows, of which no end can be given."""
    mask, tokens = masks.causal() & masks.document(lengths=lengths), sum(lengths)
    plan = make_plan(mask, tokens, ranks, token_slack=slack)
    plan.check()
    assert int(plan.layout.counts.max()) - int(plan.layout.counts.min()) <= 1


def test_all_ranks_may_share_heads_also_with_the_rest_of_the_model():
    mask = masks.causal() & masks.document(lengths=[2469, 216])
    how = {"num_heads": 40, "head_dim": 128, "machine": "pcie", "flops_per_token": 1.0}
    auto = make_plan(mask, 2685, 8, **how)
    ulysses = make_plan(mask, 2685, 8, schedule="ulysses", **how)
    assert auto.stats().predicted_seconds <= 1.02 * ulysses.stats().predicted_seconds


def test_numbers_of_numpy_are_numbers():
    mask = masks.causal()
    plan = make_plan(mask, 512, 2, flops_per_token=np.float32(1e6), token_slack=np.float64(0.1))
    same = make_plan(mask, 512, 2, flops_per_token=1e6, token_slack=0.1)
    assert plan.layout == same.layout
