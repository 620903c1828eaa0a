"""`flexcp train`: real ranks through torchrun, which can be killed and go on."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launched import launched
from typer.testing import CliRunner

from flexcp import testing
from flexcp.tools.cli import main
from flexcp.tools.cli.app import app
from flexcp.tools.train import Finished, TrainConfig
from flexcp.tools.train import train as train_in_process
from flexcp.tools.train.events import Compared, Started, Stepped

SIZES = shlex.split(
    "--steps 6 --tokens 256 --document-tokens 90 --dim 16 --layers 1 --heads 2 --kv-heads 1 "
    "--checkpoint-every 2 --eval-sequences 0 --data texts --out out"
)
SAME = TrainConfig(
    data="texts", out="unharmed", steps=6, tokens=256, document_tokens=90, dim=16, layers=1,
    heads=2, kv_heads=1, eval_sequences=0,
)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder but for some texts, and no launcher around."""
    (tmp_path / "texts").mkdir()
    for n in range(12):
        (tmp_path / "texts" / f"{n}.txt").write_text(f"line {n} of a text\n" * (n + 1))
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def start(*args, **variables):
    return subprocess.Popen(
        [sys.executable, "-m", "flexcp.tools.cli", "train", *args],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | variables,
    )  # fmt: skip


def run_here(*args, code=0):
    """In this process, which has torch already."""
    run = CliRunner().invoke(app, ["train", *args])
    if run.exception is not None and not isinstance(run.exception, SystemExit):
        raise run.exception
    assert run.exit_code == code, run.output
    return run.output


def losses(out="out"):
    lines = map(json.loads, Path(out, "metrics.jsonl").read_text().splitlines())
    return [(e["step"], e["loss"], e["gradient_norm"]) for e in lines if e["event"] == "stepped"]


def test_a_killed_run_goes_on_with_the_losses_of_one_that_was_not():
    with start(*SIZES) as run:
        for line in run.stdout:
            if line.startswith("step      3"):
                run.kill()
    assert run.returncode == -signal.SIGKILL
    assert 3 <= len(losses()) < 7
    with start(*SIZES, "--json", "--compare") as run:
        summary = json.loads(run.stdout.read())
    assert run.returncode == 0
    testing.spawn(lambda mesh: train_in_process(SAME, mesh), 2)
    assert losses() == losses("unharmed")
    assert (summary["ranks"], summary["step"]) == (2, 6)
    assert 2 <= summary["done"] <= 6
    assert summary["last_loss"] == losses()[-1][1]
    assert all(Path(name).stat().st_size for name in summary["files"])


def test_an_interruption_saves_and_ends():
    with start(*SIZES, "--steps", "5000", "--checkpoint-every", "5000") as run:
        for line in run.stdout:
            if line.startswith("step      1"):
                run.send_signal(signal.SIGINT)
                break
        rest, errors = run.stdout.read(), run.stderr.read()
    assert run.returncode == 130, errors
    assert errors == ""
    assert "Stopping after this step" in rest
    assert f"Stopped after step {len(losses())} of 5,000. The same command goes on" in rest
    assert Path("out", "checkpoint.pt").exists()


def test_it_joins_ranks_that_others_have_started(tmp_path):
    first, second = launched(lambda: main(["train", *SIZES, "--json", "--steps", "2"]), 2, tmp_path)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert second.out == ""
    assert json.loads(first.out)["ranks"] == 2
    assert len(losses()) == 2


def test_errors_of_ranks_are_the_librarys_own_messages():
    Path("empty").mkdir()
    with start(*SIZES, "--data", "empty") as run:
        assert run.stdout.read() == ""
        assert run.stderr.read() == (
            "flexcp: expected text: at least 40 bytes in files that are not binary, got 0 such "
            "files in empty; pass another --data\n"
        )
    assert run.returncode == 2


def test_one_rank_is_this_process():
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    out = run_here(*SIZES, "--ranks", "1")
    assert "One process, 256 tokens a step" in out
    assert "Loss 5." in out
    assert Path("out", "loss.svg").read_text().startswith("<svg")
    assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    again = run_here(*SIZES, "--ranks", "1")
    assert "The run in out has ended with step 6: nothing is left to do" in " ".join(again.split())
    assert "Written" not in again


@pytest.mark.parametrize(
    ("difference", "code", "word"),
    [(1e-6, 0, "equal those of one process"), (0.01, 1, "DIFFER FROM those of one process")],
)
def test_the_exit_code_says_whether_ranks_equal_one_process(monkeypatch, difference, code, word):
    compared = Compared(1, 2.0, 2.0, 1.0, 1.0, difference, "layers.0.q.weight", 3e-4)

    def launch(config, ranks, *, listen, **_):
        assert config.compare
        listen(Started(ranks, 10, 3, 300, 256, 1, 0, "balanced, exchange", "out"))
        listen(Stepped(1, 2.0, 1.0, 1e-3, 3, 0.5, 0.01))
        listen(compared)
        ended = Finished(
            1, 1, 2.0, 2.0, None, 512.0, 0.02, False, compared.equal, 0.0, difference, ("out/x",)
        )
        listen(ended)
        return ended

    monkeypatch.setattr("flexcp.tools.train.launch.launch", launch)
    out = " ".join(run_here(*SIZES, "--compare", "--ranks", "3", code=code).split())
    assert f"Losses and gradients of 3 ranks {word}" in out
    assert ("MORE THAN ROUNDING" in out) == bool(code)
    assert "layers.0.q.weight" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tokens", "3", "--ranks", "4"], "one token for each of 4 ranks, got sequences of 3"),
        (["--dim", "30", "--heads", "4"], "4 heads divide into even parts"),
        (["--schedule", "hybrid"], "groups of ranks that share heads, for the hybrid schedule"),
        (["--ranks", "1", "--compare"], "at least 2 ranks to compare with one process"),
    ],
)
def test_impossible_settings_are_refused_before_anything_starts(args, message):
    with pytest.raises(ValueError, match=message):
        run_here(*SIZES, *args)
    assert not Path("out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_machine_without_cuda_says_so():
    with pytest.raises(ValueError, match="a CUDA device for every process of a machine, got 0"):
        run_here(*SIZES, "--ranks", "1", "--device", "cuda")


def test_ranks_that_contradict_the_launcher_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    message = "expected --ranks 4, as many as the launcher has started, got --ranks 2"
    with pytest.raises(ValueError, match=message):
        run_here(*SIZES, "--ranks", "2")
