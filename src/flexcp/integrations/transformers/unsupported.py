"""What can't be honoured on a part of a sequence, refused by name: models, arguments, batches."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from flexcp.errors import FlexCPError
from flexcp.integrations.transformers.model_source_probes import (
    is_encoder,
    makes_a_mask,
    tells_its_loss,
)

ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
"""Layer types that are attention and nothing else."""

_OF_GENERATION = ("past_key_values", "cache_position", "prefix_allowed_tokens_fn")
_TYPES_OF_TOKENS = ("token_type_ids", "mm_token_type_ids")
"""Of which 0 is text."""
_OF_OTHER_MODALITIES = (
    "pixel_values",
    "pixel_values_videos",
    "image_grid_thw",
    "input_features",
    "input_values",
    "block_sequence_ids",
    "encoder_hidden_states",
    "encoder_outputs",
    "decoder_input_ids",
)


_HEADS = {
    "ForTokenClassification": "scores classes of each token, with labels that are not shifted",
    "ForSequenceClassification": "looks at chosen tokens of the whole sequence",
    "ForQuestionAnswering": "compares all tokens of the sequence",
}
"""What heads do that predict no tokens, by Transformers' name of their loss."""


def language_model(model: nn.Module) -> PreTrainedModel:
    """The Transformers model in what a user calls a model: itself, or what DDP or PEFT wrap."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, PreTrainedModel):
            return module
    raise FlexCPError(
        "a model from Transformers, or a module that wraps one",
        type(model).__name__,
        "for other modules, use flexcp.attention with a plan",
    )


def check_model(model: PreTrainedModel) -> None:
    """Raises unless all that mixes tokens in the model is attention that can be replaced."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise _unfit("a decoder", f"{name}, which has an encoder too")
    if not (has_head(model) or model.base_model is model):
        raise _unfit(
            "a decoder, or one with a language-model head, which predicts the next token",
            f"{name}, whose head {_HEADS.get(str(getattr(model, 'loss_type', '')), 'does not')}",
        )
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - set(ATTENTION_LAYERS))
    if kinds:
        raise _unfit(
            f"layer types among {', '.join(ATTENTION_LAYERS)}", f"{', '.join(kinds)} in {name}"
        )
    if getattr(model, "_is_stateful", False):
        raise _unfit(
            "layers that are attention",
            f"{name}, which has recurrent layers, or others that keep a state of the sequence",
        )
    if not type(model)._can_set_attn_implementation():
        raise _unfit(
            "a model that takes its attention from Transformers' AttentionInterface",
            f"{name}, which has its own",
        )
    decoder = decoder_of(model)
    if is_encoder(type(decoder), bool(getattr(config, "is_decoder", False))):
        raise _unfit("a decoder", f"{name}, an encoder: each of its tokens sees the whole sequence")
    for module in decoder.modules():
        if makes_a_mask(type(module).forward):
            raise _unfit(
                "layers that attend under the masks that the model makes for them",
                f"{type(module).__name__}, which makes one of its own from the tokens it is given",
            )
    if "position_ids" not in inspect.signature(type(decoder).forward).parameters:
        raise _unfit(
            "a model that is told the positions of its tokens", f"{name}, without position_ids"
        )
    if not accepts_keywords(model):
        raise _unfit(
            "a model that passes num_items_in_batch on to its loss",
            f"{name}, whose forward takes no further keywords",
        )


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The part that embeds tokens and runs the layers."""
    inner: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    if not isinstance(inner, PreTrainedModel):  # some call their head so
        inner = model
    if has_head(inner):  # Llama 4 names its decoder otherwise than it says
        return next(m for m in inner.modules() if isinstance(m, PreTrainedModel) and m is not inner)
    return inner


def accepts_keywords(model: PreTrainedModel) -> bool:
    """Whether forward has **kwargs, through which the loss gets its number of items."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    return not has_head(model) or any(p.kind is p.VAR_KEYWORD for p in parameters)


def has_head(model: PreTrainedModel) -> bool:
    """Whether the model predicts tokens, rather than returning hidden states."""
    return model.get_output_embeddings() is not None  # type: ignore[no-untyped-call]


