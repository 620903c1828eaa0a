"""Real ranks: what one of them raises is what the caller sees."""

from __future__ import annotations

import pytest

from flexcp import FlexCPError, make_plan, masks, testing
from flexcp.comm import RankError


def test_a_refusal_by_flexcp_is_one_to_the_caller_as_well():
    def fn(mesh):
        make_plan(masks.causal(), 100, mesh, schedule="hybrid", num_heads=4)

    with pytest.raises(FlexCPError, match=r"failed: FlexCPError: .*a mesh of two dim") as error:
        testing.spawn(fn, 2, timeout=20)
    found = error.value
    assert isinstance(found, RankError)
    assert isinstance(found.__cause__, FlexCPError)
    assert found.fix == found.__cause__.fix
    assert set(found.failures) == {0, 1}


def test_simulated_ranks_within_a_real_one_keep_their_error():
    def fn(mesh):
        testing.simulate(lambda inner: make_plan(masks.causal(), 0, inner), 2)

    with pytest.raises(
        FlexCPError, match=r"rank 0 failed: .*rank 0 failed: .*seq_len to be an int"
    ):
        testing.spawn(fn, 1, timeout=20)
