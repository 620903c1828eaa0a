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
from flexcp.ops.executor import fetched, give_workspace, take_workspace
from flexcp.ops.places import rows_of_spans
from flexcp.ops.program import RankProgram, Source, rank_program
from flexcp.ops.returns import GradientReturns
from flexcp.ops.rows import bound_rounds, fetched_shape
from flexcp.ops.sharded import sharded_op, tell_ranks_on_error, telling_ranks
from flexcp.ops.work import ElementWork, WorkFinder
from flexcp.plan import Plan
from flexcp.schedule import make_schedule


@dataclass(frozen=True, eq=False)
class Fetch:
    """How one rank fetches rows, and returns their gradients."""

    forward: RankProgram
    backward: RankProgram
    work: WorkFinder
    order: Tensor
    """int64 [rows] Where they are, in the order of the sequence: own rows, then those that come."""
    ascending: Tensor
    """int64 [rows] Which rows of the sequence they are then."""
    rows_of_round: tuple[Tensor, ...]
    """int64 Which of them each round of the backward program speaks of."""


def fetch_of(plan: Plan, mask: str) -> Fetch:
    """How this rank fetches what its queries need under a mask, worked out once per plan."""
    return plan.memo.kept(("fetch", mask), lambda: _fetch(plan, mask), per_mask=True)


def work_on_fetched(plan: Plan, mask: str) -> tuple[ElementWork, ...]:
    """What the rank computes against the rows that it fetches, worked out once per plan."""
    fetch = fetch_of(plan, mask)
    return plan.memo.kept(
        ("fetched work", mask), lambda: fetch.work.of(fetch.ascending), per_mask=True
    )


@run_eagerly_on_cpu
def _fetch(plan: Plan, mask: str) -> Fetch:
    rank, grid = plan.ranks.rank, plan.grids[mask]
    assert rank is not None
    schedule = make_schedule("exchange", [grid], plan.layout, keep=True)
    program = rank_program(schedule, None, rank, "forward")
    rows = torch.cat([rows_of_spans(step.work) for step in schedule.steps(rank, "forward")])
    found = torch.cat([_places_of(program, round_.keys) for round_ in program.rounds])
    ascending, order = torch.sort(rows)
    at = torch.full((plan.layout.rows,), -1).scatter_(0, ascending, torch.arange(len(rows)))
    backward = schedule.steps(rank, "backward")
    return Fetch(
        program,
        rank_program(schedule, None, rank, "backward"),
        WorkFinder(schedule, grid, rank, 0),
        found[order],
        ascending,
        tuple(at[rows_of_spans(step.work)] for step in backward),
    )


def _places_of(program: RankProgram, source: Source) -> Tensor:
    """int64 Where rows are, if own rows come before those that arrive."""
    places = source.places
    at = torch.arange(places.rows) + places.first if places.index is None else places.index
    return at if source.of == "own" else at + program.own_rows


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
    dropout_p: float,
    seed: Tensor | None,
    first_head: int,
    in_place: bool,
) -> tuple[Tensor, Tensor]:
    """K and V of all rows that this rank's queries need, side by side; and the call's label.

    With `in_place`, they are where the sequence has them, and `rows` is all of it: what no query
    needs has the values of a row that is there.
    """
    plan = owner_of(handle, keep=True)
    assert isinstance(plan, Plan)
    with tell_ranks_on_error(plan):
        op = sharded_op(
            q, k, v, plan, mask, None, scale, sinks, gradients=gradients, traced=True,
            dropout_p=dropout_p, first_head=first_head,
        )  # fmt: skip
    call = op.begin(0 if seed is None else int(seed))
    labels = call.label.passing("forward")
    fetch = fetch_of(plan, mask)
    program = fetch.forward
    expected = plan.layout.rows if in_place else len(fetch.ascending)
    require_compiled_for("fetched rows", rows, expected)
    require_compiled_for("layouts by batch element (0 or 1)", by_element, program.by_element)
    space = take_workspace(program, k, v)
    kind = space.kind
    whole = kind.empty(program.own_rows + program.arriving_rows)
    own, arriving = whole.split([program.own_rows, program.arriving_rows])
    space.fill(own, k, v)
    bound = bound_rounds(space.program, kind, own, arriving, space.staged, space.gathered)
    with telling_ranks(op.transport, labels):
        for _ in fetched(bound, op.transport, labels):
            pass
    give_workspace(program, space)
    order = fetch.order
    if in_place:
        # Real values, so that a score_mod is not asked about scores that no pair of rows has.
        places = torch.zeros(rows, dtype=torch.int64)
        order = places.index_copy_(0, fetch.ascending, order)
        whole = whole if len(whole) else kind.empty(1).zero_()
    return whole.index_select(0, order.to(whole.device)), call.label.as_tensor()


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
    dropout_p: float,  # noqa: ARG001
    seed: Tensor | None,  # noqa: ARG001
    first_head: int,  # noqa: ARG001
    in_place: bool,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    label = torch.empty(CallLabel.WORDS, dtype=torch.int64)
    return k.new_empty(fetched_shape(k, v, rows, by_element)), label


@torch.library.custom_op("flexcp::return_rows", mutates_args=())
def _return_rows(
    gradient: Tensor, k: Tensor, v: Tensor, handle: Tensor, call: Tensor, mask: str, in_place: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of k and v, from those of the rows that were fetched."""
    plan = owner_of(handle)
    assert isinstance(plan, Plan)
    fetch, transport = fetch_of(plan, mask), plan.transport
    label = CallLabel.of_tensor("attention", call)
    labels = label.passing("backward", transport.calls.next_backward(label))
    space = take_workspace(fetch.backward, k, v)
    returns = GradientReturns(space.gradients, transport, labels)
    with telling_ranks(transport, labels):
        for number, fetched_rows in enumerate(fetch.rows_of_round):
            rows = fetch.ascending[fetched_rows] if in_place else fetched_rows
            for piece in returns.work(number):
                piece.rows.copy_(gradient.index_select(0, rows.to(gradient.device)))
            returns.add_round(number)
        grad_k, grad_v = space.kind.as_tokens(returns.finish(k.dtype))
    give_workspace(fetch.backward, space)
    return grad_k.contiguous(), grad_v.contiguous()


@_return_rows.register_fake
def _(
    gradient: Tensor,  # noqa: ARG001
    k: Tensor,
    v: Tensor,
    handle: Tensor,  # noqa: ARG001
    call: Tensor,  # noqa: ARG001
    mask: str,  # noqa: ARG001
    in_place: bool,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    return k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, k, v, handle, mask, *_ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(k, v, handle, output[1])
    ctx.mask, ctx.in_place = mask, inputs[-1]


def _backward(ctx: Any, gradient: Any, _: Any) -> tuple[Any, ...]:
    grad_k, grad_v = _return_rows(gradient, *ctx.saved_tensors, ctx.mask, ctx.in_place)
    return None, grad_k, grad_v, *[None] * 11


fetch_rows.register_autograd(_backward, setup_context=_setup_context)
