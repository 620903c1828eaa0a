"""Every example runs, started plainly and by torchrun, at a small size.

To add one: put it into EXAMPLES with arguments that make it small, and with what it prints. If it
runs no ranks, or starts them always by itself, put it into WITHOUT_TORCHRUN.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from launched import launched

ROOT = Path(__file__).parents[2]
EXAMPLES: dict[str, tuple[list[str], str]] = {
    "plain_pytorch.py": (
        ["--tokens", "75"],
        r"75 tokens, loss (\d\.\d{4})\d* of one process, \1\d* of 2\n.* differ by at most",
    ),
    "fsdp2_cp.py": (["--tokens", "41", "--steps", "2"], r"step 1: loss \d\.\d+ on 1 x 2 ranks"),
    "custom_mask.py": (
        ["--tokens", "203"],
        r"Schedule \w+ .* for anchored(.|\n)*2 ranks against one process:\n  out differs by at",
    ),
    "global_batch.py": (
        ["--ranks", "2", "--steps", "2", "--longest", "90"],
        r"rank 1: \d+ tokens, \d+ samples whole(.|\n)*weights differ by at most",
    ),
    "training_loop.py": (
        ["--steps", "3", "--tokens", "90", "--width", "16"],
        r"step   3  loss \d\.\d+  norm \d\.\d+",
    ),
}

WITHOUT_TORCHRUN: dict[str, tuple[list[str], str]] = {
    "sharded_attention.py": (["--tokens", "300"], r"2 ranks against one process(.|\n)*dv "),
    "mask_gallery.py": (["--tokens", "4096", "--out", "gallery"], "Block grids at 4,096 tokens"),
}


@pytest.mark.parametrize("name", [*EXAMPLES, *WITHOUT_TORCHRUN])
def test_an_example_runs_when_started_plainly(name, monkeypatch, capfd, tmp_path):
    arguments, says = (EXAMPLES | WITHOUT_TORCHRUN)[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert re.search(says, capfd.readouterr().out)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_as_the_ranks_that_torchrun_starts(name, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [name, *EXAMPLES[name][0]])
    example = str(ROOT / "examples" / name)
    ranks = launched(lambda: runpy.run_path(example, run_name="__main__"), 2, tmp_path)
    assert [rank.code for rank in ranks] == [0, 0], ranks
    assert re.search(EXAMPLES[name][1], ranks[0].out), ranks[0]


def test_torchrun_itself_runs_one():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(ROOT / "examples" / "plain_pytorch.py"), *EXAMPLES["plain_pytorch.py"][0]]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    # After all is done, gloo's threads may still abort a rank that leaves: torch alone does it too.
    aborted = "terminate called without an active exception" in done.stderr
    assert done.returncode == 0 or aborted, done.stderr
    assert "AssertionError" not in done.stderr
    assert re.search(EXAMPLES["plain_pytorch.py"][1], done.stdout)


def test_a_training_loop_resumes_on_another_number_of_ranks(monkeypatch, capfd, tmp_path):
    def run(*options):
        arguments = ["--tokens", "90", "--width", "16", "--folder", str(tmp_path), *options]
        monkeypatch.setattr(sys, "argv", ["training_loop.py", *arguments])
        runpy.run_path(str(ROOT / "examples" / "training_loop.py"), run_name="__main__")
        return dict(re.findall(r"step +(\d+)  loss (\d\.\d{5})", capfd.readouterr().out))

    monkeypatch.delenv("RANK", raising=False)
    uninterrupted = run("--steps", "4", "--save_every", "2")
    for saved in (tmp_path / "step-4").iterdir():
        saved.unlink()
    (tmp_path / "step-4").rmdir()
    resumed = run("--steps", "4", "--cp", "3")
    assert resumed.keys() == {"3", "4"}
    for step, loss in resumed.items():
        assert abs(float(loss) - float(uninterrupted[step])) < 2e-5


def test_every_example_is_named_in_a_test():
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for example in (ROOT / "examples").glob("*.py"):
        assert f'"{example.stem}' in tests, example.name
