"""plan_ahead: plans made in a thread, in processes or in a loader's workers run on the ranks."""

import pickle
import threading
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

import flexcp
from flexcp import FlexCPError, Machine, masks, plan_ahead, testing
from flexcp.comm.calls import Calls
from flexcp.kernels.reference import dense_attention, dense_mask

LENGTHS = ([40, 24], [10, 50, 4], [64], [1, 62, 1])


def plan_of(lengths, mesh=2):
    mask = masks.causal() & masks.document(lengths=lengths)
    return flexcp.make_plan(
        mask,
        sum(lengths),
        mesh,
        num_heads=2,
        head_dim=8,
        dtype=torch.float64,
        block_size=8,
        machine="cpu-gloo",
    )


def refuses_long(lengths):
    if len(lengths) > 2:
        raise RuntimeError(f"too many documents: {lengths}")
    return plan_of(lengths)


def with_plan(samples):
    return samples[0], plan_of(samples[0])


def right(lengths, plan):
    """Whether output and gradients over the plan are those of one process."""
    x = torch.randn(3, 1, 2, 64, 8, dtype=torch.float64, generator=torch.manual_seed(len(lengths)))
    whole = x.requires_grad_().unbind(0)
    local = [plan.shard(t.detach(), 2).requires_grad_() for t in whole]
    out = plan.unshard(flexcp.attention(*local, plan), 2)
    out.square().sum().backward()
    mask = masks.causal() & masks.document(lengths=lengths)
    at = torch.arange(64)
    allowed = dense_mask(mask.mask_mod, at, at, batch=1, heads=2)
    expected = dense_attention(*whole, allowed=allowed).out
    expected.square().sum().backward()
    wanted = [plan.shard(g, 2) for g in x.grad]
    same = [torch.allclose(a.grad, g) for a, g in zip(local, wanted, strict=True)]
    return torch.allclose(out, expected) and all(same)


@pytest.mark.parametrize("ahead", [3])
def test_plans_are_those_of_make_plan_in_the_order_of_the_batches(ahead):
    found = list(plan_ahead(LENGTHS, plan_of, ahead=ahead))
    assert [batch for batch, _ in found] == list(LENGTHS)
    for lengths, plan in found:
        assert plan.fingerprint() == plan_of(lengths).fingerprint()


def test_plans_that_processes_made_are_the_same_and_run_on_ranks():
    loader = ({"lengths": lengths, "unpicklable": lambda: None} for lengths in LENGTHS[:2])
    ahead = plan_ahead(loader, plan_of, processes=1, depends_on=lambda batch: batch["lengths"])
    found = [(batch["lengths"], plan) for batch, plan in ahead]
    for lengths, plan in found:
        assert plan.fingerprint() == plan_of(lengths).fingerprint()
        assert all(testing.simulate(lambda mesh, a=lengths, p=plan: right(a, p.on(mesh)), 2))


def test_plans_run_on_ranks_and_their_programs_are_there_before_the_first_call():
    def rank(mesh):
        found = []
        for lengths, plan in plan_ahead(LENGTHS, plan_of, mesh):
            ready = "forward" in plan.memo[("programs", "", False, 0)].__dict__
            found.append(ready and right(lengths, plan))
        return found

    assert testing.simulate(rank, 2) == [[True] * len(LENGTHS)] * 2


def test_programs_of_every_part_of_the_heads_are_there_before_the_first_call():
    eager = Machine("nothing to start", 1e6, 1, 1e6, 1e6, 0.0, 0.0, 0.0)

    def narrower_heads(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= 8 * h + 8)

    def plan_of(length):
        return flexcp.make_plan(
            narrower_heads, length, 2, num_heads=4, schedule="ulysses", machine=eager
        )

    def rank(mesh):
        _, plan = next(iter(plan_ahead([48], plan_of, mesh)))
        programs = [plan.memo[("programs", "", False, part)] for part in range(2)]
        return plan.schedule.head_parts, ["forward" in vars(one) for one in programs]

    assert testing.simulate(rank, 2) == [(2, [True, True])] * 2


