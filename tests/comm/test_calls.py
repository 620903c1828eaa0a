"""Ranks compare a kind of call once, and count calls alike whatever becomes of them."""

from __future__ import annotations

import threading

import pytest
import torch

import flexcp
from flexcp import FlexCPError, masks, testing
from flexcp.comm import World, process_calls
from flexcp.comm.board import MemoryBoard

X = torch.randn(1, 2, 61, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
CAUSAL = masks.causal()
EXPECTED = flexcp.flex_attention(X, X, X, block_mask=CAUSAL)
STARTS = [testing.simulate, testing.spawn]
SCHEDULES = ["ring", "exchange", "allgather", "ulysses"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(process_calls, "SLOW", 0.3)
    monkeypatch.setattr(process_calls, "LOOK", 0.05)


def plan_for(mesh, schedule="exchange", mask=CAUSAL):
    return flexcp.make_plan(
        mask, 61, mesh, schedule=schedule, layout="contiguous", num_heads=2, head_dim=8,
        block_size=8, dtype=torch.float64,
    )  # fmt: skip


def attend(plan, x=None, **kwargs):
    x = plan.shard(X, 2) if x is None else x
    return flexcp.attention(x, x, x, plan, **kwargs)


def assert_right(plan, out):
    torch.testing.assert_close(out, plan.shard(EXPECTED, 2))


def error_of(step):
    with pytest.raises(FlexCPError) as caught:
        step()
    return str(caught.value)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_kind_of_call_that_was_made_before_touches_no_board(schedule, monkeypatch):
    touched = []
    for name in ("write", "read", "first", "count", "erase"):
        method = getattr(MemoryBoard, name)

        def noting(self, *args, method=method):
            touched.append(args)
            return method(self, *args)

        monkeypatch.setattr(MemoryBoard, name, noting)

    def rank(mesh):
        x = plan_for(mesh, schedule).shard(X, 2).requires_grad_()
        for _ in range(3):
            plan = plan_for(mesh, schedule)  # an equal one: kinds are compared by value
            attend(plan, x).sum().backward()
            plan.unshard(x, 2)

    testing.simulate(rank, 3)
    keys = [args[0] for args in touched]
    assert any(key.startswith("1.0.forward.0/") for key in keys)  # the first unshard
    # Simulated ranks look whether the others have failed while they wait: at nothing else.
    later = [key for key in keys if int(key.split(".")[0]) > 1]
    assert {key.rsplit("/", 1)[-1] for key in later} <= {"trouble"}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_messages_are_those_of_the_schedule(schedule, monkeypatch):
    worlds = []
    monkeypatch.setattr(World, "run", _noting(World.run, worlds))

    def rank(mesh):
        plan = plan_for(mesh, schedule)
        x = plan.shard(X, 2).requires_grad_()
        for _ in range(8):
            x = attend(plan, x)
        x.sum().backward()
        return sum(messages_of(plan.schedule, mesh.get_rank()))

    expected = testing.simulate(rank, 4 if schedule != "ulysses" else 2)
    assert worlds[0].messages_received == [8 * n for n in expected]


def _noting(run, worlds):
    def noting(self, fn):
        worlds.append(self)
        return run(self, fn)

    return noting


def messages_of(schedule, rank):
    """How many messages a rank receives forward and backward."""
    swaps = 4 * (schedule.heads_group_size - 1)  # k with v, q, out and lse; then their gradients
    backward_swaps = 3 * (schedule.heads_group_size - 1)
    forward = sum(1 for s in schedule.steps(rank, "forward") for _, rows in s.receives if rows)
    back = 0
    for step in schedule.steps(rank, "backward"):
        back += sum(1 for _, rows in (*step.receives, *step.returns_in) if rows)
    return forward + swaps, back + backward_swaps


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rank_that_refuses_a_warm_call_is_named_and_later_calls_work(start, schedule):
    def rank(mesh):
        plan = plan_for(mesh, schedule, masks.full())  # all ranks need rows of each other
        attend(plan)
        for _ in range(2):
            x = plan.shard(X, 2)
            bad = x[:, :, 1:] if mesh.get_rank() == 1 else x
            told = error_of(lambda bad=bad: attend(plan, bad))
            assert "rows that rank 1 owns" in told
            assert mesh.get_rank() == 1 or "rank 1 can't" in told
            found = plan.unshard(attend(plan), 2)
            torch.testing.assert_close(found, flexcp.flex_attention(X, X, X))

    start(rank, 2)


@pytest.mark.parametrize("start", STARTS)
def test_a_refusal_that_all_catch_does_not_reach_later_calls(start):
    def rank(mesh):
        plan = plan_for(mesh)
        for _ in range(3):
            told = error_of(lambda: attend(plan, torch.ones(1, 2, 3, 8, dtype=torch.float64)))
            assert "plan.shard" in told
            assert_right(plan, attend(plan))

    start(rank, 3)


@pytest.mark.parametrize("start", STARTS)
def test_a_rank_in_another_call_is_found_out_cold_and_warm(start):
    def rank(mesh):
        plans = [plan_for(mesh), plan_for(mesh, mask=masks.sliding_window(7))]
        mine = plans[mesh.get_rank() == 1]
        cold = error_of(lambda: attend(mine))
        assert "sliding_window(7, 0)" in cold
        for plan in plans:
            attend(plan)
        if start is testing.simulate:
            return  # a deadlock ends all simulated ranks
        assert "rank 1 waits for rank 0" in error_of(lambda: attend(mine))
        assert_right(plans[0], attend(plans[0]))

    start(rank, 2)


@pytest.mark.parametrize("start", STARTS)
def test_a_rank_that_makes_an_equal_plan_anew_is_in_the_same_call(start):
    def rank(mesh):
        plan = plan_for(mesh)
        for _ in range(3):
            plan = plan_for(mesh) if mesh.get_rank() == 1 else plan
            assert_right(plan, attend(plan))

    start(rank, 3)


@pytest.mark.parametrize("start", STARTS)
def test_score_functions_that_do_different_things_are_not_the_same_call(start):
    def rank(mesh):
        plan = plan_for(mesh)
        slope = torch.tensor([0.5, 0.25 + 0.25 * mesh.get_rank()])
        told = error_of(lambda: attend(plan, score_mod=lambda s, b, h, q, k: s * 0.5 + slope[h]))
        assert "what score_mod does: " in told
        factor = 2.0 + mesh.get_rank()
        told = error_of(lambda: attend(plan, score_mod=lambda s, b, h, q, k: s * factor))
        assert "what score_mod does: " in told
        attend(plan, score_mod=lambda s, b, h, q, k: s + h)
        assert_right(plan, attend(plan))

    start(rank, 2)


@pytest.mark.parametrize("start", STARTS)
def test_a_second_thread_is_refused_by_name_and_the_first_goes_on(start):
    def rank(mesh):
        plan = plan_for(mesh)
        assert_right(plan, attend(plan))
        told = []
        other = threading.Thread(
            target=lambda: told.append(error_of(lambda: attend(plan))), name="helper"
        )
        other.start()
        other.join()
        assert "attention in thread 'helper'" in told[0]
        assert_right(plan, attend(plan))

    start(rank, 2)


def test_a_rank_that_fails_within_a_call_is_named_and_later_calls_work():
    def rank(mesh):
        plan = plan_for(mesh, "ring", masks.full())

        def score_mod(score, b, h, q_idx, kv_idx):
            if mesh.get_rank() == 1 and score.numel() > 1:  # a tile, not an examination
                raise ValueError("out of luck")
            return score + score  # used twice: the function itself runs on tiles

        with pytest.raises(ValueError, match="out of luck") as caught:
            attend(plan, score_mod=score_mod)
        if mesh.get_rank() != 1:
            assert "expected rank 1 to go on in round 2" in str(caught.value)
        attend(plan)

    testing.spawn(rank, 3)
