"""Masks as plain data, to be written into files: how they were made, not their code.

Masks of the catalogue and sets of them are data. A function of the user's own is written as
"package.module:name", if it can be found there again.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from flexcp.errors import FlexCPError
from flexcp.masks import Mask, catalog
from flexcp.masks import mask as algebra
from flexcp.masks.recipe import Recipe, TensorValue, operands_first

_MAKERS: dict[str, Callable[..., Mask]] = {
    maker.__name__.strip("_"): maker
    for maker in (
        catalog.full, catalog.causal, catalog.sliding_window, catalog.prefix_lm, catalog.document,
        catalog.chunked, catalog.block_causal, catalog.global_tokens, catalog._shared_prefix,
        algebra.intersection, algebra.union, algebra.complement, algebra.transposition,
        algebra.shift,
    )
}  # fmt: skip
"""The functions that masks are made by, as files call them."""


def mask_as_data(mask: Mask) -> list[dict[str, Any]]:
    """Steps that make the mask, each from numbers, tensors and the masks of earlier steps.

    >>> from flexcp import masks
    >>> mask_as_data(masks.causal() & masks.sliding_window(4))[1:]
    [{'make': 'sliding_window', 'of': [4, 0]}, {'make': 'intersection', 'of': [{'step': 0},
    {'step': 1}]}]
    """
    every = operands_first(mask)
    place = {id(some): step for step, some in enumerate(every)}
    names = {maker: name for name, maker in _MAKERS.items()}
    steps: list[dict[str, Any]] = []
    for some in every:
        recipe = some.recipe
        if recipe is None or not some.compares_by_recipe or recipe.maker not in names:
            steps.append({"function": _name_of(some), "name": some.name})
            continue
        given = [
            {"step": place[id(a)]} if isinstance(a, Mask)
            else _runs(a.tensor) if isinstance(a, TensorValue)
            else a
            for a in recipe.arguments
        ]  # fmt: skip
        named = {} if recipe.name == some.name else {"name": some.name}
        steps.append({"make": names[recipe.maker], "of": given, **named})
    return steps


def mask_from_data(steps: list[dict[str, Any]]) -> Mask:
    """The mask again; raises for a function that can't be found.

    >>> from flexcp import masks
    >>> mask = masks.causal() & masks.document(lengths=[3, 5])
    >>> mask_from_data(mask_as_data(mask)) == mask
    True
    """
    made: list[Mask] = []
    for step in steps:
        if "function" in step:
            made.append(Mask(_function(step), step["name"]))
            continue
        given = [
            a if isinstance(a, int)
            else made[a["step"]] if "step" in a
            else TensorValue(_tensor(a))
            for a in step["of"]
        ]  # fmt: skip
        mask = Recipe(_MAKERS[step["make"]], tuple(given)).make()
        made.append(Mask(mask, step["name"]) if "name" in step else mask)
    return made[-1]


def _name_of(mask: Mask) -> str | None:
    """Where a function can be found again; None if nowhere."""
    function = mask.mask_mod
    module, name = (getattr(function, x, None) for x in ("__module__", "__qualname__"))
    if module in (None, "__main__") or name is None:
        return None
    try:
        found: Any = reduce(getattr, name.split("."), sys.modules[module])
    except (AttributeError, KeyError):
        return None
    return f"{module}:{name}" if found is function else None


def _function(step: dict[str, Any]) -> Any:
    if step["function"] is not None:
        module, _, name = step["function"].partition(":")
        try:
            return reduce(getattr, name.split("."), importlib.import_module(module))
        except (ImportError, AttributeError):
            pass
    raise FlexCPError(
        f"the function of the mask {step['name']!r}",
        step["function"] or "one that is not at the top level of a module",
        "pass load_plan(path, mask=...) with the mask that the plan was made for",
    )


def _runs(x: Tensor) -> dict[str, Any]:
    """A tensor as runs of equal numbers: documents are long."""
    flat = x.flatten()
    values, counts = torch.unique_consecutive(flat, return_counts=True)
    return {"shape": list(x.shape), "values": values.tolist(), "counts": counts.tolist()}


def _tensor(data: dict[str, Any]) -> Tensor:
    values, counts = (torch.tensor(data[x], dtype=torch.int64) for x in ("values", "counts"))
    return values.repeat_interleave(counts).view(data["shape"])