def train_on_loaded_plans(mesh, context):
    loader = DataLoader(
        LENGTHS, batch_size=1, collate_fn=with_plan, num_workers=1, multiprocessing_context=context
    )
    return [right(lengths, plan.on(mesh)) for lengths, plan in loader]


def test_plans_that_a_loaders_workers_made_run_on_real_ranks():
    found = testing.spawn(partial(train_on_loaded_plans, context="fork"), 2)
    assert found == [[True] * len(LENGTHS)] * 2


def test_plans_come_out_of_spawned_workers():
    loader = DataLoader(
        LENGTHS[:2], collate_fn=with_plan, num_workers=1, multiprocessing_context="spawn"
    )
    for lengths, plan in loader:
        assert plan.fingerprint() == plan_of(lengths).fingerprint()


def run_ahead(mesh):
    agreements = []
    agree = Calls._agree
    Calls._agree = lambda calls, *args: agreements.append(1) or agree(calls, *args)
    threads = threading.active_count()
    found = [right(*both) for both in plan_ahead(LENGTHS * 2, plan_of, mesh)]
    return found, len(agreements), threading.active_count() - threads


def test_ranks_agree_once_per_plan_and_threads_do_not_pile_up():
    # Attention once for each of four masks, unshard for each layout: the second round is known.
    layouts = len({plan_of(lengths).layout.fingerprint() for lengths in LENGTHS})
    for found, agreements, threads in testing.spawn(run_ahead, 2):
        assert found == [True] * 8
        assert agreements == len(LENGTHS) + layouts
        assert threads <= 1  # one that waits for gloo


def test_what_planning_raises_is_raised_at_its_batch():
    ahead = plan_ahead(LENGTHS, refuses_long, ahead=3)
    assert next(ahead)[0] == LENGTHS[0]
    with pytest.raises(RuntimeError, match="too many documents"):
        next(ahead)
    assert not planners()


def test_what_the_loader_raises_is_raised_after_the_batches_before_it():
    def loader():
        yield from LENGTHS[:2]
        raise OSError("disk")

    ahead = plan_ahead(loader(), plan_of, ahead=5)
    assert [next(ahead)[0], next(ahead)[0]] == list(LENGTHS[:2])
    with pytest.raises(OSError, match="disk"):
        next(ahead)


def test_no_more_batches_are_drawn_than_asked_for():
    drawn = []
    loader = (drawn.append(lengths) or lengths for lengths in LENGTHS)
    ahead = plan_ahead(loader, plan_of, ahead=2)
    assert not drawn
    next(ahead)
    assert len(drawn) == 3


def planners():
    return [t for t in threading.enumerate() if t.name.startswith("flexcp-planner")]


def test_leaving_the_loop_stops_the_thread():
    ahead = plan_ahead(LENGTHS, plan_of, ahead=3)
    next(ahead)
    assert planners()
    ahead.close()
    assert not planners()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ahead": 0}, "ahead"),
        ({"processes": -1}, "processes"),
        ({"processes": 1, "plan_of": lambda lengths: None}, "top level of a module"),
    ],
)
def test_arguments_are_checked_before_anything_is_drawn(arguments, message):
    with pytest.raises(FlexCPError, match=message):
        plan_ahead(iter(()), **{"plan_of": plan_of, **arguments})


def test_what_is_not_a_plan_is_refused():
    with pytest.raises(FlexCPError, match=r"plan_of to return a plan.*None"):
        next(plan_ahead(LENGTHS, lambda lengths: None))


def test_a_plan_is_put_on_a_mesh_of_its_size_alone():
    plan = pickle.loads(pickle.dumps(plan_of(LENGTHS[0], 3)))
    with pytest.raises(FlexCPError, match=r"a mesh of 3 ranks.*one of 2"):
        testing.simulate(plan.on, 2)
