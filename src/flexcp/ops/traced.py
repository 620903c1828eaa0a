"""Attention with a score_mod inside torch.compile: traced, one block of rows at a time.

A score_mod of a compiled function belongs to its graph, together with what it captures, so the
whole computation is made of operations that the compiler sees. Where scores are many, each block of
rows is a checkpoint: they are computed again in the backward pass, and never stored for all rows.
Over a plan, one op fetches the rows of K and V that are needed (`fetch.py`); the rest is as on one
device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flexcp.graph_handles import GraphOwner
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.dropout import Dropout
from flexcp.kernels.head_groups import HeadGroup, select
from flexcp.kernels.interface import Plane, pairs_within
from flexcp.kernels.merge import accumulation_dtype
from flexcp.kernels.program import forbidden_columns
from flexcp.kernels.score import ScoreFunction
from flexcp.ops.arguments import needs_gradients
from flexcp.ops.compiled import handle_of, require_made_outside
from flexcp.ops.dropout import traced_kept
from flexcp.ops.fetch import fetch_of, fetch_rows, work_on_fetched
from flexcp.ops.mask_cache import MaskLike, compiled_shapes_for
from flexcp.ops.positions import in_translation, looking_up, positions_of
from flexcp.ops.sharded import shifted
from flexcp.ops.traced_plans import attend_over_any_plan
from flexcp.ops.traced_rows import attend_by_rows, by_handle
from flexcp.ops.traced_scores import (
    ScoreSemantics,
    attend_to_scores,
    fully_masked,
    fully_masked_rows,
    is_recomputed,
    run_block,
    semantics_of,
)
from flexcp.plan import Plan
from flexcp.torch_names import compiled_frame, compiles_for_many, constant_in_graphs

_ROWS = 256


@dataclass(frozen=True, eq=False)
class _Block:
    """Rows [q0, q1) and the keys [k0, k1) that any of them sees."""

    q0: int
    q1: int
    k0: int
    k1: int
    edges: tuple[tuple[int, int, Tensor], ...]
    """Ranges of columns, ascending, and bool [rows, columns] where the pair may not attend."""


@dataclass(frozen=True, eq=False)
class TracedWork:
    """What a graph computes: which rows against which keys, block by block."""

    b: int | None
    """Which batch element; None for all."""
    keys: list[int] | None
    """Which of the rows of K and V are its keys; None for all."""
    head_groups: tuple[HeadGroup, ...]
    blocks: tuple[tuple[_Block, ...], ...]
    """Of each plane."""
    q_positions: Tensor
    """int64 Global positions of the queries."""
    kv_positions: Tensor
    """int64 Global positions of the keys."""


def _work(
    shapes: CompiledShapes,
    batch: int,
    heads: int,
    kv_heads: int,
    b: int | None = None,
    keys: list[int] | None = None,
) -> TracedWork:
    """The work of tensors with so many batch elements, query heads and kv heads."""
    cpu = torch.device("cpu")
    return TracedWork(
        b,
        keys,
        shapes.head_groups(batch, heads, kv_heads),
        tuple(tuple(_blocks(plane, shapes.shapes.q_len)) for plane in shapes.shapes.planes),
        shapes.positions("q", cpu),
        shapes.positions("kv", cpu),
    )


@constant_in_graphs
def _local_work(mask: MaskLike | None, *sizes: int) -> list[TracedWork]:
    require_made_outside(mask)
    if isinstance(mask, GraphOwner):
        mask.note_own_graph(compiled_frame())
    batch, heads, q_len, kv_heads, kv_len = sizes
    query = torch.empty(batch, heads, q_len, 1, device="meta")
    key = torch.empty(batch, kv_heads, kv_len, 1, device="meta")
    return [_work(compiled_shapes_for(mask, query, key), batch, heads, kv_heads)]


@constant_in_graphs
def _sharded_work(
    plan: Plan, mask: str, batch: int, heads: int, kv_heads: int
) -> tuple[int, list[TracedWork]]:
    """How many rows are fetched, and what is computed with them."""
    plan.note_own_graph(compiled_frame())
    fetch = fetch_of(plan, mask)
    found = []
    for work in work_on_fetched(plan, mask):
        size = batch if work.b is None else 1
        keys = None if work.b is None else list(range(work.first, work.first + work.rows))
        found.append(_work(work.shapes, size, heads, kv_heads, work.b, keys))
    return len(fetch.ascending), found


def traced_local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike | None,
    score_mod: ScoreFunction,
    scale: float,
    sinks: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and the largest scores of one device, in operations that a compiler can see."""
    positions = positions_of(mask, q.device)
    dropout = Dropout(dropout_p, seed, positions=positions) if seed is not None else None
    if positions is None and compiles_for_many():
        bool(getattr(mask, "own_graph", ""))  # makes dynamo guard on it
        forbidden = by_handle(handle_of(mask), q, k)
        return attend_by_rows(q, k, v, forbidden, None, score_mod, scale, sinks, dropout)
    if positions is not None:
        score_mod = looking_up(score_mod, *positions)
    id(mask)  # makes dynamo guard on which object it is
    work = _local_work(mask, *q.shape[:3], *k.shape[1:3])
    found: tuple[Tensor, Tensor, Tensor] = in_translation(
        positions, _attend_to, q, k, v, work, score_mod, scale, sinks, None, dropout
    )
    return found


