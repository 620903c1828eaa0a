"""Parts are gathered from all ranks; gradients stay with the rank that owns the part."""

import torch

from flexcp import testing
from flexcp.comm.agreement import Agreement
from flexcp.comm.gather import gather_shards

COUNTS = [2, 0, 3]


def test_every_rank_gets_all_parts_and_its_own_gradient():
    def rank(mesh):
        own = mesh.get_rank()
        x = torch.full((4, COUNTS[own]), float(own), requires_grad=True)
        call = mesh.transport.calls.begin(Agreement("gather", "a gathering", {}, ""))
        parts = gather_shards(x, 1, COUNTS, mesh.transport, call)
        torch.cat(parts, dim=1).mul(own + 1).sum().backward()
        return [part.detach() for part in parts], x.grad

    for own, (parts, grad) in enumerate(testing.simulate(rank, 3)):
        for other, part in enumerate(parts):
            assert torch.equal(part, torch.full((4, COUNTS[other]), float(other)))
        assert torch.equal(grad, torch.full((4, COUNTS[own]), own + 1.0))
