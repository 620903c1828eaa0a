"""Sequences so short that messages cost more than what is in them or what is computed."""

import pytest
import torch

import flexcp
from flexcp import FlexCPError, masks, testing
from flexcp.kernels.reference import dense_attention, dense_mask
from flexcp.layout.balance.objective import Objective
from flexcp.plan import Machine, make_plan

PACK = [412, 75, 1203, 18, 640, 333, 260, 91, 58, 600]
FEW = [1055, 607, 451, 596, 434, 975]
CASES = [
    (masks.causal() & masks.document(lengths=PACK), sum(PACK), 12, (8, 8), "a100-ib"),
    (masks.causal() & masks.document(lengths=FEW), sum(FEW), 12, (32, 8), "a100-ib"),
    (masks.causal(), 2813, 12, (8, 8), "h100-ib"),
    (masks.causal(), 1999, 24, (16, 4), "h100-ib"),
    (masks.sliding_window(700), 4001, 32, (16, 4), "h100-nvlink"),
    (masks.full(), 1500, 10, (4, 1), "h100-nvlink"),
]


@pytest.mark.parametrize(
    ("mask", "length", "ranks", "heads", "machine"), CASES, ids=lambda x: str(x)[:30]
)
def test_auto_is_hardly_dearer_than_any_explicit_choice(mask, length, ranks, heads, machine):
    """By as much at most as bytes that are moved more have to buy."""
    numbers = Machine.preset(machine)
    options = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 128}

    def price(**how):
        stats = make_plan(mask, length, ranks, machine=machine, **options, **how).stats()
        received, far = (
            torch.tensor(stats.bytes_received_per_rank)
            + torch.tensor(stats.backward_bytes_received_per_rank),
            torch.tensor(stats.bytes_received_between_nodes_per_rank)
            + torch.tensor(stats.backward_bytes_received_between_nodes_per_rank),
        )
        wire = float(numbers.wire(received, far).mean())
        return stats.predicted_seconds + Objective.moved * wire

    auto = price()
    for layout in ("contiguous", "head_tail", "striped", "balanced"):
        for schedule in ("exchange", "ring", "allgather", "ulysses"):
            try:
                other = price(layout=layout, schedule=schedule)
            except FlexCPError:
                continue
            assert auto <= other * 1.05, (layout, schedule)


def test_auto_may_leave_ranks_without_heads_and_is_exact():
    """Bytes are all that costs: one swap of rows for heads, though three ranks compute nothing."""
    length, heads, ranks = 97, 2, 5
    machine = Machine("slow links", 1e15, 1 << 30, 1e6, 1e6, 1e-9, 1e-9, 1e-9)
    mask = masks.causal()
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, heads, length, 8, dtype=torch.float64, generator=draw) for _ in "qkvg"]

    def run(mesh):
        plan = make_plan(
            mask, length, mesh, num_heads=heads, head_dim=8, dtype=torch.float64, block_size=16,
            machine=machine,
        )  # fmt: skip
        assert plan.schedule.heads_group_size == ranks
        *qkv, grad = (plan.shard(x, 2) for x in whole)
        local = [x.requires_grad_() for x in qkv]
        out = flexcp.attention(*local, plan)
        found = [out, *torch.autograd.grad(out, local, grad)]
        return [plan.unshard(x.detach(), 2) for x in found]

    given = [x.clone().requires_grad_() for x in whole[:3]]
    at = torch.arange(length)
    allowed = dense_mask(mask.mask_mod, at, at, batch=1, heads=1)
    out = dense_attention(*given, allowed=allowed).out
    expected = [out, *torch.autograd.grad(out, given, whole[3])]
    for found in testing.simulate(run, ranks):
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want)
