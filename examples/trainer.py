"""The Trainer of Transformers on sequences that two ranks share: one base class more.

torchrun --nproc-per-node 2 examples/trainer.py

Without torchrun, it starts two ranks itself.
"""

from __future__ import annotations

import os
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from flexcp import testing
from flexcp.integrations import transformers as hf


class ShardedTrainer(hf.TrainerMixin, Trainer):
    """Trains and evaluates with the numbers of one process."""


class Numbers(Dataset):
    """Sequences that count modulo 64 from a random start, with steps of 1 to 3."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (index * 7 + (1 + index % 3) * torch.arange(200)) % 64
        return {"input_ids": ids, "labels": ids}


def train(folder: str, steps: int = 6) -> dict[str, float]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=2,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    trainer = ShardedTrainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=Numbers(),
        eval_dataset=Numbers(),
    )
    trainer.train()
    return trainer.evaluate()


def launch(ranks: int, folder: str) -> list[dict[str, float]]:
    """What torchrun does: starts the ranks, and says in the environment which is which."""

    def rank(mesh):
        number = str(mesh.get_rank())
        os.environ |= {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        return train(folder)

    return testing.spawn(rank, ranks)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        result = train(folder) if "RANK" in os.environ else launch(2, folder)[0]
    print(f"evaluation loss: {result['eval_loss']:.6f}")


if __name__ == "__main__":
    main()
