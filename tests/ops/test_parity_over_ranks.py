"""Attention over a plan equals attention in one process: outputs and all gradients."""

from __future__ import annotations

import pytest
import torch

import flexcp
from flexcp import masks, testing
from flexcp.testing import tolerance

IDS = torch.sort(torch.randint(0, 6, (203,), generator=torch.Generator().manual_seed(1))).values
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
MASKS = {
    "full": masks.full(),
    "causal": masks.causal(),
    "documents": masks.causal() & masks.document(IDS),
    "window": masks.sliding_window(17),
    "prefix and nothing": masks.Mask(lambda b, h, q, kv: (q >= kv) & (kv > 3) | (kv < h)),
}


def alibi(score, b, h, q_idx, kv_idx):
    return score - SLOPES.to(score.dtype)[h] * (q_idx - kv_idx).abs()


def compare(
    run,
    ranks,
    mask,
    length,
    *,
    layout="balanced",
    schedule="exchange",
    heads=4,
    kv_heads=2,
    batch=2,
    dtype=torch.float64,
    score_mod=None,
    sinks=None,
    permuted=False,
    plan_of=None,
    machine=None,
):
    """The largest difference between one process and many, over outputs and gradients.

    `plan_of` gives the plan of a mesh, if it is made already.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    full = [draw(batch, h, length, 8).requires_grad_() for h in (heads, kv_heads, kv_heads)]
    weight, weight_of_lse = draw(batch, heads, length, 8), draw(batch, heads, length)

    def objective(out, lse, w, wl):
        return (out * w).sum() + (lse.masked_fill(lse == -torch.inf, 0).to(w.dtype) * wl).sum()

    out, lse = flexcp.flex_attention(
        *full, block_mask=mask, enable_gqa=True, return_lse=True, sinks=sinks, score_mod=score_mod
    )
    objective(out, lse, weight, weight_of_lse).backward()
    expected = [out.detach(), lse.detach(), *(x.grad for x in full)]

    def made_by_each(mesh):
        return flexcp.make_plan(
            mask,
            length,
            mesh,
            layout=layout,
            schedule=schedule,
            block_size=16,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=8,
            dtype=dtype,
            batch=batch,
            machine=machine,
        )

    def rank(mesh):
        plan = (plan_of or made_by_each)(mesh)
        if mesh.get_rank() == 0:  # the plan of every rank is the same
            plan.check()
        local = [plan.shard(x.detach(), 2).requires_grad_() for x in full]
        given = local
        if permuted:  # the same values in memory as [B, L, H, D]
            given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in local]
        o, s = flexcp.attention(*given, plan, return_lse=True, sinks=sinks, score_mod=score_mod)
        w = plan.shard(weight, 2)
        if permuted:
            w = w.transpose(1, 2).contiguous().transpose(1, 2)
        objective(o, s, w, plan.shard(weight_of_lse, 2)).backward()
        grads = [x.grad for x in local]
        return [plan.unshard(x, 2) for x in (o.detach(), s.detach(), *grads)]

    worst = 0.0
    for found in run(rank, ranks):
        for got, want in zip(found, expected, strict=True):
            scale = want.masked_fill(want == -torch.inf, 0).abs().max().clamp(min=1e-3)
            difference = torch.where(got == want, 0, (got - want).abs()).max() / scale
            # Python's max would pass over NaN.
            worst = max(worst, float(difference.nan_to_num(nan=torch.inf)))
    return worst


@pytest.mark.parametrize("schedule", ["exchange", "ring", "allgather", "ulysses"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_schedule_gives_the_result_of_one_process(schedule, name, ranks):
    assert compare(testing.simulate, ranks, MASKS[name], 203, schedule=schedule) < 1e-10


@pytest.mark.parametrize(
    "layout", ["contiguous", "head_tail", "striped", "per_document", "ptrr", "balanced"]
)
@pytest.mark.parametrize("length", [13, 100, 203])
def test_every_layout_gives_the_result_of_one_process(layout, length):
    mask = masks.causal() & masks.document(IDS[:length])
    assert compare(testing.simulate, 4, mask, length, layout=layout) < 1e-10


@pytest.mark.parametrize("ranks", [2, 7, 8])
@pytest.mark.parametrize("length", [1, 5, 257, 512])
def test_any_length_on_any_number_of_ranks(ranks, length):
    assert compare(testing.simulate, ranks, masks.causal(), length, layout="auto") < 1e-10


@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 3)])
def test_heads_and_sequence_are_split_together_on_a_mesh_of_two_dimensions(shape):
    for heads, kv_heads in ((4, 2), (6, 3), (5, 1)):
        worst = compare(
            testing.simulate, shape, masks.causal(), 100, schedule="hybrid", heads=heads,
            kv_heads=kv_heads,
        )  # fmt: skip
        assert worst < 1e-10


@pytest.mark.parametrize("length", [1, 3, 5])
@pytest.mark.parametrize("heads", [1, 2])
def test_heads_and_sequence_are_split_together_if_ranks_have_neither(length, heads):
    run = testing.simulate
    options = {"schedule": "hybrid", "heads": heads, "kv_heads": 1}
    assert compare(run, (2, 3), masks.causal(), length, **options) < 1e-10


@pytest.mark.parametrize("schedule", ["exchange", "ring", "ulysses"])
def test_score_functions_see_global_positions_and_heads(schedule):
    worst = compare(testing.simulate, 3, masks.causal(), 100, schedule=schedule, score_mod=alibi)
    assert worst < 1e-10


@pytest.mark.parametrize("schedule", ["exchange", "ulysses"])
def test_sinks_join_every_rows_denominator(schedule):
    sinks = torch.randn(4, dtype=torch.float64)
    worst = compare(testing.simulate, 3, masks.causal(), 100, schedule=schedule, sinks=sinks)
    assert worst < 1e-10


@pytest.mark.parametrize("schedule", ["exchange", "ring", "allgather", "ulysses"])
def test_batch_elements_may_have_documents_and_layouts_of_their_own(schedule):
    ids = torch.stack([IDS[:90], torch.arange(90) // 7])
    mask = masks.causal() & masks.document(ids)
    assert compare(testing.simulate, 3, mask, 90, schedule=schedule) < 1e-10


@pytest.mark.parametrize("layout", ["per_document", "ptrr"])
def test_named_layouts_differ_between_batch_elements_that_do(layout):
    ids = torch.stack([IDS[:90], torch.arange(90) // 7])
    mask = masks.causal() & masks.document(ids)
    for ranks, schedule in ((3, "exchange"), ((2, 2), "hybrid")):
        assert compare(testing.simulate, ranks, mask, 90, layout=layout, schedule=schedule) < 1e-10


@pytest.mark.parametrize(("dtype", "budget"), [(torch.float32, 3e-5), (torch.bfloat16, 3e-2)])
def test_smaller_types_agree_within_their_rounding(dtype, budget):
    for schedule in ("exchange", "ring"):
        worst = compare(testing.simulate, 3, masks.causal(), 203, schedule=schedule, dtype=dtype)
        assert worst < budget


def test_autocast_casts_as_it_does_in_one_process():
    q, k, v = (torch.randn(1, 2, 61, 8) for _ in range(3))

    def rank(mesh):
        plan = flexcp.make_plan(masks.causal(), 61, mesh, num_heads=2, head_dim=8)
        with torch.autocast("cpu", torch.bfloat16):
            local = [plan.shard(x, 2) for x in (q, k, v.bfloat16())]
            out = flexcp.attention(*local, plan)
        return plan.unshard(out, 2)

    with torch.autocast("cpu", torch.bfloat16):
        one = flexcp.flex_attention(q, k, v, block_mask=masks.causal())
    whole = testing.simulate(rank, 3)[0]
    assert whole.dtype == one.dtype == torch.bfloat16
    tolerance.assert_close(whole, one)


def test_sixty_four_ranks():
    # Made once: 64 plans take longer than the rest.
    mask = MASKS["window"]
    made = flexcp.make_plan(
        mask, 203, 64, layout="balanced", schedule="exchange", block_size=16, num_heads=4,
        num_kv_heads=2, head_dim=8, dtype=torch.float64, batch=2,
    )  # fmt: skip
    assert compare(testing.simulate, 64, mask, 203, plan_of=made.on) < 1e-10


@pytest.mark.parametrize("schedule", ["exchange", "ring", "allgather", "ulysses"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_real_ranks_give_the_result_of_one_process(schedule, ranks):
    mask = MASKS["causal" if ranks == 2 else "documents"]
    assert compare(testing.spawn, ranks, mask, 203, schedule=schedule, permuted=True) < 1e-10


def test_real_ranks_on_a_mesh_of_two_dimensions():
    assert compare(testing.spawn, (2, 2), masks.causal(), 101, schedule="hybrid") < 1e-10


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_real_ranks_agree_under_many_masks_layouts_and_schedules_in_float32(ranks):
    """All cases in one start of the ranks, each of which compares by itself."""
    cases = [
        {"name": name, "layout": layout, "schedule": schedule, "score_mod": score_mod}
        for name, score_mod, layout, schedule in (
            ("window", None, "contiguous", "ring"),
            ("window", None, "striped", "allgather"),
            ("window", None, "auto", "auto"),
            ("full", None, "head_tail", "exchange"),
            ("full", None, "balanced", "ulysses"),
            ("full", None, "auto", "auto"),
            ("documents", alibi, "per_document", "exchange"),
            ("documents", alibi, "ptrr", "ring"),
            ("documents", alibi, "auto", "ulysses"),
        )
    ]

    def rank(mesh):
        def here(function, _):
            return [function(mesh)]

        worst = {}
        for case in cases:
            options = dict(case)
            mask = MASKS[options.pop("name")]
            worst[str(case)] = compare(here, ranks, mask, 203, dtype=torch.float32, **options)
        return worst

    for worst in testing.spawn(rank, ranks):
        assert {case: found for case, found in worst.items() if found >= 3e-5} == {}


def test_the_same_run_gives_the_same_bits():
    def rank(mesh):
        torch.manual_seed(0)
        plan = flexcp.make_plan(masks.causal(), 100, mesh, num_heads=2, head_dim=8)
        x = [plan.shard(torch.randn(1, 2, 100, 8), 2).requires_grad_() for _ in range(3)]
        flexcp.attention(*x, plan).square().sum().backward()
        return [y.grad for y in x]

    first, second = testing.spawn(rank, 3), testing.spawn(rank, 3)
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_one_plan_serves_several_masks_by_name():
    both = {"full": masks.causal(), "sliding": masks.sliding_window(9)}
    x = torch.randn(1, 2, 77, 8, dtype=torch.float64)

    def rank(mesh):
        plan = flexcp.make_plan(both, 77, mesh, num_heads=2, head_dim=8, block_size=16)
        local = plan.shard(x, 2)
        return [
            plan.unshard(flexcp.attention(local, local, local, plan, mask=name), 2) for name in both
        ]

    found = testing.simulate(rank, 3)[0]
    for got, mask in zip(found, both.values(), strict=True):
        want = flexcp.flex_attention(x, x, x, block_mask=mask)
        torch.testing.assert_close(got, want, atol=1e-10, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("schedule", ["exchange", "ring", "allgather", "ulysses", "hybrid"])
def test_the_bytes_that_a_plan_promises_are_the_bytes_that_come(schedule, dtype):
    q, k = torch.randn(2, 4, 203, 8, dtype=dtype), torch.randn(2, 2, 203, 8, dtype=dtype)
    ranks = (3, 2) if schedule == "hybrid" else (3,)

    def rank(mesh):
        plan = flexcp.make_plan(
            masks.causal(), 203, mesh, schedule=schedule, num_heads=4, num_kv_heads=2, head_dim=8,
            dtype=dtype, batch=2,
        )  # fmt: skip
        local = [plan.shard(x, 2).requires_grad_() for x in (q, k, k)]
        world, me = mesh.transport.world, mesh.get_rank()
        out = flexcp.attention(*local, plan)
        out.sum().backward()
        counts = plan.layout.counts.tolist()
        each = 2 * local[1].nbytes // max(counts[me], 1)  # K and V of a row
        padding = sum(max(counts) - n for r, n in enumerate(counts) if r != me) * each
        return world.bytes_received[me], plan.stats(), padding

    results = testing.simulate(rank, ranks)
    stats = results[0][1]
    for me, (received, _, padding) in enumerate(results):
        promised = stats.bytes_received_per_rank[me] + stats.backward_bytes_received_per_rank[me]
        # An all-gather pads all parts to the longest; what a plan promises are rows.
        promised += padding if schedule == "allgather" else 0
        assert received == promised


@pytest.mark.parametrize("schedule", ["exchange", "ulysses"])
def test_keys_of_one_batch_element_serve_all_as_on_one_device(schedule):
    q = torch.randn(3, 4, 40, 8, dtype=torch.float64)
    k, v = (torch.randn(1, 2, 40, 8, dtype=torch.float64) for _ in range(2))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    out = flexcp.flex_attention(*whole, block_mask=masks.causal(), enable_gqa=True)
    wanted = [out, *torch.autograd.grad(out.square().sum(), whole)]

    def rank(mesh):
        plan = flexcp.make_plan(
            masks.causal(), 40, mesh, num_heads=4, num_kv_heads=2, batch=3, schedule=schedule
        )
        own = [plan.shard(x, 2).requires_grad_() for x in (q, k, v)]
        out = flexcp.attention(*own, plan)
        return [plan.unshard(x, 2) for x in (out, *torch.autograd.grad(out.square().sum(), own))]

    for found in testing.simulate(rank, 2):
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y)
