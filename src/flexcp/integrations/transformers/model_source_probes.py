"""What a model does by itself with positions and labels, read from its code.

Transformers has no flags for this. It reads models' code itself to find out whether attention can
be replaced; and what is concluded here about documents is checked in every forward pass.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from transformers import PreTrainedModel

_KEPT = 64
"""Forward functions whose code is remembered: one per class of model."""


def counts_from_zero(decoder: PreTrainedModel) -> bool:
    """Whether a decoder that is given no positions takes 0, 1, 2, ... for every sequence.

    Some derive them from the padding instead, as OPT does.
    """
    return "torch.arange(inputs_embeds.shape[1]" in _source(type(decoder).forward)


def infers_documents(decoder: PreTrainedModel) -> bool:
    """Whether a decoder hands its position_ids to the functions that make masks.

    These take a jump for the beginning of a document, in causal models. gpt-oss does not hand
    them over.
    """
    is_causal = bool(getattr(decoder.config, "is_causal", True))
    return is_causal and _makes_masks_by_position(type(decoder).forward)


@lru_cache(_KEPT)
def _makes_masks_by_position(forward: Callable[..., Any]) -> bool:
    for node in ast.walk(_code(forward)):
        given = {}
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            given = {key.value: value for key, value in pairs if isinstance(key, ast.Constant)}
        elif isinstance(node, ast.Call) and "mask" in ast.unparse(node.func):
            given = {keyword.arg: keyword.value for keyword in node.keywords}
        if {"config", "position_ids"} <= set(given):
            return ast.unparse(given["position_ids"]) == "position_ids" or _keeps_text_positions(
                forward
            )
    return False


def _keeps_text_positions(forward: Callable[..., Any]) -> bool:
    """Whether a model with positions in several dimensions has one of them for the text.

    Masks are made by that one. Qwen3-VL makes four of positions [B, S]; Qwen2.5-VL three, for the
    places in an image alone.
    """
    for node in ast.walk(_code(forward)):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "position_ids.ndim == 2":
            return "expand(4," in ast.unparse(node.body[0])
    return False


def is_encoder(decoder: type[PreTrainedModel], runs_as_decoder: bool) -> bool:
    """Whether a model lets every token see the whole sequence, by the masks that it makes.

    Args:
        decoder: Its class.
        runs_as_decoder: What its configuration says, for those that can be either, as BERT can.
    """
    code = ast.parse(textwrap.dedent(inspect.getsource(decoder)))
    of_others = {  # what a decoder sees of an encoder
        id(node.value)
        for node in ast.walk(code)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("encoder_")
    }
    made = {
        ast.unparse(node.func)
        for node in ast.walk(code)
        if isinstance(node, ast.Call) and id(node) not in of_others
    }
    both_ways = any(name.startswith("create_bidirectional_") for name in made)
    return both_ways and not (runs_as_decoder and "create_causal_mask" in made)


@lru_cache(_KEPT)
def makes_a_mask(forward: Callable[..., Any]) -> bool:
    """Whether a layer attends under another mask than the one that it was given.

    Such as one that it derives from the tokens: the best keys of an index, a learned decay.
    """
    try:
        code = _code(forward)
    except OSError:  # the layer is not from a file; what it passes is looked at in every call
        return False
    for node in ast.walk(code):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "attention_interface":
            named = [k.value for k in node.keywords if k.arg == "attention_mask"]
            masks = {ast.unparse(mask) for mask in named or node.args[4:5]}
            return masks != {"attention_mask"} or _changes_its_mask(code)
    return False


def _changes_its_mask(code: ast.Module) -> bool:
    for node in ast.walk(code):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "attention_mask":
            chosen = [node.value]
            if isinstance(node.value, ast.IfExp):
                chosen = [node.value.body, node.value.orelse]
            if not all(isinstance(value, ast.Name) for value in chosen):  # another of the inputs
                return True
    return False


@lru_cache(_KEPT)
def tells_its_loss(forward: Callable[..., Any]) -> bool:
    """Whether a model's forward hands further keywords, such as shifted labels, to its loss.

    Some compute a loss of their own instead, as Bart does, which would shift or average again.
    """
    for node in ast.walk(_code(forward)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.loss_function":
            return any(keyword.arg is None for keyword in node.keywords)
    return False


def leaves_the_loss_to_its_base(compute_loss: Callable[..., Any]) -> bool:
    """Whether a trainer's method takes the loss of the class that it is derived from.

    One that calls the model itself computes something else of its outputs.
    """
    try:
        calls = [node for node in ast.walk(_code(compute_loss)) if isinstance(node, ast.Call)]
    except OSError:  # such as a class that was typed in at a prompt
        return False
    called = {ast.unparse(call.func) for call in calls}
    return "super().compute_loss" in called and not {"model", "self.model"} & called


def _code(forward: Callable[..., Any]) -> ast.Module:
    return ast.parse(textwrap.dedent(_source(forward)))


@lru_cache(_KEPT)
def _source(forward: Callable[..., Any]) -> str:
    """The code of a forward pass. Reading it takes milliseconds, so it is read once."""
    return inspect.getsource(inspect.unwrap(forward))
