"""Masks serve any later call, whatever mode or default device they were made under."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flexcp
from flexcp import masks

MODES = {
    "inference": torch.inference_mode,
    "fake tensors": FakeTensorMode,
    "meta": lambda: torch.device("meta"),
}
MAKERS = {
    "causal": masks.causal,
    "lengths": lambda: masks.causal() & masks.document(lengths=[5, 11]),
    "lengths of each element": lambda: masks.document(lengths=[[5, 11]]),
    "cu_seqlens": lambda: masks.document(cu_seqlens=[0, 5, 16]),
    "shared_prefix": lambda: masks.shared_prefix(4, [5, 7]),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_mask_made_in_any_mode_is_the_mask_made_outside_of_it(mode, make):
    with mode():
        mask = make()
    assert type(mask.graph_handle) is torch.Tensor
    assert not mask.graph_handle.is_inference()
    assert mask.graph_handle.device.type == "cpu"
    assert mask == make()
    assert flexcp.build_block_grid(mask, 16) == flexcp.build_block_grid(make(), 16)


@pytest.mark.parametrize("mode", [torch.inference_mode, FakeTensorMode])
def test_a_mask_made_in_another_mode_trains_in_a_compiled_graph(mode):
    with mode():
        mask = masks.causal() & masks.document(lengths=[5, 11])
    attend = torch.compile(
        lambda q: flexcp.flex_attention(q, q, q, block_mask=mask), backend="aot_eager"
    )
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    attend(q).sum().backward()
    assert q.grad is not None


def test_ids_made_in_inference_mode_are_ordinary_tensors():
    with torch.inference_mode():
        assert not masks.document(torch.tensor([0, 1])).recipe.arguments[0].tensor.is_inference()
        assert not masks.document(lengths=[1, 2]).recipe.arguments[0].tensor.is_inference()
