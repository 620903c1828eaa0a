"""The kernel contract against the oracle: results that merge, gradients that add up."""

from itertools import cycle

import pytest
import torch

import flexcp
from flexcp import Mask, masks
from flexcp.kernels import flash
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.fused import CPU_FLASH, FusedOp
from flexcp.kernels.merge import merge
from flexcp.kernels.reference import dense_attention
from flexcp.kernels.score import examine
from flexcp.kernels.shapes import shapes_of
from flexcp.testing.tolerance import assert_close
from kernels.cases import MASKS, loss, problem


@pytest.mark.parametrize("fused", [CPU_FLASH, None], ids=["fused", "strips"])
@pytest.mark.parametrize("name", MASKS)
def test_results_and_gradients_are_the_oracles(name: str, fused: FusedOp | None) -> None:
    mask = MASKS[name]()
    p = problem(q_len=333, kv_len=411)
    grid = flexcp.build_block_grid(mask, 333, 411, batch=2, heads=4)
    compiled = CompiledShapes(shapes_of(grid))
    expected = p.expected(mask)
    grads = torch.autograd.grad(loss(expected.out), p.inputs)
    grad_out = torch.autograd.grad(loss(expected.out), expected.out)[0]
    q, k, v = (x.detach() for x in p.inputs)
    found = flash.forward(q, k, v, compiled, scale=8**-0.5, fused=fused)
    back = flash.backward(
        grad_out, q, k, v, found.out, found.lse, compiled, scale=8**-0.5, fused=fused
    )
    assert_close(found.out, expected.out, what="out")
    assert_close(found.lse, expected.lse, what="lse")
    for what, actual, wanted in zip("qkv", (back.q, back.k, back.v), grads, strict=True):
        assert_close(actual, wanted, what=f"d{what}")


@pytest.mark.parametrize("name", ["causal", "documents", "noise", "by batch and head"])
def test_large_rectangles_go_through_the_fused_op_unnoticed(name: str) -> None:
    mask = MASKS[name]()
    length = 700 if name in ("documents", "noise") else 2100
    p = problem(batch=2, heads=2, kv_heads=1, q_len=length, dim=4)
    compiled = CompiledShapes(shapes_of(flexcp.build_block_grid(mask, length, batch=2, heads=2)))
    q, k, v = (x.detach() for x in p.inputs)
    by_fused, by_strips = (
        flash.forward(q, k, v, compiled, scale=0.5, fused=op) for op in (CPU_FLASH, None)
    )
    assert_close(by_fused.out, by_strips.out)
    assert_close(by_fused.lse, by_strips.lse)
    grads = [
        flash.backward(q, q, k, v, by_strips.out, by_strips.lse, compiled, scale=0.5, fused=op)
        for op in (CPU_FLASH, None)
    ]
    for name_of in "qkv":
        assert_close(getattr(grads[0], name_of), getattr(grads[1], name_of), what=name_of)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_results_dont_depend_on_how_many_threads_share_a_product(
    kv_heads: int, threads: int
) -> None:
    mask = MASKS["shared prefix"]()
    p = problem(q_len=600, kv_heads=kv_heads)
    compiled = CompiledShapes(shapes_of(flexcp.build_block_grid(mask, 600)))
    expected = p.expected(mask)
    grads = torch.autograd.grad(loss(expected.out), p.inputs)
    grad_out = torch.autograd.grad(loss(expected.out), expected.out)[0]
    q, k, v = (x.detach() for x in p.inputs)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = flash.forward(q, k, v, compiled, scale=8**-0.5, fused=None)
        back = flash.backward(
            grad_out, q, k, v, found.out, found.lse, compiled, scale=8**-0.5, fused=None
        )
    finally:
        torch.set_num_threads(before)
    assert_close(found.out, expected.out, what="out")
    for what, actual, wanted in zip("qkv", (back.q, back.k, back.v), grads, strict=True):
        assert_close(actual, wanted, what=f"d{what}")


LONG_MASKS = {
    "window with a tail": masks.sliding_window(700),
    "two-sided window": masks.sliding_window(1100, 90),
    "equal documents": masks.causal() & masks.document(lengths=[300] * 6 + [27]),
    "equal two-way documents": masks.document(lengths=[609] * 3),
    "block causal": masks.block_causal(250),
    "rows that see nothing": masks.causal() & Mask(lambda b, h, q, kv: q - kv >= 130),
    "by head": Mask(lambda b, h, q, kv: (q >= kv) & ((h > 0) | (q - kv < 333))),
}


@pytest.mark.parametrize(("name", "kv_heads"), [*zip(LONG_MASKS, cycle([1, 2]))])
def test_long_unaligned_masks_are_the_oracles_twice_with_the_same_bits(
    name: str, kv_heads: int
) -> None:
    mask = LONG_MASKS[name]
    p = problem(batch=1, heads=2, kv_heads=kv_heads, q_len=1827, dim=3)
    expected = p.expected(mask)
    wanted = torch.autograd.grad(loss(expected.out, expected.lse), p.inputs, retain_graph=True)
    found = []
    for _ in range(2):
        out, lse = flexcp.flex_attention(
            p.q, p.k, p.v, block_mask=mask, enable_gqa=True, return_lse=True
        )
        plain = torch.autograd.grad(loss(out), p.inputs, retain_graph=True)
        found.append([out, lse, *torch.autograd.grad(loss(out, lse), p.inputs), *plain])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert_close(found[0][0], expected.out, what="out")
    assert_close(found[0][1], expected.lse, what="lse")
    for what, actual, want in zip("qkv", found[0][2:5], wanted, strict=True):
        assert_close(actual, want, what=f"d{what}")
    alone = torch.autograd.grad(loss(expected.out), p.inputs)
    for what, actual, want in zip("qkv", found[0][5:], alone, strict=True):
        assert_close(actual, want, what=f"d{what} without lse")


