"""Work along the keys: its sum is exactly the work of a rank, whatever its blocks are cut into."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcp import build_block_grid, masks
from flexcp.layout import area_per_rank, contiguous, head_tail, striped
from flexcp.plan.work_profile import WorkProfile


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=8),
    st.integers(1, 7),
    st.sampled_from([contiguous, head_tail, striped]),
    st.booleans(),
    st.sampled_from([16, 64, 128]),
)
def test_all_keys_together_are_the_pairs_of_a_rank(lengths, ranks, layout_of, causal, block):
    """Short documents begin and end within tiles, of which a rank has a part of the rows."""
    mask, tokens = masks.document(lengths=lengths), sum(lengths)
    grid = build_block_grid(
        mask & masks.causal() if causal else mask, tokens, block_size=block, heads=3
    )
    layout = layout_of(tokens, ranks)
    found = WorkProfile.of([grid], layout).before[:, -1]
    torch.testing.assert_close(found, area_per_rank([grid], layout).double())
