"""A NaN in one document: it stays there where documents share no tile, as docs/limits.md says."""

from __future__ import annotations

import pytest
import torch

import flexcp
from flexcp import masks, testing

LENGTHS = [128, 256, 128]
IDS = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
MASK = masks.causal() & masks.document(lengths=LENGTHS)


def documents_with_nan(tensors):
    return {int(n) for x in tensors for n in IDS[x.isnan().any(-1).any(1)[0]]}


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_a_nan_stays_in_its_document_over_ranks_as_in_one_process(which):
    torch.manual_seed(0)
    whole = {name: torch.randn(1, 2, 512, 16) for name in "qkv"}
    whole[which][:, :, 5] = torch.nan

    def results(leaves, out):
        out.sum().backward()
        return [out.detach(), *(x.grad for x in leaves)]

    leaves = [x.clone().requires_grad_() for x in whole.values()]
    alone = results(leaves, flexcp.flex_attention(*leaves, block_mask=MASK))
    assert documents_with_nan(alone) == {0}

    def rank(mesh, layout, schedule):
        plan = flexcp.make_plan(MASK, 512, mesh, layout=layout, schedule=schedule, num_heads=2)
        local = [plan.shard(x, 2).detach().requires_grad_() for x in whole.values()]
        found = results(local, flexcp.attention(*local, plan))
        return [plan.unshard(x, 2) for x in found]

    for layout, schedule in (("balanced", "exchange"), ("head_tail", "ring"), ("auto", "ulysses")):
        found = testing.simulate(lambda mesh: rank(mesh, layout, schedule), 2)[0]  # noqa: B023
        assert documents_with_nan(found) == {0}
