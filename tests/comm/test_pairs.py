"""An all-to-all between processes is messages between pairs, what comes asked for first."""

from __future__ import annotations

import torch

from flexcp import testing
from flexcp.comm import CallLabel
from flexcp.comm.process import ProcessTransport


class Listed:
    """A process group that notes in which order messages are posted."""

    def __init__(self, group):
        self._group, self.posted = group, []

    def __getattr__(self, name):
        return getattr(self._group, name)

    def send(self, tensors, peer, tag):
        self.posted.append(("send", peer))
        return self._group.send(tensors, peer, tag)

    def recv(self, tensors, peer, tag):
        self.posted.append(("receive", peer))
        return self._group.recv(tensors, peer, tag)


def swap(mesh):
    transport = ProcessTransport.of_mesh(mesh)
    rank, size = transport.rank, transport.world_size
    _ = transport.group_ranks, transport.calls  # which ask torch for its group
    group = transport.group = Listed(transport.group)
    gives, takes = [rank + 1] * size, [r + 1 for r in range(size)]
    x = torch.cat([torch.full((rank + 1,), 10.0 * rank + to) for to in range(size)])
    out = torch.full((sum(takes),), torch.nan)
    label = CallLabel("a swap", b"", 0).passing("forward").round("swap", 0)
    transport.all_to_all(out, x, takes, gives, range(size), label=label).wait()
    return out.tolist(), group.posted


def test_every_rank_gets_its_part_of_every_other():
    for rank, (found, _) in enumerate(testing.spawn(swap, 3)):
        assert found == [10.0 * r + rank for r in range(3) for _ in range(r + 1)]


def test_what_comes_is_asked_for_before_anything_is_sent():
    for rank, (_, posted) in enumerate(testing.spawn(swap, 3)):
        others = [(rank + 1) % 3, (rank + 2) % 3]
        assert posted == [*(("receive", r) for r in others), *(("send", r) for r in others)]
