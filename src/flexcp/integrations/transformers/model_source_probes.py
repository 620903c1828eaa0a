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
        if isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            if {"config", "position_ids"} <= keys:
                return True
        if isinstance(node, ast.Call):
            names = {keyword.arg for keyword in node.keywords}
            if {"config", "position_ids"} <= names and "mask" in ast.unparse(node.func):
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


def _code(forward: Callable[..., Any]) -> ast.Module:
    return ast.parse(textwrap.dedent(_source(forward)))


@lru_cache(_KEPT)
def _source(forward: Callable[..., Any]) -> str:
    """The code of a forward pass. Reading it takes milliseconds, so it is read once."""
    return inspect.getsource(inspect.unwrap(forward))
