"""The loop that users of Accelerate write, on sequences that two ranks share.

accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py

Without a launcher, it starts two ranks itself.
"""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from flexcp import testing
from flexcp.integrations import transformers as hf
from flexcp.integrations.accelerate import share_batches

CONFIG = Gemma3TextConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    layer_types=["sliding_attention", "full_attention"],
    sliding_window=32,
    pad_token_id=0,
)


def samples(count: int = 16, length: int = 150) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, 64, (count, length), generator=generator)
    return [{"input_ids": ids, "labels": ids} for ids in rows]


def train() -> list[float]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    model = Gemma3ForCausalLM(CONFIG)
    cp = hf.attach(model, mesh, gradients="averaged")
    share_batches(accelerator, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(samples(), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**cp.shard(batch)).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def launch(ranks: int) -> list[list[float]]:
    """What a launcher does: starts the ranks, and says in the environment which is which."""

    def rank(mesh):
        number = str(mesh.get_rank())
        os.environ |= {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        return train()

    return testing.spawn(rank, ranks)


def main() -> None:
    losses = train() if "RANK" in os.environ else launch(2)[0]
    print(" ".join(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()
