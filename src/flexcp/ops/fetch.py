"""Rows that a rank's queries need, fetched by one op of a compiled graph, and their gradients.

The op fetches each row from its owner, whatever the plan's schedule is, so that what follows can be
made of operations that a compiler sees. That takes memory for the fetched rows, and nothing is
computed while they travel: outside of torch.compile neither is so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexcp.comm import CallLabel
from flexcp.eager import run_eagerly_on_cpu
from flexcp.graph_handles import owner_of, require_compiled_for
from flexcp.ops.executor import GradientReturns, KVPrefetcher
from flexcp.ops.program import RankPrograms, WorkFinder, rows_of_spans
from flexcp.ops.rows import ROW, KVRows, joined, shape_of_rows
from flexcp.ops.sharded import sharded_op, tell_ranks_on_error
from flexcp.plan import Plan
from flexcp.schedule import make_schedule


@dataclass(frozen=True, eq=False)
class Fetch:
    """How one rank fetches rows, and returns their gradients."""

    programs: RankPrograms
    rows_of_round: tuple[Tensor, ...]
    """int64 Which of the fetched rows each round of the backward program speaks of."""
    rows: int
    """How many are fetched, own rows included."""
    work: WorkFinder
    order: Tensor
    """int64 [rows] Puts them, as they come, in the order of the sequence."""
    ascending: Tensor
    """int64 [rows] Which rows of the sequence they are then."""


def fetch_of(plan: Plan, mask: str) -> Fetch:
    """How this rank fetches what its queries need under a mask, worked out once per plan."""
    return plan.memo.kept(("fetch", mask), lambda: _fetch(plan, mask), per_mask=True)


@run_eagerly_on_cpu
def _fetch(plan: Plan, mask: str) -> Fetch:
    rank, grid = plan.ranks.rank, plan.grids[mask]
    assert rank is not None
    schedule = make_schedule("exchange", [grid], plan.layout, keep=True)
    came = torch.cat([rows_of_spans(step.work) for step in schedule.steps(rank, "forward")])
    ascending, order = torch.sort(came)
    place = torch.full((plan.layout.rows,), -1).scatter_(0, ascending, torch.arange(len(came)))
    return Fetch(
        RankPrograms(schedule, grid, rank),
        tuple(place[rows_of_spans(step.work)] for step in schedule.steps(rank, "backward")),
        len(came),
        WorkFinder(schedule, grid, rank, 0),
        order,
        ascending,
    )


@torch.library.custom_op("flexcp::fetch_rows", mutates_args=())
def fetch_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    handle: Tensor,
    mask: str,
    scale: float | None,
    sinks: Tensor | None,
    gradients: bool,
    by_element: bool,
    rows: int,
) -> Tensor:
    """K and V of all rows that this rank's queries need, side by side."""
    plan = owner_of(handle, keep=True)
    assert isinstance(plan, Plan)
    with tell_ranks_on_error(plan):
        op = sharded_op(q, k, v, plan, mask, None, scale, sinks, gradients=gradients, traced=True)
    labels = op.begin().label.passing("forward")
    fetch = fetch_of(plan, mask)
    program = fetch.programs.forward
    require_compiled_for("fetched rows", rows, fetch.rows)
    require_compiled_for("layouts by batch element (0 or 1)", by_element, program.by_element)
    own = KVRows.of(k, v, program)
    fetched = KVPrefetcher(program, op.transport, own, labels)
    came = joined([fetched.keys(round_) for round_ in fetched])
    return came.index_select(ROW, fetch.order.to(came.device))


@fetch_rows.register_fake
def _(
    q: Tensor,  # noqa: ARG001
    k: Tensor,
    v: Tensor,
    handle: Tensor,  # noqa: ARG001
    mask: str,  # noqa: ARG001
    scale: float | None,  # noqa: ARG001
    sinks: Tensor | None,  # noqa: ARG001
    gradients: bool,  # noqa: ARG001
    by_element: bool,
    rows: int,
) -> Tensor:
    return k.new_empty(shape_of_rows(k, v, rows, by_element))


@torch.library.custom_op("flexcp::return_rows", mutates_args=())
def _return_rows(
    gradient: Tensor, k: Tensor, v: Tensor, handle: Tensor, mask: str
) -> tuple[Tensor, Tensor]:
    """The gradients of k and v, from those of the rows that were fetched."""
    plan = owner_of(handle)
    assert isinstance(plan, Plan)
    fetch, transport = fetch_of(plan, mask), plan.transport
    program = fetch.programs.backward
    own = KVRows.of(k, v, program)
    returns = GradientReturns(
        program, transport, own, gradient.dtype, CallLabel("x", b"", 0).passing("backward")
    )
    for number, round_ in enumerate(program.rounds):
        index = fetch.rows_of_round[number].to(gradient.device)
        returns.add_round(number, round_, gradient.index_select(ROW, index))
    grad_k, grad_v = returns.finish()
    return grad_k.to(k.dtype).contiguous(), grad_v.to(v.dtype).contiguous()


@_return_rows.register_fake
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
    grad_k, grad_v = _return_rows(gradient, k, v, handle, ctx.mask)
    return None, grad_k, grad_v, *[None] * 7


fetch_rows.register_autograd(_backward, setup_context=_setup_context)
