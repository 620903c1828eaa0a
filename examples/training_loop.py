"""A training loop as large runs have it, cut along the lines of torchtitan.

python examples/training_loop.py [--steps 20] [--folder checkpoints]
torchrun --standalone --nproc-per-node 4 examples/training_loop.py --cp 2 --folder checkpoints

Config, model, parallelisms, packed documents, steps with clipping and metrics, and checkpoints that
a run with any number of ranks resumes from. What is flexcp's in it: a style for the attention
modules, a plan for each batch, this rank's part of the batch, and its part of the loss.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import flexcp
from flexcp import masks, testing


@dataclass(frozen=True)
class Config:
    steps: int = 20
    tokens: int = 512  # of the sequence that a row of ranks trains on in a step
    dp: int = 1  # rows of ranks
    cp: int = 2  # ranks that share a sequence
    words: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    lr: float = 1e-2
    max_norm: float = 1.0
    save_every: int = 10
    recompute: int = 1  # whether to keep only the inputs of layers for the backward pass
    folder: str = ""  # where checkpoints go


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dim = config.width // config.heads
        self.wq = nn.Linear(config.width, config.heads * self.dim, bias=False)
        self.wk, self.wv = (
            nn.Linear(config.width, config.kv_heads * self.dim, bias=False) for _ in range(2)
        )
        self.wo = nn.Linear(config.heads * self.dim, config.width, bias=False)

    def forward(self, x, rotation):
        q, k, v = (
            w(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, rotation), rotate(k, rotation)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.attn = Attention(config)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x, rotation):
        x = x + self.attn(self.norm1(x), rotation)
        return x + self.down(functional.silu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dim = config.width // config.heads
        self.words = nn.Embedding(config.words, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.words, bias=False)

    def forward(self, input_ids, position_ids):
        x = self.words(input_ids)
        frequency = 10_000.0 ** (-torch.arange(0, self.dim, 2, device=x.device) / self.dim)
        angle = position_ids[:, None, :, None] * frequency  # positions of the documents
        rotation = (angle.cos(), angle.sin())
        for layer in self.layers:
            x = layer(x, rotation)
        return self.head(self.norm(x))


def rotate(x, rotation):
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def parallelize(model, config, mesh):
    """Attention over the sequence, layers recomputed, parameters sharded over all ranks."""
    style = flexcp.ContextParallel()
    flexcp.parallelize(model, mesh["cp"], {"layers.*.attn": style})
    if config.recompute:
        for i, layer in enumerate(model.layers):
            model.layers[i] = checkpoint_wrapper(layer)
    every_rank = mesh._flatten("dp_cp")
    for layer in model.layers:
        fully_shard(layer, mesh=every_rank)
    fully_shard(model, mesh=every_rank)
    return style


def packed_documents(config, row, step):
    """Documents of unequal lengths that fill a sequence; each counts upwards by its own stride."""
    random = torch.Generator().manual_seed(1000 * step + row)
    lengths = []
    while sum(lengths) < config.tokens:
        length = int(torch.randint(3, config.tokens // 2, (), generator=random))
        lengths.append(min(length, config.tokens - sum(lengths)))
    documents = []
    for length in lengths:
        start, stride = torch.randint(0, config.words, (2,), generator=random).tolist()
        documents.append((start + (1 + stride % 5) * torch.arange(length)) % config.words)
    return torch.cat(documents)[None], lengths


class Trainer:
    def __init__(self, config):
        self.config = config
        self.mesh = init_device_mesh("cpu", (config.dp, config.cp), mesh_dim_names=("dp", "cp"))
        torch.manual_seed(0)
        self.model = Model(config)
        self.style = parallelize(self.model, config, self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr)
        self.step = 0

    def plan(self, lengths):
        config = self.config
        return flexcp.make_plan(
            masks.causal() & masks.document(lengths=lengths),
            config.tokens,
            self.mesh["cp"],
            num_heads=config.heads,
            num_kv_heads=config.kv_heads,
            head_dim=config.width // config.heads,
            dtype=torch.float32,
        )

    def train_step(self):
        ids, lengths = packed_documents(self.config, self.mesh.get_local_rank("dp"), self.step)
        with self.style.using(self.plan(lengths)) as plan:
            local = flexcp.shard_batch(
                {"input_ids": ids, "labels": ids}, plan, documents=lengths, restart_positions=True
            )
            scored = torch.tensor(local["num_scored"])
            dist.all_reduce(scored, group=self.mesh.get_group("dp"))  # of all rows
            logits = self.model(local["input_ids"], local["position_ids"])
            loss = flexcp.cross_entropy(
                logits,
                local["labels"],
                int(scored),
                gradients="averaged",  # as FSDP does
                ranks=self.mesh.size(),
            )
            loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        loss = loss.detach() / self.mesh.size()
        dist.all_reduce(loss)
        return loss.item(), norm.full_tensor().item(), int(scored)

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def save(self):
        dcp.save(self.state(), checkpoint_id=Path(self.config.folder) / f"step-{self.step}")

    def load_latest(self):
        saved = [int(p.name.split("-")[1]) for p in Path(self.config.folder).glob("step-*")]
        if not saved:
            return
        state = self.state()
        dcp.load(state, checkpoint_id=Path(self.config.folder) / f"step-{max(saved)}")
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]

    def run(self):
        config, is_first = self.config, dist.get_rank() == 0
        if config.folder:
            self.load_latest()
        while self.step < config.steps:
            begin = time.perf_counter()
            loss, norm, scored = self.train_step()
            speed = scored / (time.perf_counter() - begin)
            if is_first:
                print(f"step {self.step:3}  loss {loss:.6f}  norm {norm:.4f}  {speed:.0f} tokens/s")
            if config.folder and (self.step % config.save_every == 0 or self.step == config.steps):
                self.save()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in fields(Config):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    options = vars(parser.parse_args())

    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
        options["dp"] = dist.get_world_size() // options["cp"]
        Trainer(Config(**options)).run()
        dist.barrier()  # whoever leaves first would cut off those that still read from it
        dist.destroy_process_group()
        gc.collect()  # gloo aborts if a group is only let go when Python ends
    else:
        config = Config(**options)
        testing.spawn(lambda _: Trainer(config).run(), config.dp * config.cp)


if __name__ == "__main__":
    main()
