"""A rank that ends in the middle of PyTorch's context parallelism is named by all others."""

import os
import signal

import pytest
import torch
from torch.nn import functional

from flexcp.comm.rank_errors import RankError
from flexcp.compat.context_parallel import context_parallel, flex_cp_allgather, set_rotate_method
from flexcp.testing.processes import spawn


def _die_on_rank_1(mesh):
    if mesh.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _others(rank):
    """The errors of the ranks that were not killed."""
    with pytest.raises(RankError, match=r"rank 1 failed: .* ended with code -9") as caught:
        spawn(rank, 3, timeout=20)
    others = {r: str(error) for r, error in caught.value.failures.items() if r != 1}
    assert sorted(others) == [0, 2]
    assert all(f"no answer on rank {r}" in text for r, text in others.items())
    return list(others.values())


@pytest.mark.parametrize("is_before", [True, False], ids=["before forward", "before backward"])
@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_sdpa_names_the_rank_that_was_killed(method, is_before):
    def rank(mesh):
        set_rotate_method(method)
        x = torch.randn(1, 1, 4, 4, requires_grad=True)
        with context_parallel(mesh):
            if is_before:
                _die_on_rank_1(mesh)
            out = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        _die_on_rank_1(mesh)
        out.sum().backward()

    for text in _others(rank):
        assert text.startswith("expected rank 1 to ")
        assert "look at the output of rank 1" in text
        assert is_before or "backward" in text or "gradients" in text


@pytest.mark.parametrize("is_before", [True, False], ids=["before forward", "before backward"])
def test_gathering_names_the_rank_that_was_killed(is_before):
    def rank(mesh):
        x = torch.randn(1, 1, 4, 4, requires_grad=True)
        if is_before:
            _die_on_rank_1(mesh)
        k, v = flex_cp_allgather(x, x, 2, mesh.get_group().group_name)
        _die_on_rank_1(mesh)
        (k * v).sum().backward()

    for text in _others(rank):
        assert text.startswith("expected rank 1 to take part in flex_cp_allgather, got no answer")
