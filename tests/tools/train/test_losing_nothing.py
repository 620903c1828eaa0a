"""A run that is killed, damaged or told nonsense goes on as it was, or says what is wrong."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flexcp import FlexCPError, testing
from flexcp.tools import launch as launching
from flexcp.tools.launch import RanksExit, run_ranks
from flexcp.tools.train import TrainConfig, checkpoint, train
from flexcp.tools.train import launch as train_launch
from flexcp.tools.train.curve import Record
from flexcp.tools.train.loop import _Run

SCRIPT = Path(__file__).parents[3] / "scripts" / "kill_training.py"


def test_runs_that_are_killed_at_random_have_the_losses_of_those_that_are_not(tmp_path):
    spec = importlib.util.spec_from_file_location("kill_training", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.run(tmp_path, kills=3, seed=1) == 0


def test_every_flipped_bit_of_a_checkpoint_is_found(tiny):
    train(replace(tiny, steps=1, eval_sequences=0))
    path = Path(tiny.out, checkpoint.NAME)
    whole = path.read_bytes()
    source = random.Random(0)
    head = range(200 * 8)  # the checksum, and the first bytes after it
    places = [*source.sample(head, 40), *(source.randrange(len(whole) * 8) for _ in range(40))]
    for place in places:
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="checksum"):
            checkpoint._read(path)
    path.write_bytes(whole)
    assert checkpoint._read(path).step == 1


JUNK = {
    "lr": [float("inf"), float("nan"), 0, -1, "x", None, True],
    "steps": [0, -1, 1.5, "x", None, True, 10**30],
    "tokens": [0, 1, 10**30, [], None],
    "out": [3, None],
    "data": [3],
    "dtype": ["bfloat16", 3, None],
    "autocast": ["float32", 3],
    "timeout": [float("inf"), float("nan"), 0],
    "compare": [1, "yes"],
    "window": [0, 1.5, "x"],
    "heads": [0, 1.0],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, every in JUNK.items() for v in every])
def test_settings_that_make_no_sense_are_refused_by_name(name, value):
    with pytest.raises(FlexCPError, match=f"expected --{name.replace('_', '-')} to be "):
        TrainConfig(**{name: value})


@pytest.mark.parametrize("step", [10**9, -1, "3", None])
def test_a_checkpoint_of_a_step_that_the_run_does_not_have_is_refused(tiny, step):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    Path(tiny.out).mkdir()
    checkpoint.save(Path(tiny.out), step, model, torch.optim.SGD(model.parameters()), tiny, "data")
    with pytest.raises(FlexCPError, match=f"one of the run's 6 steps, got one of step {step!r}"):
        checkpoint.load(Path(tiny.out), tiny, "data")


LINE = (
    '{"event": "stepped", "step": 1, "loss": 2.0, "gradient_norm": 1.0, "lr": 0.1, '
    '"documents": 3, "seconds": 0.1, "plan_seconds": 0.1}'
)


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "",
        "\0\1",
        '{"event": "stepped"}',
        '{"event": "nothing"}',
        LINE.replace("2.0", "[]"),
    ],
)
def test_damaged_metrics_are_named_by_their_line(tmp_path, damage):
    (tmp_path / "metrics.jsonl").write_text(f"{LINE}\n{damage}\n{LINE}\n")
    with pytest.raises(FlexCPError, match=r"metrics.jsonl, got something else in line 2"):
        Record.opened(tmp_path, 3)


def test_a_line_that_a_kill_has_cut_short_is_dropped(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(f"{LINE}\n{LINE[:40]}".encode() + b"\xff")
    assert [e.step for e in Record.opened(tmp_path, 3).steps] == [1]


def test_autocast_computes_attention_in_bfloat16_and_equals_one_process(tiny):
    half = replace(tiny, autocast="bfloat16", compare=True, steps=2)
    ended = testing.spawn(lambda mesh: train(half, mesh), 2)[0]
    assert ended.equal
    assert ended.loss_difference is not None
    exact = train(replace(tiny, steps=2, out=f"{tiny.out}-exact"))
    assert ended.last_loss != exact.last_loss
    assert ended.last_loss == pytest.approx(exact.last_loss, rel=0.02)
    saved = checkpoint._read(Path(tiny.out, checkpoint.NAME))
    assert {x.dtype for x in saved.model.values()} == {torch.float32}


def test_autocast_reaches_the_attention_of_one_process(tiny, monkeypatch):
    seen = []
    step = _Run._step

    def spy(self, *args):
        hook = self.model.layers[0].v.register_forward_hook(lambda *x: seen.append(x[2].dtype))
        try:
            return step(self, *args)
        finally:
            hook.remove()

    monkeypatch.setattr(_Run, "_step", spy)
    train(replace(tiny, autocast="bfloat16", steps=1, eval_sequences=0))
    assert set(seen) == {torch.bfloat16}


def test_the_rank_that_died_is_named(tiny, monkeypatch):
    def run(*_, **__):
        return RanksExit((1, -signal.SIGKILL, -signal.SIGKILL), frozenset({2}))

    monkeypatch.setattr(train_launch, "run_ranks", run)
    with pytest.raises(FlexCPError, match="rank 1 was ended by SIGKILL; run the same command"):
        train_launch.launch(tiny, 3, listen=print)


WORKER = """
import json, os, signal, sys
rank = int(os.environ["RANK"])
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
about = [os.environ["GLOO_SOCKET_IFNAME"], os.path.basename(sys.argv[2]), sys.argv[1]]
print(json.dumps([rank, *about]), flush=True)
sys.stdin.read()
"""


def test_ranks_meet_in_a_file_on_loopback_and_do_not_outlive_one_that_was_killed(
    tmp_path, monkeypatch
):
    (tmp_path / "worker_of_a_test.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(launching, "_TO_REPORT", 0.2)
    heard: list[str] = []
    ended = run_ranks("worker_of_a_test", "about", 2, hear=heard.append)
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    assert heard in ([], [f'[0, "{loopback}", "store", "about"]\n'])
    assert ended.codes[1] == -signal.SIGKILL
    assert str(ended) == "rank 1 was ended by SIGKILL"
    assert ended.ended_here == {0}
