import torch

from flexcp.kernels.merge import accumulation_dtype
from flexcp.kernels.reference import dense_attention
from flexcp.testing.tolerance import assert_close


def test_without_a_mask_it_is_sdpa() -> None:
    q, k, v = (torch.randn(2, 3, 17, 8, dtype=torch.float64) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert_close(dense_attention(q, k, v).out, expected)


def test_shared_key_heads_are_sdpa_with_enable_gqa() -> None:
    q = torch.randn(2, 6, 17, 8, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 19, 8, dtype=torch.float64) for _ in range(2))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert_close(dense_attention(q, k, v).out, expected)


def test_a_row_that_sees_nothing_gives_zero_and_minus_infinity_and_no_gradient() -> None:
    q, k, v = (torch.randn(1, 1, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    found = dense_attention(q, k, v, allowed=torch.tensor([[False, False], [True, True]]))
    assert found.out[0, 0, 0].tolist() == [0, 0, 0, 0]
    assert found.lse[0, 0, 0] == -torch.inf
    assert found.max_scores[0, 0, 0] == -torch.inf
    grad = torch.autograd.grad(found.out.sum(), q)[0]
    assert grad[0, 0, 0].tolist() == [0, 0, 0, 0]
    assert grad.isfinite().all()


def test_a_sink_is_a_key_without_a_value() -> None:
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    sinks = torch.randn(2, dtype=torch.float64)
    scores = torch.cat([q @ k.mT / 2, sinks[None, :, None, None].expand(1, 2, 5, 1)], -1)
    found = dense_attention(q, k, v, sinks=sinks)
    assert_close(found.out, scores.softmax(-1)[..., :-1] @ v)
    assert_close(found.lse, scores.logsumexp(-1))


def test_half_precision_accumulates_in_float32() -> None:
    assert accumulation_dtype(torch.float16) is torch.float32
    q = torch.randn(1, 1, 9, 4).bfloat16()
    assert dense_attention(q, q, q).lse.dtype is torch.float32
    assert dense_attention(q, q, q).out.dtype is torch.bfloat16
