"""Plans for links that are slow beside compute: what moves less, or crosses nodes once, wins."""

from dataclasses import replace

import torch

import flexcp
from flexcp import masks, testing
from flexcp.kernels.reference import dense_attention, dense_mask
from flexcp.plan import Machine, make_plan

SLOW = Machine("slow", 2e10, 1, 6e8, 5e7, 1e-3, 2e-4, 1e-4)
NODES = Machine("nodes", 2e10, 2, 6e8, 1e7, 1e-3, 2e-4, 1e-4)
LENGTHS = [40, 300, 12, 90, 38, 20]


def test_auto_is_no_slower_than_a_window_in_plain_order():
    options = {"num_heads": 8, "head_dim": 64, "dtype": torch.float32, "machine": SLOW}
    window = masks.sliding_window(512)
    auto = make_plan(window, 4096, 4, **options).stats()
    plain = make_plan(window, 4096, 4, layout="contiguous", **options).stats()
    assert auto.predicted_seconds <= plain.predicted_seconds
    assert max(auto.bytes_received_per_rank) <= max(plain.bytes_received_per_rank)


def test_an_exchange_over_a_slow_link_is_cut_into_more_rounds_than_memory_asks_for():
    documents = masks.causal() & masks.document(lengths=[2900, 500, 396, 300])
    slower = replace(SLOW, inter_bandwidth=2e7)
    options = {"num_heads": 1, "head_dim": 512, "dtype": torch.float32, "machine": slower}
    plan = make_plan(documents, 4096, 4, **options)
    schedule = plan.schedule_of()
    received, own = schedule.forward.moves.received(4), int(schedule.layout.counts.max())
    assert schedule.outer_schedule == "exchange"
    assert schedule.forward.rounds > 1 + -(-int(received.max()) // own)
    by_round = torch.zeros(schedule.forward.rounds, 4, dtype=torch.int64)
    moves = schedule.forward.moves
    by_round.index_put_((moves.round, moves.target), moves.rows, accumulate=True)
    even = by_round[1:].double().mean(0)
    assert bool(((by_round[1:] - even).abs() <= 3).all()), "a row of each message at most"
    plan.check()


def global_batch(mesh):
    return make_plan(
        masks.causal() & masks.document(lengths=LENGTHS),
        sum(LENGTHS),
        mesh,
        num_heads=4,
        head_dim=8,
        dtype=torch.float64,
        block_size=4,
        machine=NODES,
        flops_per_token=2e4,
        token_slack=0.3,
    )


def test_ranks_of_a_node_share_heads_of_a_long_document_and_have_even_work_together():
    plan = global_batch(4)
    assert plan.schedule.heads_group_size == 2
    pairs = torch.tensor(plan.stats().area_per_rank, dtype=torch.float64)
    work = pairs * 4 * 8 * 3.5 + plan.layout.counts * 2e4 * 3
    assert work.max() <= 1.05 * work.mean()
    assert plan.layout.counts.max() <= 1.3 * sum(LENGTHS) / 4 + 1


def test_a_global_batch_on_nodes_equals_one_process():
    total = sum(LENGTHS)
    x = torch.randn(3, 1, 4, total, 8, dtype=torch.float64).requires_grad_()
    at = torch.arange(total)
    mask = masks.causal() & masks.document(lengths=LENGTHS)
    allowed = dense_mask(mask.mask_mod, at, at, batch=1, heads=4)
    want = dense_attention(*x.unbind(0), allowed=allowed).out
    want.square().sum().backward()

    def rank(mesh):
        plan = global_batch(mesh)
        local = [plan.shard(t.detach(), 2).requires_grad_() for t in x.unbind(0)]
        out = flexcp.attention(*local, plan)
        out.square().sum().backward()
        found = [out, *(t.grad for t in local)]
        return all(
            torch.allclose(a, plan.shard(b, 2))
            for a, b in zip(found, [want.detach(), *x.grad], strict=True)
        )

    assert all(testing.simulate(rank, 4))
