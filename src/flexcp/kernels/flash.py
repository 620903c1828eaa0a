"""The flash kernel: runs the program of each lane, on fused ops and strips.

Partial results are kept in the accumulation type (float32; float64 for float64) and merged in the
order of the program, so that the same call gives the same bits.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from flexcp.kernels.fused import FusedOp
from flexcp.kernels.interface import Gradients, Partial
from flexcp.kernels.lanes import Lane, place, select
from flexcp.kernels.merge import merge_into
from flexcp.kernels.prepared import Prepared
from flexcp.kernels.program import Piece, Program
from flexcp.kernels.reference import accumulation_dtype
from flexcp.kernels.score import ScoreMod
from flexcp.kernels.strip_data import (
    Incoming,
    Results,
    Rows,
    Scoring,
    Sums,
    Workspace,
    keys_of,
    of_chunk,
    rows_of,
)
from flexcp.kernels.strips import LOG2_E, deterministic_sums, strip_backward, strip_forward


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prepared: Prepared,
    *,
    scale: float,
    fused: FusedOp | None,
    score_mod: ScoreMod | None = None,
    max_scores: bool = False,
) -> Partial:
    """The partial result over the pairs of `prepared`.

    Args:
        q: [B, H, Lq, D].
        k: [B, G, Lkv, D].
        v: [B, G, Lkv, Dv].
        prepared: the pairs.
        scale: factor on the scores.
        fused: the op for large rectangles; None computes all by strips.
        score_mod: a function on the scores; only without `fused`.
        max_scores: whether to return each row's largest score; only without `fused`.
    """
    assert fused is None or (score_mod is None and not max_scores)
    lanes = prepared.lanes(q.shape[0], q.shape[1], k.shape[1])
    if len(lanes) == 1:
        return _forward_lane(q, k, v, lanes[0], prepared, scale, fused, score_mod, max_scores)
    dtype = accumulation_dtype(q.dtype)
    out = q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=dtype)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
    highest = lse.clone() if max_scores else None
    for lane in lanes:
        part = _forward_lane(
            select(q, lane.batches, lane.q_heads),
            select(k, lane.batches, lane.kv_heads),
            select(v, lane.batches, lane.kv_heads),
            lane, prepared, scale, fused, score_mod, max_scores,
        )  # fmt: skip
        place(out, lane.batches, lane.q_heads, part.out, add=False)
        place(lse, lane.batches, lane.q_heads, part.lse, add=False)
        if highest is not None and part.max_scores is not None:
            place(highest, lane.batches, lane.q_heads, part.max_scores, add=False)
    return Partial(out, lse, highest)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    prepared: Prepared,
    *,
    scale: float,
    fused: FusedOp | None,
    score_mod: ScoreMod | None = None,
    grad_lse: Tensor | None = None,
) -> Gradients:
    """The gradients' share of the pairs of `prepared`.

    Args:
        grad_out: [B, H, Lq, Dv] gradient of the global out.
        q: [B, H, Lq, D].
        k: [B, G, Lkv, D].
        v: [B, G, Lkv, Dv].
        out: [B, H, Lq, Dv] the *global* result, over all keys that any call sees.
        lse: [B, H, Lq] the global lse.
        prepared: the pairs.
        scale: factor on the scores.
        fused: the op for large rectangles; None computes all by strips.
        score_mod: the function on the scores; only without `fused`.
        grad_lse: [B, H, Lq] gradient of the global lse; only without `fused`.
    """
    assert fused is None or (score_mod is None and grad_lse is None)
    dtype = accumulation_dtype(q.dtype)
    # exp(score - inf) is 0, also for a score of -inf: rows that see nothing get zero gradients.
    lse = lse.to(dtype).masked_fill(lse == -torch.inf, torch.inf)
    captured = [torch.zeros_like(x) for x in score_mod.captured] if score_mod else []
    lanes = prepared.lanes(q.shape[0], q.shape[1], k.shape[1])
    with deterministic_sums() if captured else nullcontext():
        if len(lanes) == 1:
            dq, dk, dv = _backward_lane(
                grad_out, q, k, v, out, lse, lanes[0], prepared, scale, fused, score_mod, grad_lse,
                captured,
            )  # fmt: skip
            return Gradients(dq, dk, dv, tuple(captured))
        dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
        for lane in lanes:
            of_q = [
                None if x is None else select(x, lane.batches, lane.q_heads)
                for x in (grad_out, q, out, lse, grad_lse)
            ]
            g, q_part, out_part, lse_part, grad_lse_part = of_q
            assert g is not None
            assert q_part is not None
            assert out_part is not None
            assert lse_part is not None
            parts = _backward_lane(
                g, q_part, select(k, lane.batches, lane.kv_heads),
                select(v, lane.batches, lane.kv_heads), out_part, lse_part, lane, prepared, scale,
                fused, score_mod, grad_lse_part, captured,
            )  # fmt: skip
            place(dq, lane.batches, lane.q_heads, parts[0], add=False)
            place(dk, lane.batches, lane.kv_heads, parts[1], add=True)
            place(dv, lane.batches, lane.kv_heads, parts[2], add=True)
    return Gradients(dq, dk, dv, tuple(captured))


def _forward_lane(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lane: Lane,
    prepared: Prepared,
    scale: float,
    fused: FusedOp | None,
    mod: ScoreMod | None,
    want_max: bool,
) -> Partial:
    dtype = accumulation_dtype(q.dtype)
    program = prepared.program(lane.plane, fused=fused is not None)
    if fused is not None and _is_one_call(program, q, k):
        out, lse = fused.forward(q, k, v, scale)
        return Partial(out.to(dtype), lse.to(dtype))
    if program.writes_every_row:
        out = q.new_empty((*q.shape[:3], v.shape[-1]), dtype=dtype)
        lse = q.new_empty(q.shape[:3], dtype=dtype)
    else:
        out = q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=dtype)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
    highest = q.new_full(q.shape[:3], -torch.inf, dtype=dtype) if want_max else None
    for piece in program.rectangles:
        assert fused is not None
        part, part_lse = fused.forward(
            rows_of(q, piece), keys_of(k, piece), keys_of(v, piece), scale
        )
        _store(out, lse, part.to(dtype), part_lse.to(dtype), piece)
    if program.strips:
        rows, scoring = _rows(q, k, v, lane, mod), _scoring(prepared, scale, mod, q.device)
        work = Workspace(rows, program, scores=1 if mod is None else 2)
        heads = k.shape[1]
        results = Results(
            _by_kv_head(out, heads),
            _by_kv_head(lse, heads),
            None if highest is None else _by_kv_head(highest, heads),
        )
        for chunk in work.chunks():
            own_rows, own_results = of_chunk(rows, chunk), of_chunk(results, chunk)
            for piece in program.strips:
                strip_forward(own_rows, piece, scoring, work, own_results)
    return Partial(out, lse, highest)


def _store(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, piece: Piece) -> None:
    """Writes a piece's result to its rows of `out` and `lse`, or merges it with what is there."""
    out, lse = rows_of(out, piece), rows_of(lse, piece)
    if piece.fresh:
        out.copy_(part)
        lse.copy_(part_lse)
    else:
        merge_into(out, lse, part, part_lse)


