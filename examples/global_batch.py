"""A global batch of samples over all ranks: short ones whole on one rank, long ones on several.

python examples/global_batch.py [--ranks 4] [--steps 3] [--longest 600]
torchrun --standalone --nproc-per-node 4 examples/global_batch.py

There are no groups of data and context parallelism to choose. The samples of a step are put one
after the other, one plan says which rank has which of their tokens, and it is made while the step
before runs. Attention and the rest of the model are balanced together. The same steps in one
process give the same losses and weights.
"""

from __future__ import annotations

import argparse
import gc
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import flexcp
from flexcp import masks, testing

WORDS, WIDTH, HEADS = 101, 64, 4
FLOPS_PER_TOKEN = 2.0 * (4 * WIDTH * WIDTH + 8 * WIDTH * WIDTH)  # of a layer without attention


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, attend):
        q, k, v = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, dim=1)
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, longest):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(longest, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, part, attend):
        x = self.words(part["input_ids"]) + self.places(part["position_ids"])
        for layer in self.layers:
            x = layer(x, attend)
        return self.head(x)


def batches(steps, longest):
    """The lengths of each step's samples, most of them short, and their tokens in a row."""
    for step in range(steps):
        draw = random.Random(step)
        lengths = [longest, *(draw.randint(8, longest // 5) for _ in range(12))]
        draw.shuffle(lengths)
        ids = torch.randint(0, WORDS, (1, sum(lengths)), generator=torch.manual_seed(step))
        yield {"lengths": lengths, "input_ids": ids, "labels": ids}


def one_process(model, steps, longest):
    """Losses of the steps, every sample by itself and in plain PyTorch."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch in batches(steps, longest):
        total = sum(n - 1 for n in batch["lengths"])
        loss = 0.0
        for ids in batch["input_ids"].split(batch["lengths"], dim=1):
            part = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None]}
            attend = functional.scaled_dot_product_attention
            logits = model(part, lambda *qkv, f=attend: f(*qkv, is_causal=True))[0, :-1]
            loss += functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / total
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def one_rank(model, steps, longest, mesh):
    """The same over the ranks of a mesh, each with its own tokens of all samples."""

    def plan_of(batch):  # in another thread, while the step before runs
        lengths = batch["lengths"]
        return flexcp.make_plan(
            masks.causal() & masks.document(lengths=lengths),
            sum(lengths),
            mesh,
            num_heads=HEADS,
            head_dim=WIDTH // HEADS,
            dtype=torch.float32,
            block_size=16,
            machine="cpu-gloo",
            flops_per_token=FLOPS_PER_TOKEN,  # balanced together with attention
            token_slack=0.25,  # a rank may have a quarter more tokens than others: its memory
        )

    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch, plan in flexcp.plan_ahead(batches(steps, longest), plan_of):
        lengths = batch.pop("lengths")
        if not losses and mesh.get_rank() == 0:
            print(told(plan, lengths))
        part = flexcp.shard_batch(batch, plan, documents=lengths, restart_positions=True)
        logits = model(part, lambda q, k, v, p=plan: flexcp.attention(q, k, v, p))
        loss = flexcp.cross_entropy(logits, part["labels"], part["num_scored"])
        loss.backward()
        losses.append(loss.detach())
        for x in (losses[-1], *(p.grad for p in model.parameters())):
            dist.all_reduce(x)  # losses and gradients of the ranks add up to those of one process
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def told(plan, lengths):
    """Which samples each rank has, whole or in part."""
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    lines = []
    for rank in range(plan.layout.ranks):
        own = torch.bincount(sample[plan.positions(rank)], minlength=len(lengths))
        whole = int((own == torch.tensor(lengths)).sum())
        parts = [f"{n} of {of}" for n, of in zip(own.tolist(), lengths, strict=True) if 0 < n < of]
        also = f", and {', '.join(parts)}" if parts else ""
        lines.append(f"rank {rank}: {int(own.sum())} tokens, {whole} samples whole{also}")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--longest", type=int, default=600)
    options = parser.parse_args()
    steps, longest = options.steps, options.longest

    def run(mesh):
        torch.manual_seed(0)
        model, other = Model(longest), Model(longest)
        other.load_state_dict(model.state_dict())
        want, found = one_process(model, steps, longest), one_rank(other, steps, longest, mesh)
        worst = max(
            float(((p - o).abs().max() / p.abs().max()).detach())
            for p, o in zip(model.parameters(), other.parameters(), strict=True)
        )
        if mesh.get_rank() == 0:
            print("losses of one process", *(f"{x:.5f}" for x in want))
            print(f"losses of {mesh.size()} ranks    ", *(f"{x:.5f}" for x in found))
            print(f"weights differ by at most {worst:.1e} of their largest after {steps} steps")
        assert worst < 1e-4

    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
        run(init_device_mesh("cpu", (dist.get_world_size(),)))
        dist.barrier()  # whoever leaves first would cut off those that still read from it
        dist.destroy_process_group()
        gc.collect()  # gloo aborts if a group is only let go when Python ends
    else:
        testing.spawn(run, options.ranks)


if __name__ == "__main__":
    main()
