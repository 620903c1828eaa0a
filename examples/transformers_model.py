"""A Transformers model whose sequences are shared by two ranks.

`train` is a loop for DDP, as it stands in many scripts. Two lines make it context-parallel; they
end in "# flexcp". Documents are packed, half of the layers are sliding, and nobody had to say so.

python examples/transformers_model.py [--ranks 2] [--steps 5]
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3Config, Qwen3ForCausalLM

from flexcp import testing
from flexcp.integrations import transformers as hf

CONFIG = Qwen3Config(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    layer_types=["full_attention", "sliding_attention"],
    sliding_window=32,
    use_sliding_window=True,
    use_cache=False,
    pad_token_id=0,
)


def make_batch(step: int, tokens: int = 300) -> dict[str, torch.Tensor]:
    """Two sequences of packed documents; every rank gets the same."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 256, (2, tokens), generator=generator)
    cuts = [[100 + step, tokens - 100 - step], [77, 150, tokens - 227]]
    positions = [torch.cat([torch.arange(n) for n in lengths]) for lengths in cuts]
    return {"input_ids": ids, "labels": ids, "position_ids": torch.stack(positions)}


def train(mesh, steps: int = 5) -> list[float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Qwen3ForCausalLM(CONFIG))
    cp = hf.attach(model, mesh, gradients="averaged")  # flexcp
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(steps):
        batch = make_batch(step)
        batch = cp.shard(batch)  # flexcp
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    alone = testing.spawn(lambda mesh: train(mesh, options.steps), 1)[0]
    together = testing.spawn(lambda mesh: train(mesh, options.steps), options.ranks)[0]
    print(f"step   1 rank     {options.ranks} ranks")
    for step, (one, many) in enumerate(zip(alone, together, strict=True)):
        print(f"{step:4d}   {one:.6f}   {many:.6f}")


if __name__ == "__main__":
    main()
