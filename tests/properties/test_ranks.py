"""Attention over any plan, executed: outputs and gradients are those of attention's definition."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexcp
from flexcp import FlexCPError, masks, testing
from flexcp.kernels.dropout import Dropout
from flexcp.kernels.reference import dense_attention, dense_mask
from flexcp.layout import Layout
from flexcp.plan import Machine
from flexcp.plan.make import _require_length
from flexcp.plan.problem import LAYOUTS
from flexcp.testing.strategies import catalog_masks, mask_trees

LENGTHS = [13, 100, 203, 257, 512]
MESHES = [(2, 2), (3, 2), (2, 3), (4, 2), (2, 4)]
SCHEDULES = ["auto", "exchange", "ring", "allgather", "ulysses", "hybrid", "hierarchical"]
DIM, VALUE_DIM = 6, 5
NAMES = ("out", "lse", "gradient of q", "gradient of k", "gradient of v")


def fits(mask, length):
    """Only masks whose tables are as long as the sequence: plans refuse others."""
    try:
        _require_length(mask, length)
    except FlexCPError:
        return False
    return True


@st.composite
def some_masks(draw, length, batch, heads):
    models_use = st.sampled_from(
        [
            masks.causal(),
            masks.sliding_window(max(1, length // 5)),
            masks.causal() & masks.document(torch.arange(length) // 37),
            masks.causal() & masks.document(torch.arange(batch * length).view(batch, -1) // 29),
        ]
    )
    anything = mask_trees(length, batch=batch, heads=heads).filter(lambda m: fits(m, length))
    catalog = catalog_masks(length, batch=batch).filter(lambda m: fits(m, length))
    return draw(st.one_of(models_use, catalog, anything))


@st.composite
def some_layouts(draw, length, ranks, batch):
    """One of the names, or tokens dealt out at random, also of some ranks to none."""
    if draw(st.booleans()):
        return draw(st.sampled_from(LAYOUTS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    lanes = draw(st.sampled_from([1, batch]))
    cuts = torch.randint(0, length + 1, (ranks - 1,), generator=generator).sort().values.tolist()
    sizes = [b - a for a, b in pairwise([0, *cuts, length])]
    orders = torch.stack([torch.randperm(length, generator=generator) for _ in range(lanes)])
    return Layout.of_positions([p if lanes > 1 else p[0] for p in orders.split(sizes, dim=1)])


def alibi_of(heads):
    slopes = torch.exp2(-torch.arange(1, heads + 1, dtype=torch.float64))

    def alibi(score, b, h, q_idx, kv_idx):
        return score - slopes[h] * (q_idx - kv_idx).abs()

    return alibi


def deviation(got, want):
    """The largest one, relative to the largest entry; NaN and misplaced infinities are infinite."""
    finite = want.isfinite()
    if not torch.equal(got.isfinite(), finite) or not torch.equal(got[~finite], want[~finite]):
        return float("inf")
    if not finite.any():
        return 0.0
    # Gradients of rows that see one key are 0 but for rounding: nothing to be relative to.
    scale = want[finite].abs().amax().clamp(min=1e-3)
    return float((got[finite] - want[finite]).abs().amax() / scale)


def objective(out, lse, weight):
    return (out * weight).sum() + lse.masked_fill(lse == -torch.inf, 0.0).square().sum() * 0.01


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_any_plan_gives_the_outputs_and_gradients_of_the_definition(data):
    length, batch = data.draw(st.sampled_from(LENGTHS)), data.draw(st.integers(1, 2))
    kv_heads = data.draw(st.integers(1, 2))
    heads = kv_heads * data.draw(st.integers(1, 2))
    mask = data.draw(some_masks(length, batch, heads))
    schedule = data.draw(st.sampled_from(SCHEDULES))
    world = data.draw(st.sampled_from(MESHES) if schedule == "hybrid" else st.integers(1, 8))
    ranks = world[0] * world[1] if isinstance(world, tuple) else world
    layout = data.draw(some_layouts(length, ranks, batch))
    block = data.draw(st.sampled_from([16, 64, 128]))
    score_mod = alibi_of(heads) if data.draw(st.booleans()) else None
    dropout = Dropout(0.3, 77) if data.draw(st.booleans()) else None
    per_node = data.draw(st.integers(1, 4))
    machine = replace(Machine.preset("h100-ib"), ranks_per_node=per_node)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def random(heads, dim):
        return torch.randn(batch, heads, length, dim, generator=generator, dtype=torch.float64)

    full = [random(heads, DIM), random(kv_heads, DIM), random(kv_heads, VALUE_DIM)]
    weight = random(heads, VALUE_DIM)
    every = torch.arange(length)
    allowed = dense_mask(mask.mask_mod, every, every, batch=batch, heads=heads)
    whole = [x.clone().requires_grad_() for x in full]
    expected = dense_attention(*whole, allowed=allowed, score_mod=score_mod, dropout=dropout)
    grads = torch.autograd.grad(objective(expected.out, expected.lse, weight), whole)
    wanted = [expected.out.detach(), expected.lse.detach(), *grads]

    def rank(mesh):
        plan = flexcp.make_plan(
            mask, length, mesh, layout=layout, schedule=schedule, block_size=block,
            num_heads=heads, num_kv_heads=kv_heads, head_dim=DIM, dtype=torch.float64, batch=batch,
            machine=machine,
        )  # fmt: skip
        local = [plan.shard(x, 2).requires_grad_() for x in full]
        out, lse = flexcp.attention(
            *local, plan, score_mod=score_mod, return_lse=True,
            dropout_p=dropout.p if dropout else 0.0, dropout_seed=77 if dropout else None,
        )  # fmt: skip
        grads = torch.autograd.grad(objective(out, lse, plan.shard(weight, 2)), local)
        return [plan.unshard(x, 2) for x in (out.detach(), lse.detach(), *grads)]

    found = testing.simulate(rank, world)[0]
    for name, got, want in zip(NAMES, found, wanted, strict=True):
        assert deviation(got, want) < 1e-10, name
