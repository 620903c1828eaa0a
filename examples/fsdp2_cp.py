"""FSDP2 and context parallelism: parameters sharded over all ranks, sequences over some of them.

python examples/fsdp2_cp.py [--dp 2] [--cp 2]
torchrun --standalone --nproc-per-node 4 examples/fsdp2_cp.py --cp 2

Ranks of a row of the mesh share the same sequences; rows have other ones. FSDP averages gradients
over all ranks, so the loss says that it does.
"""

from __future__ import annotations

import argparse
import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import flexcp
from flexcp import masks, testing

WORDS, WIDTH, HEADS, KV_HEADS = 101, 64, 4, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH * 2 * KV_HEADS // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2 * KV_HEADS, -1)).transpose(1, 2).chunk(2, dim=1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.RMSNorm(WIDTH), Attention()

    def forward(self, x):
        return x + self.attn(self.norm(x))


class Model(nn.Module):
    def __init__(self, tokens):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(tokens, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids, position_ids):
        x = self.words(input_ids) + self.places(position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(tokens, steps, dp, cp):
    mesh = init_device_mesh("cpu", (dp, cp), mesh_dim_names=("dp", "cp"))
    every_rank = mesh._flatten("dp_cp")
    torch.manual_seed(0)
    model = Model(tokens)
    plan = flexcp.make_plan(
        masks.causal(), tokens, mesh["cp"], num_heads=HEADS, num_kv_heads=KV_HEADS,
        head_dim=WIDTH // HEADS, dtype=torch.float32, batch=2,
    )  # fmt: skip
    flexcp.parallelize(model, mesh["cp"], {"layers.*.attn": flexcp.ContextParallel(plan)})
    for layer in model.layers:
        fully_shard(layer, mesh=every_rank)
    fully_shard(model, mesh=every_rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    data = torch.Generator().manual_seed(mesh.get_local_rank("dp"))  # the same on a row of ranks
    ids = torch.randint(0, WORDS, (2, tokens), generator=data)
    for step in range(steps):
        local = flexcp.shard_batch({"input_ids": ids, "labels": ids}, plan)
        scored = torch.tensor(local["num_scored"])
        dist.all_reduce(scored, group=mesh.get_group("dp"))  # of all rows
        logits = model(local["input_ids"], local["position_ids"])
        loss = flexcp.cross_entropy(
            logits, local["labels"], int(scored), gradients="averaged", ranks=mesh.size()
        )
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / mesh.size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean:.4f} on {dp} x {cp} ranks")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dp", type=int, default=1, help="rows of ranks, when started plainly")
    parser.add_argument("--cp", type=int, default=2, help="ranks that share a sequence")
    o = parser.parse_args()

    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
        train(o.tokens, o.steps, dist.get_world_size() // o.cp, o.cp)
        dist.barrier()  # whoever leaves first would cut off those that still read from it
        dist.destroy_process_group()
        gc.collect()  # gloo aborts if a group is only let go when Python ends
    else:
        testing.spawn(lambda _: train(o.tokens, o.steps, o.dp, o.cp), o.dp * o.cp)


if __name__ == "__main__":
    main()
