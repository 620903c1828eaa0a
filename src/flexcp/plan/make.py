"""make_plan: from a mask, a length and a mesh to a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flexcp.errors import (
    FlexCPError,
    as_whole,
    did_you_mean,
    finite_number,
    quote,
    require,
    whole_number,
)
from flexcp.grid import BlockGrid, BlockKind
from flexcp.grid.analysis.measured import IndexOutsideError
from flexcp.grid.memo import grid_of_mask
from flexcp.layout import Layout
from flexcp.masks import Mask, as_mask, trace_mask
from flexcp.masks.graph import INPUTS, Ref
from flexcp.masks.trace import MaskMod
from flexcp.plan.machine import Machine
from flexcp.plan.mesh import Ranks
from flexcp.plan.plan import Plan
from flexcp.plan.problem import LAYOUTS, Problem
from flexcp.plan.search import search
from flexcp.plan.shape import AttentionShape
from flexcp.schedule import SCHEDULES
from flexcp.schedule.heads import require_heads

DEFAULT_MACHINE = "h100-ib"
"""What plans are priced for unless a machine is given."""


def make_plan(
    mask: Mask | MaskMod | BlockGrid | Mapping[str, Mask | MaskMod | BlockGrid],
    seq_len: int,
    mesh: Any,
    *,
    layout: str | Layout = "auto",
    schedule: str = "auto",
    block_size: int = 128,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
    machine: Machine | str | None = None,
    flops_per_token: float | None = None,
    token_slack: float | None = None,
) -> Plan:
    """Who owns which tokens, what moves when, and what that costs.

    Every rank makes the same plan by itself: nothing is communicated. With a DeviceMesh, or the
    mesh that `testing.simulate` gives, the plan can also be run.

    Args:
        mask: A Mask, a mask_mod, a BlockGrid, or several of them by name: then there is one layout
            that is good for their sum, and a schedule for each.
        seq_len: Tokens of the whole sequence.
        mesh: A DeviceMesh of one dimension, or of two: groups, and ranks that share the heads; a
            simulated one; or a number of ranks, or a shape: then the plan can be priced, drawn and
            checked, but not run.
        layout: "auto", "contiguous", "head_tail", "striped", "per_document", "ptrr", "balanced", or
            a Layout.
        schedule: "auto", "exchange", "ring", "allgather", "ulysses", "hybrid" or "hierarchical".
            "auto" is the cheapest by prediction; "hybrid" needs a mesh of two dimensions;
            "hierarchical" goes by the machine's `ranks_per_node`.
        block_size: Tokens of a square block: the granularity at which masks are analysed.
        num_heads: Query heads.
        num_kv_heads: Key-value heads; as many as query heads if not given.
        head_dim: Elements of a head.
        dtype: Type of Q, K and V.
        batch: Batch elements.
        machine: What to price for: a Machine, the name of a preset, or None for "h100-ib".
        flops_per_token: Floating-point operations that the rest of the model takes per token,
            forward, for the attention of all masks once: the layouts "auto" and "balanced" then
            make the sum of both even, rather than attention alone.
        token_slack: By which share of the mean the layouts "auto" and "balanced" may let token
            counts differ from it: what memory allows. By default they differ by a block at most.
            Where batch elements have layouts of their own, by one.

    >>> import flexcp
    >>> plan = make_plan(flexcp.masks.sliding_window(4096), 1 << 17, 8)
    >>> plan
    Plan(Layout(balanced: 131072 tokens on 8 ranks, 16384 each, 8 runs), exchange, on h100-ib)
    >>> max(plan.stats().tokens_received_per_rank)
    4096
    """
    ranks = Ranks.of(mesh).connected()
    require_names(layout, schedule)
    seq_len, batch, head_dim, num_heads, num_kv_heads = (
        whole_number(name, value, at_least=1, at_most=most, fix=f"pass {name}=1 or more")
        for name, value, most in (
            ("seq_len", seq_len, 2**40),
            ("batch", batch, _MOST),
            ("head_dim", head_dim, _MOST),
            ("num_heads", num_heads, _MOST),
            ("num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads, _MOST),
        )
    )
    require_heads(num_heads, num_kv_heads)
    block_size = require_block_size(block_size)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise FlexCPError(
            "dtype to be a floating-point type of torch",
            quote(dtype),
            "pass the type of Q, K and V, such as dtype=torch.bfloat16",
        )
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, dtype, batch)
    machine = require_machine(machine)
    grids = grids_of(mask, seq_len, block_size, shape)
    _require_layout(layout, seq_len, ranks.size, batch)
    problem = Problem(
        grids,
        ranks,
        shape,
        machine,
        _share("flops_per_token", flops_per_token, _MOST_FLOPS) or 0.0,
        _share("token_slack", token_slack, 1.0),
    )
    found = search(problem, layout, schedule)
    best, considered = found[0], dict[str, float]()
    for candidate in found:  # of several of one name, the first was preferred
        considered.setdefault(candidate.name, candidate.seconds)
    return Plan(
        grids,
        best.layout,
        best.schedules,
        best.costs,
        shape,
        machine,
        ranks,
        tuple(considered.items()),
    )


_MOST = 2**20
"""Of batch elements, heads, elements of a head and tokens of a block: beyond any model."""


def grids_of(
    mask: Any, seq_len: int, block_size: int, shape: AttentionShape
) -> dict[str, BlockGrid]:
    """The block grid of every mask that a plan is made for, by name."""
    masks = dict(mask) if isinstance(mask, Mapping) else {"": mask}
    if not masks:
        raise FlexCPError("at least one mask", "an empty dict", "pass a mask, or a dict of masks")
    for name in masks:
        require("the name of a mask", name, str, "attention(..., mask=) asks for it by this name")
    grids = {name: _merged(_grid(m, seq_len, block_size, shape)) for name, m in masks.items()}
    _require_alike(grids)
    return grids


def _share(name: str, value: object, most: float) -> float | None:
    """A number that is given, or None."""
    if value is None:
        return None
    fix = f"leave {name} out, or pass a number within these bounds"
    return finite_number(name, value, fix=fix, least=0.0, most=most)


_MOST_FLOPS = 2.0**60
"""Of one token: more than any model, and small enough to be counted."""


def require_block_size(block_size: object) -> int:
    """Tokens of a block, if it has as many queries as keys."""
    pair = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(pair) != 2 or as_whole(pair[0]) != as_whole(pair[1]):
        raise FlexCPError(
            "square blocks, since rows and keys of a plan are cut alike",
            f"block_size={quote(block_size)}",
            "pass one number, such as block_size=128",
        )
    fix = "pass block_size=128"
    return whole_number("block_size", pair[0], at_least=1, at_most=_MOST, fix=fix)


def _require_alike(grids: Mapping[str, BlockGrid]) -> None:
    """One layout can only be even for the sum of masks that are cut alike."""
    sizes = {grid.block_size[0] for grid in grids.values()}
    if len(sizes) > 1:
        raise FlexCPError(
            "masks with the same block size, since they share one layout",
            ", ".join(f"{name!r} with blocks of {g.block_size[0]}" for name, g in grids.items()),
            "build all block grids with the same block_size, and pass it to make_plan if some of "
            "the masks are not block grids",
        )


def _grid(mask: Any, seq_len: int, block_size: int, shape: AttentionShape) -> BlockGrid:
    if isinstance(mask, BlockGrid):
        wanted = (seq_len, seq_len, shape.batch, shape.num_heads)
        got = (mask.q_len, mask.kv_len, mask.batch, mask.heads)
        require_block_size(mask.block_size)
        if got[:2] != wanted[:2]:
            raise FlexCPError(
                f"a block grid of {seq_len} x {seq_len} tokens",
                f"one of {mask.q_len} x {mask.kv_len} tokens",
                "build it for the sequence length that is planned for",
            )
        mask.require_planes(*wanted[2:])
        return mask if got == wanted else _expanded(mask, shape)
    mask = as_mask(mask)
    _require_length(mask, seq_len)
    try:
        return grid_of_mask(
            mask,
            seq_len,
            seq_len,
            block_size=(block_size, block_size),
            batch=shape.batch,
            heads=shape.num_heads,
            by_rows=True,
        )
    except IndexOutsideError as error:
        raise FlexCPError(
            f"a mask for seq_len={seq_len}, batch={shape.batch} and num_heads={shape.num_heads}",
            f"{mask.name!r}, which captures a smaller tensor ({error.got})",
            "pass the length that the mask's document ids or other tensors have",
        ) from error


def _require_length(mask: Mask, seq_len: int) -> None:
    """Tensors that a mask indexes by position have to be as long as the sequence."""
    graph = trace_mask(mask.mask_mod)
    positions = {INPUTS.index("q"), INPUTS.index("kv")}
    for node in graph.nodes:
        if node.name != "index" or not isinstance(node.args[0], Ref):
            continue
        table = graph.nodes[node.args[0].node]
        for size, index in zip(table.shape, node.args[1], strict=False):
            by_position = isinstance(index, Ref) and index.node in positions
            if table.is_constant and by_position and size != seq_len:
                raise FlexCPError(
                    f"a mask for seq_len={seq_len}",
                    f"{mask.name!r}, which looks positions up in a tensor of {size}",
                    "pass the length that the mask was made for, or cut its document ids or other "
                    "tensors to the sequence",
                )


def _merged(grid: BlockGrid) -> BlockGrid:
    """One plane, if all have the same tiles and none of them is partial: they are the same mask."""
    first = grid.runs[0]
    if len(grid.runs) == 1 or any(
        bool((runs.kind == BlockKind.PARTIAL).any()) or not runs.equals(first) for runs in grid.runs
    ):
        return grid
    planes = type(grid.planes)(
        grid.planes.b[:1], grid.planes.h[:1], torch.zeros_like(grid.planes.of)
    )
    return BlockGrid(grid.q_len, grid.kv_len, grid.block_size, planes, (first,), grid.mask)


def _expanded(grid: BlockGrid, shape: AttentionShape) -> BlockGrid:
    """A grid for one batch element or head, for all of them."""
    planes = type(grid.planes)(
        grid.planes.b, grid.planes.h, grid.planes.of.expand(shape.batch, shape.num_heads)
    )
    return BlockGrid(grid.q_len, grid.kv_len, grid.block_size, planes, grid.runs, grid.mask)


def require_machine(machine: object) -> Machine:
    """The machine that is meant: itself, a preset by name, or the default for None."""
    if machine is None or isinstance(machine, str):
        return Machine.preset(DEFAULT_MACHINE if machine is None else machine)
    require("machine", machine, Machine, "pass a preset's name, or a flexcp.Machine")
    assert isinstance(machine, Machine)
    return machine


def require_names(layout: str | Layout, schedule: str) -> None:
    """Raises for a layout or schedule that there is not."""
    if not isinstance(layout, Layout) and not (isinstance(layout, str) and layout in LAYOUTS):
        raise FlexCPError(
            f"a layout among {', '.join(LAYOUTS)}, or a Layout",
            quote(layout),
            did_you_mean(layout, LAYOUTS)
            or "pass one of those names, or a Layout made for this sequence",
        )
    if not isinstance(schedule, str) or schedule not in ("auto", *SCHEDULES):
        raise FlexCPError(
            f"a schedule among auto, {', '.join(SCHEDULES)}",
            quote(schedule),
            did_you_mean(schedule, ("auto", *SCHEDULES)) or "pass one of those names",
        )


def _require_layout(layout: str | Layout, seq_len: int, ranks: int, batch: int) -> None:
    if not isinstance(layout, Layout):
        return
    if (layout.seq_len, layout.ranks) != (seq_len, ranks) or layout.batch_elements not in (
        1,
        batch,
    ):
        elements = (
            f" with {layout.batch_elements} batch elements" if layout.batch_elements > 1 else ""
        )
        raise FlexCPError(
            f"a layout of {seq_len} tokens on {ranks} ranks, for batch {batch}",
            f"one of {layout.seq_len} tokens on {layout.ranks} ranks{elements}",
            "make the layout for the sequence, mesh and batch of the plan",
        )
