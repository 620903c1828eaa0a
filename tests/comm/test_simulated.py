"""Simulated ranks: collectives, turns, deadlocks and failures."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

import flexcp
from flexcp import FlexCPError, masks, testing
from flexcp.comm import CallLabel, RankError, Transport
from flexcp.comm.collectives import ordered_sum
from flexcp.plan import make_plan


def test_the_transport_has_the_interface_of_a_transport():
    assert testing.simulate(lambda mesh: isinstance(mesh.transport, Transport), 2) == [True] * 2


def round_of(number, *, call=0):
    return CallLabel("attention", b"", call).passing("forward").round("rows", number)


def test_collectives_give_every_rank_the_same():
    def fn(mesh):
        t, r = mesh.transport, mesh.get_rank()
        gathered, swapped = torch.empty(3, 2), torch.empty(1 + 2 + 3)
        t.all_gather(gathered, torch.full((2,), float(r)), label=round_of(0)).wait()
        given = torch.full((3 * (r + 1),), float(r))
        t.all_to_all(swapped, given, [1, 2, 3], [r + 1] * 3, range(3), label=round_of(1)).wait()
        return gathered.tolist(), swapped.tolist(), ordered_sum(t, torch.full((5,), 1.0 + r))

    for gathered, swapped, total in testing.simulate(fn, 3):
        assert gathered == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
        assert swapped == [0.0, 1.0, 1.0, 2.0, 2.0, 2.0]
        assert total.tolist() == [6.0] * 5


def test_transfers_are_asynchronous_and_match_by_label():
    def fn(mesh):
        t, r = mesh.transport, mesh.get_rank()
        first, second = torch.empty(1), torch.empty(1)
        mine = [(1 - r, torch.tensor([float(r)]))]
        pending = t.exchange(mine, [(1 - r, first)], label=round_of(0))
        other = t.exchange(
            [(1 - r, torch.tensor([10.0 + r]))], [(1 - r, second)], label=round_of(0, call=1)
        )
        other.wait()
        pending.wait()
        return float(second), float(first)

    assert testing.simulate(fn, 2) == [(11.0, 1.0), (10.0, 0.0)]


def test_runs_are_the_same_every_time():
    def run():
        order = []

        def fn(mesh):
            for i in range(3):
                order.append((i, mesh.get_rank()))
                ordered_sum(mesh.transport, torch.ones(1))

        testing.simulate(fn, 5)
        return order

    assert run() == run()


def test_a_deadlock_says_who_waits_for_whom():
    def fn(mesh):
        r = mesh.get_rank()
        if r < 2:
            mesh.transport.exchange([], [(1 - r, torch.zeros(1))], label=round_of(3)).wait()

    with pytest.raises(FlexCPError, match=r"rank 0 waits for rank 1 to send in round 3") as error:
        testing.simulate(fn, 3)
    assert "rank 1 waits for rank 0" in str(error.value)
    assert "ranks [2] have returned" in str(error.value)


def test_a_failing_rank_ends_the_others_and_is_named():
    def fn(mesh):
        if mesh.get_rank() == 2:
            raise ValueError("out of luck")
        ordered_sum(mesh.transport, torch.ones(1))

    with pytest.raises(RankError, match="rank 2 failed: ValueError: out of luck") as error:
        testing.simulate(fn, 4)
    assert isinstance(error.value.__cause__, ValueError)


def test_a_message_of_another_shape_or_type_is_an_error():
    def fn(mesh):
        r = mesh.get_rank()
        x = torch.zeros(2 + r)
        came = torch.zeros(2 + r)
        mesh.transport.exchange([(1 - r, x)], [(1 - r, came)], label=round_of(1)).wait()

    with pytest.raises(RankError, match=r"shape \(3,\) from rank 0 in round 1"):
        testing.simulate(fn, 2)


def test_two_dimensional_meshes_know_their_coordinates():
    def fn(mesh):
        return mesh.get_coordinate(), mesh.size(), mesh.size(1), mesh.ndim, mesh.get_local_rank(1)

    assert testing.simulate(fn, (2, 3))[4] == ([1, 1], 6, 3, 2, 1)


def test_no_ranks_are_refused():
    for size in (0, -1, True, 2.0, (), (2, 0), "2"):
        for start in (testing.simulate, testing.spawn):
            with pytest.raises(FlexCPError, match="at least 1 rank"):
                start(lambda mesh: None, size)


def test_integers_of_numpy_are_integers():
    sizes = testing.simulate(lambda mesh: mesh.shape, np.int64(2))
    assert sizes == [(2,)] * 2


def test_plans_shard_and_unshard_with_gradients_on_64_ranks():
    x = torch.randn(2, 300, 4, dtype=torch.float64)
    weight = torch.randn_like(x)

    # Made once: 64 plans take longer than all the rest.
    found = make_plan(masks.causal(), 300, 64, block_size=16, batch=2)

    def fn(mesh):
        plan = found.on(mesh)
        local = plan.shard(x, 1).requires_grad_()
        full = plan.unshard(local, 1)
        assert torch.equal(full, x)
        (full * weight).sum().backward()
        assert torch.equal(local.grad, plan.shard(weight, 1))
        return plan.fingerprint()

    assert len(set(testing.simulate(fn, 64))) == 1


def test_plans_with_a_layout_per_batch_element_unshard():
    ids = torch.stack([torch.arange(90) // 40, torch.arange(90) // 25])
    x = torch.randn(2, 3, 90)

    def fn(mesh):
        plan = make_plan(masks.document(ids) & masks.causal(), 90, mesh, block_size=8, batch=2)
        assert plan.layout.batch_elements == 2
        return torch.equal(plan.unshard(plan.shard(x, 2), 2), x)

    assert testing.simulate(fn, 4) == [True] * 4


def test_unsharding_the_wrong_number_of_rows_is_an_error():
    def fn(mesh):
        plan = make_plan(masks.causal(), 10, mesh)
        plan.unshard(torch.zeros(4), 0)

    with pytest.raises(RankError, match="5 rows along dim 0, as rank 0 owns"):
        testing.simulate(fn, 2)


def test_a_refusal_by_flexcp_is_one_to_the_caller_as_well():
    def fn(mesh):
        make_plan(masks.causal(), 100, mesh, schedule="hybrid", num_heads=4)

    with pytest.raises(FlexCPError, match=r"rank 0 failed: .*a mesh of two dimensions") as error:
        testing.simulate(fn, 2)
    found, cause = error.value, error.value.__cause__
    assert isinstance(found, RankError)
    assert found.rank == 0
    assert found.failures == {0: cause}
    assert (found.expected, found.got, found.fix) == (cause.expected, cause.got, cause.fix)


def test_other_exceptions_are_not_taken_for_refusals():
    with pytest.raises(RankError) as error:
        testing.simulate(lambda mesh: 1 // mesh.get_rank(), 2)
    assert not isinstance(error.value, FlexCPError)


def test_errors_of_ranks_can_be_sent_to_other_processes():
    for cause in (KeyError("x"), FlexCPError("5 rows", "4", "pass all of them")):
        error = RankError.of(3, cause)
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert (str(copy), copy.rank, list(copy.failures)) == (str(error), 3, [3])
        assert isinstance(copy, FlexCPError) == isinstance(cause, FlexCPError)


@pytest.mark.parametrize("skipped", ["unshard", "attention", "backward"])
def test_a_rank_that_leaves_out_a_call_is_a_deadlock_that_says_who_waits_for_whom(skipped):
    def fn(mesh):
        plan = flexcp.make_plan(
            masks.causal(), 40, mesh, num_heads=2, head_dim=8, schedule="exchange"
        )
        local = plan.shard(torch.ones(1, 2, 40, 8), 2).requires_grad_()
        absent = skipped if mesh.get_rank() == 1 else None
        if absent == "attention":
            return
        out = flexcp.attention(local, local, local, plan)
        if absent != "unshard":
            plan.unshard(out, 2)
        if absent != "backward":
            out.sum().backward()

    with pytest.raises(
        FlexCPError, match=r"a deadlock: .*rank \d waits for rank 1 to send"
    ) as error:
        testing.simulate(fn, 3)
    assert "all ranks call the same collectives in the same order" in error.value.fix
