"""Ranks of a process that has used threads: they neither hang nor inherit what they can't use."""

from __future__ import annotations

import os
import subprocess
import sys

START = """
import torch
from flexcp import attention, make_plan, masks, testing

def step(mesh):
    plan = make_plan(masks.causal(), 300, mesh, num_heads=4, head_dim=64)
    x = plan.shard(torch.randn(1, 4, 300, 64), 2).requires_grad_()
    out = attention(x, x, x, plan)
    out.sum().backward()
    big = torch.ones(700, 700)
    assert (big @ big).exp().shape == big.shape
    return torch.get_num_threads(), x.grad.shape == x.shape

def many_threads():
    torch.set_num_threads(3)
    big = torch.randn(700, 700)
    (big @ big).exp().sum()
    counts = torch.arange(5000) % 3
    counts.repeat_interleave(counts)
"""
USED = {
    "by an operation": "many_threads()",
    "by simulated ranks": "testing.simulate(step, 2)",
}
COMPILED = """
import torch
from flexcp import testing

torch.set_num_threads(2)
first = torch.compile(lambda x: (x.sin() + 1).sum(-1))
second = torch.compile(lambda x: (x.cos() * 3).sum(-1))
x = torch.ones(2000, 500)
expected = first(x)

def rank(mesh):
    # The code that was compiled before asks for two threads, whatever this rank has.
    return torch.equal(first(x), expected), second(x).shape == (2000,)

print(testing.spawn(rank, 2, timeout=60))
"""


def run(script, tmp_path):
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], env=environment,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_ranks_answer_after_the_parent_has_used_threads(tmp_path):
    script = START
    for use in USED.values():
        for threads in (1, 2):
            start = f"testing.spawn(step, 2, timeout=30, threads={threads})"
            script += f"{use}\nassert {start} == [({threads}, True)] * 2\n"
    assert run(script, tmp_path) == ""


def test_ranks_run_and_compile_code_after_the_parent_has_compiled(tmp_path):
    assert run(COMPILED, tmp_path) == str([(True, True)] * 2)
