"""ContextParallel makes a module's own attention calls those of the whole sequence."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa_by_name
from torch.utils.checkpoint import checkpoint

import flexcp
from flexcp import FlexCPError, masks, testing
from flexcp.comm.simulated import RankError
from flexcp.compat.flex_attention import flex_attention as compat_flex_attention
from flexcp.testing.tolerance import assert_close

LENGTH = 37
DOCUMENTS = [11, 3, 23]
PACKED = masks.causal() & masks.document(lengths=DOCUMENTS)
compiled_by_the_user = torch.compile(torch_flex_attention, backend="aot_eager")


class Attention(nn.Module):
    """An attention layer whose attention function is the caller's choice."""

    def __init__(self, attend, heads=4, kv_heads=2):
        super().__init__()
        self.heads, self.kv_heads, self.attend = heads, kv_heads, attend
        self.qkv = nn.Linear(8, (heads + 2 * kv_heads) * 4)
        self.out = nn.Linear(heads * 4, 8)

    def forward(self, x):
        heads = self.qkv(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


def bias(score, b, h, q_idx, kv_idx):
    return score - 0.05 * (h + 1) * (q_idx - kv_idx)


def plan_for(mesh, mask=PACKED, length=LENGTH, **options):
    return flexcp.make_plan(
        mask, length, mesh, block_size=8, num_heads=4, num_kv_heads=2, head_dim=4,
        dtype=torch.float64, **options,
    )  # fmt: skip


def layer(attend, seed=0):
    torch.manual_seed(seed)
    return Attention(attend).double()


X = torch.randn(2, LENGTH, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def whole(mask=PACKED, **options):
    """Output and gradients of one process."""
    module = layer(
        lambda q, k, v: flexcp.flex_attention(q, k, v, block_mask=mask, enable_gqa=True, **options)
    )
    x = X.clone().requires_grad_()
    out = module(x)
    out.square().sum().backward()
    return out.detach(), x.grad, [p.grad for p in module.parameters()]


def sharded(mesh, attend, plan=None, run=lambda module, x: module(x)):
    """The same by this rank, put together."""
    plan = plan_for(mesh) if plan is None else plan
    module = parallelize_module(layer(attend), mesh, flexcp.ContextParallel(plan))
    x = plan.shard(X, 1).requires_grad_()
    out = run(module, x)
    out.square().sum().backward()
    grads = [p.grad for p in module.parameters()]
    return plan.unshard(out.detach(), 1), plan.unshard(x.grad, 1), grads


def assert_same(results, expected):
    for out, x_grad, _ in results:
        assert_close(out, expected[0], what="out")
        assert_close(x_grad, expected[1], what="dx")
    for *parts, want in zip(*(grads for _, _, grads in results), expected[2], strict=True):
        assert_close(sum(parts), want, what="a parameter's gradient")


ATTENTIONS = {
    "sdpa": lambda q, k, v: functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    ),
    "sdpa by name": lambda q, k, v: sdpa_by_name(q, k, v, None, 0.0, True, enable_gqa=True),
    "torch flex": lambda q, k, v: torch_flex_attention(q, k, v, enable_gqa=True),
    "compiled torch flex": lambda q, k, v: compiled_by_the_user(q, k, v, enable_gqa=True),
    "flexcp flex": lambda q, k, v: flexcp.flex_attention(q, k, v, enable_gqa=True),
    "compat flex": lambda q, k, v: compat_flex_attention(q, k, v, enable_gqa=True),
}


@pytest.mark.parametrize("name", [n for n in ATTENTIONS if n != "compiled torch flex"])
def test_every_attention_function_is_that_of_the_whole_sequence(name):
    results = testing.simulate(lambda mesh: sharded(mesh, ATTENTIONS[name]), 3)
    assert_same(results, whole())


@pytest.mark.parametrize("name", ["sdpa", "compiled torch flex"])
def test_it_is_so_between_processes(name):
    results = testing.spawn(lambda mesh: sharded(mesh, ATTENTIONS[name]), 2)
    assert_same(results, whole())


def test_score_mods_see_positions_and_heads_of_the_whole_model():
    def attend(q, k, v):
        return torch_flex_attention(q, k, v, bias, scale=0.3, enable_gqa=True)

    results = testing.simulate(lambda mesh: sharded(mesh, attend), 2)
    assert_same(results, whole(score_mod=bias, scale=0.3))


def test_lse_is_returned_as_the_function_returns_it():
    q = torch.randn(1, 2, LENGTH, 4, dtype=torch.float64)
    _, want = flexcp.flex_attention(q, q, q, block_mask=PACKED, return_lse=True)

    class Module(nn.Module):
        def forward(self, x):
            _, lse = flexcp.flex_attention(x, x, x, return_lse=True)
            _, aux = torch_flex_attention(x, x, x, return_aux=AuxRequest(lse=True))
            assert torch.equal(lse, aux.lse)
            return lse

    def rank(mesh):
        plan = plan_for(mesh)
        module = parallelize_module(Module(), mesh, flexcp.ContextParallel(plan))
        return plan.unshard(module(plan.shard(q, 2)), 2)

    for found in testing.simulate(rank, 2):
        assert_close(found, want, what="lse")


def test_a_head_offset_counts_heads_across_tensor_parallel_ranks():
    q = torch.randn(1, 4, LENGTH, 4, dtype=torch.float64)
    want = flexcp.flex_attention(q, q, q, bias, block_mask=PACKED)

    class Module(nn.Module):
        def forward(self, x):
            return torch_flex_attention(x, x, x, bias)

    def rank(mesh):
        plan = plan_for(mesh)
        parts = []
        for first in (0, 2):  # as two ranks of a tensor-parallel mesh would
            style = flexcp.ContextParallel(plan, first_head=first)
            module = parallelize_module(Module(), mesh, style)
            parts.append(plan.unshard(module(plan.shard(q[:, first : first + 2], 2)), 2))
        return torch.cat(parts, dim=1)

    for found in testing.simulate(rank, 2):
        assert_close(found, want, what="out")


def test_tensors_without_a_head_dimension_keep_their_shape():
    x = torch.randn(3, LENGTH, 4, dtype=torch.float64)

    class Module(nn.Module):
        def forward(self, x):
            return functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    def rank(mesh):
        plan = plan_for(mesh, masks.causal())
        module = parallelize_module(Module(), mesh, flexcp.ContextParallel(plan))
        return plan.unshard(module(plan.shard(x, 1)), 1)

    for found in testing.simulate(rank, 2):
        assert_close(found, Module()(x), what="out")


def test_autocast_lowers_the_type_as_it_does_for_torch():
    x = torch.randn(1, 2, LENGTH, 4)

    class Module(nn.Module):
        def forward(self, x):
            return functional.scaled_dot_product_attention(x, x, x)

    def rank(mesh):
        plan = plan_for(mesh)
        module = parallelize_module(Module(), mesh, flexcp.ContextParallel(plan))
        with torch.autocast("cpu", torch.bfloat16):
            return module(plan.shard(x, 2)).dtype

    assert testing.simulate(rank, 2) == [torch.bfloat16] * 2


def test_multihead_attention_of_torch_runs_without_its_weights():
    torch.manual_seed(0)
    original = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    square = masks.causal().mask_mod(0, 0, torch.arange(LENGTH)[:, None], torch.arange(LENGTH))
    want, _ = original(X, X, X, attn_mask=~square, need_weights=False)

    def rank(mesh):
        plan = plan_for(mesh, masks.causal())
        module = parallelize_module(copy.deepcopy(original), mesh, flexcp.ContextParallel(plan))
        x = plan.shard(X, 1)
        out, _ = module(x, x, x, need_weights=False)
        with pytest.raises(FlexCPError, match="MultiheadAttention, whose forward called neither"):
            module(x, x, x, need_weights=True)
        return plan.unshard(out, 1)

    for found in testing.simulate(rank, 2):
        assert_close(found, want, what="out")


def test_an_encoder_layer_of_torch_does_not_go_around_its_attention_module():
    original = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double().eval()
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    with torch.no_grad():
        want = original(X, src_mask=later)

    def rank(mesh):
        plan = plan_for(mesh, masks.causal())
        style = flexcp.ContextParallel(plan)
        module = parallelize_module(copy.deepcopy(original), mesh, {"self_attn": style})
        with torch.no_grad():
            return plan.unshard(module(plan.shard(X, 1)), 1)

    for found in testing.simulate(rank, 2):
        assert_close(found, want, what="out")


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_checkpointed_around_the_module_is_recomputed_alike(reentrant):
    def run(module, x):
        return checkpoint(module, x, use_reentrant=reentrant)

    results = testing.simulate(lambda mesh: sharded(mesh, ATTENTIONS["sdpa"], run=run), 3)
    assert_same(results, whole())


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_checkpointed_within_the_module_is_recomputed_alike(reentrant):
    def attend(q, k, v):
        return checkpoint(ATTENTIONS["sdpa"], q, k, v, use_reentrant=reentrant)

    results = testing.simulate(lambda mesh: sharded(mesh, attend), 3)
    assert_same(results, whole())


OTHER = masks.causal() & masks.document(lengths=[20, 17])


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_every_step_is_recomputed_under_its_own_plan(reentrant):
    """Both forward passes come before one backward pass, which is under neither plan."""

    def rank(mesh):
        style = flexcp.ContextParallel()
        module = parallelize_module(layer(ATTENTIONS["sdpa"]), mesh, style)
        losses = []
        for mask in (PACKED, OTHER):
            with style.using(plan_for(mesh, mask)) as plan:
                x = plan.shard(X, 1).requires_grad_()
                if reentrant is None:
                    out = module(x)
                else:
                    out = checkpoint(module, x, use_reentrant=reentrant)
                losses.append(out.square().sum())
        assert style.plan is None
        sum(losses).backward()
        return [p.grad for p in module.parameters()]

    wanted = [a + b for a, b in zip(whole()[2], whole(OTHER)[2], strict=True)]
    for *parts, want in zip(*testing.simulate(rank, 2), wanted, strict=True):
        assert_close(sum(parts), want, what="a parameter's gradient")


def test_nested_checkpoints_are_recomputed_under_their_plan():
    def inner(module, x):
        return checkpoint(module, x, use_reentrant=False)

    def rank(mesh):
        style = flexcp.ContextParallel(plan_for(mesh, masks.full()))
        module = parallelize_module(layer(ATTENTIONS["flexcp flex"]), mesh, style)
        with style.using(plan_for(mesh)) as plan:
            x = plan.shard(X, 1).requires_grad_()
            loss = checkpoint(inner, module, x, use_reentrant=False).square().sum()
        loss.backward()
        return [p.grad for p in module.parameters()]

    for *parts, want in zip(*testing.simulate(rank, 2), whole()[2], strict=True):
        assert_close(sum(parts), want, what="a parameter's gradient")


def test_layers_with_several_masks_share_the_plan_of_a_step():
    model = nn.Sequential(layer(ATTENTIONS["flexcp flex"]), layer(ATTENTIONS["flexcp flex"], 1))
    two = {"full": masks.causal(), "local": masks.sliding_window(4)}
    x = X
    for module, mask in zip(model, two.values(), strict=True):
        one = copy.deepcopy(module)
        one.attend = lambda q, k, v, mask=mask: flexcp.flex_attention(
            q, k, v, block_mask=mask, enable_gqa=True
        )
        x = one(x)

    def rank(mesh):
        cp = flexcp.ContextParallel()
        mine = parallelize_module(
            copy.deepcopy(model), mesh, {"0": cp.with_mask("full"), "1": cp.with_mask("local")}
        )
        with cp.using(plan_for(mesh, two)) as plan:
            return plan.unshard(mine(plan.shard(X, 1)), 1)

    for found in testing.simulate(rank, 2):
        assert_close(found, x, what="out")


def test_a_disabled_style_leaves_whole_sequences_to_the_module():
    def rank(mesh):
        style = flexcp.ContextParallel(plan_for(mesh))
        module = parallelize_module(layer(ATTENTIONS["sdpa"]), mesh, style)
        with style.disabled():
            return torch.equal(module(X), layer(ATTENTIONS["sdpa"])(X))

    assert testing.simulate(rank, 2) == [True, True]


def test_nothing_stays_changed_after_a_module_has_raised():
    import torch.utils.checkpoint as torch_checkpoint

    before = torch_checkpoint.CheckpointFunction
    x = torch.randn(1, 4, LENGTH, 4, dtype=torch.float64)
    want = torch_flex_attention(x, x, x)

    def attend(q, k, v):
        raise KeyError("in the middle")

    def rank(mesh):
        style = flexcp.ContextParallel()
        module = parallelize_module(layer(attend), mesh, style)
        with pytest.raises(KeyError, match="in the middle"), style.using(plan_for(mesh)) as plan:
            module(plan.shard(X, 1))
        assert style.plan is None

    testing.simulate(rank, 2)
    assert torch_checkpoint.CheckpointFunction is before
    assert torch.equal(torch_flex_attention(x, x, x), want)
    assert torch.overrides._get_current_function_mode_stack() == []


def test_a_copy_of_a_model_keeps_its_style():
    def rank(mesh):
        plan = plan_for(mesh)
        style = flexcp.ContextParallel(plan)
        module = parallelize_module(layer(ATTENTIONS["sdpa"]), mesh, style)
        other = copy.deepcopy(module)
        nn.init.zeros_(other.out.weight)
        x = plan.shard(X, 1)
        return bool(module(x).std() > 0), bool((other(x) - other.out.bias).abs().max() == 0)

    assert testing.simulate(rank, 2) == [(True, True)] * 2


REFUSED = {
    "an attn_mask": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, q, q, torch.ones(1) > 0),
        "attn_mask=None, since a dense mask",
    ),
    "dropout": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5),
        r"got dropout_p=0.5; pass dropout_p=0.0",
    ),
    "heads that differ": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v),
        "4 query heads and 2 key heads; pass enable_gqa=True",
    ),
    "a cache of keys": (
        lambda q, k, v: functional.scaled_dot_product_attention(
            q, *(torch.cat([x, x], 2) for x in (q, q))
        ),
        "k with the .* rows that rank . owns",
    ),
    "kernel options": (
        lambda q, k, v: torch_flex_attention(q, q, q, kernel_options={"BLOCK_M": 64}),
        r"no kernel_options, .* got kernel_options=\{'BLOCK_M': 64\}",
    ),
    "largest scores": (
        lambda q, k, v: torch_flex_attention(q, q, q, return_aux=AuxRequest(max_scores=True)),
        r"got AuxRequest\(max_scores=True\); ask for lse alone",
    ),
    "two requests for lse": (
        lambda q, k, v: flexcp.flex_attention(
            q, q, q, return_lse=True, return_aux=AuxRequest(lse=True)
        ),
        "return_lse or return_aux, got both",
    ),
    "a mask of the rank's rows": (
        lambda q, k, v: flexcp.flex_attention(
            q, q, q, block_mask=flexcp.build_block_grid(masks.causal(), q.shape[2])
        ),
        "a block_mask of the whole sequence, 37 x 37, or none, got one of",
    ),
    "a mask that forbids more": (
        lambda q, k, v: flexcp.flex_attention(q, q, q, block_mask=masks.sliding_window(2)),
        "forbids some of them; make the plan with this mask",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_plan_cannot_do_is_refused_by_name(name):
    attend, message = REFUSED[name]
    with pytest.raises(RankError, match=message):
        testing.simulate(lambda mesh: sharded(mesh, attend), 2)


def test_is_causal_is_refused_where_the_plan_sees_later_keys():
    def rank(mesh):
        return sharded(mesh, ATTENTIONS["sdpa"], plan_for(mesh, masks.sliding_window(5, 1)))

    with pytest.raises(RankError, match="the plan's mask lets queries see later keys, got is_caus"):
        testing.simulate(rank, 2)


@pytest.mark.parametrize(
    "block_mask",
    [
        PACKED,
        masks.causal(),
        create_block_mask(PACKED.mask_mod, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16),
        flexcp.build_block_grid(masks.causal(), LENGTH, block_size=4),
    ],
    ids=["the plan's", "a wider one", "a BlockMask", "a BlockGrid"],
)
def test_a_block_mask_that_repeats_the_plan_or_says_less_is_fine(block_mask):
    def attend(q, k, v):
        return flexcp.flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)

    results = testing.simulate(lambda mesh: sharded(mesh, attend), 2)
    assert_same(results, whole())


