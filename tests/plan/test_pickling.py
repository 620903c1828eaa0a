"""Plans pickle: all that was decided travels, the mesh and the rank do not."""

import copy
import pickle

import pytest
import torch

import flexcp
from flexcp import FlexCPError, testing
from flexcp.plan import Plan, make_plan


def diagonal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 40)


def travelled(plan: Plan) -> Plan:
    return pickle.loads(pickle.dumps(plan))


@pytest.mark.parametrize("schedule", ["auto", "exchange", "ring", "allgather", "ulysses"])
def test_an_unpickled_plan_says_and_shards_the_same(schedule):
    plan = make_plan({"a": diagonal, "b": window}, 300, 4, num_heads=4, schedule=schedule)
    other = travelled(plan)
    assert other.to_json() == plan.to_json()
    assert other.explain() == plan.explain()
    assert other.stats() == plan.stats()
    assert other.layout == plan.layout
    assert other.fingerprint() == plan.fingerprint()
    other.check()
    x = torch.randn(2, 300)
    for rank in range(4):
        assert torch.equal(other.shard(x, 1, rank=rank), plan.shard(x, 1, rank=rank))
        assert torch.equal(other.positions(rank), plan.positions(rank))


def test_an_unpickled_plan_pickles_again():
    plan = make_plan(window, 300, 4)
    assert travelled(travelled(plan)).to_json() == plan.to_json()


def test_what_was_worked_out_does_not_travel():
    plan = make_plan(window, 300, 4)
    plan.memo.kept(("lock", ""), lambda: lambda: None)
    other = travelled(plan)
    assert (len(plan.memo), len(other.memo)) == (1, 0)
    assert other.graph_handle is not plan.graph_handle


def test_a_mesh_does_not_travel_and_running_says_so():
    def rank(mesh):
        plan = make_plan(diagonal, 30, mesh, num_heads=2, head_dim=8)
        x = torch.randn(1, 2, 30, 8)
        flexcp.attention(*[plan.shard(x, 2)] * 3, plan)
        other = travelled(travelled(plan))
        local = other.shard(x, 2, rank=mesh.get_rank())
        errors = []
        for run in (
            lambda: flexcp.attention(local, local, local, other),
            lambda: other.unshard(local, 2),
            lambda: other.shard(x, 2),
        ):
            with pytest.raises(FlexCPError) as found:
                run()
            errors.append(str(found.value))
        return other.to_json() == plan.to_json(), errors

    for same, (attend, unshard, shard) in testing.simulate(rank, 2):
        assert same
        assert "one for 2 ranks that was pickled, which drops the mesh" in attend
        assert "one for 2 ranks that was pickled, which drops the mesh" in unshard
        assert "a rank, since the plan was pickled, which drops the rank" in shard


def test_copies_of_a_plan_are_the_plan_which_never_changes():
    def rank(mesh):
        plan = make_plan(diagonal, 30, mesh)
        return copy.copy(plan) is plan, copy.deepcopy({"plan": plan})["plan"] is plan

    assert testing.simulate(rank, 2) == [(True, True)] * 2
