"""From what a user names to a model and a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flexcp.errors import FlexCPError


def build_model(model: Any, dtype: torch.dtype | None, seed: int) -> nn.Module:
    """The model of a factory, or a model itself, in the type to verify in."""
    torch.manual_seed(seed)
    built = model if isinstance(model, nn.Module) else model()
    if not isinstance(built, nn.Module):
        raise FlexCPError(
            "a factory that returns an nn.Module",
            f"{type(built).__name__}",
            "pass a function without arguments that builds the model",
        )
    return built if dtype is None else built.to(dtype)


def random_batch(model: nn.Module, shape: tuple[int, int], seed: int) -> dict[str, Tensor]:
    """Tokens and labels, some of them ignored, as in a batch of prompts and answers.

    >>> batch = random_batch(nn.Embedding(9, 4), (1, 12), seed=0)
    >>> batch["input_ids"].shape, int((batch["labels"] == -100).sum())
    (torch.Size([1, 12]), 2)
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary(model), shape, generator=generator)
    tokens[0, 0] = vocabulary(model) - 1
    labels = tokens.clone()
    labels[:, : shape[1] // 6] = -100
    return {"input_ids": tokens, "labels": labels}


def vocabulary(model: nn.Module) -> int:
    """How many tokens a model knows."""
    config = getattr(model, "config", None)
    for source in (config, model):
        for name in ("vocab_size", "vocabulary"):
            size = getattr(source, name, None)
            if isinstance(size, int) and size > 1:
                return size
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    if not sizes:
        raise FlexCPError(
            "a model with an nn.Embedding, to make a batch for",
            type(model).__name__,
            "pass batch=, with the whole batch as the step takes it",
        )
    return sizes[0]


def name_of(model: Any) -> str:
    """What to call a model in a verdict.

    >>> name_of("llama"), name_of(nn.Linear(1, 1))
    ('llama', 'Linear')
    """
    if isinstance(model, str):
        return model
    if isinstance(model, (Callable, type)) and hasattr(model, "__name__"):  # type: ignore[arg-type]
        return str(model.__name__)
    return type(model).__name__


def require_batch(batch: Any) -> dict[str, Any]:
    """A batch as a dict of whole tensors."""
    if not isinstance(batch, Mapping) or not any(isinstance(x, Tensor) for x in batch.values()):
        raise FlexCPError(
            "a batch: names and tensors [B, S] of the whole sequence",
            type(batch).__name__,
            'pass {"input_ids": ..., "labels": ...}, or None for a random one',
        )
    return dict(batch)
