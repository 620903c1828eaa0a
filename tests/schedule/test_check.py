"""check_schedule proves schedules, and finds every kind of fault that is planted in one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flexcp import FlexCPError, build_block_grid, masks
from flexcp.layout import contiguous, head_tail
from flexcp.plan import make_plan
from flexcp.schedule import (
    HeadSlice,
    Pass,
    Tasks,
    Transfers,
    check_schedule,
    make_schedule,
)

LENGTH, RANKS = 200, 4
GRID = build_block_grid(masks.causal(), LENGTH, block_size=16)
NAMES = ["exchange", "ring", "allgather"]


def schedule_of(name):
    return make_schedule(name, [GRID], head_tail(LENGTH, RANKS))


def without_line(table, at):
    keep = torch.ones(len(table), dtype=torch.bool)
    keep[at] = False
    fields = (getattr(table, f)[keep] for f in table.__dataclass_fields__)
    return type(table)(*fields)


def with_line_again(table, at):
    fields = (
        torch.cat([getattr(table, f), getattr(table, f)[at : at + 1]])
        for f in table.__dataclass_fields__
    )
    return type(table)(*fields)


def changed(table, column, at, value):
    fields = {f: getattr(table, f).clone() for f in table.__dataclass_fields__}
    fields[column][at] = value
    return type(table)(**fields)


def faulty(name, where, **parts):
    schedule = schedule_of(name)
    return replace(schedule, **{where: replace(getattr(schedule, where), **parts)})


@pytest.mark.parametrize("name", NAMES)
def test_a_correct_schedule_passes(name):
    check_schedule(schedule_of(name), [GRID])


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("name", NAMES)
def test_a_dropped_tile_is_caught(name, where):
    work = getattr(schedule_of(name), where).work
    with pytest.raises(FlexCPError, match="never works on rows"):
        check_schedule(faulty(name, where, work=without_line(work, 0)), [GRID])


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("name", NAMES)
def test_a_doubled_tile_is_caught(name, where):
    work = getattr(schedule_of(name), where).work
    with pytest.raises(FlexCPError, match="more than once"):
        check_schedule(faulty(name, where, work=with_line_again(work, len(work) - 1)), [GRID])


def test_a_late_transfer_is_caught():
    for name in ("exchange", "ring"):
        forward = schedule_of(name).forward
        late = changed(forward.moves, "round", 0, int(forward.moves.round[0]) + 1)
        with pytest.raises(FlexCPError, match="before all of them have arrived"):
            check_schedule(faulty(name, "forward", moves=late), [GRID])


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_missing_transfer_is_caught(where):
    moves = getattr(schedule_of("exchange"), where).moves
    with pytest.raises(FlexCPError, match="before all of them have arrived"):
        check_schedule(faulty("exchange", where, moves=without_line(moves, 0)), [GRID])


def test_a_row_that_is_received_twice_is_caught():
    moves = schedule_of("exchange").forward.moves
    with pytest.raises(FlexCPError, match="that it has already"):
        check_schedule(faulty("exchange", "forward", moves=with_line_again(moves, 0)), [GRID])


def test_sending_on_what_has_not_arrived_is_caught():
    """Rank 1 would wait for rank 0 and rank 0 for rank 1: the round would deadlock."""
    layout = contiguous(LENGTH, 3)
    schedule = make_schedule("exchange", [GRID], layout)
    moves = schedule.forward.moves
    at = int(torch.nonzero((moves.target == 2) & (moves.source == 0))[0])
    through_one = changed(changed(moves, "source", at, 1), "round", at, 1)
    with pytest.raises(FlexCPError, match="sends rows"):
        check_schedule(
            replace(schedule, forward=replace(schedule.forward, moves=through_one)), [GRID]
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_gradient_is_caught(name):
    returns = schedule_of(name).backward.returns
    with pytest.raises(FlexCPError, match="gradient"):
        check_schedule(faulty(name, "backward", returns=without_line(returns, 0)), [GRID])


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_that_is_sent_twice_is_caught(name):
    returns = schedule_of(name).backward.returns
    with pytest.raises(FlexCPError, match="gradient"):
        check_schedule(faulty(name, "backward", returns=with_line_again(returns, 0)), [GRID])


def test_a_gradient_for_the_wrong_owner_is_caught():
    returns = schedule_of("exchange").backward.returns
    last = len(returns) - 1
    source, target = int(returns.source[last]), int(returns.target[last])
    other = next(r for r in range(RANKS) if r not in (source, target))
    with pytest.raises(FlexCPError, match="gradient"):
        check_schedule(
            faulty("exchange", "backward", returns=changed(returns, "target", last, other)), [GRID]
        )


def test_a_transfer_to_oneself_is_caught():
    moves = schedule_of("exchange").forward.moves
    to_self = changed(moves, "source", 0, int(moves.target[0]))
    with pytest.raises(FlexCPError, match="between two groups"):
        check_schedule(faulty("exchange", "forward", moves=to_self), [GRID])


def test_work_after_the_last_round_is_caught():
    forward = schedule_of("exchange").forward
    late = changed(forward.work, "round", 0, forward.rounds)
    with pytest.raises(FlexCPError, match="in one of"):
        check_schedule(faulty("exchange", "forward", work=late), [GRID])


def test_a_head_that_nobody_computes_is_caught():
    schedule = make_schedule("ulysses", [GRID], contiguous(LENGTH, 2), num_heads=4)
    fewer = (schedule.heads[0], HeadSlice(range(2, 3), range(2, 3)))
    with pytest.raises(FlexCPError, match="each query head once"):
        check_schedule(replace(schedule, heads=fewer), [GRID], num_heads=4)


def test_gradients_in_the_forward_pass_are_caught():
    schedule = schedule_of("exchange")
    forward = replace(schedule.forward, returns=schedule.backward.returns)
    with pytest.raises(FlexCPError, match="no gradients in the forward pass"):
        check_schedule(replace(schedule, forward=forward), [GRID])


def test_a_schedule_for_a_narrower_mask_is_caught():
    window = build_block_grid(masks.sliding_window(5), LENGTH, block_size=16)
    schedule = make_schedule("exchange", [window], contiguous(LENGTH, RANKS))
    check_schedule(schedule, [window])
    with pytest.raises(FlexCPError, match="never works on rows"):
        check_schedule(schedule, [GRID])


def test_an_empty_pass_is_not_attention():
    nothing = Tasks(*(torch.zeros(0, dtype=torch.int64) for _ in range(4)))
    schedule = replace(schedule_of("exchange"), forward=Pass(1, Transfers.none(), nothing))
    with pytest.raises(FlexCPError, match="never works on rows"):
        check_schedule(schedule, [GRID])


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "slices"),
    [
        (4, 2, [((0, 2), (1, 2)), ((2, 4), (0, 1))]),
        (4, 2, [((0, 2), (0, 2)), ((2, 4), (1, 2))]),
        (4, 2, [((0, 2), (0, 0)), ((2, 4), (1, 2))]),
        (4, 4, [((0, 2), (0, 2)), ((2, 4), (1, 3))]),
        (6, 2, [((0, 5), (0, 1)), ((5, 6), (1, 2))]),
        (3, 3, [((0, 3), (0, 3)), ((3, 3), (2, 3))]),
    ],
    ids=["exchanged", "too many", "none", "shifted", "uneven", "of nobody"],
)
def test_kv_heads_that_do_not_belong_to_the_query_heads_are_caught(num_heads, num_kv_heads, slices):
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    schedule = make_schedule("ulysses", [GRID], contiguous(LENGTH, 2), **heads)
    check_schedule(schedule, [GRID], **heads)
    wrong = tuple(HeadSlice(range(*q), range(*kv)) for q, kv in slices)
    with pytest.raises(FlexCPError, match=r"kv heads \[.*\] in slice \d, for query heads"):
        check_schedule(replace(schedule, heads=wrong), [GRID], **heads)
    with pytest.raises(FlexCPError, match="kv heads"):
        check_schedule(replace(schedule, heads=wrong), [GRID])


def test_heads_of_another_model_are_caught():
    schedule = make_schedule("exchange", [GRID], head_tail(LENGTH, 2), num_heads=4, num_kv_heads=4)
    with pytest.raises(FlexCPError, match="kv heads"):
        check_schedule(schedule, [GRID], num_heads=4, num_kv_heads=2)
    with pytest.raises(FlexCPError, match="each query head once"):
        check_schedule(schedule, [GRID], num_heads=8, num_kv_heads=4)


def test_a_slice_that_leaves_heads_out_is_caught():
    """Ranks send heads from the first to the last, and would send these as well."""
    schedule = make_schedule("ulysses", [GRID], contiguous(LENGTH, 2), num_heads=2)
    gaps = (HeadSlice(range(0, 2, 2), range(1)), HeadSlice(range(1, 2), range(1, 2)))
    with pytest.raises(FlexCPError, match="consecutive heads"):
        check_schedule(replace(schedule, heads=gaps), [GRID], num_heads=2)


@pytest.mark.parametrize("where", ["moves", "returns", "work"])
@pytest.mark.parametrize("begin", [-5, -LENGTH, LENGTH - 1, LENGTH], ids=lambda n: f"from {n}")
def test_rows_that_do_not_exist_are_caught(where, begin):
    table = getattr(schedule_of("exchange").backward, where)
    size = int(table.stop[0] - table.start[0])
    assert size > 5
    moved = changed(changed(table, "start", 0, begin), "stop", 0, begin + size)
    with pytest.raises(FlexCPError, match=f"rows 0 to {LENGTH - 1}"):
        check_schedule(faulty("exchange", "backward", **{where: moved}), [GRID])


def test_work_of_an_unknown_group_is_caught():
    work = schedule_of("exchange").forward.work
    with pytest.raises(FlexCPError, match=f"by one of {RANKS} groups"):
        check_schedule(faulty("exchange", "forward", work=changed(work, "rank", 0, RANKS)), [GRID])


@pytest.mark.parametrize("when", ["before", "after"])
def test_gradients_that_a_group_does_not_have_are_caught(when):
    """Nothing would be lost: but the group that returns them has none yet, or none any more."""
    backward = schedule_of("exchange").backward
    returns = backward.returns
    at = int(returns.round.argmax())
    extra = 0 if when == "before" else backward.rounds
    again = changed(with_line_again(returns, at), "round", len(returns), extra)
    parts = {"returns": again, "rounds": backward.rounds + 1}
    with pytest.raises(FlexCPError, match=r"returns gradients of rows .* and has none"):
        check_schedule(faulty("exchange", "backward", **parts), [GRID])


def test_groups_and_masks_of_other_tokens_are_caught():
    schedule = schedule_of("exchange")
    longer = build_block_grid(masks.causal(), LENGTH + 1, block_size=16)
    with pytest.raises(FlexCPError, match=f"masks of the layout's {LENGTH} tokens, got one of 201"):
        check_schedule(schedule, [longer])
    with pytest.raises(FlexCPError, match="other rows in a group"):
        check_schedule(replace(schedule, groups=contiguous(LENGTH, RANKS)), [GRID])
    with pytest.raises(FlexCPError, match="groups that divide 4 ranks, got groups of 3"):
        check_schedule(replace(schedule, heads_group_size=3), [GRID])


def test_a_plan_with_another_layout_than_its_schedules_is_caught():
    plan = make_plan(masks.causal(), LENGTH, RANKS, layout="head_tail", block_size=16)
    plan.check()
    replace(plan, layout=head_tail(LENGTH, RANKS)).check()
    with pytest.raises(FlexCPError, match=r"on the plan's layout, Layout\(contiguous"):
        replace(plan, layout=contiguous(LENGTH, RANKS)).check()


def test_a_plan_without_a_schedule_for_one_of_its_masks_is_caught():
    plan = make_plan({"a": masks.causal(), "b": masks.full()}, LENGTH, RANKS)
    with pytest.raises(FlexCPError, match=r"each of the masks \['a', 'b'\], got .* \['a'\]"):
        replace(plan, schedules={"a": plan.schedule_of("a")}).check()
