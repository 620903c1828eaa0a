"""A rank that raises or dies while it computes, with transfers on their way: nobody hangs."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal

import pytest
import torch

import flexcp
from flexcp import masks, testing
from flexcp.comm import RankError

LENGTH = 61
X = torch.randn(1, 2, LENGTH, 8, generator=torch.Generator().manual_seed(0))


def run(mesh, schedule, act, when, nth):
    """Rank 1 acts in its score function, when it computes the n-th tile of a pass."""
    # Under a full mask every rank computes in every round, while the next one's rows travel.
    plan = flexcp.make_plan(
        masks.full(), LENGTH, mesh, layout="contiguous", schedule=schedule, num_heads=2, head_dim=8,
        block_size=16, dtype=torch.float32,
    )  # fmt: skip
    armed, tiles = when == "forward" and mesh.get_rank() == 1, 0

    def score_mod(score, b, h, q_idx, kv_idx):
        nonlocal tiles
        if armed and score.numel() > 1:  # before anything moves it is tried on one score
            tiles += 1
            if tiles == nth:
                act()
        return score + score  # what can't be done in place, so that it is called on every tile

    local = [plan.shard(X, 2).requires_grad_() for _ in range(3)]
    out = flexcp.attention(*local, plan, score_mod=score_mod)
    armed = mesh.get_rank() == 1
    out.sum().backward()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise ValueError("a rank's own mistake")


ROUND = {
    "forward": r"round \d of the forward of attention",
    "backward": r"round \d of the (backward|gradients) of attention",
}


@pytest.mark.parametrize(
    ("schedule", "when", "nth"),
    [
        ("ring", "forward", 1),
        ("ring", "backward", 1),
        ("ring", "backward", 2),
        ("exchange", "forward", 1),
        ("exchange", "backward", 1),
        ("ulysses", "forward", 1),
        ("ulysses", "backward", 1),
    ],
)
def test_a_rank_that_is_killed_while_it_computes_makes_the_others_raise(schedule, when, nth):
    with pytest.raises(RankError, match=r"rank 1 failed: .* ended with code -9") as caught:
        testing.spawn(lambda mesh: run(mesh, schedule, die, when, nth), 3, timeout=20)
    others = {r: str(e) for r, e in caught.value.failures.items() if r != 1}
    assert sorted(others) == [0, 2]
    where = "all-to-all" if schedule == "ulysses" else ROUND[when]
    for text in others.values():
        assert "no answer on rank" in text
        assert re.search(where, text), text


@pytest.mark.parametrize(("when", "nth"), [("forward", 1), ("backward", 2)])
def test_after_a_rank_has_raised_all_get_an_error_and_can_destroy_their_process_group(when, nth):
    # Nobody leaves before all know: the others' time-out has to end their waiting.
    everybody = multiprocessing.get_context("fork").Barrier(3)

    def rank(mesh):
        told = "nothing"
        try:
            run(mesh, "ring", fail, when, nth)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        gc.collect()  # nothing holds what was on its way any more
        everybody.wait(60)
        torch.distributed.destroy_process_group()
        return told

    first, raised, last = testing.spawn(rank, 3, timeout=3)
    assert raised == "ValueError: a rank's own mistake"
    for told in (first, last):
        assert told.startswith("FlexCPError")
        assert "no answer on rank" in told
        assert re.search(ROUND[when], told), told


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("start", [testing.simulate, testing.spawn])
def test_a_rank_that_raises_while_it_computes_is_what_the_caller_sees(start, when):
    with pytest.raises(RankError, match="rank 1 failed: ValueError: a rank's own mistake"):
        start(lambda mesh: run(mesh, "ring", fail, when, 2), 3)
