"""The benchmarks run at a small size, and write what they measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# All of them in one process: what they import takes longer than they do at this size.
SCRIPT = """
import shutil, sys
import distributed, overhead, planning

out = sys.argv[1]

def run(main, *arguments):
    sys.argv = [main.__module__, "--out", out, *arguments]
    main()

names = ("causal", "documents, causal", "window 4096 + global")
planning.TARGETS = tuple(planning.Target(name, 4096, 4, 0.5) for name in names)
planning.MORE, planning.CELLS = (), ((4096, 8),)
planning.packs_of = lambda name, tokens: [[1000, 3000, 96]]
planning.CELL_MASKS = ("full", "documents, full", "prefix-LM")
run(planning.main, "--quick")

distributed.SCHEDULES = ("auto", "ulysses")
small = ["--lengths", "512", "--ranks", "2", "--repeats", "1", "--masks"]
run(distributed.main, *small, "causal", "full", "--parts", "time")
shutil.copy(out + "/distributed.json", out + "/times.json")
distributed.SCHEDULES, distributed.ROTATIONS = ("ulysses",), ()
run(distributed.main, *small, "causal", "--parts", "memory")

run(overhead.main, "--ranks", "2", "--rounds", "4", "--repeats", "2")
"""
EVERYBODY = ("torch ring alltoall", "torch ring allgather", "flexcp auto", "flexcp ulysses")
WEIGHED = ("one process", "flexcp ulysses")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmarks")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], cwd=BENCHMARKS, env=environment,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder / "said").write_text(done.stdout)
    return folder


def rows_of(path):
    found = json.loads(path.read_text())
    assert found["machine"]["flops"] > 0
    return {(r["mask"], r["tokens"], r["ranks"], r["who"]): r for r in found["rows"]}


def test_attention_over_ranks_is_timed_beside_pytorchs_rings(results):
    rows = rows_of(results / "times.json")
    alone = [(mask, 512, 1, "one process") for mask in ("causal", "full")]
    together = [(mask, 512, 2, who) for mask in ("causal", "full") for who in EVERYBODY]
    assert sorted(rows) == sorted(alone + together)
    for row in rows.values():
        assert row["seconds"] > 0
        assert row["cpu_seconds"] > 0
        assert row["memory_mb"] == row["tensor_mb"] == 0
    for key in together:
        row = rows[key]
        assert row["of_torch"] > 0
        assert row["scaling"] > 0
        if row["who"].startswith("flexcp"):
            # Before data moves ranks compare digests: 16 bytes that no plan counts.
            assert 0 <= row["received_mb"] * 2**20 - row["promised_mb"] * 2**20 <= 16
            assert 0 <= row["hidden"] <= 1
            assert row["predicted"] > 0
        else:
            # The other's K and V in both passes, and gradients that go all the way round.
            assert row["received_mb"] * 2**20 == 4 * (2 * 8 * 256 * 64 * 4)


def test_memory_that_is_measured_later_leaves_the_times(results):
    before, after = rows_of(results / "times.json"), rows_of(results / "distributed.json")
    assert after.keys() == before.keys()
    for key, row in after.items():
        assert (row["tensor_mb"] > 0) == (key[0] == "causal" and key[3] in WEIGHED)
        assert row | {"memory_mb": 0, "tensor_mb": 0} == before[key]
    table = (results / "distributed.md").read_text().splitlines()
    assert len(table) == 2 + len(after)
    assert (results / "distributed.png").stat().st_size > 10_000


def test_plans_are_compared_with_the_strategies_of_others(results):
    found = json.loads((results / "planning.json").read_text())
    said = (results / "said").read_text()
    assert len(found["targets"]) == 3
    for row in found["targets"]:
        assert row["imbalance"] >= row["bound"] >= 1
        assert row["unavoidable"] <= row["received"] <= 1
        assert row["planning"] > 0
        assert row["mask"] in said
    assert [cell["mask"] for cell in found["cells"]] == ["full", "documents, full", "prefix-LM"]
    for cell in found["cells"]:
        assert len(cell["chosen"]) == 4
        assert len(cell["others"]) == 8
        for machine in cell["chosen"]:
            assert cell["ours"][machine] > 0
            assert all(other[machine] > 0 for other in cell["others"].values())
    assert (results / "planning.png").stat().st_size > 10_000


def test_host_time_without_kernels_is_measured_beside_pytorchs_rings(results):
    rows = json.loads((results / "overhead.json").read_text())["rows"]
    calls = {"flexcp ring": (2, 4), "flexcp allgather": (1, 4), "torch ring alltoall": (2, 4)}
    for who, rounds in calls.items():
        assert tuple(row["rounds"] for row in rows if row["who"] == who) == rounds
    for row in rows:
        assert row["forward"] > 0
        assert row["backward"] > 0
        assert row["process_seconds"] > 0
        assert row["of_torch"] > 0
        if row["who"].startswith("flexcp"):
            assert list(row["shares"]) == ["agreement", "copies", "exchange", "rest"]
            assert sum(row["shares"].values()) == pytest.approx(1)
    assert len((results / "overhead.md").read_text().splitlines()) == 2 + len(rows)
