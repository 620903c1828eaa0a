"""Attention over a sequence that two ranks share, compared with one process.

python examples/sharded_attention.py [--tokens 4096] [--ranks 2]
"""

from __future__ import annotations

import argparse

import torch

import flexcp
from flexcp import masks, testing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    tokens, heads, kv_heads, dim = options.tokens, 4, 2, 32

    lengths = [tokens // 2, tokens // 8, tokens - tokens // 2 - tokens // 8]
    mask = masks.causal() & masks.document(lengths=lengths)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, tokens, dim) for n in (heads, kv_heads, kv_heads))

    def one_rank(mesh):
        plan = flexcp.make_plan(
            mask, tokens, mesh, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
            dtype=torch.float32,
        )  # fmt: skip
        local = [plan.shard(x, 2).requires_grad_() for x in (q, k, v)]
        out = flexcp.attention(*local, plan)
        out.square().sum().backward()
        whole = [plan.unshard(x, 2) for x in (out.detach(), *(x.grad for x in local))]
        return whole, plan.explain()

    ranks = testing.spawn(one_rank, options.ranks)
    whole = [x.requires_grad_() for x in (q, k, v)]
    out = flexcp.flex_attention(*whole, block_mask=mask, enable_gqa=True)
    assert isinstance(out, torch.Tensor)
    out.square().sum().backward()
    expected = [out.detach(), *(x.grad for x in whole)]

    print(ranks[0][1])
    print(f"\n{options.ranks} ranks against one process, largest difference of any entry:")
    for name, found, want in zip(("out", "dq", "dk", "dv"), ranks[0][0], expected, strict=True):
        largest = float(want.abs().max())
        print(f"  {name:3} {float((found - want).abs().max()):.1e} of {largest:.1f}")


if __name__ == "__main__":
    main()
