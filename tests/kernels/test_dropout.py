"""Which weights are dropped, and what the kernels make of it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flexcp
from flexcp import masks
from flexcp.kernels import CompiledShapes, causal_shapes, choose, explain
from flexcp.kernels.dropout import Dropout, drop_, droppable, numbers_of
from flexcp.kernels.flash import FlashKernel
from flexcp.kernels.reference import dense_attention
from flexcp.testing.tolerance import assert_close

SIDE = 512


def kept_by_hand(p, seed, b, h, q, kv):
    """One weight, in Python's integers: a definition that shares nothing with the kernels."""

    def mixed(x):
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    def hashed(start, *numbers):
        x = mixed(seed % 2**32 ^ start)
        for number in ((seed >> 32) % 2**32, *numbers):
            x = mixed(x ^ number)
        return x

    def signed(x):
        return (x + 2**31) % 2**32 - 2**31

    x = (hashed(0x1E3779B9, b, h, q) | 1) * (hashed(0x42B2AE35, kv) | 1)
    x = signed(x * (2 * x + 1) * (hashed(0x7F4A7C15, b, h, q) | 1))
    return x + 2**31 >= min(round(p * 2**32), 2**32 - 1)


seeds = st.integers(-(2**63), 2**63 - 1)
places = st.tuples(*[st.integers(0, 2**20)] * 4)


@given(st.floats(0, 0.999), seeds, places)
def test_the_oracle_keeps_what_the_definition_keeps(p, seed, place):
    kept = Dropout(p, seed).kept(*(torch.tensor([n]) for n in place))
    assert kept.item() == kept_by_hand(p, seed, *place)


@given(st.floats(0, 0.999), seeds, st.integers(0, 2**20), st.integers(0, 2**20))
def test_32_bits_in_place_keep_what_the_oracle_keeps(p, seed, q0, k0):
    dropout = Dropout(p, seed, first_batch=3, first_head=5)
    b, h = torch.tensor([[[1]]]), torch.tensor([[[2]]])
    q, kv = torch.arange(q0, q0 + 9).view(1, 9, 1), torch.arange(k0, k0 + 33).view(1, 1, 33)
    row, second = dropout.rows(b, h, q)
    numbers = torch.empty(1, 9, 33, dtype=torch.int32)
    numbers_of(row, second, dropout.keys(kv), numbers)
    for dtype in (torch.float32, torch.float64):
        weights = torch.ones(1, 9, 33, dtype=dtype)
        drop_(droppable(weights), numbers, dropout.threshold)
        assert torch.equal(weights.bool(), dropout.kept(b, h, q, kv))
    assert torch.equal(dropout.kept(b, h, q, kv), Dropout(p, seed).kept(b + 3, h + 5, q, kv))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_kept_keeps_its_bits(dtype):
    weights, numbers = torch.randn(50, dtype=dtype), torch.arange(-25, 25, dtype=torch.int32)
    for threshold in (-(2**31), -3, 0, 2**31 - 1):
        wanted = weights.masked_fill(numbers < threshold, 0.0)
        found = weights.clone()
        drop_(droppable(found), numbers, threshold)
        assert torch.equal(found, wanted)


def standardised(p, seed, b=0, h=0):
    """Whether weights are kept, as numbers of mean 0 and variance 1."""
    i = torch.arange(SIDE)
    kept = Dropout(p, seed).kept(torch.tensor(b), torch.tensor(h), i[:, None], i).double()
    return (kept - (1 - p)) / math.sqrt(p * (1 - p))


@pytest.mark.parametrize(("p", "seed"), [(0.1, 0), (0.5, 1), (0.9, 2**40 + 5)])
def test_weights_are_dropped_as_if_independently(p, seed):
    z = standardised(p, seed)
    products = {
        "the share": z,
        "the next key": z[:, 1:] * z[:, :-1],
        "the next row": z[1:] * z[:-1],
        "a diagonal": z[1:, 1:] * z[:-1, :-1],
        "the transpose": (z * z.T).triu(1),
        "three keys": z[:, 2:] * z[:, 1:-1] * z[:, :-2],
        "a square": z[1:, 1:] * z[:-1, 1:] * z[1:, :-1] * z[:-1, :-1],
        "a large square": z[:256, :256] * z[256:, :256] * z[:256, 256:] * z[256:, 256:],
        "another head": z * standardised(p, seed, h=1),
        "another batch element": z * standardised(p, seed, b=1),
        "head and batch element swapped": standardised(p, seed, 1, 2) * standardised(p, seed, 2, 1),
        "another seed": z * standardised(p, seed + 1),
        "another high half of a seed": z * standardised(p, seed + 2**32),
    }
    for what, product in products.items():
        sigmas = product.sum() / math.sqrt(product.count_nonzero())
        assert abs(sigmas) < 5, f"{what}: {sigmas:.1f} standard deviations"
    for what, m in (("rows", z), ("keys", z.T)):
        sums = m.sum(1) / math.sqrt(SIDE)
        assert abs(sums.var() - 1) < 0.3, f"shares of {what}"
        overlaps = (m @ m.T) / math.sqrt(SIDE)
        off = overlaps[~torch.eye(SIDE, dtype=torch.bool)]
        assert off.abs().max() < 8, f"two {what} drop alike"
        # Of independent weights, its standard deviation is 0.004 for p = 0.5 and 0.011 for 0.1.
        assert abs(off.var() - 1) < 0.05, f"correlation of {what}"