def _score(score, b, h, q, kv):  # type: ignore[no-untyped-def]
    return torch.tanh(score) - 0.01 * (h + 1) * (q - kv)


@pytest.mark.parametrize("score_mod", [None, _score], ids=["plain", "scored"])
@pytest.mark.parametrize(
    "name", ["causal", "window", "documents", "noise", "by head", "fully masked rows"]
)
def test_ranks_that_hold_a_share_of_the_keys_add_up_to_the_whole(
    name: str, score_mod: object
) -> None:
    """As a distributed layer does: each rank's keys in turn, rows and keys in striped order."""
    mask = MASKS[name]()
    length, ranks = 260, 3
    grid = flexcp.build_block_grid(mask, length, batch=2, heads=4)
    p = problem(q_len=length)
    expected = p.expected(mask, score_mod)
    grads = torch.autograd.grad(loss(expected.out), p.inputs)
    grad_out = torch.autograd.grad(loss(expected.out), expected.out)[0]
    mod = None if score_mod is None else examine(score_mod, torch.float64, p.q.device)  # type: ignore[arg-type]
    q, k, v = (x.detach() for x in p.inputs)
    rows = torch.arange(1, length, 2).flip(0)
    shares = [torch.arange(r, length, ranks) for r in range(ranks)]
    parts = [
        CompiledShapes(shapes_of(grid, q_positions=rows, kv_positions=share)) for share in shares
    ]
    out = torch.zeros_like(q[:, :, rows])
    lse = torch.full(out.shape[:3], -torch.inf, dtype=out.dtype)
    for share, part in zip(shares, parts, strict=True):
        found = flash.forward(
            q[:, :, rows], k[:, :, share], v[:, :, share], part, scale=8**-0.5, fused=None,
            score_mod=mod,
        )  # fmt: skip
        out, lse = merge(out, lse, found.out, found.lse)
    assert_close(out, expected.out[:, :, rows])
    assert_close(lse, expected.lse[:, :, rows])
    dq = torch.zeros_like(out)
    for share, part in zip(shares, parts, strict=True):
        back = flash.backward(
            grad_out[:, :, rows], q[:, :, rows], k[:, :, share], v[:, :, share], out, lse, part,
            scale=8**-0.5, fused=None, score_mod=mod,
        )  # fmt: skip
        dq += back.q
    assert_close(dq, grads[0][:, :, rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["causal", "window", "documents", "full"])
def test_narrow_types_are_as_close_as_their_digits_allow(name: str, dtype: torch.dtype) -> None:
    mask = MASKS[name]()
    length = 700 if name == "documents" else 1100
    p = problem(batch=1, heads=4, kv_heads=2, q_len=length, dim=16, dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in p.inputs]
    dense = dense_attention(*wide, allowed=_allowed(mask, length))
    grad_out = torch.autograd.grad(loss(dense.out), dense.out)[0]
    grads = torch.autograd.grad(loss(dense.out), wide)
    compiled = CompiledShapes(shapes_of(flexcp.build_block_grid(mask, length)))
    q, k, v = (x.detach() for x in p.inputs)
    found = flash.forward(q, k, v, compiled, scale=0.25, fused=CPU_FLASH)
    back = flash.backward(
        grad_out.to(dtype), q, k, v, found.out, found.lse, compiled, scale=0.25, fused=CPU_FLASH
    )
    assert found.out.dtype == found.lse.dtype == torch.float32
    assert_close(found.out, dense.out, dtype=dtype, what="out")
    assert_close(found.lse, dense.lse, dtype=torch.float32, what="lse")
    for what, actual, wanted in zip("qkv", (back.q, back.k, back.v), grads, strict=True):
        assert_close(actual, wanted, dtype=dtype, what=f"d{what}", factor=2)


def _allowed(mask: flexcp.Mask, length: int) -> torch.Tensor:
    i = torch.arange(length)
    zero = torch.zeros((), dtype=torch.int64)
    return mask.mask_mod(zero, zero, i[:, None], i).expand(length, length)


@pytest.mark.parametrize("name", ["causal", "window"])
def test_large_scores_have_gradients_as_exact_as_torchs(name: str) -> None:
    """A weight of 1 stays one: a score of 50,000 and its lse have to agree to the last digit."""
    length = 400
    inputs = [torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3)]
    q, k, v = inputs
    gradient = torch.randn_like(q)
    allowed = _allowed(MASKS[name](), length)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    wide[0].data *= 5e4
    exact = torch.autograd.grad(
        dense_attention(*wide, allowed=allowed).out, wide, gradient.double()
    )
    ours = flexcp.flex_attention(q * 5e4, k, v, block_mask=MASKS[name]())
    theirs = torch.nn.functional.scaled_dot_product_attention(q * 5e4, k, v, attn_mask=allowed)
    found, known = (torch.autograd.grad(out, (q, k, v), gradient) for out in (ours, theirs))
    for wanted, mine, torchs in zip(exact[1:], found[1:], known[1:], strict=True):
        off, theirs_off = ((x - wanted).abs().max() for x in (mine, torchs))
        assert off <= 2 * theirs_off
