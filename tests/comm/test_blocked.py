"""Ranks that wait for each other in a circle are told from those whose rows are on their way."""

from __future__ import annotations

import random

from flexcp.comm.blocked import Blocked, Waits, stuck
from flexcp.comm.board import MemoryBoard


def blocked(needs, begun=()):
    return Blocked(1, "a round", needs, frozenset(begun))


def test_two_ranks_that_wait_for_what_the_other_has_not_begun_are_stuck():
    ranks = {0: blocked({1: 50}, [60]), 1: blocked({0: 70}, [80])}
    assert stuck(0, ranks.get) == ranks


def test_ranks_whose_rows_were_sent_are_not_stuck():
    ranks = {0: blocked({1: 50}, [60]), 1: blocked({0: 60}, [80])}
    assert stuck(0, ranks.get) == {}


def test_a_rank_that_does_not_wait_may_still_do_what_others_need():
    assert stuck(0, {0: blocked({1: 50}), 1: blocked({2: 50})}.get) == {}


def test_whoever_waits_for_a_circle_is_stuck_as_well():
    ranks = {0: blocked({1: 5}), 1: blocked({2: 5}), 2: blocked({1: 6})}
    assert sorted(stuck(0, ranks.get)) == [0, 1, 2]
    assert sorted(stuck(2, ranks.get)) == [1, 2]


def test_nobody_who_is_stuck_can_go_on_before_another_who_is():
    draw = random.Random(0)
    found_some = 0
    for _ in range(2000):
        ranks = {
            r: blocked(
                {draw.randrange(6): draw.randrange(5) for _ in range(draw.randrange(4))},
                [tag for tag in range(5) if draw.random() < 0.3],
            )
            for r in range(6)
            if draw.random() < 0.8
        }
        for start in range(6):
            found = stuck(start, ranks.get)
            assert not found or start in found
            for each in found.values():
                assert any(r in found and t not in found[r].begun for r, t in each.needs.items())
            found_some += bool(found)
    assert found_some > 1000


def test_a_circle_is_found_at_the_second_look_and_told_to_all_in_it():
    board = MemoryBoard()
    first, second = Waits(0, board), Waits(1, board)
    first.begun.append(60)
    first.begin_wait("round 2", [(1, 50)])
    assert first.verdict() is None
    second.begin_wait("round 3", [(0, 70)])
    assert first.verdict() is None
    told = first.verdict()
    assert told == "rank 0 waits for rank 1 in round 2; rank 1 waits for rank 0 in round 3"
    first.end_wait()
    assert second.verdict() == told


def test_records_travel_as_text():
    record = blocked({1: 50, 3: 7}, [4, 2])
    assert Blocked.of(record.as_text()) == record
