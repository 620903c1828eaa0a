"""Sinks and what a score function captures: gradients, summed over ranks, are one process's."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flexcp
from flexcp import masks, testing
from flexcp.comm.collectives import ordered_sum
from flexcp.kernels.reference import dense_attention, dense_mask
from flexcp.ops import traced_scores
from flexcp.testing.tolerance import assert_close

LENGTH, HEADS, KV_HEADS, BATCH, DIM = 101, 4, 2, 2, 8
_DRAW = torch.Generator().manual_seed(0)


def draw(*shape):
    return torch.randn(*shape, generator=_DRAW, dtype=torch.float64)


FULL = [draw(BATCH, h, LENGTH, DIM) for h in (HEADS, KV_HEADS, KV_HEADS)]
WEIGHT, WEIGHT_OF_LSE = draw(BATCH, HEADS, LENGTH, DIM), draw(BATCH, HEADS, LENGTH)
LEARNED = {
    "sinks": draw(HEADS),
    "factor of a head": draw(HEADS),
    "bias of a distance": draw(HEADS, 2 * LENGTH),
    "bias of a key": draw(BATCH, LENGTH),
}
NAMES = ["out", "lse", *(f"gradient of {x}" for x in ("q", "k", "v", *LEARNED))]
IDS = torch.stack([torch.arange(LENGTH) // 23, torch.arange(LENGTH) // 9])
MASKS = {
    # Heads differ, and some queries see nothing but the sink.
    "blind rows": masks.Mask(lambda b, h, q, kv: (q >= kv) & (kv > 3) | (kv < h)),
    # Batch elements have layouts of their own.
    "documents": masks.causal() & masks.document(IDS),
}
ON_RANKS = [
    ("exchange", 3),
    ("ring", 3),
    ("allgather", 3),
    ("ulysses", 3),
    ("ulysses", 5),  # one rank has no head
    ("hybrid", (3, 2)),
    ("hybrid", (2, 3)),
]


def score_mod_of(by_head, by_distance, by_key):
    def score_mod(score, b, h, q_idx, kv_idx):
        near = by_distance[h, q_idx - kv_idx + LENGTH]
        return score * (1 + by_head[h]) + near + by_key[b, kv_idx]

    return score_mod


def objective(out, lse, weight, weight_of_lse):
    seen = lse.masked_fill(lse == -torch.inf, 0.0)
    return (out * weight).sum() + (seen * weight_of_lse).sum()


def leaves(tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


@cache
def one_process(name):
    """Outputs and gradients by the definition of attention, in the order of NAMES."""
    full, learned = leaves(FULL), leaves(LEARNED.values())
    every = torch.arange(LENGTH)
    allowed = dense_mask(MASKS[name].mask_mod, every, every, batch=BATCH, heads=HEADS)
    score_mod = score_mod_of(*learned[1:])
    found = dense_attention(*full, allowed=allowed, score_mod=score_mod, sinks=learned[0])
    objective(found.out, found.lse, WEIGHT, WEIGHT_OF_LSE).backward()
    return [found.out.detach(), found.lse.detach(), *(x.grad for x in (*full, *learned))]


def over_ranks(mesh, mask, schedule, recompute=None):
    """The same on one rank of several; parts of the sequence put together, the rest summed."""
    plan = flexcp.make_plan(
        mask, LENGTH, mesh, schedule=schedule, block_size=16, num_heads=HEADS,
        num_kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.float64, batch=BATCH,
    )  # fmt: skip
    local = leaves(plan.shard(x, 2) for x in FULL)
    learned = leaves(LEARNED.values())
    score_mod = score_mod_of(*learned[1:])

    def attend(q, k, v, sinks):
        return flexcp.attention(
            q, k, v, plan, score_mod=score_mod, sinks=sinks, return_lse=True
        )  # fmt: skip

    if recompute is None:
        out, lse = attend(*local, learned[0])
    else:
        out, lse = checkpoint(
            attend, *local, learned[0], use_reentrant=recompute == "reentrant"
        )  # fmt: skip
    objective(out, lse, plan.shard(WEIGHT, 2), plan.shard(WEIGHT_OF_LSE, 2)).backward()
    parts = [out.detach(), lse.detach(), *(x.grad for x in local)]
    return [
        *(plan.unshard(x, 2) for x in parts),
        *(ordered_sum(plan.ranks.transport, x.grad) for x in learned),
    ]


def assert_one_process(results, name):
    for found in results:
        for what, got, want in zip(NAMES, found, one_process(name), strict=True):
            assert_close(got, want, what=what)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("schedule", "ranks"), ON_RANKS)
def test_gradients_of_sinks_and_of_captured_tensors_add_up_over_ranks(schedule, ranks, name):
    results = testing.simulate(lambda mesh: over_ranks(mesh, MASKS[name], schedule), ranks)
    assert_one_process(results, name)


def test_they_add_up_over_real_ranks():
    def rank(mesh):
        return [over_ranks(mesh, MASKS["documents"], s) for s in ("exchange", "ring", "ulysses")]

    for results in testing.spawn(rank, 3):
        assert_one_process(results, "documents")


@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("schedule", ["exchange", "ulysses"])
def test_they_add_up_if_attention_is_recomputed_in_a_checkpoint(schedule, recompute):
    def rank(mesh):
        return over_ranks(mesh, MASKS["documents"], schedule, recompute)

    assert_one_process(testing.simulate(rank, 3), "documents")


def test_real_ranks_recompute_in_checkpoints_of_both_kinds():
    def rank(mesh):
        return [
            over_ranks(mesh, MASKS["blind rows"], "ring", recompute)
            for recompute in ("reentrant", "not reentrant")
        ]

    for results in testing.spawn(rank, 3):
        assert_one_process(results, "blind rows")


@pytest.mark.parametrize("schedule", ["exchange", "ring", "allgather", "ulysses"])
def test_they_get_gradients_if_nothing_else_needs_any(schedule):
    def rank(mesh):
        plan = flexcp.make_plan(
            MASKS["documents"], LENGTH, mesh, schedule=schedule, block_size=16, num_heads=HEADS,
            num_kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.float64, batch=BATCH,
        )  # fmt: skip
        learned = leaves(LEARNED.values())
        out, lse = flexcp.attention(
            *(plan.shard(x, 2) for x in FULL), plan, sinks=learned[0],
            score_mod=score_mod_of(*learned[1:]), return_lse=True,
        )  # fmt: skip
        objective(out, lse, plan.shard(WEIGHT, 2), plan.shard(WEIGHT_OF_LSE, 2)).backward()
        return [ordered_sum(plan.ranks.transport, x.grad) for x in learned]

    wanted = one_process("documents")[5:]
    for found in testing.simulate(rank, 3):
        for what, got, want in zip(NAMES[5:], found, wanted, strict=True):
            assert_close(got, want, what=what)


def half_mods(by_offset, by_head):
    """Score functions that read few entries for many scores."""

    def offset(q, kv):
        return (q - kv).clamp(-4, 4) + LENGTH

    return {
        "sum": lambda s, b, h, q, kv: s + by_offset[h, offset(q, kv)],
        "wider at once": lambda s, b, h, q, kv: s * torch.sigmoid(by_head[h].to(s.dtype)),
        "score by score": lambda s, b, h, q, kv: s + by_offset[h][offset(q, kv)].reshape(()),
        "in steps": lambda s, b, h, q, kv: s * by_head[h] + by_offset[h][offset(q, kv)],
    }


def assert_summed_in_float32(attend, name, dtype):
    """Gradients of half-precision tables are those of the oracle, rounded once."""
    tables = leaves(LEARNED[x].to(dtype) for x in ("bias of a distance", "factor of a head"))
    wide = leaves(x.double() for x in tables)
    out = dense_attention(*FULL, score_mod=half_mods(*wide)[name]).out
    wanted = torch.autograd.grad(out, wide, WEIGHT, materialize_grads=True)
    out = attend(*(x.float() for x in FULL), half_mods(*tables)[name])
    found = torch.autograd.grad(out, tables, WEIGHT.float(), materialize_grads=True)
    eps = torch.finfo(dtype).eps
    # Steps in half precision, such as its `reshape`, round each of the terms, but not their sum.
    slack = eps if name == "score by score" else 2e-5
    for got, want in zip(found, wanted, strict=True):
        assert ((got.double() - want).abs() <= eps * want.abs() + slack * want.abs().max()).all()


def whole_attention(*given):
    return flexcp.flex_attention(*given, enable_gqa=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", half_mods(None, None))
def test_gradients_of_captured_half_precision_tensors_are_summed_in_float32(name, dtype):
    assert_summed_in_float32(whole_attention, name, dtype)


@pytest.mark.parametrize("most_kept", [1 << 24, 100], ids=["kept", "recomputed"])
def test_they_are_in_a_compiled_function_too(most_kept, monkeypatch):
    monkeypatch.setattr(traced_scores, "MOST_KEPT_SCORES", most_kept)
    torch._dynamo.reset()
    compiled = torch.compile(whole_attention, backend="aot_eager", fullgraph=True)
    assert_summed_in_float32(compiled, "in steps", torch.bfloat16)


def doubled(x):
    x *= 2
    return x


def doubled_through_a_view(x):
    x.view(x.shape).mul_(2)
    return x


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("double", [doubled, doubled_through_a_view])
def test_entries_that_a_score_function_changes_in_place_count_as_changed(double, compiled):
    table = LEARNED["bias of a key"].bfloat16().requires_grad_()
    full = leaves(x.float() for x in FULL)

    def results(attend, twice):
        out = attend(*full, lambda s, b, h, q, kv: s + twice(table[b, kv]))
        return [out.detach(), *torch.autograd.grad(out, (*full, table), WEIGHT.float())]

    attend = whole_attention
    if compiled:
        attend = torch.compile(whole_attention, backend="aot_eager", fullgraph=True)
    expected = results(whole_attention, lambda x: x * 2)
    for got, want in zip(results(attend, double), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("learned", [False, True], ids=["constant", "learned"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_captured_must_not_change_between_the_passes(ranks, learned):
    """Scores are computed again: gradients would be those of another function."""

    def changed_after_forward(mesh=None):
        slopes = LEARNED["factor of a head"].clone()
        full = leaves(FULL)
        scaled = (slopes * 1).requires_grad_() if learned else slopes

        def mod(score, b, h, q, kv):
            return score + scaled[h] * (q - kv)

        if mesh is None:
            out = flexcp.flex_attention(*full, mod, masks.causal(), enable_gqa=True)
        else:
            sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "batch": BATCH}
            plan = flexcp.make_plan(masks.causal(), LENGTH, mesh, **sizes)
            out = flexcp.attention(*(plan.shard(x, 2) for x in full), plan, score_mod=mod)
        with torch.no_grad():
            scaled.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    if ranks == 1:
        changed_after_forward()
    else:
        testing.simulate(changed_after_forward, ranks)
