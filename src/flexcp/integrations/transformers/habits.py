"""What a decoder does by itself with positions, read from its code.

Transformers has no flags for this. It reads models' code itself to find out whether attention can
be replaced; and what is concluded here about documents is checked in every forward pass.
"""

from __future__ import annotations

import ast
import inspect
import textwrap

from transformers import PreTrainedModel


def counts_from_zero(decoder: PreTrainedModel) -> bool:
    """Whether a decoder that is given no positions takes 0, 1, 2, ... for every sequence.

    Some derive them from the padding instead, as OPT does.
    """
    return "torch.arange(inputs_embeds.shape[1]" in _source(decoder)


def infers_documents(decoder: PreTrainedModel) -> bool:
    """Whether a decoder hands its position_ids to the functions that make masks.

    These take a jump for the beginning of a document, in causal models. gpt-oss does not hand
    them over.
    """
    if not getattr(decoder.config, "is_causal", True):
        return False
    for node in ast.walk(ast.parse(textwrap.dedent(_source(decoder)))):
        if isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            if {"config", "position_ids"} <= keys:
                return True
        if isinstance(node, ast.Call):
            names = {keyword.arg for keyword in node.keywords}
            if {"config", "position_ids"} <= names and "mask" in ast.unparse(node.func):
                return True
    return False


def _source(decoder: PreTrainedModel) -> str:
    return inspect.getsource(inspect.unwrap(type(decoder).forward))
