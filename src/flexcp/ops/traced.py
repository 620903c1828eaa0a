"""Attention with a score_mod inside torch.compile: traced, one block of rows at a time.

A score_mod of a compiled function belongs to its graph, together with what it captures, so the
whole computation is made of operations that the compiler sees. Each block of rows is a
checkpoint: its scores are computed again in the backward pass, and never stored for all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.head_groups import HeadGroup, select
from flexcp.kernels.interface import Plane
from flexcp.kernels.merge import accumulation_dtype
from flexcp.kernels.program import forbidden_columns
from flexcp.kernels.score import ScoreFunction
from flexcp.ops.mask_cache import MaskLike, compiled_shapes_for

_ROWS = 256


@dataclass(frozen=True, eq=False)
class _Block:
    """Rows [q0, q1) and the keys [k0, k1) that any of them sees."""

    q0: int
    q1: int
    k0: int
    k1: int
    edges: tuple[tuple[int, int, Tensor], ...]
    """Ranges of columns, and bool [rows, columns] where the pair may not attend."""


@dataclass(frozen=True, eq=False)
class TracedPlan:
    """What a graph computes: which rows against which keys, block by block."""

    lanes: tuple[HeadGroup, ...]
    blocks: tuple[tuple[_Block, ...], ...]
    """Of each plane."""
    q_positions: Tensor
    kv_positions: Tensor


def traced_plan(prepared: CompiledShapes, q_len: int, *sizes: int) -> TracedPlan:
    """The plan for tensors with so many batch elements, query heads and kv heads."""
    cpu = torch.device("cpu")
    return TracedPlan(
        prepared.head_groups(*sizes),
        tuple(tuple(_blocks(plane, q_len)) for plane in prepared.shapes.planes),
        prepared.positions("q", cpu),
        prepared.positions("kv", cpu),
    )


def _plan(block_mask: MaskLike | None, *sizes: int) -> TracedPlan:
    batch, heads, q_len, kv_heads, kv_len = sizes
    query = torch.empty(batch, heads, q_len, 1, device="meta")
    key = torch.empty(batch, kv_heads, kv_len, 1, device="meta")
    return traced_plan(compiled_shapes_for(block_mask, query, key), q_len, batch, heads, kv_heads)


# What `torch._dynamo.assume_constant_result` does, without importing dynamo.
_plan._dynamo_marked_constant = True  # type: ignore[attr-defined]


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
        allowed = torch.zeros(q1 - q0, k1 - k0, dtype=torch.bool)
        column = torch.arange(k0, k1)
        for s in slabs:
            i = torch.arange(s.rows)[:, None]
            inside = (column >= s.k0 + i * s.k0_step) & (column < s.k1 + i * s.k1_step)
            allowed[s.q0 - q0 : s.q1 - q0] |= inside
        for t in tiles:
            rows = slice(max(t.q0, q0), min(t.q1, q1))
            part = t.bits[rows.start - t.q0 : rows.stop - t.q0]
            allowed[rows.start - q0 : rows.stop - q0, t.k0 - k0 : t.k1 - k0] |= part
        forbidden, _ = forbidden_columns(allowed)
        edges = tuple((f.c0, f.c1, f.pairs) for f in forbidden)
        found.append(_Block(q0, q1, k0, k1, edges))
    return found


def traced_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction,
    block_mask: MaskLike | None,
    scale: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and the largest scores, in operations that a compiler can see."""
    id(block_mask)  # makes dynamo guard on which object it is
    for x in (query, key, value):
        for dim in range(4):
            torch._dynamo.mark_static(x, dim)
    plan = _plan(block_mask, *query.shape[:3], *key.shape[1:3])
    return run_traced(plan, query, key, value, score_mod, scale, sinks)


