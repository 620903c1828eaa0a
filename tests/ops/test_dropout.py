"""Dropout by global positions: the same weights for any layout, schedule and number of ranks."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flexcp
from flexcp import masks
from flexcp.testing import simulate, spawn
from flexcp.testing.tolerance import assert_close

S, HEADS = 26, 8
DOCUMENTS = masks.causal() & masks.document(lengths=[9, 3, 14])
SEEDED = {"dropout_p": 0.3, "dropout_seed": 2**40 + 7}
LAYOUTS = ["contiguous", "head_tail", "striped", "per_document", "ptrr", "balanced"]


def flat_scores(batch=2):
    """Queries, keys and values whose output says which weights were kept: none of them is 0."""
    q = torch.zeros(batch, HEADS, S, 4)
    return q, q[:, :4], torch.eye(S).expand(batch, 4, S, S)


def dropped(out):
    return out.detach() == 0


def alone(mask, **options):
    q, k, v = flat_scores()
    return dropped(flexcp.flex_attention(q, k, v, None, mask, enable_gqa=True, **options))


def over(mesh, mask, layout, schedule, **options):
    plan = flexcp.make_plan(
        mask, S, mesh, layout=layout, schedule=schedule, block_size=4, num_heads=HEADS,
        num_kv_heads=4, head_dim=4, dtype=torch.float32, batch=2,
    )  # fmt: skip
    out = flexcp.attention(*(plan.shard(x, 2) for x in flat_scores()), plan, **options)
    return dropped(plan.unshard(out, 2))


def same_on_all(found, wanted):
    return all(torch.equal(each, wanted) for each in found)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_the_same_weights_are_dropped_on_any_number_of_ranks(ranks):
    wanted = alone(DOCUMENTS, **SEEDED)
    for at in range(ranks, ranks + 3):
        layout, schedule = LAYOUTS[at * 5 % 6], ["exchange", "ring", "allgather"][at % 3]
        found = simulate(lambda mesh: over(mesh, DOCUMENTS, layout, schedule, **SEEDED), ranks)  # noqa: B023
        assert same_on_all(found, wanted), (layout, schedule)


@pytest.mark.parametrize(
    ("schedule", "ranks"), [("ulysses", 2), ("ulysses", 4), ("hybrid", (2, 2)), ("hybrid", (2, 4))]
)
def test_the_same_weights_are_dropped_where_ranks_split_heads(schedule, ranks):
    found = simulate(lambda mesh: over(mesh, masks.causal(), "auto", schedule, **SEEDED), ranks)
    assert same_on_all(found, alone(masks.causal(), **SEEDED))


def test_the_same_weights_are_dropped_where_batch_elements_have_layouts_of_their_own():
    ids = torch.stack([torch.arange(S) // 9, torch.arange(S) // 4])
    mask = masks.causal() & masks.document(ids)
    found = simulate(lambda mesh: over(mesh, mask, "per_document", "auto", **SEEDED), 3)
    assert same_on_all(found, alone(mask, **SEEDED))


def test_a_score_function_changes_no_weight_that_is_dropped():
    def bias(score, b, h, q, kv):
        return score - 0.1 * (q - kv)

    def rank(mesh):
        return over(mesh, DOCUMENTS, "balanced", "auto", score_mod=bias, **SEEDED)

    assert same_on_all(simulate(rank, 3), alone(DOCUMENTS, **SEEDED))


def test_share_and_scale_are_those_of_dropout():
    q, k, v = torch.zeros(1, 4, 64, 8), torch.zeros(1, 4, 64, 8), torch.eye(64).expand(1, 4, 64, 64)
    out = flexcp.flex_attention(q, k, v, dropout_p=0.25, dropout_seed=1)
    kept = out[out != 0]
    assert torch.allclose(kept, torch.tensor(1 / 64 / 0.75))
    share = 1 - kept.numel() / out.numel()
    assert abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / out.numel())


def test_gradients_over_ranks_are_those_of_the_oracle():
    q, k, v = (torch.randn(2, h, S, 4).double() for h in (HEADS, 4, 4))
    sinks, grad, grad_lse = torch.randn(HEADS).double(), torch.randn(q.shape), torch.randn(2, 8, S)
    given = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
    out, lse = flexcp.flex_attention(
        *given[:3], None, DOCUMENTS, enable_gqa=True, sinks=given[3], return_lse=True,
        kernel_options={"kernel": "reference"}, **SEEDED,
    )  # fmt: skip
    torch.autograd.backward((out, lse), (grad.double(), grad_lse.double()))

    def rank(mesh):
        plan = flexcp.make_plan(
            DOCUMENTS, S, mesh, block_size=4, num_heads=HEADS, num_kv_heads=4, head_dim=4,
            dtype=torch.float64, batch=2,
        )  # fmt: skip
        own = [plan.shard(x, 2).requires_grad_() for x in (q, k, v)]
        logits = sinks.clone().requires_grad_()
        out, lse = flexcp.attention(*own, plan, sinks=logits, return_lse=True, **SEEDED)
        grads = tuple(plan.shard(x.double(), 2) for x in (grad, grad_lse))
        torch.autograd.backward((out, lse), grads)
        return [plan.unshard(x, 2) for x in (out, lse, *(x.grad for x in own))], logits.grad

    found = simulate(rank, 3)
    for mine, theirs in zip(found[0][0], (out, lse, *(x.grad for x in given[:3])), strict=True):
        assert_close(mine, theirs)
    assert_close(sum(grad for _, grad in found), given[3].grad)


def test_without_a_seed_the_default_generator_draws_one_for_each_call():
    def two(mesh):
        return [over(mesh, DOCUMENTS, "auto", "auto", dropout_p=0.3) for _ in range(2)]

    torch.manual_seed(5)
    first, second = (alone(DOCUMENTS, dropout_p=0.3) for _ in range(2))
    assert not torch.equal(first, second)
    for ranks in (1, 3):
        torch.manual_seed(5)
        for found in simulate(two, ranks):
            assert torch.equal(found[0], first)
            assert torch.equal(found[1], second)


def gradient_of(q, attend, reentrant=None, preserved=True):
    """The gradient of two calls and what moves the generator on, as a checkpoint or not."""

    def block(x):
        return torch.dropout(attend(attend(x)), 0.5, train=True)

    leaf = q.clone().requires_grad_()
    if reentrant is None:
        out = block(leaf)
    else:
        out = checkpoint(block, leaf, use_reentrant=reentrant, preserve_rng_state=preserved)
    out.square().sum().backward()
    return leaf.grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_drops_the_same_weights(reentrant):
    q, k, v = (torch.randn(1, h, S, 4) for h in (HEADS, 4, 4))

    def attend(x):
        return flexcp.flex_attention(x, k, v, None, DOCUMENTS, enable_gqa=True, dropout_p=0.3)

    torch.manual_seed(3)
    wanted = gradient_of(q, attend)
    torch.manual_seed(3)
    assert torch.equal(gradient_of(q, attend, reentrant), wanted)


@pytest.mark.parametrize(("reentrant", "preserved"), [(False, True), (True, True), (False, False)])
def test_recomputation_over_ranks_drops_the_same_weights(reentrant, preserved):
    q, k, v = (torch.randn(1, h, S, 4) for h in (HEADS, 4, 4))

    def rank(mesh, **options):
        plan = flexcp.make_plan(
            DOCUMENTS, S, mesh, block_size=4, num_heads=HEADS, num_kv_heads=4, head_dim=4
        )
        own, *kv = (plan.shard(x, 2) for x in (q, k, v))

        def attend(x):
            return flexcp.attention(x, *kv, plan, dropout_p=0.3)

        def block(x):
            return attend(attend(x)).square()

        leaf = own.requires_grad_()
        out = checkpoint(block, leaf, **options) if options else block(leaf)
        out.sum().backward()
        return plan.unshard(leaf.grad, 2)

    torch.manual_seed(3)
    wanted = simulate(rank, 2)
    torch.manual_seed(3)
    options = {"use_reentrant": reentrant, "preserve_rng_state": preserved}
    for mine, theirs in zip(simulate(lambda m: rank(m, **options), 2), wanted, strict=True):
        assert torch.equal(mine, theirs)


def test_autocast_drops_the_same_weights():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(alone(DOCUMENTS, **SEEDED), alone(DOCUMENTS, **SEEDED))
        found = alone(DOCUMENTS, **SEEDED)
    assert torch.equal(found, alone(DOCUMENTS, **SEEDED))


@pytest.mark.parametrize("p", [1.0, -0.1, 1.5, float("nan"), "0.1", True, None])
def test_a_share_outside_of_0_to_1_is_refused(p):
    with pytest.raises(flexcp.FlexCPError, match="dropout_p to be a number of at least 0"):
        alone(DOCUMENTS, dropout_p=p)
    with pytest.raises(flexcp.FlexCPError, match="dropout_p to be a number of at least 0"):
        simulate(lambda mesh: over(mesh, DOCUMENTS, "auto", "auto", dropout_p=p), 2)


@pytest.mark.parametrize(
    "seed",
    [
        0.5,
        "7",
        True,
        2**64,
        -(2**63) - 1,
        torch.tensor(0.5),
        torch.tensor([1, 2]),
        torch.tensor(1, device="meta"),
    ],
)
def test_a_seed_that_is_no_integer_is_refused(seed):
    for p in (0.0, 0.1):
        with pytest.raises(flexcp.FlexCPError, match="dropout_seed to be an integer of 64 bits"):
            alone(DOCUMENTS, dropout_p=p, dropout_seed=seed)


def test_a_seed_may_be_a_number_of_64_bits_without_a_sign():
    found = [alone(DOCUMENTS, dropout_p=0.3, dropout_seed=x) for x in (2**64 - 5, -5, 2**63 - 5)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_a_seed_may_be_a_tensor():
    wanted = alone(DOCUMENTS, dropout_p=0.3, dropout_seed=9)
    for seed in (torch.tensor(9), torch.tensor([9], dtype=torch.int32)):
        assert torch.equal(alone(DOCUMENTS, dropout_p=0.3, dropout_seed=seed), wanted)


def calls_with(mesh, *seeds):
    """One call over a plan for each pair of seeds: that of rank 0, and that of all others."""
    plan = flexcp.make_plan(
        masks.full(), S, mesh, layout="contiguous", schedule="ring", num_heads=HEADS,
        num_kv_heads=4, head_dim=4,
    )  # fmt: skip
    q, k, v = (plan.shard(x, 2) for x in flat_scores())
    for first, others in seeds:
        seed = first if mesh.get_local_rank() == 0 else others
        flexcp.attention(q, k, v, plan, dropout_p=0.5, dropout_seed=seed)


def test_ranks_with_different_seeds_are_named_in_the_first_call():
    with pytest.raises(flexcp.FlexCPError) as caught:
        simulate(lambda mesh: calls_with(mesh, (1, 2)), 3)
    assert "dropout_seed: 1 on ranks [0]; 2 on ranks [1, 2]" in str(caught.value)
    assert "pass the same dropout_seed on every rank" in str(caught.value)


def test_ranks_with_different_seeds_are_named_in_a_warm_call():
    with pytest.raises(flexcp.FlexCPError) as caught:
        simulate(lambda mesh: calls_with(mesh, (1, 1), (2, 2), (3, 4)), 2)
    assert "dropout_seed 3" in str(caught.value)
    assert "dropout_seed 4" in str(caught.value)


def test_processes_with_different_seeds_are_told_so():
    def rank(mesh):
        with pytest.raises(flexcp.FlexCPError) as first:
            calls_with(mesh, (1, 2))
        calls_with(mesh, (5, 5))
        with pytest.raises(flexcp.FlexCPError) as warm:
            calls_with(mesh, (6, 7))
        calls_with(mesh, (8, 8))
        torch.manual_seed(mesh.get_local_rank())
        with pytest.raises(flexcp.FlexCPError) as drawn:
            calls_with(mesh, (None, None))
        return [str(each.value) for each in (first, warm, drawn)]

    for first, warm, drawn in spawn(rank, 2):
        assert "dropout_seed: 1 on ranks [0]; 2 on ranks [1]" in first
        assert "dropout_seed 6" in warm
        assert "dropout_seed 7" in warm
        assert "dropout_seed" in drawn


def test_other_seeds_need_no_agreement():
    def rank(mesh):
        calls_with(mesh, (0, 0))
        plan_calls = flexcp.make_plan(masks.full(), S, mesh).transport.calls
        known = len(plan_calls._agreed)
        calls_with(mesh, *((n, n) for n in range(1, 6)))
        return known, len(plan_calls._agreed)

    for before, after in simulate(rank, 2):
        assert before == after
