import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flexcp import FlexCPError, kernels
from flexcp.kernels.registry import choose, explain


def _cpu(dtype: torch.dtype = torch.float32, dim: int = 16, heads: int = 64) -> torch.Tensor:
    return torch.zeros(1, heads, 8, dim, dtype=dtype)


def test_plain_attention_on_cpu_uses_the_fused_op() -> None:
    choice = choose(_cpu(), _cpu())
    assert choice.kernel == "flash"
    assert choice.fused is not None
    assert "CPU flash takes torch.float32" in str(choice)


def test_values_of_another_head_dim_are_computed_in_strips_and_it_says_why() -> None:
    choice = choose(_cpu(), _cpu(dim=8))
    assert choice.fused is None
    assert "needs values of the head dim 16, not 8" in str(choice)


def test_too_few_heads_for_the_threads_are_computed_in_strips() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert "too few" in explain(_cpu(heads=1), _cpu(heads=1))
    finally:
        torch.set_num_threads(threads)


def test_a_score_mod_needs_the_scored_kernel() -> None:
    text = kernels.explain(_cpu(), _cpu(), score_mod=lambda s, b, h, q, k: s)
    assert text.startswith("scored: strips of matrix products")


def test_a_kernel_that_was_asked_for_says_so() -> None:
    assert "asked for by name" in explain(_cpu(), _cpu(), kernel="reference")
    assert choose(_cpu(), _cpu(), kernel="scored").fused is None


def test_asking_for_what_cant_do_the_job_is_an_error() -> None:
    with pytest.raises(FlexCPError, match="takes a score_mod, got kernel 'flash'"):
        choose(_cpu(), _cpu(), kernel="flash", score_mod=True)
    with pytest.raises(FlexCPError, match="CUDA tensors for the kernel 'flex', got tensors on cpu"):
        choose(_cpu(), _cpu(), kernel="flex")
    with pytest.raises(FlexCPError, match="kernel to be one of"):
        choose(_cpu(), _cpu(), kernel="magic")


def test_on_cuda_masks_are_data_and_rectangles_are_fused() -> None:
    with FakeTensorMode():
        for dtype, name in ((torch.bfloat16, "CUDA flash"), (torch.float32, "CUDA efficient")):
            x = torch.empty(1, 4, 64, 64, dtype=dtype, device="cuda")
            assert choose(x, x).kernel == "triton"
            assert choose(x, x, score_mod=True).kernel == "flex"
            assert choose(x, x, score_mod=True, partial=True).kernel == "scored"
            assert choose(x, x, max_scores=True).kernel == "flex"
            choice = choose(x, x, is_one_rectangle=True)
            assert choice.fused is not None
            assert choice.fused.name == name
        x = torch.empty(1, 4, 64, 64, dtype=torch.float64, device="cuda")
        assert choose(x, x, is_one_rectangle=True).fused is None
        with pytest.raises(FlexCPError, match="for the kernel 'flex', got float64"):
            choose(x, x)
