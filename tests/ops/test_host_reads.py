"""A warm call reads no tensor on the host: on a GPU that would wait for all that was launched."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flexcp
from flexcp import masks, testing

LENGTH, DIM = 61, 8
SCHEDULES = [
    ("exchange", 3),
    ("ring", 3),
    ("allgather", 3),
    ("ulysses", 2),
    ("ulysses", 3),
    ("hybrid", (2, 2)),
]
READING_OPS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")
"""Operations of torch whose result, or its shape, the host has to know."""
READING_METHODS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__")


class Reads(TorchDispatchMode):
    """Counts what reads a tensor's numbers on the host, or brings them to another device."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        moves = name == "_to_copy" and (kwargs or {}).get("device") not in (None, args[0].device)
        if moves or name.startswith(READING_OPS):
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


HERE = threading.local()
"""`HERE.reads` counts those of a rank, which is a thread."""


@pytest.fixture(autouse=True)
def reading_methods_are_counted(monkeypatch):
    def counting(name, method):
        def call(self, *args, **kwargs):
            if getattr(HERE, "reads", None) is not None:
                HERE.reads[name] += 1
            return method(self, *args, **kwargs)

        return call

    for name in READING_METHODS:
        monkeypatch.setattr(torch.Tensor, name, counting(name, getattr(torch.Tensor, name)))


@pytest.fixture(autouse=True)
def scores_are_known_to_be_small(monkeypatch):
    """As on a GPU, where the kernels don't look how large they may be."""
    monkeypatch.setattr("flexcp.kernels.flash.exponential_for", lambda q, k, scale: (2.0, False))


@contextmanager
def counted_reads():
    """Counts the host reads of this thread; autograd runs on it as well, on a CPU."""
    with Reads() as reads:
        HERE.reads = reads.seen
        try:
            yield reads.seen
        finally:
            HERE.reads = None


def tensors(kv_heads):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, LENGTH, DIM, generator=draw) for h in (4, kv_heads, kv_heads)]


@pytest.mark.parametrize("extras", ["nothing else", "sinks and lse", "GQA", "uneven GQA"])
@pytest.mark.parametrize(("schedule", "shape"), SCHEDULES)
def test_a_warm_call_reads_no_tensor_on_the_host(schedule, shape, extras):
    kv_heads = {"GQA": 2, "uneven GQA": 1}.get(extras, 4)

    def rank(mesh):
        plan = flexcp.make_plan(
            masks.causal() & masks.document(lengths=[40, 21]), LENGTH, mesh, schedule=schedule,
            block_size=8, num_heads=4, num_kv_heads=kv_heads, head_dim=DIM, dtype=torch.float32,
            batch=2,
        )  # fmt: skip
        local = [plan.shard(x, 2).requires_grad_() for x in tensors(kv_heads)]
        sinks = torch.zeros(4, requires_grad=True) if extras == "sinks and lse" else None

        def run():
            out, lse = flexcp.attention(*local, plan, sinks=sinks, return_lse=True)
            given = [(out, torch.ones_like(out))]
            if extras == "sinks and lse":
                given.append((lse, torch.ones_like(lse)))
            leaves = local if sinks is None else [*local, sinks]
            results, grads = zip(*given, strict=True)
            torch.autograd.grad(results, leaves, grads)

        run()
        with counted_reads() as seen:
            run()
        return dict(seen)

    for found in testing.simulate(rank, shape):
        assert found == {}


def test_reads_are_counted():
    x = torch.arange(3)
    with counted_reads() as seen:
        x.tolist(), int(x[0]), bool(x[1]), x.nonzero(), torch.equal(x, x)
        x.to("meta")
    assert {"tolist", "__int__", "__bool__", "nonzero", "equal", "_to_copy"} <= set(seen)
