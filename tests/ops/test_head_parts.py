"""Heads that ranks compute in parts: the results of one process, and swaps that are hidden."""

from __future__ import annotations

import pickle
import threading
from dataclasses import replace

import pytest
import torch

import flexcp
from flexcp import Machine, make_plan, masks, testing
from flexcp.kernels.flash import FlashKernel
from flexcp.ops.swap import Swap
from flexcp.plan import load_plan, save_plan
from flexcp.plan.timeline import timeline
from tests.ops.late_transport import late_mesh
from tests.ops.test_dropout import DOCUMENTS, SEEDED, alone, flat_scores
from tests.ops.test_parity_over_ranks import IDS, MASKS, SLOPES, alibi, compare

EAGER = Machine("nothing to start", 1e6, 1, 1e6, 1e6, 0.0, 0.0, 0.0)
"""Messages and rounds cost nothing: parts are always worth it."""
PLACES = [("ulysses", 2), ("ulysses", 3), ("hybrid", (2, 2)), ("hybrid", (3, 2))]
HEADS = [(8, 8), (12, 6), (10, 5), (14, 7)]
"""Even, shared by query heads, and such that neighbours use the same kv head in different parts."""


SHORT = MASKS | {"documents": masks.causal() & masks.document(IDS[:101])}


def in_parts(mesh, schedule, heads, kv_heads, length=101, mask=MASKS["causal"], **how):
    plan = make_plan(
        mask, length, mesh, schedule=schedule, block_size=16, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=8, dtype=torch.float64, batch=2, machine=EAGER, **how,
    )  # fmt: skip
    assert plan.schedule.head_parts > 1
    return plan


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("schedule", "shape"), PLACES)
def test_parts_give_the_result_of_one_process(schedule, shape, name):
    at = list(MASKS).index(name)
    for heads, kv_heads in (HEADS[at % 4], HEADS[(at + 2) % 4]):
        worst = compare(
            testing.simulate, shape, SHORT[name], 101, heads=heads, kv_heads=kv_heads,
            plan_of=lambda mesh: in_parts(mesh, schedule, heads, kv_heads, mask=SHORT[name]),  # noqa: B023
        )  # fmt: skip
        assert worst < 1e-10, (heads, kv_heads)


@pytest.mark.parametrize(("schedule", "shape"), PLACES)
def test_sinks_and_score_functions_know_the_heads_of_their_part(schedule, shape):
    slopes = torch.cat([SLOPES, SLOPES / 3])

    def sloped(score, b, h, q_idx, kv_idx):
        return score - slopes[h] * (q_idx - kv_idx).abs() * (b + 1)

    for options in ({"score_mod": sloped}, {"sinks": slopes * 3}):
        worst = compare(
            testing.simulate, shape, MASKS["causal"], 60, heads=8, kv_heads=8, **options,
            plan_of=lambda mesh: in_parts(mesh, schedule, 8, 8, 60, MASKS["causal"]),
        )  # fmt: skip
        assert worst < 1e-10


