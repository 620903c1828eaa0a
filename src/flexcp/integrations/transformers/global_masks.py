"""The masks of a whole batch, as the model itself defines them, before anything is sharded."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import (
    LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING,
    and_masks,
    create_masks_for_generate,
    find_packed_sequence_indices,
    padding_mask_function,
)

from flexcp import masks
from flexcp.errors import FlexCPError
from flexcp.masks import Mask

_CAPTURE = "flexcp_capture"
"""The name of a mask interface that returns the predicate instead of evaluating it."""

_OF_THE_DATA = ("packed_sequence_mask_function", "padding_mask_function")
"""Parts of a mask that come from the batch, not from the layer."""

_REMAPPED = "remap_positions_for_packed_sequence"
"""What gives a mask function positions within documents, from Transformers 5.23 on."""

_BY_DISTANCE = frozenset({"causal_mask_function", "sliding_window_overlay"})
"""Rules that say the same of rows as of positions within a document, which count up by 1."""

_OF_IMAGES = ("blockwise_overlay", "token_type_ids_mask_function")
"""Parts that models add for images, and that add nothing to a text."""

MaskKind = str
"""What a layer's mask is made of, whatever the batch: equal for equal rules.

Words, since a compiled graph can keep them, and look names up by them.
"""


def _captured(**arguments: Any) -> dict[str, Any]:
    return arguments


AttentionMaskInterface.register(_CAPTURE, _captured)


@dataclass(frozen=True, eq=False)
class TokenFacts:
    """What a batch says about who may see whom, on the CPU and in its simplest form."""

    shape: tuple[int, int]
    """B, S."""
    padding: Tensor | None
    """bool [B, S] False where there is no token; None if there is no padding."""
    packed: Tensor | None
    """int64 [B, S] Documents that Transformers infers from `position_ids`; None if there is one."""
    positions: Tensor | None
    """int64 [B, S] The `position_ids` that `packed` was inferred from."""
    documents: Tensor | None
    """int64 [B, S] Documents that the batch names; None if it names none."""

    @classmethod
    def of(
        cls,
        shape: tuple[int, int],
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        documents: Tensor | None,
    ) -> TokenFacts:
        """From the batch.

        Args:
            shape: B, S.
            attention_mask: [B, S], if given.
            position_ids: [B, S], if given, and if the model takes jumps for new documents.
            documents: [B, S], if given.
        """
        padding = packed = positions = None
        if attention_mask is not None:
            padding = attention_mask.detach().cpu().bool()
            padding = None if bool(padding.all()) else padding
        elif position_ids is not None:  # with an attention mask, Transformers infers nothing
            positions = position_ids.detach().cpu().long().expand(shape)
            packed = find_packed_sequence_indices(positions)
            positions = None if packed is None else positions
        if documents is not None:
            documents = documents.detach().cpu().long().expand(shape)
            if bool((documents == documents[:, :1]).all()):
                documents = None
        return cls(shape, padding, packed, positions, documents)

    def key(self) -> tuple[object, ...]:
        """Equal for batches with equal masks."""
        found = (self.padding, self.packed, self.positions, self.documents)
        return (self.shape, *map(_digest, found))


def _digest(x: Tensor | None) -> str | None:
    if x is None:
        return None
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def global_masks(
    config: PreTrainedConfig, facts: TokenFacts
) -> tuple[dict[str, Mask], dict[MaskKind, str]]:
    """The mask of every layer type over the whole batch, and the name of each kind of mask.

    Layer types with equal masks share one; a name is that of the first such layer type.
    """
    view = copy.copy(config.get_text_config(decoder=True))
    view._attn_implementation_internal = _CAPTURE
    found = _masks_of_layers(
        view,
        torch.empty(()).expand(*facts.shape, 1),  # a stand-in: only its shape is read
        facts.padding,
        facts.positions,
    )
    if "mask_function" in found:
        found = {"attention": found}
    by_name: dict[str, Mask] = {}
    names: dict[MaskKind, str] = {}
    for name in sorted(found):  # Transformers goes through a set: ranks would disagree
        parts = found[name]
        kind = mask_kind(parts["mask_function"])
        if kind in names:
            continue
        names[kind] = name
        by_name[name] = _mask(parts, facts)
    return by_name, names


def _masks_of_layers(
    config: PreTrainedConfig, inputs_embeds: Tensor, padding: Tensor | None, at: Tensor | None
) -> Any:
    """What Transformers itself says: one mask, or one for each layer type."""
    try:
        return create_masks_for_generate(config, inputs_embeds, padding, None, position_ids=at)
    except TypeError as error:
        # Transformers 5.9 to 5.18 passes chunked layers an argument that they don't take.
        if "block_sequence_ids" not in str(error) or not hasattr(config, "layer_types"):
            raise
        functions: Mapping[str, Any] = LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
        return {
            kind: functions[kind](config, inputs_embeds, padding, None, position_ids=at)
            for kind in set(config.layer_types)
        }


def _mask(parts: Mapping[str, Any], facts: TokenFacts) -> Mask:
    function = _of_rows(parts["mask_function"])
    if parts["attention_mask"] is not None:
        function = and_masks(function, padding_mask_function(parts["attention_mask"]))
    mask = Mask(function)
    return mask if facts.documents is None else mask & masks.document(facts.documents)


def _of_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """A mask function of rows, where it asks for positions within documents but need not.

    Comparisons of rows are what planning is fast for.
    """
    functions = _functions_in(function)
    if _name(function) != "and_masks" or "packed_sequence_mask_function" not in map(
        _name, functions
    ):
        return function
    return and_masks(*(_functions_in(f)[0] if _is_of_distances(f) else f for f in functions))


def _is_of_distances(function: Callable[..., Any]) -> bool:
    """Whether positions within documents are asked for, by rules that rows fulfil as well."""
    rules = {rule.partition("(")[0] for rule in _rules(function)}
    return _name(function) == _REMAPPED and rules <= _BY_DISTANCE


def mask_kind(function: Callable[..., Any]) -> MaskKind:
    """What a mask function of Transformers is made of, without what comes from the batch.

    >>> from transformers import masking_utils as hf
    >>> mask_kind(hf.sliding_window_causal_mask_function(3))
    'causal_mask_function & sliding_window_overlay(3)'
    >>> packed = hf.packed_sequence_mask_function(torch.zeros(1, 4))
    >>> mask_kind(hf.and_masks(hf.causal_mask_function, packed))
    'causal_mask_function'
    """
    return " & ".join(sorted(_rules(function))) or "everything"


def _rules(function: Callable[..., Any]) -> set[str]:
    """What must all hold for a mask function to hold."""
    name, parts = _name(function), _captured_by(function)
    if name in _OF_THE_DATA:
        return set()
    functions = _functions_in(function)
    if name == "or_masks":
        functions = [f for f in functions if not _adds_nothing(f)]
    if name in ("and_masks", _REMAPPED) or (name == "or_masks" and len(functions) == 1):
        return set().union(*map(_rules, functions))
    numbers = [str(x) for x in parts if isinstance(x, int | float)]
    inside = numbers + sorted(map(mask_kind, functions))
    return {f"{name}({', '.join(inside)})" if inside else name}


def _adds_nothing(function: Callable[..., Any]) -> bool:
    """Whether an overlay of images is that of a text: models add it to the masks of any batch."""
    name = _name(function)
    ids = [x for x in _captured_by(function) if isinstance(x, Tensor)]
    if name == "blockwise_overlay":  # the image of every token, -1 for text
        return all(bool((x < 0).all()) for x in ids)
    if name == "token_type_ids_mask_function":  # 1 for images, and their numbers
        return any(bool((x == 0).all()) for x in ids)
    return False


def known_before_it_runs(function: Callable[..., Any]) -> tuple[MaskKind, bool] | None:
    """For `asked_while_traced`: the kind of a mask, and whether it `separates_documents`.

    None where that depends on what is in the batch, which a graph does not know.
    """
    if _depends_on_images(function):
        return None
    return mask_kind(function), separates_documents(function)


def _depends_on_images(function: Callable[..., Any]) -> bool:
    """Whether some part of a mask function lets the tokens of an image see each other."""
    parts = _functions_in(function)
    return _name(function) in _OF_IMAGES or any(map(_depends_on_images, parts))


def separates_documents(function: Callable[..., Any]) -> bool:
    """Whether Transformers took jumps in the positions that the model was given for documents."""
    parts = _functions_in(function)
    return _name(function) == "packed_sequence_mask_function" or any(
        map(separates_documents, parts)
    )


def _name(function: Callable[..., Any]) -> str:
    """Of the function of Transformers that a mask function was made by, or is."""
    return function.__qualname__.split(".")[0]


def _captured_by(function: Callable[..., Any]) -> list[Any]:
    values: list[Any] = []
    for cell in getattr(function, "__closure__", None) or ():
        value = cell.cell_contents
        values.extend(value if isinstance(value, tuple | list) else [value])
    return values


def _functions_in(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The mask functions that a mask function was made of."""
    return [f for f in _captured_by(function) if callable(f)]


def require_known(kind: MaskKind, names: Mapping[MaskKind, str]) -> str:
    """The name of a mask that the model asks for in its forward pass."""
    if kind not in names:
        raise FlexCPError(
            "layers whose masks are among those that Transformers derives from the configuration: "
            + "; ".join(f"{name}: {known}" for known, name in names.items()),
            f"a mask that the model builds inside its forward pass: {kind}",
            "such masks (image tokens, custom overlays) can't be made from a part of the "
            "sequence; run this model without context parallelism",
        )
    return names[kind]
