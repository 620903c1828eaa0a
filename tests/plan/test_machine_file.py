"""A machine in a file: what is read is what was written, or an error that says what is wrong."""

from __future__ import annotations

import json

import pytest

from flexcp import FlexCPError
from flexcp.plan import PRESETS, load_machine, save_machine


@pytest.mark.parametrize("machine", PRESETS, ids=lambda machine: machine.name)
def test_what_is_read_is_what_was_written(machine, tmp_path):
    save_machine(machine, tmp_path / "machine.json")
    assert load_machine(tmp_path / "machine.json") == machine


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda text: text[:30], "not JSON"),
        (lambda text: "[]", "no file with"),
        (lambda text: changed(text, **{"flexcp machine": 2}), "no file with"),
        (lambda text: changed(text, flops="fast"), 'flops = "fast"'),
        (lambda text: changed(text, latency=-1.0), "latency = -1.0"),
        (lambda text: changed(text, flops=float("nan")), "flops = NaN"),
        (lambda text: changed(text, ranks_per_node=True), "ranks_per_node = true"),
        (lambda text: changed(text, speed=1), "an unknown 'speed'"),
        (lambda text: text.replace("latency", "lateness"), "no latency, an unknown 'lateness'"),
    ],
)
def test_a_damaged_file_is_refused_by_what_is_wrong_with_it(change, got, tmp_path):
    path = tmp_path / "machine.json"
    save_machine(PRESETS[0], path)
    path.write_text(change(path.read_text()))
    with pytest.raises(FlexCPError, match="flexcp doctor") as refused:
        load_machine(path)
    assert got in refused.value.got


def changed(text, **values):
    return json.dumps({**json.loads(text), **values})


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FlexCPError, match=r"nowhere\.json.*No such file"):
        load_machine(tmp_path / "nowhere.json")
