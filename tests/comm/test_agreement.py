"""Ranks that are about to do different things find out before data moves, and say what differs."""

import pytest

from flexcp import FlexCPError, testing
from flexcp.comm.agreement import Agreement


def agree_on(facts_by_rank):
    def rank(mesh):
        facts = facts_by_rank[mesh.get_rank()]
        mesh.transport.calls.begin(Agreement("do the same", "a step", facts, "fix it"))

    testing.simulate(rank, len(facts_by_rank))


def test_equal_facts_are_agreed_on():
    agree_on([{"type": "float32", "shape": "1, 2"}] * 3)


def test_what_differs_is_said_and_nothing_else():
    with pytest.raises(FlexCPError) as error:
        agree_on([{"type": "a", "shape": "1"}, {"type": "b", "shape": "1"}, {"type": "a"}])
    assert "type: a on ranks [0, 2]; b on ranks [1]" in str(error.value)
    assert "shape: 1 on ranks [0, 1]; nothing of the kind on ranks [2]" in str(error.value)


def test_values_may_hold_any_text():
    same = "lambda: x == 1\nand y=2"
    with pytest.raises(FlexCPError, match=r"got mask: a\nb=c on ranks \[0\]; a\nb=d on ranks"):
        agree_on([{"mask": "a\nb=c", "more": same}, {"mask": "a\nb=d", "more": same}])
