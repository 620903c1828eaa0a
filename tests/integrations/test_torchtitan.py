"""torchtitan's own trainer over ranks against one process, where torchtitan is installed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.integrations import titan_run

pytestmark = pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is missing")

HAS_SPMD_TYPES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
"""Whether torch's FSDP knows what torchtitan's default backend asks of it."""

NAMES = [n for n in titan_run.CASES if HAS_SPMD_TYPES or "partial_dtensor" in n]


def launch(folder: Path, results: Path, ranks: int, names: list[str]) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    source = Path(__file__).parents[2]
    shared = os.environ | {
        "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join([str(source / "src"), *sys.path]),
    }  # fmt: skip
    command = [sys.executable, titan_run.__file__, str(folder), str(results), *names]
    logs = [results / f"{ranks}.{rank}.log" for rank in range(ranks)]
    running = []
    for rank, log in enumerate(logs):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("w") as file:
            running.append(
                subprocess.Popen(command, env=shared | own, stdout=file, stderr=subprocess.STDOUT)
            )
    codes = [process.wait() for process in running]
    assert codes == [0] * ranks, logs[0].read_text()[-3000:]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("titan")
    titan_run.write_assets(folder)
    results = folder / "results"
    results.mkdir()
    launch(folder, results, 1, list(dict.fromkeys(titan_run.alone(name) for name in NAMES)))
    launch(folder, results, 2, NAMES)
    return results


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_of_two_ranks_are_those_of_one(results, name):
    one = torch.load(results / f"1 {titan_run.alone(name)}.pt")
    two = torch.load(results / f"2 {name}.pt")
    for alone, found in zip(one["losses"], two["losses"], strict=True):
        assert abs(alone - found) <= 1e-6 * abs(alone)
    for step, found in zip(one["gradients"], two["gradients"], strict=True):
        assert step.keys() == found.keys()
        for parameter, expected in step.items():
            worst = float((found[parameter] - expected).abs().max())
            assert worst <= 1e-5 * float(expected.abs().max()), parameter
