"""The example runs under torchrun, and equals one process with every schedule."""

import argparse
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from flexcp.testing.processes import spawn

EXAMPLE = Path(__file__).parents[2] / "examples" / "flex_attention_cp.py"


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


SCHEDULES = ("pytorch", "auto", "exchange", "ring", "allgather", "ulysses")


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [*((s, n) for s in SCHEDULES for n in (2, 3)), ("hybrid", (2, 2))],
)
def test_every_schedule_equals_one_process(example, schedule, ranks):
    options = argparse.Namespace(
        schedule=schedule, tokens=203, batch=2, block_size=32, dtype="float64"
    )

    def rank(mesh):
        import torch

        return example["compare"](mesh, options, torch.device("cpu"))

    assert all(spawn(rank, ranks))


def test_torchrun_runs_the_example():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(EXAMPLE), "--tokens", "130", "--dtype", "float64"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "130 tokens on 2 ranks (cpu), pytorch:" in done.stdout
    assert done.stdout.count("differs by at most") == 4