def traced_sharded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    mask: str | None,
    score_mod: ScoreFunction,
    scale: float | None,
    sinks: Tensor | None,
    gradients: bool,
    dropout_p: float,
    seed: Tensor | None,
    first_head: int,
) -> tuple[Tensor, Tensor]:
    """Out and lse over a plan, in one op that fetches and operations that a compiler can see."""
    name = plan.mask_name(mask)
    plan.require_mesh()
    if compiles_for_many():
        bool(plan.own_graph)  # makes dynamo guard on it
        return attend_over_any_plan(
            q, k, v, plan, name, score_mod, scale, sinks, gradients, dropout_p, seed, first_head
        )
    handle = plan.graph_handle
    _mark_static(q, k, v)
    # As an argument of what is marked constant, the plan is guarded on by its identity.
    rows, work = _sharded_work(plan, name, q.shape[0], q.shape[1], k.shape[1])
    by_element = plan.layout.batch_elements > 1
    given = None if sinks is None else sinks.detach()
    fetched, _ = fetch_rows(
        q.detach(), k, v, handle, name, scale, given, gradients, by_element, rows, dropout_p, seed,
        first_head, False,
    )  # fmt: skip
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    dropout = Dropout(dropout_p, seed, first_head=first_head) if seed is not None else None
    out, lse, _ = _attend_to(q, k, v, work, score_mod, factor, sinks, fetched, dropout)
    return out, lse


def _mark_static(*tensors: Tensor) -> None:
    for x in tensors:
        for dim in range(4):
            torch._dynamo.mark_static(x, dim)


