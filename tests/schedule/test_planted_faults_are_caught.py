"""check_schedule proves schedules, and finds every kind of fault that is planted in one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flexcp import FlexCPError, build_block_grid, masks
from flexcp.layout import contiguous, head_tail
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
