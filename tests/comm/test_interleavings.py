"""Passes in orders of their own, refusals, retries, threads: right numbers, or a FlexCPError."""

from __future__ import annotations

import os

import pytest

from flexcp import FlexCPError, testing
from flexcp.comm import process_calls
from tests.comm.interleavings import make_case, meet, run_rank

SIMULATED, REAL = (int(n) for n in os.environ.get("FLEXCP_INTERLEAVINGS", "80,10").split(","))
"""How many programs: "1000,100" takes some minutes."""


@pytest.mark.parametrize("block", range(SIMULATED // 50))
def test_simulated_ranks_give_right_numbers_or_an_error(block):
    outcomes = set()
    for seed in range(50 * block, 50 * block + 50):
        case = make_case(seed)
        try:
            results = testing.simulate(lambda mesh, case=case: run_rank(mesh, case), case.ranks)
        except FlexCPError:
            if case.in_step:
                raise
            outcomes.add("error for all")
            continue
        raised = [text for _, texts in results for text in texts]
        assert not (case.in_step and raised), f"{case}: {raised}"
        outcomes.add("caught errors" if raised else "right")
    assert {"right", "error for all"} <= outcomes


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_processes_give_right_numbers_or_an_error_and_go_on(ranks, monkeypatch):
    monkeypatch.setattr(process_calls, "SLOW", 0.3)
    monkeypatch.setattr(process_calls, "LOOK", 0.05)
    cases = [case for case in map(make_case, range(REAL)) if case.ranks == ranks]

    def rank(mesh):
        found = []
        for case in cases:
            found.append(run_rank(mesh, case))
            meet(mesh)
        return found

    results = testing.spawn(rank, ranks, timeout=60)
    for case, outcome in zip(cases, zip(*results, strict=True), strict=True):
        raised = [text for _, texts in outcome for text in texts]
        assert not (case.in_step and raised), f"{case}: {raised}"
    assert any(texts for _, texts in results[0])