def _attend_to(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    work: list[TracedWork],
    score_mod: ScoreFunction,
    scale: float,
    sinks: Tensor | None,
    fetched: Tensor | None,
    dropout: Dropout | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and the largest scores.

    `fetched` are the rows of K and V to attend to, side by side: [n, B, G, D + Dv], or
    [n, G, D + Dv] where batch elements have rows of their own; None for k and v themselves.
    """
    d = k.shape[3]
    if fetched is None or fetched.dim() == 4:
        if fetched is not None:
            fetched = fetched.permute(1, 2, 0, 3)
        keys = (k, v) if fetched is None else (fetched[..., :d], fetched[..., d:])
        if not work:
            return fully_masked_rows(q, v, sinks)
        return _run_work(work[0], q, *keys, score_mod, scale, sinks, dropout)
    by_number = {each.b: each for each in work}
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for b in range(q.shape[0]):
        each, own = by_number.get(b), q[b : b + 1]
        if each is None:
            parts.append(fully_masked_rows(own, v, sinks))
            continue
        picked = fetched[torch.tensor(each.keys, device=fetched.device)]
        rows = picked.permute(1, 0, 2)[None]
        mod = shifted(score_mod, b, 0)
        keys = (rows[..., :d], rows[..., d:])
        drops = None if dropout is None else dropout.of_element(b)
        parts.append(_run_work(each, own, *keys, mod, scale, sinks, drops))
    out, lse, highest = (torch.cat(found) for found in zip(*parts, strict=True))
    return out, lse, highest


def _blocks(plane: Plane, q_len: int) -> list[_Block]:
    found = []
    for q0 in range(0, q_len, _ROWS):
        q1 = min(q0 + _ROWS, q_len)
        slabs = [
            s.cut(max(s.q0, q0), min(s.q1, q1)) for s in plane.slabs if s.q0 < q1 and s.q1 > q0
        ]
        tiles = [t for t in plane.tiles if t.q0 < q1 and t.q1 > q0]
        bounds = [s.bounds for s in slabs] + [(t.k0, t.k1) for t in tiles]
        if not bounds:
            continue
        k0, k1 = min(b[0] for b in bounds), max(b[1] for b in bounds)
        allowed = pairs_within(plane, q0, q1, k0, k1)
        forbidden, _ = forbidden_columns(allowed)
        edges = tuple((f.c0, f.c1, f.pairs) for f in forbidden)
        found.append(_Block(q0, q1, k0, k1, edges))
    return found


def _run_work(
    work: TracedWork,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction,
    scale: float,
    sinks: Tensor | None,
    dropout: Dropout | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and the largest scores of queries against all keys that the work speaks of."""
    groups = [
        _run_head_group(work, group, query, key, value, score_mod, scale, sinks, dropout)
        for group in work.head_groups
    ]
    heads = query.shape[1]
    order = [
        b * heads + h
        for group in work.head_groups
        for b in group.batch_elements
        for h in group.q_heads
    ]
    place = [order.index(i) for i in range(len(order))]
    out, lse, highest = (
        found[0] if len(groups) == 1 else _in_order(found, place, heads)
        for found in zip(*groups, strict=True)
    )
    return out.to(query.dtype), lse, highest.detach()


def _in_order(parts: tuple[Tensor, ...], place: list[int], heads: int) -> Tensor:
    """The results of head groups, put back into the order of batch elements and heads."""
    flat = [row for part in parts for row in part.flatten(0, 1).unbind(0)]
    return torch.stack([flat[i] for i in place]).unflatten(0, (-1, heads))  # type: ignore[no-any-return]


def _run_head_group(
    work: TracedWork,
    heads: HeadGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction,
    scale: float,
    sinks: Tensor | None,
    dropout: Dropout | None,
) -> list[Tensor]:
    dtype, device = accumulation_dtype(query.dtype), query.device
    b = torch.tensor(heads.batch_elements, device=device)
    h = torch.tensor(heads.q_heads, device=device)
    group = len(heads.q_heads) // len(heads.kv_heads)
    q = select(query, heads.batch_elements, heads.q_heads).to(dtype) * scale
    k, v = (
        select(x, heads.batch_elements, heads.kv_heads).to(dtype).repeat_interleave(group, dim=1)
        for x in (key, value)
    )
    sink = None if sinks is None else sinks.to(dtype)[h][None, :, None, None]

    def rows(
        block: _Block, semantics: ScoreSemantics, q: Tensor, k: Tensor, v: Tensor
    ) -> list[Tensor]:
        q_pos = work.q_positions[block.q0 : block.q1].to(device)
        kv_pos = work.kv_positions[block.k0 : block.k1].to(device)
        products = q @ k.transpose(-1, -2)
        allowed = _allowed_pairs(block, products) if block.edges else None
        scores = semantics.modify(score_mod, products, allowed, b, h, q_pos, kv_pos)
        for c0, c1, pairs in block.edges:
            edge = scores[..., c0:c1].masked_fill(pairs.to(device), -torch.inf)
            scores = torch.cat([scores[..., :c0], edge, scores[..., c1:]], dim=-1)
        kept = None
        if dropout is not None:
            if dropout.positions is not None:
                q_pos, kv_pos = (
                    x[..., start:stop] if x.dim() == 1 else x[b, None, start:stop]
                    for x, start, stop in zip(
                        dropout.positions, (block.q0, block.k0), (block.q1, block.k1), strict=True
                    )
                )
            kept = traced_kept(
                dropout, b[:, None, None, None], h[:, None, None], q_pos[..., None],
                kv_pos[..., None, :],
            )  # fmt: skip
        return attend_to_scores(scores, v, sink, kept, 1.0 if dropout is None else dropout.factor)

    blocks = work.blocks[heads.plane]
    pairs = sum((block.q1 - block.q0) * (block.k1 - block.k0) for block in blocks)
    scores = len(b) * len(h) * pairs
    again = is_recomputed(needs_gradients(query, key, value, sinks), scores)
    semantics = semantics_of(
        again, score_mod, b, h, work.q_positions.to(device), work.kv_positions.to(device)
    )
    parts: list[list[Tensor]] = []
    done = 0
    for block in blocks:
        if block.q0 > done:
            parts.append(fully_masked(q[:, :, done : block.q0], v, sink))
        keys = slice(block.k0, block.k1)
        part = run_block(
            again, semantics, partial(rows, block),
            q[:, :, block.q0 : block.q1], k[:, :, keys], v[:, :, keys],
        )  # fmt: skip
        parts.append(part)
        done = block.q1
    if done < q.shape[2]:
        parts.append(fully_masked(q[:, :, done:], v, sink))
    return [torch.cat(found, dim=2) for found in zip(*parts, strict=True)]


def _allowed_pairs(block: _Block, scores: Tensor) -> Tensor:
    """Bool, of the shape of a block's scores: which pairs may attend."""
    rows, columns, done, parts = *scores.shape[-2:], 0, []
    for c0, c1, pairs in block.edges:
        parts += [scores.new_ones(rows, c0 - done, dtype=torch.bool), ~pairs.to(scores.device)]
        done = c1
    parts.append(scores.new_ones(rows, columns - done, dtype=torch.bool))
    return torch.cat(parts, dim=1).expand_as(scores)
