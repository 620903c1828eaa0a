"""A model in plain PyTorch, on one process and then on two ranks that share the sequence.

python examples/plain_pytorch.py
torchrun --standalone --nproc-per-node 2 examples/plain_pytorch.py [--tokens 1000]

What changes for the ranks: a plan, a style for the attention modules, a part of the batch, a loss
that adds up, and gradients that are summed.
"""

from __future__ import annotations

import argparse
import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import flexcp
from flexcp import masks, testing

WORDS, WIDTH, HEADS = 101, 64, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, dim=1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, tokens):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(tokens, WIDTH)
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": Attention()}) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids, position_ids):
        x = self.words(input_ids) + self.places(position_ids)
        for layer in self.layers:
            x = x + layer["attn"](x)
        return self.head(x)


def one_process(model, batch):
    tokens = batch["input_ids"]
    logits = model(tokens, torch.arange(tokens.shape[1])[None])
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.detach()


def one_rank(model, batch, mesh):
    tokens = batch["input_ids"].shape[1]
    plan = flexcp.make_plan(masks.causal(), tokens, mesh, num_heads=HEADS, head_dim=WIDTH // HEADS)
    flexcp.parallelize(model, mesh, {"layers.*.attn": flexcp.ContextParallel(plan)})
    local = flexcp.shard_batch(batch, plan)  # this rank's tokens; labels are shifted before
    logits = model(local["input_ids"], local["position_ids"])
    loss = flexcp.cross_entropy(logits, local["labels"], local["num_scored"])
    loss.backward()
    loss = loss.detach()
    for x in (loss, *(p.grad for p in model.parameters())):
        dist.all_reduce(x)  # losses and gradients of the ranks add up to those of one process
    return loss


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1000)
    tokens = parser.parse_args().tokens

    def run(mesh):
        torch.manual_seed(0)
        model, other = Model(tokens), Model(tokens)
        other.load_state_dict(model.state_dict())
        ids = torch.randint(0, WORDS, (2, tokens))
        batch = {"input_ids": ids, "labels": ids}
        want, found = one_process(model, batch), one_rank(other, batch, mesh)
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        worst = max(float((p.grad - o.grad).abs().max() / p.grad.abs().max()) for p, o in pairs)
        if mesh.get_rank() == 0:
            print(f"{tokens} tokens, loss {want:.6f} of one process, {found:.6f} of {mesh.size()}")
            print(f"gradients of all parameters differ by at most {worst:.1e} of their largest")
        assert worst < 1e-4

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
