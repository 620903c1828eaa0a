"""Attention over a plan with a score_mod inside torch.compile: fetched rows, and a traced rest.

A score_mod of a compiled function belongs to its graph, with what it captures. So one op fetches
all rows of K and V that this rank's queries need, each from its owner, whatever the plan's schedule
is; what follows is made of operations that the compiler sees. That takes memory for the fetched
rows, and nothing is computed while they travel: outside of torch.compile neither is so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexcp.eager import run_eagerly_on_cpu
from flexcp.graph_handles import owner_of
from flexcp.kernels.score import ScoreFunction
from flexcp.ops.agreement import refusing
from flexcp.ops.executor import run_gather, run_scatter
from flexcp.ops.passes import prepare_call, shifted, transport_of
from flexcp.ops.rank_program import RankProgram, Work, rank_program, rows_of_spans
from flexcp.ops.rows import ROW, shape_of_rows
from flexcp.ops.traced import TracedPlan, no_keys, run_traced, traced_plan
from flexcp.plan import Plan
from flexcp.schedule import make_schedule


@dataclass(frozen=True, eq=False)
class _Fetch:
    """How one rank fetches rows, and returns their gradients."""

    forward: RankProgram
    backward: RankProgram
    rows_of_round: tuple[Tensor, ...]
    """int64 Which of the fetched rows each round of the backward program speaks of."""
    rows: int
    """How many are fetched, own rows included."""
    work: Work
    order: Tensor
    """int64 [rows] Puts them, as they come, in the order of the sequence."""
    ascending: Tensor
    """int64 [rows] Which rows of the sequence they are then."""


def _fetch(plan: Plan, mask: str) -> _Fetch:
    """Made once per plan and mask."""
    kept: dict[str, _Fetch] = vars(plan).setdefault("_fetches", {})
    if mask not in kept:
        kept[mask] = _make_fetch(plan, mask)
    return kept[mask]


@run_eagerly_on_cpu
def _make_fetch(plan: Plan, mask: str) -> _Fetch:
    rank, grid = plan.ranks.rank, plan.grids[mask]
    assert rank is not None
    schedule = make_schedule("exchange", [grid], plan.layout, keep=True)
    came = torch.cat([rows_of_spans(step.work) for step in schedule.steps(rank, "forward")])
    ascending, order = torch.sort(came)
    place = torch.full((plan.layout.rows,), -1).scatter_(0, ascending, torch.arange(len(came)))
    return _Fetch(
        rank_program(schedule, grid, rank, "forward"),
        rank_program(schedule, grid, rank, "backward"),
        tuple(place[rows_of_spans(step.work)] for step in schedule.steps(rank, "backward")),
        len(came),
        Work(schedule, grid, rank, 0),
        order,
        ascending,
    )


@dataclass(frozen=True, eq=False)
class _Lane:
    """The work of one batch element, or of all."""

    b: int | None
    keys: list[int] | None
    """Which of the fetched rows are its keys; None for all."""
    plan: TracedPlan


def _lanes(plan: Plan, mask: str, batch: int, heads: int, kv_heads: int) -> tuple[int, list[_Lane]]:
    """How many rows are fetched, and what is computed with them."""
    fetch = _fetch(plan, mask)
    found = []
    for lane in fetch.work.lanes(fetch.ascending):
        size = batch if lane.b is None else 1
        traced = traced_plan(lane.prepared, lane.prepared.shapes.q_len, size, heads, kv_heads)
        found.append(_Lane(lane.b, None if lane.b is None else lane.keys.tolist(), traced))
    return fetch.rows, found


# What `torch._dynamo.assume_constant_result` does, without importing dynamo.
_lanes._dynamo_marked_constant = True  # type: ignore[attr-defined]


def traced_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    mask: str | None,
    score_mod: ScoreFunction,
    scale: float | None,
    sinks: Tensor | None,
    gradients: str,
) -> tuple[Tensor, Tensor]:
    """Out and lse, in one op that fetches and operations that a compiler can see."""
    name = plan.mask_name(mask)
    plan.require_mesh()
    handle = plan.compiler_handle
    id(plan)  # makes dynamo guard on which object it is
    for x in (q, k, v):
        for dim in range(4):
            torch._dynamo.mark_static(x, dim)
    rows, lanes = _lanes(plan, name, q.shape[0], q.shape[1], k.shape[1])
    by_element = plan.layout.batch_elements > 1
    extras = "score_mod, traced" + ("" if sinks is None else ", sinks")
    both = _fetched(q.detach(), k, v, handle, name, scale, extras, gradients, by_element, rows)
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    parts: list[tuple[Tensor, Tensor]] = []
    by_number = {lane.b: lane for lane in lanes}
    for b in range(q.shape[0]) if by_element else (None,):
        lane = by_number.get(b)
        own = q if b is None else q[b : b + 1]
        if lane is None:
            parts.append(no_keys(own, v, sinks))
            continue
        if lane.b is None:
            keys, mod = both, score_mod
        else:
            keys = both[:, torch.tensor(lane.keys, device=both.device)][None]
            mod = shifted(score_mod, lane.b, 0)
        own_k, own_v = keys[..., : k.shape[3]], keys[..., k.shape[3] :]
        parts.append(run_traced(lane.plan, own, own_k, own_v, mod, factor, sinks)[:2])
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)


@torch.library.custom_op("flexcp::fetch_rows", mutates_args=())
def _fetched(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    handle: Tensor,
    mask: str,
    scale: float | None,
    extras: str,
    gradients: str,
    by_element: bool,
    rows: int,
) -> Tensor:
    """K and V of all rows that this rank's queries need, side by side."""
    plan = owner_of(handle)
    assert isinstance(plan, Plan)
    with refusing(plan):
        call = prepare_call(q, k, v, plan, mask, None, scale, None)
    call.agree(gradients, extras)
    fetch = _fetch(plan, mask)
    assert (fetch.rows, fetch.forward.by_element) == (rows, by_element)
    came = run_gather(fetch.forward, call.transport, k, v, call.mask)
    return came.index_select(ROW, fetch.order.to(came.device))


