"""Places in memory: buffers that live at once don't overlap, and gradients go where they belong."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

import flexcp
from flexcp import masks
from flexcp.layout import contiguous, head_tail
from flexcp.ops.places import Places, arranged
from flexcp.ops.program import rank_program
from flexcp.schedule import make_schedule

LIVES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6), st.integers(1, 5)), max_size=12)


@given(LIVES)
def test_buffers_that_live_at_once_do_not_overlap(lives):
    lives = sorted(lives, key=lambda life: life[1])
    sizes, born = [n for n, _, _ in lives], [t for _, t, _ in lives]
    until = [t + d for _, t, d in lives]
    offsets, length = arranged(sizes, born, until)
    assert all(at + n <= length for at, n in zip(offsets, sizes, strict=True))
    for i in range(len(lives)):
        for j in range(i):
            if born[i] < until[j] and sizes[i] and sizes[j]:
                apart = offsets[i] + sizes[i] <= offsets[j] or offsets[j] + sizes[j] <= offsets[i]
                assert apart, (i, j)


@given(st.lists(st.integers(0, 20), max_size=10))
def test_places_are_what_an_index_names(index):
    at = torch.tensor(index, dtype=torch.int64)
    places = Places.of(at)
    x = torch.arange(21)
    found = x[places.index] if places.index is not None else x.narrow(0, places.first, places.rows)
    assert torch.equal(found, x[at])


def programs(schedule, layout, direction, **how):
    grid = flexcp.build_block_grid(masks.full(), layout.seq_len)
    made = make_schedule(schedule, [grid], layout, **how)
    return [rank_program(made, grid, rank, direction) for rank in range(layout.ranks)]


def test_a_ring_needs_room_for_two_rounds_however_many_ranks_there_are():
    for ranks in (3, 8):
        for program in programs("ring", contiguous(16 * ranks, ranks), "forward"):
            assert program.arriving_rows == 32
        for program in programs("ring", contiguous(16 * ranks, ranks), "backward"):
            assert program.arriving_rows == 32
            assert program.gradients.rows == 32  # its own, and one message


def test_rows_that_stand_side_by_side_are_not_gathered():
    for schedule in ("ring", "exchange", "allgather"):
        for direction in ("forward", "backward"):
            for program in programs(schedule, contiguous(64, 4), direction):
                assert program.staged_rows == program.gathered_rows == 0
                if program.gradients is not None:
                    for round_ in program.gradients.rounds:
                        assert all(add.target.index is None for add in round_.work)
                        assert len(round_.returned) <= 1


def test_rows_that_many_peers_return_are_summed_in_one_step_and_in_their_order():
    for program in programs("exchange", head_tail(96, 6), "backward", at_once=True, keep=True):
        gradients = program.gradients
        (round_,) = gradients.rounds
        if round_.alike:
            continue
        assert round_.returned == ()
        assert round_.summed.target is None  # the pass is over: what is new is returned
        of_row = torch.tensor_split(round_.summed.source, round_.summed.starts[1:-1])
        assert [rows[:1].tolist() for rows in of_row] == [[i] for i in range(program.own_rows)]
        for rows in of_row:
            assert len(rows) == 1 or int(rows[1]) >= gradients.rows
            assert bool((rows.diff() > 0).all())


def test_a_ring_gathers_nothing_on_any_layout():
    for direction in ("forward", "backward"):
        for program in programs("ring", head_tail(64, 4), direction):
            assert program.staged_rows == 0
            for round_ in program.rounds:
                assert len(round_.sends) <= 1


def test_ranks_without_tokens_send_pairwise_and_so_do_very_uneven_ones():
    grid = flexcp.build_block_grid(masks.full(), 6)
    even = make_schedule("allgather", [grid], contiguous(6, 3))
    empty = make_schedule("allgather", [grid], contiguous(6, 8))
    alone = make_schedule("allgather", [grid], contiguous(6, 1))
    assert even.gathers_all
    assert not empty.gathers_all
    assert not alone.gathers_all
