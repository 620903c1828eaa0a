"""Real ranks: what one of them raises is what the caller sees."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest
import torch
import torch.distributed as dist

from flexcp import FlexCPError, make_plan, masks, testing
from flexcp.comm import RankError
from flexcp.testing import processes


def test_a_refusal_by_flexcp_is_one_to_the_caller_as_well():
    def fn(mesh):
        make_plan(masks.causal(), 100, mesh, schedule="hybrid", num_heads=4)

    with pytest.raises(FlexCPError, match=r"failed: FlexCPError: .*a mesh of two dim") as error:
        testing.spawn(fn, 2, timeout=20)
    found = error.value
    assert isinstance(found, RankError)
    assert isinstance(found.__cause__, FlexCPError)
    assert found.fix == found.__cause__.fix
    assert set(found.failures) == {0, 1}


def test_simulated_ranks_within_a_real_one_keep_their_error():
    def fn(mesh):
        testing.simulate(lambda inner: make_plan(masks.causal(), 0, inner), 2)

    with pytest.raises(
        FlexCPError, match=r"rank 0 failed: .*rank 0 failed: .*seq_len to be an int"
    ):
        testing.spawn(fn, 1, timeout=20)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(processes, "_IN_ALL", 2)
    monkeypatch.setattr(processes, "_TO_REPORT", 2.0)


@pytest.mark.usefixtures("impatient")
def test_ranks_that_never_answer_are_killed_and_named():
    everybody = multiprocessing.get_context("fork").Array("l", 3)

    def fn(mesh):
        everybody[mesh.get_rank()] = os.getpid()
        if mesh.get_rank() != 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(FlexCPError, match="expected ranks 0 and 2 to return or raise") as error:
        testing.spawn(fn, 3, timeout=1.5)
    assert sorted(error.value.failures) == [0, 2]
    for process in everybody:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_stops_is_named_rather_than_those_that_waited_for_it():
    def fn(mesh):
        if mesh.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    with pytest.raises(FlexCPError, match=r"rank 2 failed: .*expected rank 2 to return or raise"):
        testing.spawn(fn, 3, timeout=1.5)


@pytest.mark.usefixtures("impatient")
def test_a_mistake_is_named_rather_than_a_rank_that_does_not_answer():
    def fn(mesh):
        if mesh.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        raise KeyError("a rank's own mistake")

    with pytest.raises(RankError, match=r"rank 1 failed: KeyError: .*own mistake") as error:
        testing.spawn(fn, 2, timeout=1.5)
    assert "rank 0 to return or raise" in str(error.value.failures[0])


def test_ranks_have_the_gradient_mode_of_the_caller():
    with torch.no_grad():
        assert testing.spawn(lambda mesh: torch.is_grad_enabled(), 2) == [False, False]
    assert testing.spawn(lambda mesh: torch.is_grad_enabled(), 1) == [True]
