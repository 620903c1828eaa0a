"""Models of Hugging Face Transformers: tiny ones by name, and how flexcp runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from torch import Tensor, nn

from flexcp.batch import positions_within
from flexcp.errors import FlexCPError, did_you_mean, is_there, quote
from flexcp.layout import Layout
from flexcp.masks import Mask, MaskMod, document

_TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 8192,
    "sliding_window": 11,
    "attention_chunk_size": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What is set in a configuration that has it."""

_LAYERS = 3


def is_transformers(model: nn.Module) -> bool:
    """Whether a model is one of Transformers, which need not be installed to ask.

    >>> is_transformers(nn.Linear(1, 1))
    False
    """
    return any(base.__module__.startswith("transformers.") for base in type(model).__mro__)


def from_transformers(named: Any) -> nn.Module:
    """A random model from a model type, a configuration, or a folder or file that has one.

    A model type gives a tiny model of that family, with a layer of every type that it has. A
    configuration is taken as it is.

    >>> from_transformers("llama").config.num_hidden_layers
    3
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise FlexCPError(
            "the transformers package, for a model by name",
            f"{quote(named)} without it",
            "pip install flexcp[transformers], or pass a factory: package.module:function",
        ) from None
    config = _configuration(named) if isinstance(named, (str, Path)) else named
    try:
        model = cast(Any, AutoModelForCausalLM).from_config(config, attn_implementation="eager")
    except ValueError as error:
        raise FlexCPError(
            "a configuration of a model for causal language modelling",
            type(config).__name__,
            str(error).splitlines()[0][:200],
        ) from None
    return cast(nn.Module, model.train())


def _configuration(named: str | Path) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if str(named) not in ("", ".") and is_there(Path(named)):
        try:
            return AutoConfig.from_pretrained(str(named), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise FlexCPError(
                f"a configuration of Transformers in {quote(str(named))}",
                str(error).splitlines()[0][:200],
                "name a folder with a config.json, or that file",
            ) from None
    kind = str(named).replace("-", "_")
    if kind not in CONFIG_MAPPING:
        stem = kind.split("_")[0][:4]
        close = [k for k in CONFIG_MAPPING if stem and stem in k][:8]
        raise FlexCPError(
            "a model type of Transformers, a folder with a config.json, or package.module:factory",
            quote(str(named)),
            did_you_mean(kind, CONFIG_MAPPING)
            or (f"perhaps {', '.join(close)}" if close else "such as llama, qwen3 or gemma3_text"),
        )
    return tiny_configuration(CONFIG_MAPPING[kind])


def tiny_configuration(kind: Any) -> Any:
    """A configuration of a class with small sizes, no dropout, and all of its types of layer."""
    usual = kind()
    known = usual.to_dict()
    sizes: dict[str, Any] = {n: x for n, x in _TINY.items() if n in known or hasattr(usual, n)}
    sizes |= {n: 0.0 for n in known if n.endswith(("dropout", "pdrop"))}
    sizes["num_hidden_layers"] = _LAYERS
    types = list(dict.fromkeys(getattr(usual, "layer_types", None) or []))
    if known.get("use_sliding_window") is False:
        sizes["use_sliding_window"] = True
        types = ["full_attention", "sliding_attention"] if types else types
    if types:
        sizes["layer_types"] = [types[i % len(types)] for i in range(_LAYERS)]
    return kind(**sizes)


@dataclass(frozen=True, eq=False)
class Transformers:
    """How to run a model of Transformers, in one process and on ranks."""

    layout: str | Layout
    """For the plan."""
    schedule: str
    """For the plan."""
    gradients: Literal["summed", "averaged"]
    """What happens to the ranks' gradients."""

    def single(self, model: nn.Module, batch: Mapping[str, Any]) -> Any:
        """What the model itself does, with its own dense attention."""
        cast(Any, model).set_attn_implementation("eager")
        return model(**{"use_cache": False, **batch})

    def parallel(self, model: nn.Module, batch: Mapping[str, Any], mesh: Any) -> Any:
        """What a user writes: attach, shard, and the call as it was."""
        from flexcp.integrations.transformers import attach

        cp = attach(
            model,
            mesh,
            gradients=self.gradients,
            layout=self.layout,
            schedule=self.schedule,
            block_size=16,
        )
        return model(**cp.shard({"use_cache": False, **batch}))

    def masks(
        self, model: nn.Module, batch: Mapping[str, Any], tokens: Tensor, documents: Tensor | None
    ) -> dict[str, Mask | MaskMod]:
        """The masks of the model's types of layer; documents never see each other."""
        from flexcp.integrations.transformers.global_masks import TokenFacts, global_masks
        from flexcp.integrations.transformers.model_source_probes import infers_documents
        from flexcp.integrations.transformers.unsupported import decoder_of

        infers = infers_documents(decoder_of(cast(Any, model)))
        facts = TokenFacts.of(
            (tokens.shape[0], tokens.shape[1]),
            batch.get("attention_mask"),
            batch.get("position_ids") if infers else None,
            None,
        )
        found, _ = global_masks(cast(Any, model).config, facts)
        if documents is None:
            return dict(found)
        return {name: mask & document(documents) for name, mask in found.items()}


def with_documents(batch: Mapping[str, Any], tokens: Tensor, documents: Tensor) -> dict[str, Any]:
    """A batch whose positions start again in each document, which is how Transformers is told.

    >>> import torch
    >>> ids = torch.tensor([0, 0, 1])
    >>> with_documents({}, torch.zeros(1, 3), ids)["position_ids"]
    tensor([[0, 1, 0]])
    """
    if "position_ids" in batch:
        return dict(batch)
    ids = documents.expand(tokens.shape[0], tokens.shape[1])
    return {**batch, "position_ids": positions_within(ids)}
