"""Volumes, rounds and heads of each schedule."""

from __future__ import annotations

import pytest
import torch

from flexcp import FlexCPError, build_block_grid, masks
from flexcp.layout import contiguous, head_tail
from flexcp.plan import make_plan
from flexcp.schedule import check_schedule, make_schedule, split_heads

LENGTH, RANKS = 240, 6


def grid_of(mask):
    return build_block_grid(mask, LENGTH, block_size=16)


def test_exchange_under_a_full_mask_moves_what_a_ring_moves():
    grid, layout = grid_of(masks.full()), contiguous(LENGTH, RANKS)
    both = [make_schedule(name, [grid], layout) for name in ("exchange", "ring")]
    assert [s.forward.moves.received(RANKS).tolist() for s in both] == [[200] * 6] * 2
    assert both[0].forward.rounds == both[1].forward.rounds == RANKS


def test_exchange_receives_at_most_a_share_of_the_sequence_per_round():
    grid, layout = grid_of(masks.causal()), head_tail(LENGTH, RANKS)
    moves = make_schedule("exchange", [grid], layout).forward.moves
    per_round = torch.zeros(RANKS * RANKS, dtype=torch.int64)
    per_round.index_add_(0, moves.round * RANKS + moves.target, moves.rows)
    assert int(per_round.max()) <= LENGTH // RANKS


def test_exchange_under_a_window_is_one_round_between_neighbours():
    grid = grid_of(masks.causal() & masks.sliding_window(7))
    forward = make_schedule("exchange", [grid], contiguous(LENGTH, RANKS)).forward
    assert forward.rounds == 2
    assert (forward.moves.target - forward.moves.source).tolist() == [1] * 5
    assert forward.moves.rows.tolist() == [7] * 5


def test_exchange_that_keeps_moves_nothing_but_gradients_in_backward():
    grid, layout = grid_of(masks.causal()), head_tail(LENGTH, RANKS)
    for at_once in (False, True):
        schedule = make_schedule("exchange", [grid], layout, keep=True, at_once=at_once)
        check_schedule(schedule, [grid])
        assert len(schedule.backward.moves) == 0
        assert (schedule.forward.rounds == 1) == at_once


def test_few_rounds_are_as_few_as_memory_allows():
    """Every rank fills its rounds with as many rows as the largest rank owns."""
    lengths = [150, 10, 20, 40, LENGTH - 220]
    grid, layout = grid_of(masks.document(lengths=lengths)), head_tail(LENGTH, RANKS)
    schedule = make_schedule("exchange", [grid], layout, few_rounds=True)
    check_schedule(schedule, [grid])
    limit = int(layout.counts.max())
    moves = schedule.forward.moves
    assert schedule.forward.rounds == 1 - int(-int(moves.received(RANKS).max()) // limit)
    for i in range(1, schedule.forward.rounds):
        at = moves.round == i
        rows = torch.zeros(RANKS, dtype=torch.int64).index_add_(0, moves.target[at], moves.rows[at])
        assert int(rows.max()) <= limit
    by_distance = make_schedule("exchange", [grid], layout)
    assert schedule.forward.rounds <= by_distance.forward.rounds
    assert torch.equal(moves.received(RANKS), by_distance.forward.moves.received(RANKS))


def test_kept_rows_are_used_before_the_own_in_backward():
    """Gradients of others' rows are then on their way while a rank computes its own."""
    grid, layout = grid_of(masks.causal()), head_tail(LENGTH, RANKS)
    schedule = make_schedule("exchange", [grid], layout, keep=True)
    check_schedule(schedule, [grid])
    last = schedule.backward.rounds - 1
    assert int(schedule.backward.returns.round.max()) < last
    own = schedule.backward.work.round == last
    assert int(own.sum()) == len(layout.owned)


def test_ring_only_talks_to_neighbours():
    schedule = make_schedule("ring", [grid_of(masks.full())], contiguous(LENGTH, RANKS))
    for table in (schedule.forward.moves, schedule.backward.returns):
        assert torch.equal((table.source + 1) % RANKS, table.target)


def test_allgather_brings_everything_once():
    schedule = make_schedule("allgather", [grid_of(masks.causal())], contiguous(LENGTH, RANKS))
    assert schedule.forward.rounds == 1
    assert schedule.forward.moves.received(RANKS).tolist() == [200] * 6
    assert schedule.keeps_kv


def test_steps_of_two_ranks_fit_each_other():
    schedule = make_schedule("exchange", [grid_of(masks.causal())], head_tail(LENGTH, RANKS))
    for direction in ("forward", "backward"):
        steps = [schedule.steps(r, direction) for r in range(RANKS)]
        for r in range(RANKS):
            for i, step in enumerate(steps[r]):
                for peer, rows in step.sends:
                    assert (r, rows) in steps[peer][i].receives
                for peer, rows in step.returns_out:
                    assert (r, rows) in steps[peer][i].returns_in


def test_groups_talk_to_the_same_place_of_other_groups():
    grid = grid_of(masks.causal())
    schedule = make_schedule(
        "hybrid", [grid], contiguous(LENGTH, 6), heads_group_size=2, num_heads=4, num_kv_heads=2
    )
    assert schedule.steps(5, "forward")[1].receives[0][0] == 3
    assert schedule.members(5) == range(4, 6)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (6, 3), (1, 1), (5, 1), (7, 7)])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 16])
def test_head_slices_are_even_and_bring_their_kv_heads(heads, kv_heads, parts):
    slices = split_heads(heads, kv_heads, parts)
    assert [h for s in slices for h in s.q] == list(range(heads))
    sizes = [len(s.q) for s in slices]
    assert max(sizes) - min(sizes) <= 1
    for s in slices:
        assert {h * kv_heads // heads for h in s.q} == set(s.kv)


def test_heads_that_kv_heads_do_not_divide_are_refused():
    with pytest.raises(FlexCPError, match="multiple of num_kv_heads"):
        split_heads(6, 4, 2)


def test_groups_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(FlexCPError, match="groups that divide 6 ranks"):
        make_schedule("hybrid", [grid_of(masks.full())], contiguous(LENGTH, 6), heads_group_size=4)


def test_an_unknown_schedule_lists_the_known_ones():
    with pytest.raises(FlexCPError, match="exchange, ring, allgather, ulysses, hybrid"):
        make_schedule("spiral", [grid_of(masks.full())], contiguous(LENGTH, 6))


def test_a_schedule_says_what_it_is_in_a_line():
    """Not its tables: a plan that is printed, or stands in an error, has thousands of rows."""
    plan = make_plan(masks.causal(), 512, (2, 2), schedule="hybrid", num_heads=8)
    transfers, rounds = len(plan.schedule.forward.moves), plan.schedule.forward.rounds
    told = f"4 ranks, heads shared by 2, {transfers} transfers in {rounds} rounds forward"
    assert repr(plan.schedule) == f"Schedule(hybrid: {told})"
