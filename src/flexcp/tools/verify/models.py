"""From what a user names to a model and a batch."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flexcp.errors import FlexCPError, require_function, told
from flexcp.tools.import_by_name import import_name
from flexcp.tools.verify.hf import from_transformers, is_transformers


def build_model(model: Any, dtype: torch.dtype | Literal["auto"] | None, seed: int) -> nn.Module:
    """The model that was named, made or described, in the type to verify in."""
    torch.manual_seed(seed)
    if isinstance(model, str) and ":" in model:
        model = import_name(model)
    if isinstance(model, nn.Module):
        built: Any = deepcopy(model)
    elif isinstance(model, (str, Path)) or hasattr(model, "model_type"):
        built = from_transformers(model)
    elif callable(model):
        require_function("a function without arguments that builds the model", model, 0, _BUILD)
        built = model()
    else:
        raise FlexCPError(
            "a model, a function that builds one, or a name",
            told(model),
            'pass such as my_package.models:make_tiny, "llama", or a function',
        )
    if not isinstance(built, nn.Module):
        raise FlexCPError(
            "a factory that returns an nn.Module",
            f"{type(built).__name__}",
            _BUILD,
        )
    if dtype == "auto":
        dtype = torch.float32 if is_transformers(built) else torch.float64
    _wake(built)
    return built if dtype is None else built.to(dtype)


_BUILD = "pass a function without arguments that builds the model"


def _wake(model: nn.Module) -> None:
    """Gives random values to matrices that are zero: they would hide whatever comes before them."""
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1 and p.is_floating_point() and not bool(p.any()):
                p.normal_(std=0.02)


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
    if isinstance(model, nn.Module) or hasattr(model, "model_type"):
        return type(model).__name__
    given = getattr(model, "__name__", "<lambda>")
    return "a model" if given == "<lambda>" else str(given)


def require_batch(batch: Any) -> dict[str, Any]:
    """A batch as a dict of whole tensors."""
    if not isinstance(batch, Mapping) or not any(isinstance(x, Tensor) for x in batch.values()):
        raise FlexCPError(
            "a batch: names and tensors [B, S] of the whole sequence",
            type(batch).__name__,
            'pass {"input_ids": ..., "labels": ...}, or None for a random one',
        )
    return dict(batch)