def _backward_lane(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lane: Lane,
    prepared: Prepared,
    scale: float,
    fused: FusedOp | None,
    mod: ScoreMod | None,
    grad_lse: Tensor | None,
    captured: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = accumulation_dtype(q.dtype)
    program = prepared.program(lane.plane, fused=fused is not None)
    if fused is not None and _is_one_call(program, q, k):
        grads = fused.backward(grad_out, q, k, v, out.to(q.dtype), lse, scale)
        return grads[0].to(dtype), grads[1].to(dtype), grads[2].to(dtype)
    make = torch.empty if program.writes_every_row else torch.zeros
    dq = make(q.shape, dtype=dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))
    if fused is not None:
        out_typed = out.to(q.dtype)
        for piece in program.rectangles:
            part_q, part_k, part_v = fused.backward(
                rows_of(grad_out, piece), rows_of(q, piece), keys_of(k, piece), keys_of(v, piece),
                rows_of(out_typed, piece), rows_of(lse, piece), scale,
            )  # fmt: skip
            _accumulate(rows_of(dq, piece), part_q, piece.fresh)
            keys_of(dk, piece).add_(part_k)
            keys_of(dv, piece).add_(part_v)
    if program.strips:
        heads = k.shape[1]
        rows, scoring = _rows(q, k, v, lane, mod), _scoring(prepared, scale, mod, q.device)
        work = Workspace(rows, program, scores=2 if mod is None else 3)
        minus_delta = (grad_out.to(dtype) * out.to(dtype)).sum(-1).neg_()
        if grad_lse is not None:
            minus_delta += grad_lse.to(dtype)
        given = Incoming(
            _by_kv_head(grad_out.to(dtype), heads),
            _by_kv_head(lse * -LOG2_E, heads),
            _by_kv_head(minus_delta, heads),
        )
        sums = Sums(_by_kv_head(dq, heads), dk.flatten(0, 1), dv.flatten(0, 1), captured)
        for chunk in work.chunks():
            own_rows = of_chunk(rows, chunk)
            own_given, own_sums = of_chunk(given, chunk), of_chunk(sums, chunk)
            for piece in program.strips:
                strip_backward(own_rows, piece, scoring, work, own_given, own_sums)
    return dq, dk, dv


def _accumulate(target: Tensor, part: Tensor, fresh: bool) -> None:
    if fresh:
        target.copy_(part)
    else:
        target.add_(part)


def _is_one_call(program: Program, q: Tensor, k: Tensor) -> bool:
    """Whether a single fused call computes everything, so that nothing has to be gathered."""
    if len(program.pieces) != 1:
        return False
    piece = program.pieces[0]
    return piece.fused and piece.rows == q.shape[2] and piece.keys == k.shape[2]


def _rows(q: Tensor, k: Tensor, v: Tensor, lane: Lane, mod: ScoreMod | None) -> Rows:
    dtype, device = accumulation_dtype(q.dtype), q.device
    heads = k.shape[1]
    b_n = h_nr = None
    if mod is not None:
        group = q.shape[1] // heads
        b_n = torch.tensor(lane.batches, device=device).repeat_interleave(heads)
        own = torch.tensor(lane.q_heads, device=device).view(heads, group)
        h_nr = own.repeat(len(lane.batches), 1)
    return Rows(
        _by_kv_head(q.to(dtype), heads),
        k.to(dtype).flatten(0, 1),
        v.to(dtype).flatten(0, 1),
        b_n,
        h_nr,
    )


def _scoring(
    prepared: Prepared, scale: float, mod: ScoreMod | None, device: torch.device
) -> Scoring:
    if mod is None:
        return Scoring(scale, None)
    return Scoring(scale, mod, prepared.positions("q", device), prepared.positions("kv", device))


def _by_kv_head(x: Tensor, heads: int) -> Tensor:
    """[B, H, ...] as [B * G, H / G, ...]; a view if the strides allow it."""
    return x.view(x.shape[0], heads, x.shape[1] // heads, *x.shape[2:]).flatten(0, 1)
