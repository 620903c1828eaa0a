"""What is worked out once per plan is kept by value, within bounds."""

import pickle
import threading
from dataclasses import dataclass

import pytest

from flexcp.plan.memo import PlanMemo


@dataclass(frozen=True)
class ProgramKey:
    mask: str
    direction: str


def test_equal_keys_share_an_entry_and_none_is_one():
    memo, made = PlanMemo(), []

    def make():
        made.append(1)

    assert memo.kept(ProgramKey("a", "forward"), make) is None
    assert memo.kept(ProgramKey("a", "forward"), make) is None
    assert memo.kept(ProgramKey("a", "backward"), make) is None
    assert len(made) == len(memo) == 2


def test_the_oldest_entries_are_dropped_beyond_the_limit():
    memo = PlanMemo(limit=3)
    for i in range(5):
        memo.kept(("square", i), lambda i=i: i * i)
    assert len(memo) == 3
    assert [memo.kept(("square", i), lambda: "kept no more") for i in (4, 3, 2, 0)] == [
        16,
        9,
        4,
        "kept no more",
    ]


def test_what_there_is_once_per_mask_outlives_everything_else():
    memo = PlanMemo(limit=3)
    programs = memo.kept(("programs", "causal"), object, per_mask=True)
    for i in range(5):
        memo.kept(("op", i), object)
    assert memo.kept(("programs", "causal"), object) is programs
    assert len(memo) == 4


def test_nothing_is_kept_of_what_raises():
    memo = PlanMemo()
    with pytest.raises(ZeroDivisionError):
        memo.kept(("a",), lambda: 1 // 0)
    assert memo.kept(("a",), lambda: 1) == 1


def test_making_an_entry_may_use_the_memo():
    memo = PlanMemo()
    assert memo.kept(("a",), lambda: memo.kept(("b",), lambda: 1) + 1) == 2
    assert len(memo) == 2


def test_threads_that_make_an_entry_at_once_get_the_same():
    memo, both, found = PlanMemo(), threading.Barrier(2), []

    def make():
        both.wait(timeout=60)
        return object()

    threads = [
        threading.Thread(target=lambda: found.append(memo.kept(("a",), make))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1]


def test_a_copy_begins_empty():
    memo = PlanMemo(limit=7)
    memo.kept(("a",), lambda: 1)
    other = pickle.loads(pickle.dumps(memo))
    assert (other.limit, len(other)) == (7, 0)
