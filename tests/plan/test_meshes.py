"""Plans on parts of a mesh: ranks that share a sequence beside others that share another."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import flexcp
from flexcp import masks, testing
from flexcp.comm import RankError

LENGTH = 61


def data_of(copy):
    """q, k, v and the gradient of the output of one copy of the model: others see other data."""
    draw = torch.Generator().manual_seed(copy)
    return [
        torch.randn(2, heads, LENGTH, 8, generator=draw, dtype=torch.float64)
        for heads in (4, 2, 2, 4)
    ]


def mask_of(copy):
    return masks.causal() & masks.document(torch.arange(LENGTH) // (9 + 8 * copy))


def difference_from_one_process(mesh, copy, schedule):
    """Of the output and gradients of one copy of the model, whose ranks are those of a mesh."""
    q, k, v, grad = data_of(copy)
    whole = [x.requires_grad_() for x in (q, k, v)]
    out = flexcp.flex_attention(*whole, block_mask=mask_of(copy), enable_gqa=True)
    wanted = [out, *torch.autograd.grad(out, whole, grad)]
    plan = flexcp.make_plan(
        mask_of(copy), LENGTH, mesh, schedule=schedule, block_size=16, num_heads=4, num_kv_heads=2,
        head_dim=8, dtype=torch.float64, batch=2,
    )  # fmt: skip
    local = [plan.shard(x.detach(), 2).requires_grad_() for x in whole]
    out = flexcp.attention(*local, plan)
    found = [out, *torch.autograd.grad(out, local, plan.shard(grad, 2))]
    return max(
        float((plan.unshard(a.detach(), 2) - b).abs().max().nan_to_num(nan=torch.inf))
        for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("axes", [("dp", "cp"), ("cp", "dp")])
def test_copies_of_a_model_have_sequences_of_their_own(axes):
    def rank(_):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
        copy = mesh.get_local_rank("dp")
        return [
            difference_from_one_process(mesh["cp"], copy, schedule)
            for schedule in ("exchange", "ring", "ulysses")
        ]

    for differences in testing.spawn(rank, 4):
        assert max(differences) < 1e-10


@pytest.mark.parametrize("axes", [("dp", "outer", "inner"), ("outer", "dp", "inner")])
def test_heads_and_sequence_are_split_together_on_two_dimensions_of_three(axes):
    def rank(_):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=axes)
        part, copy = mesh["outer", "inner"], mesh.get_local_rank("dp")
        return [difference_from_one_process(part, copy, "hybrid") for _ in range(2)]

    for differences in testing.spawn(rank, 8):
        assert max(differences) < 1e-10


def test_a_part_without_names_says_what_to_do():
    def rank(mesh):
        if mesh.get_rank() == 0:
            part = DeviceMesh("cpu", [[0]], _init_backend=False)
            flexcp.make_plan(masks.causal(), 60, part)

    with pytest.raises(RankError, match=r"a mesh whose dimensions have names.*mesh_dim_names"):
        testing.spawn(rank, 2)
