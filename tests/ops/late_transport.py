"""A transport that is as late as one may be, and notices what a GPU's would suffer from silently.

Nothing is read from what is sent, and nothing is put into buffers, before it is waited for, or
before another transfer is, in an order drawn at random. Buffers are NaN until then. What is
touched between the start of a transfer and its wait is an error: what is sent must not change, and
buffers must not be written to or be part of another transfer.
"""

from __future__ import annotations

import random

import torch

from flexcp.comm.simulated import SimulatedMesh


def bits(x):
    """Numbers that differ if anything does, also between NaNs."""
    return x.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def bounds(x):
    first = x.data_ptr()
    return first, first + x.numel() * x.element_size()


def overlap(x, y):
    (a, b), (c, d) = bounds(x), bounds(y)
    return a < d and c < b


class LateTransfer:
    """One transfer, between its start and the return of its wait."""

    def __init__(self, transport, launch, sends, buffers, label):
        self.transport, self.launch, self.label = transport, launch, label
        self.sends, self.buffers = sends, buffers
        for other in transport.in_flight:
            for buffer in buffers:
                assert not any(overlap(buffer, x) for x in (*other.sends, *other.buffers)), label
            assert not any(overlap(x, y) for x in sends for y in other.buffers), label
        for buffer in buffers:
            buffer.fill_(torch.nan)
        self.sent, self.before = [bits(x) for x in sends], [bits(x) for x in buffers]
        self.pending = None
        transport.in_flight.append(self)

    def go(self):
        """What a network does at some time of its own."""
        if self.pending is None:
            self.untouched()
            self.pending = self.launch()
            self.before = [bits(x) for x in self.buffers]

    def untouched(self):
        for x, then in zip(self.sends, self.sent, strict=True):
            assert torch.equal(bits(x), then), f"{self.label}: sent rows were overwritten too early"
        for x, then in zip(self.buffers, self.before, strict=True):
            assert torch.equal(bits(x), then), f"{self.label}: a buffer was written to too early"

    def wait(self):
        self.transport.some_progress()
        self.go()
        self.untouched()
        self.pending.wait()
        assert self in self.transport.in_flight, f"{self.label} was waited for twice"
        self.transport.in_flight.remove(self)


class LateTransport:
    """A simulated rank's transport, made late."""

    def __init__(self, inner, seed):
        self.inner, self.draw = inner, random.Random(seed)
        self.in_flight, self.transfers = [], 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def some_progress(self):
        """Some transfers that nobody waits for yet are begun, in any order."""
        others = [x for x in self.in_flight if self.draw.random() < 0.5]
        self.draw.shuffle(others)
        for other in others:
            other.go()

    def _late(self, launch, sends, buffers, label):
        self.transfers += 1
        return LateTransfer(self, launch, sends, buffers, label)

    def exchange(self, sends, receives, *, label):
        if not sends and not receives:
            return self.inner.exchange(sends, receives, label=label)
        return self._late(
            lambda: self.inner.exchange(sends, receives, label=label),
            [x for _, x in sends],
            [x for _, x in receives],
            label,
        )

    def all_gather(self, out, x, *, label):
        return self._late(lambda: self.inner.all_gather(out, x, label=label), [x], [out], label)

    def all_to_all(self, out, x, takes, gives, ranks, *, label):
        return self._late(
            lambda: self.inner.all_to_all(out, x, takes, gives, ranks, label=label),
            [x],
            [out],
            label,
        )


def late_mesh(mesh, seed):
    """A simulated mesh whose ranks' messages are late."""
    return SimulatedMesh(mesh.shape, LateTransport(mesh.transport, seed + mesh.get_rank()))