@_fetched.register_fake
def _(
    q: Tensor,  # noqa: ARG001
    k: Tensor,
    v: Tensor,
    handle: Tensor,  # noqa: ARG001
    mask: str,  # noqa: ARG001
    scale: float | None,  # noqa: ARG001
    extras: str,  # noqa: ARG001
    gradients: str,  # noqa: ARG001
    by_element: bool,
    rows: int,
) -> Tensor:
    return k.new_empty(shape_of_rows(k, v, rows, by_element))


@torch.library.custom_op("flexcp::return_rows", mutates_args=())
def _returned(
    gradient: Tensor, k: Tensor, v: Tensor, handle: Tensor, mask: str
) -> tuple[Tensor, Tensor]:
    """The gradients of k and v, from those of the rows that were fetched."""
    plan = owner_of(handle)
    assert isinstance(plan, Plan)
    fetch, (transport, _) = _fetch(plan, mask), transport_of(plan)
    grad_k, grad_v = run_scatter(
        fetch.backward, transport, gradient, k, v, fetch.rows_of_round, mask
    )
    return grad_k.to(k.dtype).contiguous(), grad_v.to(v.dtype).contiguous()


@_returned.register_fake
def _(
    gradient: Tensor,  # noqa: ARG001
    k: Tensor,
    v: Tensor,
    handle: Tensor,  # noqa: ARG001
    mask: str,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    return k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001
    _, k, v, handle, mask, *_ = inputs
    ctx.save_for_backward(k, v, handle)
    ctx.mask = mask


def _backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
    k, v, handle = ctx.saved_tensors
    grad_k, grad_v = _returned(gradient, k, v, handle, ctx.mask)
    return None, grad_k, grad_v, None, None, None, None, None, None, None


_fetched.register_autograd(_backward, setup_context=_setup_context)
