"""Nothing is read before it has arrived, or overwritten before it was sent, however late."""

from __future__ import annotations

import pytest
import torch

import flexcp
from flexcp import FlexCPError, masks, testing
from flexcp.comm import CallLabel, RankError, RoundLabel
from flexcp.testing.tolerance import relative_error, tolerance
from tests.ops.late_transport import late_mesh

LENGTH, BATCH, HEADS, KV_HEADS, DIM, VALUE_DIM = 61, 2, 4, 2, 8, 4
SCHEDULES = [
    ("exchange", 4),
    ("ring", 4),
    ("allgather", 3),
    ("ulysses", 3),
    ("ulysses", 4),
    ("hybrid", (2, 2)),
    ("hybrid", (3, 2)),
]
DOCUMENTS = torch.tensor([[0] * 20 + [1] * 41, [0] * 50 + [1] * 11])
MASKS = {
    "causal": masks.causal(),
    "window": masks.sliding_window(11),
    "documents by batch element": masks.causal() & masks.document(DOCUMENTS),
}


def tensors(dtype):
    draw = torch.Generator().manual_seed(0)
    shapes = [(HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM), (HEADS, VALUE_DIM)]
    return [
        torch.randn(BATCH, h, LENGTH, d, generator=draw, dtype=torch.float64).to(dtype)
        for h, d in shapes
    ]


def reference(mask, dtype):
    """Output and gradients of one process, in float64."""
    *qkv, grad = (x.double() for x in tensors(dtype))
    leaves = [x.requires_grad_() for x in qkv]
    options = {"kernel": "reference"}
    out = flexcp.flex_attention(*leaves, block_mask=mask, enable_gqa=True, kernel_options=options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def on_late_ranks(mask, schedule, shape, dtype, **how):
    """Worst error of two passes in turn on workspaces that the second finds used."""
    expected = reference(mask, dtype)

    def rank(mesh):
        mesh = late_mesh(mesh, seed=3)
        plan = flexcp.make_plan(
            mask, LENGTH, mesh, schedule=schedule, block_size=8, num_heads=HEADS,
            num_kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype, batch=BATCH, **how,
        )  # fmt: skip
        *qkv, grad = (plan.shard(x, 2) for x in tensors(dtype))
        worst = 0.0
        for _ in range(2):
            leaves = [x.clone().requires_grad_() for x in qkv]
            out = flexcp.attention(*leaves, plan)
            found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
            for x, want in zip(found, expected, strict=True):
                worst = max(worst, relative_error(plan.unshard(x, 2), want))
        assert mesh.transport.in_flight == [], "what is sent and received is waited for"
        assert mesh.transport.transfers > 0
        return worst

    return max(testing.simulate(rank, shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("schedule", "shape"), SCHEDULES)
def test_every_schedule_is_right_on_a_network_that_is_late(schedule, shape, name, dtype):
    assert on_late_ranks(MASKS[name], schedule, shape, dtype) < 4 * tolerance(dtype)


@pytest.mark.parametrize("layout", ["striped", "balanced", "head_tail"])
@pytest.mark.parametrize("schedule", ["exchange", "ring", "allgather"])
def test_so_is_every_layout(schedule, layout):
    error = on_late_ranks(MASKS["causal"], schedule, 3, torch.float64, layout=layout)
    assert error < tolerance(torch.float64)


@pytest.mark.parametrize("mistake", ["reads early", "overwrites", "writes to a buffer"])
def test_the_late_transport_notices_what_is_touched_too_early(mistake):
    def rank(mesh):
        transport, peer = late_mesh(mesh, seed=0).transport, 1 - mesh.get_rank()
        x, buffer = torch.ones(3), torch.zeros(3)
        label = CallLabel("a test", b"", 0).passing("forward").round("rows", 0)
        pending = transport.exchange([(peer, x)], [(peer, buffer)], label=label)
        early = buffer.clone()
        if mistake == "overwrites":
            x.zero_()
        if mistake == "writes to a buffer":
            buffer.zero_()
        pending.wait()
        assert torch.equal(buffer, torch.ones(3))
        return bool(early.isnan().all())

    if mistake == "reads early":
        assert testing.simulate(rank, 2) == [True, True]
    else:
        with pytest.raises(RankError, match="too early"):
            testing.simulate(rank, 2)


def test_memory_of_a_pass_that_failed_is_not_used_again():
    """Something may still arrive in it."""

    def rank(mesh):
        plan = flexcp.make_plan(
            masks.causal(), LENGTH, mesh, schedule="ring", num_heads=HEADS, num_kv_heads=KV_HEADS,
            head_dim=DIM, dtype=torch.float64,
        )  # fmt: skip
        local = [plan.shard(x, 2) for x in tensors(torch.float64)[:3]]
        first = flexcp.attention(*local, plan)
        exchange, failed = plan.transport.exchange, []

        def failing(sends, receives, *, label):
            pending = exchange(sends, receives, label=label)
            if not isinstance(label, RoundLabel):
                return pending
            failed.extend(buffer for _, buffer in receives)
            pending.wait()
            raise FlexCPError("a network", "none", "wait")

        vars(plan.transport)["exchange"] = failing
        with pytest.raises(FlexCPError, match="a network"):
            flexcp.attention(*local, plan)
        vars(plan.transport)["exchange"] = exchange
        out = flexcp.attention(*local, plan)
        for buffer in failed:
            buffer.fill_(torch.nan)
        assert torch.equal(flexcp.attention(*local, plan), first)
        return torch.equal(out, first)

    assert testing.simulate(rank, 2) == [True, True]
