"""The example runs as ranks of a launcher, and equals one process with every schedule."""

import argparse
import runpy
import sys
from pathlib import Path

import pytest
from launched import launched

from flexcp.testing.processes import spawn

EXAMPLE = Path(__file__).parents[2] / "examples" / "flex_attention_cp.py"


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


SCHEDULES = ("pytorch", "auto", "exchange", "ring", "allgather", "ulysses")


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [*((s, 3) for s in SCHEDULES), ("auto", 2), ("hybrid", (2, 2))],
)
def test_every_schedule_equals_one_process(example, schedule, ranks):
    options = argparse.Namespace(
        schedule=schedule, tokens=203, batch=2, block_size=32, dtype="float64"
    )

    def rank(mesh):
        import torch

        return example["compare"](mesh, options, torch.device("cpu"))

    assert all(spawn(rank, ranks))


def test_ranks_that_a_launcher_starts_run_the_example(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--tokens", "130", "--dtype", "float64"])
    ranks = launched(lambda: runpy.run_path(str(EXAMPLE), run_name="__main__"), 2, tmp_path)
    assert [rank.code for rank in ranks] == [0, 0], ranks
    assert "130 tokens on 2 ranks (cpu), pytorch:" in ranks[0].out
    assert ranks[0].out.count("differs by at most") == 4
