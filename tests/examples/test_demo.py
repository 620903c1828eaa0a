"""`make demo` goes from a plan to a trained model, at a small size."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from flexcp.tools.cli.app import app

PATH = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.fixture
def demo(monkeypatch):
    spec = importlib.util.spec_from_file_location("demo", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def here(*args):  # in this process, which has torch already
        run = CliRunner().invoke(app, args, catch_exceptions=False)
        assert run.exit_code == 0, run.output
        print(run.output)

    def script(command, **_):
        monkeypatch.setattr(sys, "argv", command[1:])
        with contextlib.redirect_stdout(io.StringIO()) as said:
            runpy.run_path(command[1], run_name="__main__")
        return subprocess.CompletedProcess(command, 0, said.getvalue())

    monkeypatch.setattr(module, "flexcp", here)
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=script))
    return module


def test_the_demo_shows_what_it_says(demo, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = ["--steps", "2", "--tokens", "300", "--gallery-tokens", "8192"]
    monkeypatch.setattr(sys, "argv", ["demo", *sizes])
    demo.main()
    said = capsys.readouterr().out
    assert "documents packed into 300 tokens" in said
    assert "Losses and gradients of 2 ranks equal those of one process" in said
    assert "Three commands to try next" in said
    out = tmp_path / "out" / "demo"
    assert sum(map(int, (out / "lengths.csv").read_text().split())) == 300
    lines = map(json.loads, (out / "train" / "metrics.jsonl").read_text().splitlines())
    assert [e["step"] for e in lines if e["event"] == "compared"] == [1, 2]
    for name in ("report.html", "plan.svg", "train/loss.svg", "masks/causal.png"):
        assert (out / name).stat().st_size