def test_batch_elements_with_layouts_of_their_own_are_computed_in_parts():
    ids = torch.stack([torch.arange(101) // 23, torch.arange(101) // 9])
    for mask, options in ((masks.document(ids), {}), (masks.document(ids), {"score_mod": alibi})):
        worst = compare(
            testing.simulate, (2, 2), mask, 101, heads=4, kv_heads=4, **options,
            plan_of=lambda mesh: in_parts(mesh, "hybrid", 4, 4, mask=mask, layout="per_document"),  # noqa: B023
        )  # fmt: skip
        assert worst < 1e-10


@pytest.mark.parametrize(("schedule", "shape"), PLACES)
def test_gradients_of_a_captured_table_are_those_of_all_parts(schedule, shape):
    table = torch.randn(8, 60, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    inputs = [torch.randn(1, 8, 60, 8, dtype=torch.float64) for _ in range(3)]

    def gradient(attend):
        learned = table.clone().requires_grad_()
        out = attend(lambda s, b, h, q, kv: s + learned[h, kv])
        return torch.autograd.grad((out * out.detach().cos()).sum(), learned)[0]

    def rank(mesh):
        plan = in_parts(mesh, schedule, 8, 8, 60, masks.causal())
        local = [plan.shard(x, 2) for x in inputs]
        return gradient(lambda mod: flexcp.attention(*local, plan, score_mod=mod))

    found = sum(testing.simulate(rank, shape))
    wanted = gradient(
        lambda mod: flexcp.flex_attention(*inputs, score_mod=mod, block_mask=masks.causal())
    )
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("schedule", "shape"), [("ulysses", 2), ("hybrid", (2, 2))])
def test_the_same_weights_are_dropped_in_parts(schedule, shape):
    def rank(mesh):
        inputs = flat_scores()
        plan = make_plan(
            DOCUMENTS, inputs[0].shape[2], mesh, schedule=schedule, block_size=4, num_heads=8,
            num_kv_heads=4, head_dim=4, dtype=torch.float32, batch=2, machine=EAGER,
        )  # fmt: skip
        assert plan.schedule.head_parts == 2
        out = flexcp.attention(*(plan.shard(x, 2) for x in inputs), plan, **SEEDED)
        return plan.unshard(out, 2).detach() == 0

    wanted = alone(DOCUMENTS, **SEEDED)
    assert all(torch.equal(found, wanted) for found in testing.simulate(rank, shape))


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize(("schedule", "shape"), PLACES)
def test_parts_are_right_on_a_network_that_is_late(schedule, shape, permuted):
    worst = compare(
        testing.simulate, shape, MASKS["window"], 101, heads=12, kv_heads=6, permuted=permuted,
        plan_of=lambda mesh: in_parts(
            late_mesh(mesh, seed=3), schedule, 12, 6, mask=MASKS["window"]
        ),
    )  # fmt: skip
    assert worst < 1e-10


@pytest.mark.parametrize("schedule", ["ulysses", "hybrid"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (10, 5), (5, 5)])
def test_a_compiled_graph_computes_in_parts(schedule, heads, kv_heads):
    torch._dynamo.reset()
    draw = torch.Generator().manual_seed(3)
    shapes = [(2, h, 101, 8) for h in (heads, kv_heads, kv_heads, heads)]
    *full, weight = (torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes)
    sinks = torch.randn(heads, generator=draw, dtype=torch.float64)

    def attend(q, k, v, plan, sinks):
        out, lse = flexcp.attention(q * 1.5, k, v, plan, sinks=sinks, return_lse=True)
        return out.sin(), lse

    def rank(mesh):
        plan = in_parts(mesh, schedule, heads, kv_heads)
        results = []
        for function in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
            local = [plan.shard(x, 2).requires_grad_() for x in full]
            leaves = [*local, sinks.clone().requires_grad_()]
            out, lse = function(*local, plan, leaves[3])
            total = (out * plan.shard(weight, 2)).sum() + lse.sum()
            results.append([out.detach(), *torch.autograd.grad(total, leaves)])
        for eager, compiled in zip(*results, strict=True):
            torch.testing.assert_close(compiled, eager, rtol=1e-10, atol=1e-10)
        return True

    assert all(testing.simulate(rank, {"ulysses": 2, "hybrid": (2, 2)}[schedule]))


def test_real_ranks_compute_in_parts():
    worst = compare(
        testing.spawn, 2, MASKS["causal"], 101, heads=8, kv_heads=8,
        plan_of=lambda mesh: in_parts(mesh, "ulysses", 8, 8, mask=MASKS["causal"]),
    )  # fmt: skip
    assert worst < 1e-10


def test_the_next_part_is_on_its_way_before_one_is_computed(monkeypatch):
    events: dict[int, list[str]] = {}

    def noted(cls, method, name):
        original = getattr(cls, method)

        def wrapped(self, *args, **options):
            events.setdefault(threading.get_ident(), []).append(name)
            return original(self, *args, **options)

        monkeypatch.setattr(cls, method, wrapped)

    noted(Swap, "to_heads", "in")
    noted(Swap, "to_rows", "out")
    noted(FlashKernel, "forward", "compute")
    noted(FlashKernel, "backward", "compute")

    def rank(mesh):
        documents = masks.causal() & masks.document(lengths=[12, 30, 18])
        plan = in_parts(mesh, "ulysses", 8, 8, 60, documents, layout="head_tail")
        x = plan.shard(torch.randn(2, 8, 60, 8, dtype=torch.float64), 2).requires_grad_()
        out = flexcp.attention(x, x, x, plan)
        events[threading.get_ident()].append("backward")
        out.sum().backward()

    testing.simulate(rank, 2)
    each = ["in", "in"]  # K and V, then q
    own = ["compute"]  # own rows with own keys, which are here already
    middle = [*own, *each, "compute", "out", "out"]
    last = [*own, "compute", "out", "out"]
    forward = [*each, *middle, *middle, *middle, *last]
    given, first = ["in"], ["compute"]  # gradients of the output; own pairs of the first part
    middle = [*given, "compute", "out", "out"]
    backward = [*given, *first, *middle, *middle, *middle, *last[1:], *own, *own, *own]
    assert list(events.values()) == [[*forward, "backward", *backward]] * 2


SLOW = Machine("slow", 2e10, 1, 6e8, 5e7, 1e-3, 2e-4, 1e-4)
OPTIONS = {"num_heads": 8, "head_dim": 64, "dtype": torch.float32, "machine": SLOW}


def in_one_go(plan):
    """The same plan with all heads of a rank at a time."""
    return replace(plan, schedules={n: replace(s, head_parts=1) for n, s in plan.schedules.items()})


def test_parts_are_chosen_where_swaps_would_be_waited_for():
    plan = make_plan(masks.causal(), 8192, 4, schedule="ulysses", **OPTIONS)
    assert plan.schedule.head_parts == 2
    alone_ = timeline(in_one_go(plan))
    found = timeline(plan)
    swaps = [s for s in alone_.spans if s.kind == "swap"]
    waited = sum(float((s.end - s.begin)[:, 0].sum()) for s in swaps)
    for passing in ("forward", "backward"):
        seconds = getattr(plan.costs[""], passing)
        assert seconds == getattr(found, passing)
        ends = [float(s.end.max()) for s in found.spans if s.passing == passing]
        assert max(ends) == pytest.approx(seconds, rel=1e-12)
    gain = alone_.forward + alone_.backward - found.forward - found.backward
    assert 0.4 * waited < gain < 0.5 * waited
    short = make_plan(masks.causal(), 64, 4, schedule="ulysses", **OPTIONS)
    assert short.schedule.head_parts == 1, "each part has to be started"


def test_parts_are_no_more_than_kv_heads_of_a_rank():
    for kv_heads, most in ((8, 2), (4, 1), (1, 1)):
        how = OPTIONS | {"num_kv_heads": kv_heads}
        plan = make_plan(masks.causal(), 4096, 4, schedule="ulysses", **how)
        assert plan.schedule.head_parts == most


def test_a_plan_says_that_heads_are_in_parts_and_is_saved_with_them(tmp_path):
    plan = make_plan(masks.causal(), 8192, (2, 2), schedule="hybrid", **OPTIONS)
    assert plan.schedule.head_parts == 4
    assert "heads in 4 parts" in plan.considered[0][0]
    assert "4 parts of heads one after the other" in plan.explain()
    save_plan(plan, tmp_path / "plan.json")
    for other in (load_plan(tmp_path / "plan.json"), pickle.loads(pickle.dumps(plan))):
        assert other.schedule.head_parts == 4
        assert other.fingerprint() == plan.fingerprint()
    assert in_one_go(plan).fingerprint() != plan.fingerprint()


def test_a_wrong_number_of_parts_is_found():
    plan = make_plan(masks.causal(), 512, 4, schedule="exchange", num_heads=8, head_dim=8)
    wrong = replace(plan, schedules={"": replace(plan.schedule, head_parts=2)})
    with pytest.raises(flexcp.FlexCPError, match="several where ranks share them"):
        wrong.check()