@pytest.mark.parametrize(("p", "share"), [(0.0, 1.0), (1e-12, 1.0), (1 - 1e-12, 0.0)])
def test_shares_at_the_ends_keep_all_or_nothing(p, share):
    i = torch.arange(64)
    zero = torch.zeros(1, dtype=torch.int64)
    assert Dropout(p, 3).kept(zero, zero, i[:, None], i).double().mean() == share


def inputs(dtype=torch.float64, heads=4, kv_heads=2, rows=150):
    shapes = ((2, heads, rows, 8), (2, kv_heads, rows, 8), (2, kv_heads, rows, 6))
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_strips_give_the_oracles_numbers_and_gradients(dtype):
    q, k, v = inputs(dtype)
    shapes, dropout = CompiledShapes(causal_shapes(150)), Dropout(0.3, 17, 2, 1)
    grad = torch.randn(2, 4, 150, 6, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    allowed = torch.ones(150, 150).tril().bool()
    wanted = dense_attention(*exact, allowed=allowed, dropout=dropout)
    wanted_grads = torch.autograd.grad(wanted.out, exact, grad.double())
    kernel = FlashKernel(None)
    with torch.no_grad():
        found = kernel.forward(q, k, v, shapes, scale=8**-0.5, dropout=dropout)
        grads = kernel.backward(
            grad, q, k, v, found.out.to(dtype), found.lse, shapes, scale=8**-0.5, dropout=dropout
        )
    assert_close(found.out.to(dtype), wanted.out, dtype=dtype)
    assert_close(found.lse, wanted.lse, dtype=dtype)
    without = dense_attention(*exact, allowed=allowed)
    assert torch.equal(wanted.lse, without.lse)
    for mine, theirs in zip((grads.q, grads.k, grads.v), wanted_grads, strict=True):
        assert_close(mine.to(dtype), theirs, dtype=dtype)


def by_head(b, h, q, kv):
    return (q >= kv) & ((h % 2 == 0) | (q - kv < 20))


def biased(score, b, h, q, kv):
    return score + 0.1 * h * (kv - q)


@pytest.mark.parametrize(
    ("kernel", "score_mod"), [("scored", None), ("scored", biased), ("flash", None)]
)
def test_kernels_drop_alike_under_masks_by_head_score_functions_and_sinks(kernel, score_mod):
    tensors = [*inputs(), torch.randn(4, dtype=torch.float64, requires_grad=True)]
    g, g_lse = torch.randn(2, 4, 150, 6).double(), torch.randn(2, 4, 150).double()

    def run(name):
        out, lse = flexcp.flex_attention(
            *tensors[:3], score_mod, masks.Mask(by_head), enable_gqa=True, sinks=tensors[3],
            return_lse=True, kernel_options={"kernel": name}, dropout_p=0.4, dropout_seed=-5,
        )  # fmt: skip
        return [out, lse, *torch.autograd.grad((out, lse), tensors, (g, g_lse))]

    for mine, theirs in zip(run(kernel), run("reference"), strict=True):
        assert_close(mine, theirs)


def test_the_registry_says_which_kernels_can_drop():
    x = torch.zeros(1, 4, 8, 16)
    assert "strips only: fused ops don't drop" in explain(x, x, dropout_p=0.1)
    assert choose(x, x, dropout=True).fused is None
    assert choose(x, x, kernel="scored", dropout=True).kernel == "scored"
    for refused in (x.to("meta"), x):
        name = "flash" if refused.is_meta else "flex"
        with pytest.raises(flexcp.FlexCPError, match=f"dropout_p above 0 with kernel '{name}'"):
            choose(refused, refused, kernel=name, dropout=True)
