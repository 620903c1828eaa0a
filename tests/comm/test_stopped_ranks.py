"""Ranks that stop, die or give up: all others name the one that began it, and can start again."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import flexcp
from flexcp import masks, testing
from flexcp.comm import RankError

CAUSAL = masks.causal()
X = torch.randn(1, 2, 60, 8, generator=torch.Generator().manual_seed(0))


def run(mesh, between=lambda: None):
    """The whole output of attention over a ring, and its gradients."""
    plan = flexcp.make_plan(
        CAUSAL, 60, mesh, layout="contiguous", schedule="ring", num_heads=2, head_dim=8,
    )  # fmt: skip
    x = plan.shard(X, 2).requires_grad_()
    out = flexcp.attention(x, x, x, plan)
    between()
    out.sum().backward()
    return plan.unshard(out.detach(), 2)


def told(mesh, between=lambda: None):
    try:
        run(mesh, between)
    except flexcp.FlexCPError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(("what", "victim"), [("unshard", 0), ("unshard", 2), ("backward", 1)])
def test_a_rank_that_is_stopped_is_the_one_that_all_name(what, victim):
    processes = multiprocessing.get_context("fork").Array("l", 3)

    def rank(mesh):
        processes[mesh.get_rank()] = os.getpid()
        plan = flexcp.make_plan(
            masks.full(), 60, mesh, layout="contiguous", schedule="ring", num_heads=2, head_dim=8,
        )  # fmt: skip
        x = plan.shard(X, 2).requires_grad_()
        out = flexcp.attention(x, x, x, plan)
        if mesh.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            if what == "unshard":
                plan.unshard(out, 2)
            else:
                out.sum().backward()
        except flexcp.FlexCPError as error:
            os.kill(processes[victim], signal.SIGCONT)  # so that it has its say as well
            return str(error)
        return "nothing"

    for number, text in enumerate(testing.spawn(rank, 3, timeout=3)):
        if number == victim:
            assert text.startswith(f"expected rank {victim}, which is this one, to come to")
        else:
            assert text.startswith(f"expected rank {victim} to ")
            assert f"look at the output of rank {victim}" in text
        assert f"no answer on rank {number}" in text


def test_a_rank_that_gave_up_is_not_taken_for_the_one_that_died():
    def rank(mesh):
        die = lambda: mesh.get_rank() == 2 and os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        run(mesh, die)  # whoever hears of it ends at once, and closes its connections

    with pytest.raises(RankError, match=r"rank 2 failed: .* ended with code -9") as caught:
        testing.spawn(rank, 5, timeout=30)
    others = {r: str(error) for r, error in caught.value.failures.items() if r != 2}
    assert sorted(others) == [0, 1, 3, 4]
    for text in others.values():
        assert text.startswith("expected rank 2 to ")


def test_after_a_death_new_groups_among_the_same_processes_work_and_name_their_own(tmp_path):
    expected = flexcp.flex_attention(X, X, X, block_mask=CAUSAL)
    kill = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731

    def rank(mesh):
        number = mesh.get_rank()
        first = told(mesh, kill if number == 1 else lambda: None)
        assert first.startswith("expected rank 1 to "), first
        group = dist.new_group([0, 2, 3], use_local_synchronization=True)
        among_survivors = DeviceMesh.from_group(group, "cpu")
        torch.testing.assert_close(run(among_survivors), expected)

        dist.destroy_process_group()
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(tmp_path / "again"), 3), world_size=3,
            rank=max(0, number - 1), timeout=datetime.timedelta(seconds=8),
        )  # fmt: skip
        again = init_device_mesh("cpu", (3,))
        torch.testing.assert_close(run(again), expected)
        raise ValueError(told(again, kill if again.get_rank() == 2 else lambda: None))

    with pytest.raises(RankError) as caught:
        # The rank that waits for one that gave up, and closes nothing, waits all of this time.
        testing.spawn(rank, 4, timeout=8)
    ends = {r: str(error) for r, error in caught.value.failures.items()}
    assert ends[1] == ends[3] == "it ended with code -9"
    for survivor in (0, 2):
        assert ends[survivor].startswith("expected rank 2 to "), ends
