"""A budget under which everything takes a moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flexcp.tools.doctor.budget import Budget, Deadline
from flexcp.tools.doctor.examine import Request
from flexcp.tools.doctor.findings import SECTIONS

CPU = torch.device("cpu")
TINY = Budget(
    seconds=60.0, repeats=3, tokens=40, longest=64, heads=2, head_dim=16, dtypes=("float32",),
    compiles=False, largest_message=1 << 18, patience=20.0,
)  # fmt: skip


@contextmanager
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take ages where there are more of them than cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def request(*sections: str, ranks: int = 2) -> Request:
    return Request(CPU, ranks, TINY, sections or tuple(SECTIONS))


def soon() -> Deadline:
    return Deadline.within(60.0)
