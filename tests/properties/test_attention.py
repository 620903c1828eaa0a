"""Attention against the oracle, over generated shapes, masks and score functions."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexcp import Mask, masks
from flexcp.kernels.reference import dense_attention, dense_mask
from flexcp.ops import flex_attention
from flexcp.testing.tolerance import assert_close

LONGEST = 300
_TABLE = (torch.arange(LONGEST, dtype=torch.float64) * 0.7).sin()
_NOISE = torch.rand(LONGEST, LONGEST, generator=torch.Generator().manual_seed(2)) > 0.5


def _documents(lengths: list[int]) -> Mask:
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return masks.document(torch.cat([ids, torch.full((LONGEST,), len(lengths))])[:LONGEST])


simple = st.one_of(
    st.just(masks.causal()),
    st.just(masks.full()),
    st.builds(masks.sliding_window, st.integers(0, 90), st.integers(0, 20)),
    st.builds(masks.prefix_lm, st.integers(1, 200)),
    st.builds(masks.chunked, st.integers(1, 150)),
    st.builds(_documents, st.lists(st.integers(1, 120), min_size=1, max_size=9)),
    st.just(Mask(lambda b, h, q, kv: _NOISE[q, kv])),
    st.integers(1, 9).map(lambda n: Mask(lambda b, h, q, kv: (q + kv * h + b) % n == 0)),
    st.integers(-60, 60).map(lambda n: Mask(lambda b, h, q, kv: q + n * (h + 1) >= kv)),
)
some_masks = st.one_of(
    simple,
    st.tuples(simple, simple).map(lambda pair: pair[0] & pair[1]),
    st.tuples(simple, simple).map(lambda pair: pair[0] | ~pair[1]),
)
score_mods = st.sampled_from(
    [
        None,
        None,
        lambda s, b, h, q, kv: s + _TABLE[q] * (h + 1) - _TABLE[kv],
        lambda s, b, h, q, kv: 2 * torch.tanh(s / 2),
        lambda s, b, h, q, kv: torch.where((q - kv) % 2 == 0, s, s * 0.5),
        lambda s, b, h, q, kv: torch.where(kv > q, -torch.inf, s),
    ]
)


def _loss(out: Tensor, lse: Tensor) -> Tensor:
    weights = torch.linspace(0, 9, out.numel(), dtype=out.dtype).view(out.shape).sin()
    return (out * weights).sum() + lse.masked_fill(lse == -torch.inf, 0.0).square().sum() * 0.01


@settings(max_examples=60, deadline=None)
@given(
    mask=some_masks,
    score_mod=score_mods,
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    q_len=st.integers(1, LONGEST),
    kv_len=st.integers(1, LONGEST),
    dim=st.integers(1, 12),
    value_dim=st.integers(1, 12),
    with_sinks=st.booleans(),
)
def test_outputs_and_gradients_are_those_of_the_definition(
    mask, score_mod, batch, kv_heads, group, q_len, kv_len, dim, value_dim, with_sinks
) -> None:  # type: ignore[no-untyped-def]
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    heads = kv_heads * group
    q, k = random(batch, heads, q_len, dim), random(batch, kv_heads, kv_len, dim)
    v, sinks = random(batch, kv_heads, kv_len, value_dim), random(heads)
    inputs = [q, k, v, *([sinks] if with_sinks else [])]
    allowed = dense_mask(
        mask.mask_mod, torch.arange(q_len), torch.arange(kv_len), batch=batch, heads=heads
    )
    expected = dense_attention(
        q, k, v, allowed=allowed, score_mod=score_mod, sinks=sinks if with_sinks else None
    )
    out, lse = flex_attention(
        q, k, v, score_mod, mask, enable_gqa=True, return_lse=True,
        sinks=sinks if with_sinks else None,
    )  # fmt: skip
    assert_close(out, expected.out, what="out")
    assert_close(lse, expected.lse, what="lse")
    found = torch.autograd.grad(_loss(out, lse), inputs)
    wanted = torch.autograd.grad(_loss(expected.out, expected.lse), inputs)
    for actual, grad in zip(found, wanted, strict=True):
        assert_close(actual, grad, what="gradient")
