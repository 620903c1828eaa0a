"""Memory of a rank: that of its own rows, however many ranks share the sequence."""

from __future__ import annotations

import pytest
import torch

import flexcp
from flexcp import masks, testing

ROWS, HEADS, DIM = 256, 4, 32


def most_bytes(run):
    """The most bytes that torch's tensors take while something runs, beyond those before."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()
    changes = [e for e in events if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(changes, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def bytes_of_a_rank(schedule, ranks):
    length = ROWS * ranks

    def rank(mesh):
        plan = flexcp.make_plan(
            masks.full(), length, mesh, schedule=schedule, layout="contiguous", num_heads=HEADS,
            head_dim=DIM, dtype=torch.float32,
        )  # fmt: skip

        def run(dtype):
            shape = (1, HEADS, ROWS, DIM)
            local = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
            out = flexcp.attention(*local, plan)
            torch.autograd.grad(out, local, torch.ones_like(out))

        # Plans and programs are made once, but workspaces for each type: they count.
        run(torch.float64)
        return most_bytes(lambda: run(torch.float32))

    return max(testing.spawn(rank, ranks))


@pytest.mark.parametrize("schedule", ["ring", "exchange"])
def test_memory_does_not_grow_with_the_number_of_ranks(schedule):
    assert bytes_of_a_rank(schedule, 6) < 1.02 * bytes_of_a_rank(schedule, 4)


def test_an_all_gather_holds_the_whole_sequence():
    assert bytes_of_a_rank("allgather", 8) > 1.2 * bytes_of_a_rank("allgather", 4)
