"""`flexcp bench` runs scripts, keeps what they measure, and compares."""

from __future__ import annotations

import json

import pytest

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


@pytest.fixture
def scripts(tmp_path):
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "speed.py").write_text(SCRIPT.replace("FACTOR", "1.0"))
    (folder / "documents.py").write_text("'''No benchmark: it takes no --out.'''")
    return folder


@pytest.fixture
def saved(flexcp, scripts, tmp_path):
    """A run, and the benchmarks afterwards 1.5 times as slow in one of two figures."""
    path = tmp_path / "former.json"
    flexcp("bench", "--folder", scripts, "--save", path)
    (scripts / "speed.py").write_text(SCRIPT.replace("FACTOR", "1.5"))
    return path


def test_results_are_saved_with_the_setting_that_they_come_from(saved):
    run = json.loads(saved.read_text())
    assert run["setting"]["quick"] is False
    assert "torch" in run["setting"]
    assert [row["seconds"] for row in run["results"]["speed"]] == [2.0, 1.0, 2.0]


def test_progress_goes_to_stderr_and_figures_to_stdout(flexcp, scripts):
    run = flexcp("bench", "--folder", scripts)
    assert "[1/1] speed" in run.err
    assert run.out.splitlines()[1].split()[:3] == ["speed", "4", "3"]


def test_a_former_run_is_compared_as_ratios(flexcp, scripts, saved):
    out = flexcp("bench", "--folder", scripts, "--compare", saved, "--json").out
    ours, theirs = json.loads(out)["comparison"]
    assert (ours["library"], theirs["library"]) == ("flexcp", "torch")
    assert ours["cases"] == 3
    assert ours["mean"] == pytest.approx(1.5 ** (1 / 3))
    assert (ours["worst"], ours["worst_case"]) == (1.5, "tokens=1024 seconds")
    assert theirs["mean"] == 1.0
    text = flexcp("bench", "--folder", scripts, "--compare", saved).out
    assert text.splitlines()[1].split()[:6] == ["speed", "flexcp", "3", "1.14", "1.00", "1.50"]


def test_slower_than_allowed_is_exit_code_1(flexcp, scripts, saved):
    args = ("bench", "--folder", scripts, "--compare", saved, "--fail-over")
    flexcp(*args, 1.2)
    run = flexcp(*args, 1.1, code=1)
    assert "speed is 1.14 × the former run, above 1.1" in run.err


def test_saved_runs_are_compared_without_running_anything(flexcp, scripts, saved):
    (scripts / "speed.py").unlink()
    run = flexcp("bench", "--load", saved, "--compare", saved, "--fail-over", 1.01)
    assert "1.00" in run.out


def test_the_list_has_the_first_line_of_each(flexcp, scripts):
    assert flexcp("bench", "--folder", scripts, "--list").out == "speed  How fast is it?\n"


def test_the_checkout_has_benchmarks_that_follow_the_convention(flexcp):
    found = json.loads(flexcp("bench", "--list", "--json").out)
    assert {"attention", "block_masks", "planning"} <= set(found)
    assert all(found.values())


def test_a_script_that_fails_is_quoted(flexcp, scripts):
    (scripts / "speed.py").write_text('raise SystemExit("no such machine")  # "--out"')
    err = flexcp("bench", "--folder", scripts, code=2).err
    assert "expected speed.py to run to its end, got exit code 1" in err
    assert "no such machine" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("nothing",), "expected a benchmark among speed, got 'nothing'"),
        (("--compare", "no.json"), "expected a former run in 'no.json', got No such file"),
        (("--fail-over", "1.1"), "expected --compare FILE with --fail-over"),
        (("--folder", "."), "clone the repository"),
    ],
)
def test_bad_requests_are_explained(flexcp, scripts, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    where = () if "--folder" in args else ("--folder", scripts)
    assert message in flexcp("bench", *where, *args, code=2).err


def test_runs_of_other_sizes_or_benchmarks_are_not_compared(flexcp, scripts, saved, tmp_path):
    err = flexcp("bench", "--folder", scripts, "--quick", "--compare", saved, code=2).err
    assert "expected a former run with --quick" in err
    other = tmp_path / "other.json"
    other.write_text('{"results": {"else": []}}')
    err = flexcp("bench", "--load", saved, "--compare", other, code=2).err
    assert "figures that both runs have, got none in common" in err
    other.write_text("[]")
    assert "JSON without results" in flexcp("bench", "--load", other, code=2).err
