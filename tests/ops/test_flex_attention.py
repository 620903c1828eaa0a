"""flex_attention against the oracle in float64: outputs and every gradient."""

import pytest
import torch
from kernels.cases import MASKS, Problem, loss, problem
from torch.nn.attention.flex_attention import AuxRequest

import flexcp
from flexcp import Mask, masks
from flexcp.ops import flex_attention
from flexcp.testing.tolerance import assert_close


def check(p: Problem, mask: object, score_mod: object = None, through_lse: bool = True) -> None:
    """Compares everything that flex_attention returns, and all gradients, with the oracle."""
    plain = Mask(mask.mask_mod) if isinstance(mask, Mask) else None
    expected = p.expected(plain, score_mod)
    request = AuxRequest(lse=True, max_scores=through_lse)
    out, aux = flex_attention(
        p.q, p.k, p.v, score_mod, mask, enable_gqa=True, return_aux=request, sinks=p.sinks
    )  # type: ignore[misc, arg-type]
    assert_close(out, expected.out, what="out")
    assert_close(aux.lse, expected.lse, what="lse")
    if through_lse:
        assert_close(aux.max_scores, expected.max_scores, what="max_scores")
    wanted = torch.autograd.grad(
        loss(expected.out, expected.lse if through_lse else None), p.inputs, allow_unused=True
    )
    found = torch.autograd.grad(
        loss(out, aux.lse if through_lse else None), p.inputs, allow_unused=True
    )
    for i, (actual, grad) in enumerate(zip(found, wanted, strict=True)):
        zero = torch.zeros_like(p.inputs[i])
        assert_close(
            zero if actual is None else actual,
            zero if grad is None else grad,
            what=f"gradient {i}",
        )


@pytest.mark.parametrize("through_lse", [True, False], ids=["lse", "out"])
@pytest.mark.parametrize("sinks", [True, False], ids=["sinks", "plain"])
@pytest.mark.parametrize("name", MASKS)
def test_any_mask_gives_the_oracles_outputs_and_gradients(
    name: str, sinks: bool, through_lse: bool
) -> None:
    check(problem(q_len=200, sinks=sinks), MASKS[name](), through_lse=through_lse)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 300), (300, 1), (129, 257)])
def test_query_and_key_lengths_are_free(q_len: int, kv_len: int) -> None:
    for name in ("full", "causal", "noise"):
        check(problem(q_len=q_len, kv_len=kv_len), MASKS[name]())
    check(problem(q_len=q_len, kv_len=kv_len), None)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0)])
def test_no_query_and_no_key_are_lengths_too(q_len: int, kv_len: int) -> None:
    p = problem(q_len=q_len, kv_len=kv_len)
    check(p, None)
    out, lse = flex_attention(
        p.q, p.k, p.v, block_mask=masks.causal(), enable_gqa=True, return_lse=True
    )
    assert out.shape == p.q.shape
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 6), (6, 3), (6, 2), (6, 1)])
def test_key_heads_may_be_shared(heads: int, kv_heads: int) -> None:
    for name in ("causal", "by head", "by batch and head"):
        check(problem(q_len=130, heads=heads, kv_heads=kv_heads), MASKS[name]())


@pytest.mark.parametrize(("dim", "value_dim"), [(1, 1), (3, 7), (17, 5), (64, 64), (256, 130)])
def test_head_dims_are_free(dim: int, value_dim: int) -> None:
    p = problem(batch=1, q_len=70, dim=dim, value_dim=value_dim)
    check(p, MASKS["window"](), through_lse=dim != value_dim)


def test_keys_of_batch_size_one_are_shared_by_all_batch_elements() -> None:
    p = problem(batch=3, q_len=90)
    k, v = (x[:1].detach().requires_grad_() for x in (p.k, p.v))
    mask = MASKS["by batch"]()
    out = flex_attention(p.q, k, v, block_mask=mask, enable_gqa=True)
    whole = Problem(p.q, k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1)).expected(mask)
    assert_close(out, whole.out)
    for found, wanted in zip(
        torch.autograd.grad(loss(out), (k, v)),
        torch.autograd.grad(loss(whole.out), (k, v)),
        strict=True,
    ):
        assert_close(found, wanted)


