"""Where messages carry no tags, digests behind the rows tell rows of another call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flexcp
from flexcp import FlexCPError, masks, testing
from flexcp.comm import CallLabel
from flexcp.comm.digests import Digests
from flexcp.comm.process import ProcessTransport

X = torch.randn(1, 2, 60, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
FULL = masks.full()
EXPECTED = flexcp.flex_attention(X, X, X, block_mask=FULL)


class Tagless(ProcessTransport):
    """Gloo, used as if it matched messages by their order alone, as NCCL does."""

    def carries_tags(self, x):  # noqa: ARG002
        return False


def plan_for(mesh, schedule):
    plan = flexcp.make_plan(
        FULL, 60, mesh, layout="contiguous", schedule=schedule, num_heads=2, head_dim=8,
        dtype=torch.float64,
    )  # fmt: skip
    given = plan.transport
    tagless = Tagless(given.group, given.members, given.rank)
    return replace(plan, ranks=replace(plan.ranks, transport=tagless))


@pytest.mark.parametrize("schedule", ["ring", "exchange", "allgather", "ulysses"])
def test_without_tags_results_are_those_of_one_process(schedule):
    def rank(mesh):
        plan = plan_for(mesh, schedule)
        x = plan.shard(X, 2).requires_grad_()
        for _ in range(3):
            out = flexcp.attention(x, x, x, plan)
            torch.testing.assert_close(out.detach(), plan.shard(EXPECTED, 2))
            out.sum().backward()

    testing.spawn(rank, 2)


@pytest.mark.parametrize("schedule", ["ring", "allgather"])
def test_rows_of_another_call_are_told_at_the_next(schedule):
    def rank(mesh):
        plan = plan_for(mesh, schedule)
        x = plan.shard(X, 2).requires_grad_()
        outs = [flexcp.attention(x, x, x, plan) for _ in range(2)]
        order = (0, 1) if mesh.get_rank() else (1, 0)
        for number in order:  # each rank gets the other's rows of another call
            outs[number].sum().backward()
        with pytest.raises(FlexCPError, match=r"round \d of the .* from ranks \[\d\]") as caught:
            flexcp.attention(x, x, x, plan)
        assert "rows of another call" in str(caught.value)
        assert "the plan and kind of call" in str(caught.value)

    testing.spawn(rank, 2)


def test_nothing_is_raised_before_the_next_call_looks():
    label = CallLabel("attention", b"a" * 16, 3).passing("forward").round("rows", 1)
    other = CallLabel("attention", b"a" * 16, 4).passing("forward").round("rows", 1)
    digests = Digests()
    digests.compare(torch.cat([digests.of(label, X), digests.of(other, X)]), label, [2, 5])
    assert len(digests.pending) == 1
    with pytest.raises(FlexCPError, match=r"round 1 of the forward .*call 3.* ranks \[5\]"):
        digests.raise_if_different()
    assert not digests.pending
    digests.raise_if_different()