def test_the_lists_of_a_block_mask_count_beside_its_function():
    narrow = create_block_mask(PACKED.mask_mod, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16)
    narrow.kv_num_blocks.clamp_(max=1)  # the lists now leave out a tile that the function allows

    def attend(q, k, v):
        return torch_flex_attention(q, k, v, block_mask=narrow, enable_gqa=True)

    with pytest.raises(RankError, match="one that forbids some of them"):
        testing.simulate(lambda mesh: sharded(mesh, attend), 2)


def _message(rank, ranks=2):
    with pytest.raises(RankError) as caught:
        testing.simulate(rank, ranks)
    assert isinstance(caught.value.__cause__, FlexCPError)
    return str(caught.value.__cause__)


def test_a_model_without_a_plan_says_how_to_give_one():
    def rank(mesh):
        module = parallelize_module(layer(None), mesh, flexcp.ContextParallel())
        module(X)

    assert "a plan for ContextParallel, got none; pass ContextParallel(plan)" in _message(rank)


def test_a_plan_from_numbers_is_refused():
    with pytest.raises(FlexCPError, match="a plan that was made with a mesh"):
        flexcp.ContextParallel(flexcp.make_plan(PACKED, LENGTH, 2))
    with pytest.raises(FlexCPError, match=r"a plan, as flexcp\.make_plan returns it, got Mask"):
        flexcp.ContextParallel(PACKED)