def run_traced(
    plan: TracedPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction,
    scale: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Likewise, with a plan that was made before."""
    lanes = [
        _run_lane(plan, lane, query, key, value, score_mod, scale, sinks) for lane in plan.lanes
    ]
    heads = query.shape[1]
    order = [b * heads + h for lane in plan.lanes for b in lane.batches for h in lane.q_heads]
    place = [order.index(i) for i in range(len(order))]
    out, lse, highest = (
        found[0] if len(lanes) == 1 else _in_order(found, place, heads)
        for found in zip(*lanes, strict=True)
    )
    return out.to(query.dtype), lse, highest.detach()


def _in_order(parts: tuple[Tensor, ...], place: list[int], heads: int) -> Tensor:
    """The results of lanes, put back into the order of batch elements and heads."""
    flat = [row for part in parts for row in part.flatten(0, 1).unbind(0)]
    return torch.stack([flat[i] for i in place]).unflatten(0, (-1, heads))  # type: ignore[no-any-return]


def _run_lane(
    plan: TracedPlan,
    lane: HeadGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction,
    scale: float,
    sinks: Tensor | None,
) -> list[Tensor]:
    dtype, device = accumulation_dtype(query.dtype), query.device
    b = torch.tensor(lane.batches, device=device)
    h = torch.tensor(lane.q_heads, device=device)
    group = len(lane.q_heads) // len(lane.kv_heads)
    q = select(query, lane.batches, lane.q_heads).to(dtype) * scale
    k, v = (
        select(x, lane.batches, lane.kv_heads).to(dtype).repeat_interleave(group, dim=1)
        for x in (key, value)
    )
    sink = None if sinks is None else sinks.to(dtype)[h][None, :, None, None]

    def rows(block: _Block, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        q_pos = plan.q_positions[block.q0 : block.q1].to(device)
        kv_pos = plan.kv_positions[block.k0 : block.k1].to(device)
        scores = _modified(score_mod, q @ k.transpose(-1, -2), b, h, q_pos, kv_pos)
        for c0, c1, pairs in block.edges:
            edge = scores[..., c0:c1].masked_fill(pairs.to(device), -torch.inf)
            scores = torch.cat([scores[..., :c0], edge, scores[..., c1:]], dim=-1)
        return _attend(scores, v, sink)

    parts: list[list[Tensor]] = []
    done = 0
    for block in plan.blocks[lane.plane]:
        if block.q0 > done:
            parts.append(_blind(q[:, :, done : block.q0], v, sink))
        keys = slice(block.k0, block.k1)
        part = checkpoint(
            lambda *x, block=block: rows(block, *x),
            q[:, :, block.q0 : block.q1], k[:, :, keys], v[:, :, keys],
            use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
        parts.append(part)
        done = block.q1
    if done < q.shape[2]:
        parts.append(_blind(q[:, :, done:], v, sink))
    return [torch.cat(found, dim=2) for found in zip(*parts, strict=True)]


def _attend(scores: Tensor, v: Tensor, sink: Tensor | None) -> list[Tensor]:
    """out, lse and largest score of rows whose scores are known; -inf marks forbidden pairs."""
    highest = scores.detach().amax(-1)
    logits = scores
    if sink is not None:
        logits = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], dim=-1)
    blind = (logits == -torch.inf).all(-1, keepdim=True)
    # Zeros in place of a row of -inf keep autograd away from inf - inf.
    safe = logits.masked_fill(blind, 0.0)
    lse = torch.logsumexp(safe, dim=-1, keepdim=True)
    weights = (safe - lse).exp().masked_fill(blind, 0.0)[..., : scores.shape[-1]]
    return [weights @ v, lse.masked_fill(blind, -torch.inf).squeeze(-1), highest]


def _blind(q: Tensor, v: Tensor, sink: Tensor | None) -> list[Tensor]:
    """out, lse and largest score of rows that see no key."""
    nothing = q.new_full(q.shape[:3], -torch.inf)
    return [
        q.new_zeros((*q.shape[:3], v.shape[-1])),
        nothing if sink is None else sink.squeeze(-1).expand(q.shape[:3]),
        nothing,
    ]


def no_keys(query: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Out and lse of queries without any key."""
    dtype = accumulation_dtype(query.dtype)
    sink = None if sinks is None else sinks.to(dtype)[None, :, None, None]
    out, lse, _ = _blind(query.to(dtype), value, sink)
    return out.to(query.dtype), lse


def _modified(
    score_mod: ScoreFunction, scores: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor
) -> Tensor:
    mapped = score_mod
    for dims in (
        (0, None, None, None, 0),
        (0, None, None, 0, None),
        (0, None, 0, None, None),
        (0, 0, None, None, None),
    ):
        mapped = torch.func.vmap(mapped, in_dims=dims)
    return mapped(scores, b, h, q, kv)