def test_memory_layout_does_not_matter() -> None:
    p = problem(q_len=150)
    spread = [
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in p.inputs
    ]
    spread[1] = torch.cat([p.k, p.k], -1)[..., ::2].detach().requires_grad_()
    q, k, v = spread
    check(Problem(q, k, v), masks.causal(), through_lse=False)


def test_block_masks_grids_and_functions_say_the_same() -> None:
    p = problem(q_len=300)
    grid = flexcp.build_block_grid(masks.causal(), 300)

    def causal(b, h, q, kv):  # type: ignore[no-untyped-def]
        return q >= kv

    outs = [
        flex_attention(p.q, p.k, p.v, block_mask=mask, enable_gqa=True)
        for mask in (masks.causal(), grid, grid.to_block_mask(), causal)
    ]
    for out in outs[1:]:
        assert torch.equal(out, outs[0])


def test_scale_is_a_factor_on_the_scores() -> None:
    p = problem(q_len=50)
    out = flex_attention(p.q, p.k, p.v, scale=0.3, enable_gqa=True)
    assert_close(out, p.expected(None, scale=0.3).out)


@pytest.mark.parametrize("name", ["causal", "documents", "noise", "by head"])
def test_the_same_call_twice_gives_the_same_bits(name: str) -> None:
    p = problem(q_len=600, dtype=torch.float32)
    table = torch.randn(1300, requires_grad=True)

    def relative(score, b, h, q, kv):  # type: ignore[no-untyped-def]
        return score + table[q - kv + 650]

    mask = MASKS[name]()
    for score_mod in (None, relative):
        inputs = [*p.inputs, *([table] if score_mod else [])]
        runs = []
        for _ in range(2):
            out = flex_attention(p.q, p.k, p.v, score_mod, mask, enable_gqa=True)
            runs.append((out, *torch.autograd.grad(loss(out), inputs)))
        for first, second in zip(*runs, strict=True):
            assert torch.equal(first, second)


def test_planning_happens_once_per_mask() -> None:
    from flexcp.ops.mask_cache import compiled_shapes_for

    mask, p = masks.causal(), problem(q_len=64)
    assert compiled_shapes_for(mask, p.q, p.k) is compiled_shapes_for(mask, p.q, p.k)
    block_mask = flexcp.build_block_grid(mask, 64).to_block_mask()
    assert compiled_shapes_for(block_mask, p.q, p.k) is compiled_shapes_for(block_mask, p.q, p.k)


@pytest.mark.parametrize("kernel", ["reference", "scored", "flash"])
def test_a_kernel_that_is_asked_for_by_name_computes_the_same(kernel: str) -> None:
    p = problem(q_len=150)
    mask = MASKS["by batch and head"]()
    out = flex_attention(
        p.q, p.k, p.v, block_mask=mask, enable_gqa=True, kernel_options={"kernel": kernel}
    )
    assert_close(out, p.expected(mask).out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_types_keep_their_type_and_accumulate_in_float32(dtype: torch.dtype) -> None:
    p = problem(q_len=400, dtype=dtype)
    wide = Problem(*(x.detach().double().requires_grad_() for x in p.inputs))
    out, lse = flex_attention(
        p.q, p.k, p.v, block_mask=masks.causal(), enable_gqa=True, return_lse=True
    )
    expected = wide.expected(masks.causal())
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert_close(out, expected.out, what="out")
    assert_close(lse, expected.lse, what="lse")
    for found, wanted in zip(
        torch.autograd.grad(loss(out.double()), p.inputs),
        torch.autograd.grad(loss(expected.out), wide.inputs),
        strict=True,
    ):
        assert found.dtype == dtype
        assert_close(found, wanted, what="gradient", factor=2)
