"""Every plan computes every allowed pair once, moves what is needed, and brings gradients home."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from flexcp import FlexCPError, build_block_grid, masks
from flexcp.layout import Layout, area_per_rank, balanced, rows_needed
from flexcp.plan import make_plan
from flexcp.plan.make import _require_length
from flexcp.plan.problem import LAYOUTS
from flexcp.schedule import SCHEDULES
from flexcp.testing.strategies import mask_trees


def fits(length):
    """Only masks whose tables are as long as the sequence: plans refuse others."""

    def check(mask):
        try:
            _require_length(mask, length)
        except FlexCPError:
            return False
        return True

    return check


@st.composite
def problems(draw):
    length = draw(st.integers(1, 90))
    batch = draw(st.integers(1, 2))
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 2))
    mask = draw(mask_trees(length, batch=batch, heads=heads).filter(fits(length)))
    block = draw(st.sampled_from([1, 3, 8, 16, 128]))
    return mask, length, batch, heads, kv_heads, block


@st.composite
def random_layouts(draw, length, ranks, batch):
    """Any assignment of tokens to ranks, in any order, with one lane or one per batch element."""
    seed, lanes = draw(st.integers(0, 999)), draw(st.sampled_from([1, batch]))
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, length + 1, (ranks - 1,), generator=generator).sort().values.tolist()
    edges = [0, *cuts, length]
    sizes = [b - a for a, b in pairwise(edges)]
    orders = torch.stack([torch.randperm(length, generator=generator) for _ in range(lanes)])
    return Layout.of_positions([p if lanes > 1 else p[0] for p in orders.split(sizes, dim=1)])


def dense_bits(mask, batch, heads, length):
    bits = create_mask(mask.mask_mod, batch, heads, length, length, device="cpu")
    return bits.expand(batch, heads, length, length)


def play(plan, bits):
    """How often each pair is computed in forward, by following what each rank does."""
    batch, _, length, _ = bits.shape
    computed = torch.zeros(bits.shape, dtype=torch.int64)
    schedule = plan.schedule_of()
    groups = schedule.groups
    lanes = groups.batch_elements
    sent: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for rank in range(schedule.ranks):
        for i, step in enumerate(schedule.steps(rank, "forward")):
            for peer, rows in step.sends:
                sent[(rank, peer, i)] = list(rows)
    for rank in range(schedule.ranks):
        group, place = schedule.group_of(rank)
        queries = groups.rows_of(group)
        have = set(queries.tolist())
        for i, step in enumerate(schedule.steps(rank, "forward")):
            for peer, rows in step.receives:
                assert sent.pop((peer, rank, i)) == list(rows)
                have |= {row for a, b in rows for row in range(a, b)}
            keys = torch.tensor([row for a, b in step.work for row in range(a, b)])
            assert have >= set(keys.tolist())
            if keys.numel() == 0 or queries.numel() == 0:
                continue
            for b in range(batch):
                lane = b if lanes > 1 else 0
                q = queries[queries // length == lane] % length
                kv = keys[keys // length == lane].long() % length
                for h in schedule.heads[place].q:
                    computed[b, h, q[:, None], kv] += bits[b, h][q[:, None], kv]
    assert not sent, "messages that nobody receives"
    return computed


@given(problems(), st.data())
@settings(max_examples=80, deadline=None)
def test_every_allowed_pair_is_computed_once_under_every_layout_and_schedule(problem, data):
    mask, length, batch, heads, kv_heads, block = problem
    outer, inner = data.draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2), (1, 3), (5, 1)]))
    name = data.draw(st.sampled_from([*SCHEDULES, "auto"]))
    layout = data.draw(
        st.one_of(st.sampled_from(LAYOUTS), random_layouts(length, outer * inner, batch))
    )
    plan = make_plan(
        mask,
        length,
        (outer, inner) if name == "hybrid" else outer * inner,
        layout=layout,
        schedule=name,
        block_size=block,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=4,
        batch=batch,
    )
    plan.check()
    bits = dense_bits(mask, batch, heads, length)
    assert torch.equal(play(plan, bits), bits.long())
    stats = plan.stats()
    assert sum(stats.area_per_rank) == int(bits.sum())
    assert stats.imbalance >= stats.imbalance_lower_bound * (1 - 1e-9) or isinstance(layout, Layout)


@given(problems(), st.integers(1, 6), st.data())
@settings(max_examples=80, deadline=None)
def test_rows_needed_are_exactly_those_that_some_query_sees(problem, ranks, data):
    mask, length, batch, heads, _, block = problem
    layout = data.draw(random_layouts(length, ranks, batch))
    grid = build_block_grid(mask, length, block_size=block, batch=batch, heads=heads)
    bits = dense_bits(mask, batch, heads, length)
    found = rows_needed([grid], layout)
    for rank in range(ranks):
        rows = layout.rows_of(rank)
        seen: set[int] = set()
        for b in range(batch):
            lane = b if layout.batch_elements > 1 else 0
            own = rows[rows // length == lane] % length
            columns = bits[b][:, own].flatten(0, 1).any(0).nonzero().squeeze(1)
            seen |= {lane * length + int(c) for c in columns}
        expected = seen - set(rows.tolist())
        assert {row for a, b in found.of(rank) for row in range(a, b)} == expected
    areas = area_per_rank([grid], layout)
    for rank in range(ranks):
        positions = layout.positions(rank).expand(batch, -1)
        expected_area = sum(int(bits[b][:, positions[b]].sum()) for b in range(batch))
        assert int(areas[rank]) == expected_area


@given(problems(), st.integers(1, 7))
@example((masks.full(), 2, 1, 1, 1, 1), 3)
@settings(max_examples=60, deadline=None)
def test_balanced_layouts_give_ranks_token_counts_within_a_block(problem, ranks):
    mask, length, batch, heads, _, block = problem
    grid = build_block_grid(mask, length, block_size=block, batch=batch, heads=heads)
    layout = balanced([grid], ranks)
    assert int(layout.counts.max()) - int(layout.counts.min()) <= max(1, block)
    assert layout == balanced([grid], ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 16])
def test_shards_of_a_tensor_restore_it(ranks):
    generator = torch.Generator().manual_seed(ranks)
    mask_layouts = [
        make_plan(lambda b, h, q, kv: q >= kv, 53, ranks, layout=name).layout for name in LAYOUTS
    ]
    x = torch.randn(2, 53, 3, generator=generator)
    for layout in mask_layouts:
        parts = [layout.shard(x, 1, rank=r) for r in range(ranks)]
        assert torch.equal(layout.restore(parts, 1), x)