def test_an_unknown_mask_name_is_refused_before_the_model_runs():
    def rank(mesh):
        with flexcp.ContextParallel(mask="wide").using(plan_for(mesh, {"a": PACKED})):
            pass

    assert "one of this plan's masks: 'a', got 'wide'" in _message(rank)


def test_a_plan_for_another_mesh_is_refused():
    def rank(mesh):
        rows, cols = (
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))[n] for n in names
        )
        parallelize_module(layer(None), rows, flexcp.ContextParallel(plan_for(cols)))

    names = ("dp", "cp")
    with pytest.raises(RankError, match="a plan for the mesh of parallelize_module"):
        testing.spawn(rank, 4)


def test_a_module_is_parallelized_once():
    def rank(mesh):
        model = nn.Sequential(layer(None))
        style = flexcp.ContextParallel(plan_for(mesh))
        parallelize_module(model, mesh, {"0": style})
        parallelize_module(model, mesh, style)

    assert "no ContextParallel yet, got Attention '0', which has" in _message(rank)


def test_simulated_ranks_need_a_style_each():
    style = flexcp.ContextParallel()

    def rank(mesh):
        parallelize_module(layer(None), mesh, style)

    assert "in a simulation for each rank" in _message(rank)


def test_other_kinds_of_recomputation_are_refused_once_plans_change():
    """A module that runs in a backward pass for reasons of its own has no plan of its own."""

    def rank(mesh):
        style = flexcp.ContextParallel()
        module = parallelize_module(layer(ATTENTIONS["sdpa"]), mesh, style)
        with style.using(plan_for(mesh)) as plan:
            x = plan.shard(X, 1).requires_grad_()
            x.register_hook(lambda grad: module(x.detach()))
            x.sum().backward()

    assert "a module that runs in a backward pass, while plans change" in _message(rank)


