"""The `make_plan(...)` that gives the plan at hand, to be copied into a program."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexcp.masks import Mask
    from flexcp.plan import Machine, Plan

_MOST_DOCUMENTS = 32
"""Lengths that are written out; more are read again from the expression."""
_SIGNS = {"intersection": " & ", "union": " | "}


def plan_code(
    plan: Plan,
    masks: Mask | Mapping[str, Mask],
    expressions: Mapping[str, str],
    *,
    layout: str,
    schedule: str,
) -> str:
    """A few lines of Python that make this plan again.

    Args:
        plan: What `make_plan` gave.
        masks: The mask, or masks by name, that it was made for.
        expressions: What was typed for each mask, by its name, if anything was.
        layout: As it was asked for.
        schedule: As it was asked for.

    >>> import flexcp
    >>> mask = flexcp.masks.causal() & flexcp.masks.document(lengths=[600, 424])
    >>> plan = flexcp.make_plan(mask, 1024, 4)
    >>> print(plan_code(plan, mask, {}, layout="auto", schedule="auto"))
    import torch
    import flexcp
    from flexcp import masks
    <BLANKLINE>
    plan = flexcp.make_plan(
        masks.causal() & masks.document(lengths=[600, 424]),
        1024,
        4,  # or a DeviceMesh of as many ranks
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        dtype=torch.bfloat16,
    )
    """
    several = isinstance(masks, Mapping)
    named = dict(masks) if isinstance(masks, Mapping) else {"": masks}
    codes, reads = {}, False
    for name, mask in named.items():
        code = mask_code(mask)
        if code is None:
            reads = True
            code = f"read_mask({expressions.get(name, mask.name)!r}, {plan.seq_len}).mask"
        codes[name] = code
    shape, block = plan.shape, next(iter(plan.grids.values())).block_size[0]
    mesh = plan.ranks.shape if len(plan.ranks.shape) > 1 else plan.ranks.size
    lines = ["import torch", "import flexcp"]
    lines += ["from flexcp import masks"] if any("masks." in c for c in codes.values()) else []
    lines += ["from flexcp.tools.cli.masks import read_mask"] if reads else []
    machine = _machine_code(plan.machine)
    lines = (["from dataclasses import replace"] if "replace(" in machine else []) + lines
    lines += ["", "plan = flexcp.make_plan("]
    if several:
        lines += ["    {", *(f"        {n!r}: {c}," for n, c in codes.items()), "    },"]
    else:
        lines.append(f"    {codes['']},")
    lines += [f"    {plan.seq_len},", f"    {mesh},  # or a DeviceMesh of as many ranks"]
    given: dict[str, Any] = {
        "layout": (repr(layout), "'auto'"),
        "schedule": (repr(schedule), "'auto'"),
        "block_size": (str(block), "128"),
        "num_heads": (str(shape.num_heads), ""),
        "num_kv_heads": (str(shape.num_kv_heads), ""),
        "head_dim": (str(shape.head_dim), ""),
        "dtype": (str(shape.dtype), ""),
        "batch": (str(shape.batch), "1"),
        "machine": (machine, "'h100-ib'"),
    }
    lines += [f"    {k}={v}," for k, (v, usual) in given.items() if v != usual]
    return "\n".join([*lines, ")"])


def wrapped_code(code: str, width: int) -> str:
    """The same code on lines of at most so many characters, as far as its texts allow.

    >>> print(wrapped_code("f(\\n    g([1000, 2000, 3000]),\\n)", 20))
    f(
        g([1000, 2000,
            3000]),
    )
    """
    lines = []
    for line in code.splitlines():
        breaks = line.startswith("    ") and not set(line) & set("'\"#")  # within the call
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        lines += textwrap.wrap(line, width, subsequent_indent=indent) if breaks else [line]
    return "\n".join(lines)


def mask_code(mask: Mask) -> str | None:
    """A mask of the catalogue as Python; None for functions, and for very many documents.

    >>> from flexcp import masks
    >>> mask_code(~masks.causal() & (masks.full() | masks.sliding_window(4)))
    '~masks.causal() & (masks.full() | masks.sliding_window(4, 0))'
    """
    import torch

    from flexcp.masks.recipe import TensorValue

    recipe = mask.recipe
    if recipe is None or not mask.compares_by_recipe:
        return None
    maker, given = recipe.maker.__name__, recipe.arguments
    if maker in (*_SIGNS, "complement"):
        parts = [mask_code(part) for part in recipe.operands]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        inner = [
            f"({part})" if " " in _outside(part) and maker != _maker(of) else part
            for part, of in zip(known, recipe.operands, strict=True)
        ]
        if maker == "complement":
            return f"~{inner[0]}"
        second = recipe.operands[1]
        if _maker(second) == maker:  # `a & (b & c)` is no `(a & b) & c`
            inner[1] = f"({known[1]})"
        return _SIGNS[maker].join(inner)
    if maker == "document" and isinstance(given[0], TensorValue) and given[0].tensor.dim() == 1:
        ids, counts = torch.unique_consecutive(given[0].tensor, return_counts=True)
        if len(ids) > _MOST_DOCUMENTS or not torch.equal(ids, torch.arange(len(ids))):
            return None
        return f"masks.document(lengths={counts.tolist()})"
    if not all(isinstance(a, int) for a in given):
        return None
    if maker == "_shared_prefix":
        return f"masks.shared_prefix({given[0]}, {list(given[1:])})"
    return f"masks.{maker}({', '.join(map(str, given))})"


def _maker(mask: Mask) -> str:
    return "" if mask.recipe is None else mask.recipe.maker.__name__


def _outside(code: str) -> str:
    """What stands outside of all brackets."""
    found, depth = "", 0
    for sign in code:
        depth -= sign in ")]"
        found += "" if depth else sign
        depth += sign in "(["
    return found


def _machine_code(machine: Machine) -> str:
    """A preset by its name, a preset with nodes of another size, or all of its numbers."""
    from flexcp.plan import PRESETS

    for preset in PRESETS:
        if machine == preset:
            return repr(machine.name)
        if machine == replace(preset, ranks_per_node=machine.ranks_per_node):
            made = f"flexcp.Machine.preset({preset.name!r})"
            return f"replace({made}, ranks_per_node={machine.ranks_per_node})"
    return f"flexcp.{machine!r}"
