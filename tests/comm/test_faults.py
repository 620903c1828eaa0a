"""Ranks that differ, raise or die: everybody gets an error that names it, and nobody hangs."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import flexcp
from flexcp import masks, testing
from flexcp.comm import RankError

CAUSAL = masks.causal()
X = torch.randn(1, 2, 60, 8, generator=torch.Generator().manual_seed(0))


def run(
    mesh, *, before=None, between=None, mask=CAUSAL, dtype=torch.float32, heads=2, grad=True,
    grad_mode=True,
):  # fmt: skip
    plan = flexcp.make_plan(
        mask, 60, mesh, layout="contiguous", schedule="ring", num_heads=2,
        head_dim=8, block_size=16,
    )  # fmt: skip
    local = [plan.shard(X[:, :heads].to(dtype), 2).requires_grad_(grad) for _ in range(3)]
    if before and mesh.get_rank() == 1:
        before()
    with torch.set_grad_enabled(grad_mode):
        out = flexcp.attention(*local, plan)
    if between and mesh.get_rank() == 1:
        between()
    out.sum().backward()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise ValueError("a rank's own mistake")


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_rank_that_is_killed_makes_the_others_raise_and_name_it(when):
    with pytest.raises(RankError, match=r"rank 1 failed: .* ended with code -9") as caught:
        testing.spawn(lambda mesh: run(mesh, **{when: die}), 3, timeout=20)
    others = {r: str(e) for r, e in caught.value.failures.items() if r != 1}
    assert sorted(others) == [0, 2]
    where = "round 0" if when == "before" else "round 1 of the backward of attention"
    for text in others.values():
        assert "no answer on rank" in text
        assert where in text
    assert all("expected rank 1 to" in text for text in others.values())


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_rank_that_raises_is_what_the_caller_sees(when):
    with pytest.raises(RankError, match="rank 1 failed: ValueError: a rank's own mistake"):
        testing.spawn(lambda mesh: run(mesh, **{when: fail}), 3, timeout=20)


@pytest.mark.parametrize("start", [testing.simulate, testing.spawn])
@pytest.mark.parametrize(
    ("differently", "message"),
    [
        (
            lambda r: {"mask": masks.full() if r == 1 else masks.causal()},
            r"plan: .* on ranks \[0, 2\]; .* \[1\]",
        ),
        (
            lambda r: {"mask": masks.sliding_window(5 + r // 2)},
            r"mask: '', sliding_window\(5, 0\) \(\w+\) on ranks \[0, 1\]; .* \[2\]",
        ),
        (
            lambda r: {"dtype": torch.float64 if r == 2 else torch.float32},
            r"dtype: .*float64 on ra",
        ),
        (lambda r: {"heads": 1 if r == 0 else 2}, r"query heads: 1 on ranks \[0\]; 2 on ranks"),
        (
            lambda r: {"grad": r != 1},
            r"needed on ranks \[0, 2\]; not needed on ranks \[1\]",
        ),
        (lambda r: {"grad_mode": r == 0}, r"gradients: needed on ranks \[0\]; not needed on ranks"),
    ],
    ids=["mask", "mask within tiles", "dtype", "heads", "requires_grad", "no_grad"],
)
def test_ranks_whose_calls_differ_are_told_what_differs_before_data_moves(
    start, differently, message
):
    with pytest.raises(RankError, match=f"same call of attention, got .*{message}"):
        start(lambda mesh: run(mesh, **differently(mesh.get_rank())), 3)


def caught_by_all(rank, ranks=3):
    """What every rank raises, in real processes; each goes on to the end."""

    def run(mesh):
        try:
            rank(mesh)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    return testing.spawn(run, ranks, timeout=20)


@pytest.mark.parametrize("schedule", ["ring", "ulysses"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda q, k, v: (q[:, :, :-1], k, v),
        lambda q, k, v: (q, k[..., :4], v),
        lambda q, k, v: (q, k.double(), v),
        lambda q, k, v: (q[:, :1], k[:, :1], v[:, :1]),
    ],
    ids=["rows", "head dim", "dtype", "heads"],
)
def test_a_call_that_one_rank_refuses_is_refused_by_all_and_they_name_it(spoil, schedule):
    def rank(mesh):
        plan = flexcp.make_plan(CAUSAL, 60, mesh, schedule=schedule, num_heads=2, head_dim=8)
        local = [plan.shard(X, 2) for _ in range(3)]
        flexcp.attention(*(spoil(*local) if mesh.get_rank() == 1 else local), plan)

    for found in caught_by_all(rank)[::2]:
        assert "all ranks to make the same call of attention" in found
        assert "rank 1 can't" in found or "on ranks [1]" in found


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x: x.double(), r"type: torch.float32 on ranks [0, 2]; torch.float64 on ranks [1]"),
        (lambda x: x[:, :1], "shape: 1, 2, rows, 8 on ranks [0, 2]; 1, 1, rows, 8 on ranks [1]"),
        (lambda x: x[:, :, 1:], "rank 1 can't: expected 20 rows along dim 2"),
    ],
    ids=["dtype", "heads", "rows"],
)
def test_tensors_that_differ_are_not_unsharded(spoil, message):
    def rank(mesh):
        plan = flexcp.make_plan(CAUSAL, 60, mesh, layout="contiguous")
        local = plan.shard(X, 2)
        plan.unshard(spoil(local) if mesh.get_rank() == 1 else local, 2)

    for found in caught_by_all(rank)[::2]:
        assert "all ranks to unshard the same" in found
        assert message in found


def test_a_call_after_a_refused_one_runs():
    def rank(mesh):
        plan = flexcp.make_plan(CAUSAL, 60, mesh, schedule="ring", num_heads=2, head_dim=8)
        local = plan.shard(X, 2)
        with pytest.raises(flexcp.FlexCPError):
            flexcp.attention(local[:, :, 1:], local, local, plan)
        return plan.unshard(flexcp.attention(local, local, local, plan), 2)

    for found in testing.spawn(rank, 3, timeout=20):
        torch.testing.assert_close(found, flexcp.flex_attention(X, X, X, block_mask=CAUSAL))


def test_the_process_group_can_be_destroyed_after_a_fault():
    def rank(mesh):
        if mesh.get_rank() == 1:
            return "gone"
        try:
            run(mesh)
        except flexcp.FlexCPError:
            torch.distributed.destroy_process_group()
            return "destroyed"
        return "not noticed"

    assert testing.spawn(rank, 2, timeout=2) == ["destroyed", "gone"]


def test_a_plan_made_from_numbers_cannot_run():
    plan = flexcp.make_plan(masks.causal(), 60, 3)
    with pytest.raises(flexcp.FlexCPError, match=r"made with a mesh, got one for 3 ranks"):
        flexcp.attention(X, X, X, plan)


def test_rows_that_are_not_the_ranks_own_are_refused():
    def rank(mesh):
        plan = flexcp.make_plan(masks.causal(), 60, mesh, num_heads=2, layout="contiguous")
        flexcp.attention(X, X, X, plan)

    with pytest.raises(RankError, match=r"q with the 30 rows that rank 0 owns.*plan.shard"):
        testing.simulate(rank, 2)


def test_heads_that_were_not_planned_for_cannot_be_split():
    def rank(mesh):
        plan = flexcp.make_plan(masks.causal(), 60, mesh, schedule="ulysses", num_heads=4)
        local = plan.shard(X, 2)
        flexcp.attention(local, local, local, plan)

    with pytest.raises(RankError, match="4 query heads and 4 kv heads, which the plan splits"):
        testing.simulate(rank, 2)


def test_a_second_derivative_is_refused():
    def rank(mesh):
        plan = flexcp.make_plan(CAUSAL, 60, mesh, num_heads=2)
        x = plan.shard(X, 2).requires_grad_()
        (grad,) = torch.autograd.grad(flexcp.attention(x, x, x, plan).sum(), x, create_graph=True)
        grad.sum().backward()

    with pytest.raises(RankError, match="first derivatives of attention over a plan"):
        testing.simulate(rank, 2)
