"""A mask and a score function of one's own, over a sequence that two ranks share.

python examples/custom_mask.py
torchrun --standalone --nproc-per-node 2 examples/custom_mask.py [--tokens 1000]

The mask: a window, and the first tokens of every document, which all of it may see. The scores:
ALiBi with a slope per head that is learned. Both are written for positions of the whole sequence.
"""

from __future__ import annotations

import argparse
import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import flexcp
from flexcp import masks, testing
from flexcp.compat.flex_attention import flex_attention

HEADS, DIM, WINDOW, ANCHORS = 4, 16, 128, 4


def anchored_window(lengths):
    """A mask_mod: causal within documents; near tokens, and the anchors of the document."""
    lengths = torch.tensor(lengths)
    first = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)  # of each token's document

    def mask_mod(b, h, q_idx, kv_idx):
        near = q_idx - kv_idx < WINDOW
        anchor = kv_idx - first[kv_idx] < ANCHORS
        return (q_idx >= kv_idx) & (first[q_idx] == first[kv_idx]) & (near | anchor)

    return flexcp.Mask(mask_mod, "anchored window")


class Attention(nn.Module):
    """Calls flex_attention as for one process, by torch's signature."""

    def __init__(self):
        super().__init__()
        self.slopes = nn.Parameter(2.0 ** -torch.arange(1.0, HEADS + 1))

    def forward(self, q, k, v):
        def alibi(score, b, h, q_idx, kv_idx):
            return score - self.slopes[h] * (q_idx - kv_idx)

        return flex_attention(q, k, v, score_mod=alibi)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1000)
    tokens = parser.parse_args().tokens
    mask = anchored_window([tokens // 3, tokens // 10, tokens - tokens // 3 - tokens // 10])

    def run(mesh):
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, HEADS, tokens, DIM, dtype=torch.float64) for _ in range(3))
        plan = flexcp.make_plan(
            {"anchored": mask, "causal": masks.causal()}, tokens, mesh, num_heads=HEADS,
            head_dim=DIM, dtype=torch.float64,
        )  # fmt: skip
        style = flexcp.ContextParallel(plan, mask="anchored")
        module = flexcp.parallelize(Attention().double(), mesh, style)
        out = module(*(plan.shard(x, 2) for x in (q, k, v)))
        out.square().sum().backward()
        slopes = module.slopes.grad
        dist.all_reduce(slopes)  # each rank has the gradient of its own queries

        alone = Attention().double()

        def alibi(score, b, h, q_idx, kv_idx):
            return score - alone.slopes[h] * (q_idx - kv_idx)

        want = flexcp.flex_attention(q, k, v, alibi, block_mask=mask)
        want.square().sum().backward()
        off = float((plan.unshard(out.detach(), 2) - want.detach()).abs().max())
        off_slopes = float((slopes / alone.slopes.grad - 1).abs().max())
        if mesh.get_rank() == 0:
            print(plan.explain())
            print(f"\n{mesh.size()} ranks against one process:")
            print(f"  out differs by at most {off:.1e}, their gradients by {off_slopes:.0e}")
        assert off < 1e-10
        assert off_slopes < 1e-10

    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
        run(init_device_mesh("cpu", (dist.get_world_size(),)))
        dist.barrier()  # whoever leaves first would cut off those that still read from it
        dist.destroy_process_group()
        gc.collect()  # gloo aborts if a group is only let go when Python ends
    else:
        testing.spawn(run, 2)


if __name__ == "__main__":
    main()
