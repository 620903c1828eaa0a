"""`benchmarks/run.py` runs scripts, keeps what they measure, and compares."""

from __future__ import annotations

import doctest
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = '''"""How fast is it?

More.
"""
import argparse, json, pathlib

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path)
parser.add_argument("--quick", action="store_true")
options = parser.parse_args()
print("measuring", flush=True)
rows = [
    {"who": "torch", "tokens": 1024, "seconds": 2.0, "of_dense": 0.5},
    {"who": "flexcp", "tokens": 1024, "seconds": FACTOR * (0.5 if options.quick else 1.0)},
    {"who": "flexcp", "tokens": 2048, "seconds": 2.0, "peak_mb": 10.0, "failed": None},
]
(options.out / "speed.json").write_text(json.dumps(rows))
'''


def bench(*args: object, code: int = 0, cwd: Path | None = None):
    """Runs `benchmarks/run.py` with some arguments, and expects an exit code."""
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "run.py"), *map(str, args)],
        capture_output=True, text=True, cwd=cwd, check=False,
    )  # fmt: skip
    assert run.returncode == code, run.stderr
    return run


@pytest.fixture
def scripts(tmp_path):
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "speed.py").write_text(SCRIPT.replace("FACTOR", "1.0"))
    (folder / "documents.py").write_text("'''No benchmark: it takes no --out.'''")
    return folder


@pytest.fixture
def saved(scripts, tmp_path):
    """A run, and the benchmarks afterwards 1.5 times as slow in one of two figures."""
    path = tmp_path / "former.json"
    bench("--folder", scripts, "--save", path)
    (scripts / "speed.py").write_text(SCRIPT.replace("FACTOR", "1.5"))
    return path


def test_results_are_saved_with_the_setting_that_they_come_from(saved):
    run = json.loads(saved.read_text())
    assert run["setting"]["quick"] is False
    assert "torch" in run["setting"]
    assert [row["seconds"] for row in run["results"]["speed"]] == [2.0, 1.0, 2.0]


def test_progress_goes_to_stderr_and_figures_to_stdout(scripts):
    run = bench("--folder", scripts)
    assert "[1/1] speed" in run.stderr
    assert run.stdout.splitlines()[1].split()[:3] == ["speed", "4", "3"]


def test_a_former_run_is_compared_as_ratios(scripts, saved):
    out = bench("--folder", scripts, "--compare", saved, "--json").stdout
    ours, theirs = json.loads(out)["comparison"]
    assert (ours["library"], theirs["library"]) == ("flexcp", "torch")
    assert ours["cases"] == 3
    assert ours["mean"] == pytest.approx(1.5 ** (1 / 3))
    assert (ours["worst"], ours["worst_case"]) == (1.5, "tokens=1024 seconds")
    assert theirs["mean"] == 1.0
    text = bench("--folder", scripts, "--compare", saved).stdout
    assert text.splitlines()[1].split()[:6] == ["speed", "flexcp", "3", "1.14", "1.00", "1.50"]


def test_slower_than_allowed_is_exit_code_1(scripts, saved):
    args = ("--folder", scripts, "--compare", saved, "--fail-over")
    bench(*args, 1.2)
    run = bench(*args, 1.1, code=1)
    assert "speed is 1.14 × the former run, above 1.1" in run.stderr


def test_saved_runs_are_compared_without_running_anything(scripts, saved):
    (scripts / "speed.py").unlink()
    run = bench("--load", saved, "--compare", saved, "--fail-over", 1.01)
    assert "1.00" in run.stdout


def test_the_list_has_the_first_line_of_each(scripts):
    assert bench("--folder", scripts, "--list").stdout == "speed  How fast is it?\n"


def test_the_checkout_has_benchmarks_that_follow_the_convention():
    found = json.loads(bench("--list", "--json").stdout)
    assert {"attention", "block_masks", "planning"} <= set(found)
    assert all(found.values())


def test_a_script_that_fails_is_quoted(scripts):
    (scripts / "speed.py").write_text('raise SystemExit("no such machine")  # "--out"')
    err = bench("--folder", scripts, code=2).stderr
    assert "expected speed.py to run to its end, got exit code 1" in err
    assert "no such machine" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("nothing",), "expected a benchmark among speed, got 'nothing'"),
        (("--compare", "no.json"), "expected a former run in 'no.json', got No such file"),
        (("--fail-over", "1.1"), "expected --compare FILE with --fail-over"),
        (("--folder", "."), "leave --folder away"),
    ],
)
def test_bad_requests_are_explained(scripts, tmp_path, args, message):
    where = () if "--folder" in args else ("--folder", scripts)
    assert message in bench(*where, *args, code=2, cwd=tmp_path).stderr


def test_runs_of_other_sizes_or_benchmarks_are_not_compared(scripts, saved, tmp_path):
    err = bench("--folder", scripts, "--quick", "--compare", saved, code=2).stderr
    assert "expected a former run with --quick" in err
    other = tmp_path / "other.json"
    other.write_text('{"results": {"else": []}}')
    err = bench("--load", saved, "--compare", other, code=2).stderr
    assert "figures that both runs have, got none in common" in err
    other.write_text("[]")
    assert "JSON without results" in bench("--load", other, code=2).stderr


def test_the_examples_in_the_docstrings_run(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    assert doctest.testmod(importlib.import_module("results")).failed == 0
