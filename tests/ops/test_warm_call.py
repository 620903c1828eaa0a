"""A call whose plan has been used before: how much code it runs through."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import flexcp
from flexcp import masks, testing

SOURCE = Path(flexcp.__file__).parent
MOST_FILES = 14
"""What a reader has to open to follow a tensor through a forward pass."""


def files_of(call):
    """The library's files that a call enters."""
    found = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            found.add(Path(frame.f_code.co_filename).relative_to(SOURCE).as_posix())

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def entered(mesh, mask, schedule, sinks):
    plan = flexcp.make_plan(
        mask, LENGTH, mesh, schedule=schedule, num_heads=4, num_kv_heads=2, head_dim=16,
        dtype=torch.float32,
    )  # fmt: skip
    q, k, v = (plan.shard(torch.randn(1, h, LENGTH, 16), 2).requires_grad_() for h in (4, 2, 2))
    extra = {"sinks": torch.zeros(4), "return_lse": True} if sinks else {}
    flexcp.attention(q, k, v, plan, **extra)
    return files_of(lambda: flexcp.attention(q, k, v, plan, **extra))


LENGTH = 1500  # long enough for fused ops beside strips
MASKS = (
    ("causal", masks.causal(), True),
    ("documents", masks.causal() & masks.document(lengths=[130, 20, 850, 500]), False),
    ("window", masks.sliding_window(50), True),
)


@pytest.mark.parametrize(
    ("start", "schedule"),
    [
        *((testing.simulate, name) for name in ("ring", "allgather", "ulysses", "hybrid")),
        (testing.spawn, "exchange"),
        (testing.spawn, "hybrid"),
    ],
)
def test_a_warm_forward_pass_enters_few_files(start, schedule):
    shape = (2, 2) if schedule == "hybrid" else 2

    def rank(mesh):
        return {
            (name, sinks): sorted(entered(mesh, mask, schedule, sinks))
            for name, mask, sinks in MASKS
        }

    for found in start(rank, shape):
        assert {what: files for what, files in found.items() if len(files) > MOST_FILES} == {}
