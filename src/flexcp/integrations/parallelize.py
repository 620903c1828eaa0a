"""parallelize: torch's parallelize_module, with an error for patterns that match no module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from flexcp.comm.simulated import SimulatedMesh
from flexcp.errors import FlexCPError, require

Model = TypeVar("Model", bound=nn.Module)

_MOST_NAMES = 8
"""Modules that a message names."""


def parallelize(
    model: Model, mesh: Any, styles: ParallelStyle | Mapping[str, ParallelStyle]
) -> Model:
    """Applies parallel styles to the modules of a model; the model is changed and returned.

    As torch's `parallelize_module`, which passes over a pattern that matches nothing: the modules
    that were meant would then run on this rank's rows alone. Here that is an error, before any
    style is applied.

    Args:
        model: The model.
        mesh: What the styles parallelize over: a DeviceMesh, or a simulated one.
        styles: `flexcp.ContextParallel`s and torch's own styles, by pattern: a module's path, each
            part of which may have wildcards, as in "layers.*.attn"; or one style for the model.

    >>> import flexcp
    >>> class Attention(nn.Module):
    ...     def forward(self, x):
    ...         return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> def rank(mesh):
    ...     plan = flexcp.make_plan(flexcp.masks.causal(), 10, mesh)
    ...     model = nn.ModuleDict({"attn": Attention()})
    ...     try:
    ...         flexcp.parallelize(model, mesh, {"attention": flexcp.ContextParallel(plan)})
    ...     except flexcp.FlexCPError as error:
    ...         print(str(error).split(";")[0])
    ...     flexcp.parallelize(model, mesh, {"a*": flexcp.ContextParallel(plan)})
    >>> _ = flexcp.testing.simulate(rank, 1)
    expected patterns that match modules of ModuleDict: 'attn', got 'attention', which matches none
    """
    require("model", model, nn.Module, "pass the model whose modules are parallelized")
    if mesh is not None:  # torch then takes the mesh that is active
        fix = "make one with torch.distributed.device_mesh.init_device_mesh"
        require("mesh", mesh, (DeviceMesh, SimulatedMesh), fix)
    require("styles", styles, (Mapping, ParallelStyle), "pass {pattern: style}")
    if isinstance(styles, Mapping):
        if not styles:
            raise FlexCPError("a style at least", "an empty dict", "pass {pattern: style}")
        for pattern, style in styles.items():
            require("a pattern", pattern, str, "pass {pattern: style}")
            require("a style", style, ParallelStyle, "pass {pattern: style}")
        missing = [pattern for pattern in styles if not any(_matches(model, pattern))]
        if missing:
            raise _no_match(model, missing)
        styles = dict(styles)
    try:
        parallelize_module(model, mesh, styles)
    except RuntimeError as error:
        if mesh is not None:
            raise
        raise FlexCPError("a mesh, or one that is active", str(error), "pass the mesh") from None
    return model


def _matches(module: nn.Module, pattern: str) -> Iterator[nn.Module]:
    """The modules that torch takes a pattern for: its parts match names of children in turn."""
    if not pattern:
        yield module
        return
    first, _, rest = pattern.partition(".")
    for name, child in module.named_children():
        if fnmatch(name, first):
            yield from _matches(child, rest)


def _no_match(model: nn.Module, missing: list[str]) -> FlexCPError:
    names = [name for name, _ in model.named_modules() if name]
    close = {x for pattern in missing for x in get_close_matches(pattern, names, n=3)}
    named = sorted(names, key=lambda name: name not in close)
    more = len(named) - _MOST_NAMES
    told = ", ".join(map(repr, named[:_MOST_NAMES])) + (f" and {more} more" if more > 0 else "")
    return FlexCPError(
        f"patterns that match modules of {type(model).__name__}: {told or 'it has none'}",
        f"{', '.join(map(repr, missing))}, which match{'es' if len(missing) == 1 else ''} none",
        "write the path of a module as named_modules() has it, with * for any name in one place",
    )
