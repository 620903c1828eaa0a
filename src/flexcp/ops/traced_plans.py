"""Attention with a score_mod over plans that change, inside torch.compile: one graph for all.

`traced.py` writes out the blocks of one plan, so that its graph is of that plan alone. This is what
is compiled once another one has come: the rows that are fetched are put where the sequence has
them, and each of the rank's rows is computed against the whole of it. Which rows are the rank's,
and which pairs are forbidden, is read where the graph runs, by the plan's handle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from flexcp.graph_handles import owner_of
from flexcp.kernels.dropout import Dropout
from flexcp.kernels.interface import pairs_within
from flexcp.kernels.score import ScoreFunction
from flexcp.ops.fetch import fetch_of, fetch_rows, work_on_fetched
from flexcp.ops.sharded import shifted
from flexcp.ops.traced_rows import attend_by_rows
from flexcp.plan import Plan


def attend_over_any_plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    mask: str,
    score_mod: ScoreFunction,
    scale: float | None,
    sinks: Tensor | None,
    gradients: bool,
    dropout_p: float,
    seed: Tensor | None,
    first_head: int,
) -> tuple[Tensor, Tensor]:
    """Out and lse; arguments are those of `attention`."""
    handle, length = plan.graph_handle, plan.length_as_shape.shape[0] - 2
    by_element = plan.layout.batch_elements > 1
    rows = length * q.shape[0] if by_element else length
    shape_of, d = (q.detach(), k.detach()), k.shape[3]
    fetched, _ = fetch_rows(
        q.detach(), k, v, handle, mask, scale, None if sinks is None else sinks.detach(), gradients,
        by_element, rows, dropout_p, seed, first_head, True,
    )  # fmt: skip
    if by_element:
        whole = fetched.unflatten(0, (q.shape[0], length)).transpose(1, 2)
    else:
        whole = fetched.permute(1, 2, 0, 3)
    positions: Tensor = rank_positions(handle, q.detach(), by_element)
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    dropout = Dropout(dropout_p, seed, first_head=first_head) if seed is not None else None

    def forbidden(b: int) -> Callable[[Tensor], Tensor]:
        return lambda rows: forbidden_over_plan(handle, mask, *shape_of, rows, length, b)

    if not by_element:
        out, lse, _ = attend_by_rows(
            q, whole[..., :d], whole[..., d:], forbidden(-1), None, score_mod, factor, sinks,
            dropout, positions[0],
        )  # fmt: skip
        return out, lse
    parts = []
    for b in range(q.shape[0]):
        own = whole[b : b + 1]
        drops = None if dropout is None else dropout.of_element(b)
        parts.append(
            attend_by_rows(
                q[b : b + 1], own[..., :d], own[..., d:], forbidden(b), None,
                shifted(score_mod, b, 0), factor, sinks, drops, positions[b],
            )
        )  # fmt: skip
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


@torch.library.custom_op("flexcp::rank_positions", mutates_args=())
def rank_positions(handle: Tensor, q: Tensor, by_element: bool) -> Tensor:  # noqa: ARG001
    """int64 [1, L] Global positions of the rank's rows; [B, L] where batch elements differ."""
    plan = cast(Plan, owner_of(handle, keep=True))
    assert plan.ranks.rank is not None
    found = plan.layout.positions(plan.ranks.rank)
    return found.reshape(-1, q.shape[2]).to(q.device, copy=True)


@rank_positions.register_fake
def _(handle: Tensor, q: Tensor, by_element: bool) -> Tensor:  # noqa: ARG001
    return q.new_empty((q.shape[0] if by_element else 1, q.shape[2]), dtype=torch.int64)


@torch.library.custom_op("flexcp::forbidden_over_plan", mutates_args=())
def forbidden_over_plan(
    handle: Tensor, mask: str, q: Tensor, k: Tensor, rows: Tensor, length: int, b: int
) -> Tensor:
    """Bool [B, H, rows, length]: where a pair may not attend, by a mask of a plan.

    Args:
        handle: The plan's.
        mask: Which of its masks.
        q: [B, H, L, D], of which only the shape is read.
        k: [B, G, L, D], of which only the shape is read.
        rows: int64 Which of the rank's rows are asked for, ascending.
        length: Of the sequence.
        b: The batch element that is asked for, where they have layouts of their own; -1 for all.
    """
    plan = cast(Plan, owner_of(handle, keep=True))
    batch, heads, kv_heads = q.shape[0] if b < 0 else 1, q.shape[1], k.shape[1]
    asked = rows.cpu()
    found = torch.ones(batch, heads, len(asked), length, dtype=torch.bool)
    fetched = fetch_of(plan, mask).ascending
    for work in work_on_fetched(plan, mask):
        if len(asked) == 0 or (work.b is not None and work.b != b):
            continue
        first, last = int(asked[0]), int(asked[-1]) + 1
        columns = fetched[work.first : work.first + work.rows] - (work.b or 0) * length
        shapes = work.shapes.shapes
        for group in work.shapes.head_groups(batch, heads, kv_heads):
            allowed = pairs_within(shapes.planes[group.plane], first, last, 0, work.rows)
            forbidden = torch.ones(len(asked), length, dtype=torch.bool)
            forbidden[:, columns] = ~allowed[asked - first]
            for element in group.batch_elements:
                for h in group.q_heads:
                    found[element, h] = forbidden
    return found.to(q.device)


@forbidden_over_plan.register_fake
def _(
    handle: Tensor,  # noqa: ARG001
    mask: str,  # noqa: ARG001
    q: Tensor,
    k: Tensor,  # noqa: ARG001
    rows: Tensor,
    length: int,
    b: int,
) -> Tensor:
    shape = (q.shape[0] if b < 0 else 1, q.shape[1], rows.shape[0], length)
    return q.new_empty(shape, dtype=torch.bool)
