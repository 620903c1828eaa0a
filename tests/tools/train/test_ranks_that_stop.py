"""A run whose ranks wait for one that has stopped: they give up in time, and name it."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from flexcp import FlexCPError, testing
from flexcp.comm import faults
from flexcp.testing import processes
from flexcp.tools.train import TrainConfig, train, worker
from flexcp.tools.train.team import Team

TINY = TrainConfig(
    data="texts", steps=4, tokens=64, document_tokens=40, dim=16, layers=1, heads=2, kv_heads=1,
    eval_sequences=0,
)  # fmt: skip


@pytest.mark.parametrize("what", ["a step", "wait_for_all"])
def test_ranks_name_the_one_that_has_stopped(what, tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "_AFTER_TIMEOUT", 2.0)
    monkeypatch.setattr(processes, "_TO_REPORT", 3.0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("a line of a text\n" * 40)

    def stop():
        os.kill(os.getpid(), signal.SIGSTOP)

    def rank(mesh):
        is_victim, team = mesh.get_rank() == 1, Team(mesh)
        if what == "a step":
            train(TINY, mesh, should_stop=lambda: bool(is_victim and stop()))
        elif is_victim:
            stop()
        elif what == "sum_":
            team.sum_(mesh.mesh.float())
        else:
            team.wait_for_all()

    with pytest.raises(FlexCPError, match=r"rank 1 failed: .*expected rank 1 to return") as caught:
        testing.spawn(rank, 3, timeout=2)
    for number in (0, 2):
        text = str(caught.value.failures[number])
        assert text.startswith("expected rank 1 to "), text


def test_ranks_wait_as_long_as_the_settings_say(monkeypatch):
    asked = {}

    def init(backend, *, timeout):
        asked[backend] = timeout.total_seconds()
        raise KeyboardInterrupt

    monkeypatch.setattr(worker.dist, "init_process_group", init)
    with pytest.raises(KeyboardInterrupt):
        worker.train_on_ranks(replace(TINY, timeout=7.5), listen=print, should_stop=bool)
    assert asked == {"gloo": 7.5}


def test_a_time_out_is_more_than_0():
    with pytest.raises(FlexCPError, match="--timeout to be more than 0 and finite, got 0"):
        replace(TINY, timeout=0)