class SelfAttention(nn.Module):
    def forward(self, x):
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_heads_may_be_sharded_as_dtensors():
    x = torch.randn(1, 4, LENGTH, 4, dtype=torch.float64)

    def rank(_):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        plan = plan_for(mesh["cp"], masks.causal())
        module = parallelize_module(SelfAttention(), mesh["cp"], flexcp.ContextParallel(plan))
        heads = distribute_tensor(plan.shard(x, 2), mesh["tp"], [Shard(1)]).requires_grad_()
        out = module(heads)
        assert out.placements == (Shard(1),)
        out.full_tensor().square().sum().backward()
        return [plan.unshard(y.full_tensor(), 2) for y in (out.detach(), heads.grad)]

    whole = x.clone().requires_grad_()
    want = SelfAttention()(whole)
    want.square().sum().backward()
    for out, grad in testing.spawn(rank, 4):
        assert_close(out, want.detach(), what="out")
        assert_close(grad, whole.grad, what="gradient")


def test_dtensors_that_are_sharded_along_the_sequence_are_refused():
    def rank(mesh):
        plan = plan_for(mesh, masks.causal(), layout="contiguous")
        module = parallelize_module(SelfAttention(), mesh, flexcp.ContextParallel(plan))
        module(distribute_tensor(torch.randn(1, 4, LENGTH, 4), mesh, [Shard(2)]))

    with pytest.raises(
        RankError, match=r"sharded alike along batch or heads, got \(Shard\(dim=2\)"
    ):
        testing.spawn(rank, 2)
