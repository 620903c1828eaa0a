"""Plain order: taken where it is clearly cheaper, in the split that is cheapest."""

from __future__ import annotations

import random

import pytest

from flexcp import Machine, make_plan, masks

LINKS = {"intra_bandwidth": 1.5e11, "latency": 15e-6, "message": 1e-6, "launch": 10e-6}


def pack(tokens: int, draw_one, seed: int) -> list[int]:
    draw, lengths = random.Random(seed), []
    while sum(lengths) < tokens:
        lengths.append(min(tokens - sum(lengths), max(1, int(draw_one(draw)))))
    return lengths


@pytest.mark.parametrize("schedule", ["auto", "hierarchical"])
@pytest.mark.parametrize(
    ("per_node", "flops", "link", "shared", "ranks", "heads"),
    [(8, 2.5e14, 2.5e10, 5e9, 64, (64, 8)), (4, 2.5e14, 1.2e10, 1.25e9, 16, (16, 16))],
    ids=["64 ranks", "16 ranks"],
)
def test_no_split_of_plain_order_is_left_out_where_links_between_nodes_are_waited_for(
    per_node, flops, link, shared, ranks, heads, schedule
):
    """Only the best split of balanced layouts was tried: it took up to seven times as long."""
    machine = Machine("slow", flops, per_node, inter_bandwidth=link, node_bandwidth=shared, **LINKS)
    lengths = pack(1 << 17, lambda draw: draw.expovariate(30 / (1 << 17)), 4)
    mask = masks.document(lengths=lengths) & masks.causal()
    shape = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 128, "machine": machine}

    def seconds(layout: str) -> float:
        plan = make_plan(mask, 1 << 17, ranks, layout=layout, schedule=schedule, **shape)
        return plan.stats().predicted_seconds

    assert seconds("auto") <= 1.05 * min(seconds(x) for x in ("contiguous", "head_tail"))


def test_work_stays_even_where_compute_is_what_takes_time():
    lengths = pack(1 << 17, lambda draw: draw.expovariate(1 / 1000), 1)
    mask = masks.document(lengths=lengths) & masks.causal()
    plan = make_plan(mask, 1 << 17, 8, num_heads=32, num_kv_heads=8, head_dim=128)
    assert plan.layout.name == "balanced"
    assert plan.stats().imbalance <= 1.02


def test_plain_order_on_hundreds_of_ranks_is_not_tried_with_millions_of_messages():
    """Rows passed on within nodes, each in hundreds of rounds: ten seconds for nothing."""
    plan = make_plan(masks.causal(), 1 << 20, 256, block_size=512)
    assert not any("hierarchical" in name for name, _ in plan.considered)