def check_batch(batch: Mapping[str, Any], model: PreTrainedModel) -> None:
    """Raises if a batch has something that means nothing for a part of a sequence."""
    for name in _OF_GENERATION:
        if batch.get(name) is not None:
            raise FlexCPError(
                "a batch for training or evaluation, without a key-value cache",
                f"{name} in the batch",
                "drop it; to generate, call detach() first",
            )
    for name in _OF_OTHER_MODALITIES:
        if batch.get(name) is not None:
            raise FlexCPError(
                "a batch of text for a decoder",
                f"{name} in the batch",
                "masks of images and of encoders are made inside the model, from the whole "
                "sequence; run such batches without context parallelism",
            )
    for name in _TYPES_OF_TOKENS:
        types = batch.get(name)
        if types is not None and bool((types != 0).any()):
            raise FlexCPError(
                f"a batch of text for a decoder: {name} of zeros",
                f"{name} with others",
                "masks of images are made inside the model, from the whole sequence; run such "
                "batches without context parallelism",
            )
    mask = batch.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        got = f"{mask.dim()}-D" if isinstance(mask, Tensor) else type(mask).__name__
        raise FlexCPError(
            "attention_mask [B, S]: 1 for tokens, 0 for padding",
            f"a {got} mask",
            "name packed documents by document_ids or position_ids; the model's own masks are "
            "added by flexcp",
        )
    positions = batch.get("position_ids")
    if positions is not None and positions.dim() != 2:
        raise FlexCPError(
            "position_ids [B, S]",
            f"shape {tuple(positions.shape)}",
            "positions in several dimensions belong to images; run them without context "
            "parallelism",
        )
    keep = batch.get("logits_to_keep", 0)
    if not isinstance(keep, int) or keep != 0:
        raise FlexCPError(
            "logits of all tokens", "logits_to_keep in the batch", "select them after the model"
        )
    check_options(batch, model)


def check_options(options: Mapping[str, Any], model: PreTrainedModel) -> None:
    """Raises if outputs are asked for, by argument or configuration, that no rank has."""
    config = model.config.get_text_config(decoder=True)
    if _wanted("output_attentions", options, config):
        raise FlexCPError(
            "output_attentions=False",
            "True",
            "attention weights are never formed; detach() and use eager attention to see them",
        )
    if options.get("use_cache"):
        raise FlexCPError("use_cache=False", "True", "drop it; to generate, call detach() first")
    if _wanted("output_router_logits", options, config):
        raise FlexCPError(
            "output_router_logits=False",
            "True",
            "the load-balancing loss is not a sum over tokens, so that parts of it don't add up; "
            "set config.output_router_logits = False",
        )


def _wanted(name: str, options: Mapping[str, Any], config: Any) -> bool:
    asked = options.get(name)
    return bool(getattr(config, name, False) if asked is None else asked)


def check_labels(model: PreTrainedModel) -> None:
    """Raises unless the loss of the model is a sum over tokens, with labels shifted outside."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if not has_head(model):
        raise FlexCPError(
            "a model with a language-model head, if the batch has labels",
            type(model).__name__,
            "drop the labels, or load the model as ...ForCausalLM",
        )
    if not tells_its_loss(type(model).forward):
        raise FlexCPError(
            "a model that takes its loss from Transformers' loss functions",
            f"{type(model).__name__}, which computes its own",
            "drop the labels from the batch, and compute the loss of this rank's logits with "
            "flexcp.cross_entropy",
        )
    if model.loss_function is not ForCausalLMLoss:
        raise FlexCPError(
            "the loss ForCausalLMLoss of Transformers",
            getattr(model.loss_function, "__name__", repr(model.loss_function)),
            "drop the labels from the batch, and compute the loss of this rank's logits with "
            "flexcp.cross_entropy",
        )


def _unfit(expected: str, got: str) -> FlexCPError:
    return FlexCPError(
        expected,
        got,
        "run this model without context parallelism, or call flexcp.attention in its layers",
    )
