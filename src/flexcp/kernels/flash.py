"""The flash kernel: runs the program of each head group, on fused ops and strips.

Partial results are kept in the accumulation type (float32; float64 for float64) and merged in the
order of the program, so that the same call gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flexcp.kernels.captured_gradients import deterministic_sums
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.dropout import Dropout
from flexcp.kernels.exponential import exponential_for
from flexcp.kernels.fused import FusedOp
from flexcp.kernels.fused_pieces import fused_backward, fused_forward
from flexcp.kernels.head_groups import HeadGroup, place, select
from flexcp.kernels.interface import Partial, PartialGradients
from flexcp.kernels.merge import accumulation_dtype, merge_into
from flexcp.kernels.program import Program
from flexcp.kernels.score import ScoreMod
from flexcp.kernels.strip_gradients import strips_backward
from flexcp.kernels.strips import (
    BackwardInputs,
    GradientSums,
    Scoring,
    StripResults,
    StripTensors,
    Workspace,
    of_chunk,
    strips_forward,
)


@dataclass(frozen=True)
class FlashKernel:
    """The flash kernel behind the kernel contract."""

    fused: FusedOp | None
    """The op for large rectangles; None computes all by strips."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        compiled: CompiledShapes,
        *,
        scale: float,
        score_mod: ScoreMod | None = None,
        max_scores: bool = False,
        former: Partial | None = None,
        dropout: Dropout | None = None,
    ) -> Partial:
        """The partial result over the pairs of `compiled`, merged into `former` if given."""
        found = forward(
            q, k, v, compiled, scale=scale, fused=None if dropout else self.fused,
            score_mod=score_mod, max_scores=max_scores, dropout=dropout,
        )  # fmt: skip
        if former is None:
            return found
        merge_into(former.out, former.lse, found.out, found.lse)
        return former

    def delta(self, grad_out: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor | None:  # noqa: ARG002
        """Nothing: fused ops work it out themselves."""
        return None

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        compiled: CompiledShapes,
        *,
        scale: float,
        score_mod: ScoreMod | None = None,
        grad_lse: Tensor | None = None,
        delta: Tensor | None = None,  # noqa: ARG002
        grad_q: Tensor | None = None,
        grad_kv: tuple[Tensor, Tensor] | None = None,
        dropout: Dropout | None = None,
    ) -> PartialGradients:
        """The gradients' share of the pairs of `compiled`; that of q is added to `grad_q`."""
        found = backward(
            grad_out, q, k, v, out, lse, compiled, scale=scale,
            fused=None if grad_lse is not None or dropout else self.fused,
            score_mod=score_mod, grad_lse=grad_lse, dropout=dropout,
        )  # fmt: skip
        if grad_kv is not None:
            found = replace(found, k=grad_kv[0].copy_(found.k), v=grad_kv[1].copy_(found.v))
        return found if grad_q is None else replace(found, q=grad_q.add_(found.q))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    compiled: CompiledShapes,
    *,
    scale: float,
    fused: FusedOp | None,
    score_mod: ScoreMod | None = None,
    max_scores: bool = False,
    dropout: Dropout | None = None,
) -> Partial:
    """The partial result over the pairs of `compiled`.

    Args:
        q: [B, H, Lq, D].
        k: [B, G, Lkv, D].
        v: [B, G, Lkv, Dv].
        compiled: which pairs to compute.
        scale: factor on the scores.
        fused: the op for large rectangles; None computes all by strips.
        score_mod: a function on the scores; only without `fused`.
        max_scores: whether to return each row's largest score; only without `fused`.
        dropout: of the weights; only without `fused`.
    """
    assert fused is None or not (score_mod or max_scores or dropout)
    if fused is not None and not fused.multiplies(q.dtype):
        q, k, v = (x.to(accumulation_dtype(q.dtype)) for x in (q, k, v))
    groups = compiled.head_groups(q.shape[0], q.shape[1], k.shape[1])
    if len(groups) == 1:
        return _forward_group(
            q, k, v, groups[0], compiled, scale, fused, score_mod, max_scores, dropout
        )
    dtype = accumulation_dtype(q.dtype)
    out = q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=dtype)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
    highest = lse.clone() if max_scores else None
    for group in groups:
        part = _forward_group(
            select(q, group.batch_elements, group.q_heads),
            select(k, group.batch_elements, group.kv_heads),
            select(v, group.batch_elements, group.kv_heads),
            group, compiled, scale, fused, score_mod, max_scores, dropout,
        )  # fmt: skip
        place(out, group.batch_elements, group.q_heads, part.out, add=False)
        place(lse, group.batch_elements, group.q_heads, part.lse, add=False)
        if highest is not None and part.max_scores is not None:
            place(highest, group.batch_elements, group.q_heads, part.max_scores, add=False)
    return Partial(out, lse, highest)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    compiled: CompiledShapes,
    *,
    scale: float,
    fused: FusedOp | None,
    score_mod: ScoreMod | None = None,
    grad_lse: Tensor | None = None,
    dropout: Dropout | None = None,
) -> PartialGradients:
    """The gradients' share of the pairs of `compiled`.

    Args:
        grad_out: [B, H, Lq, Dv] gradient of the global out.
        q: [B, H, Lq, D].
        k: [B, G, Lkv, D].
        v: [B, G, Lkv, Dv].
        out: [B, H, Lq, Dv] the *global* result, over all keys that any call sees.
        lse: [B, H, Lq] the global lse.
        compiled: which pairs to compute.
        scale: factor on the scores.
        fused: the op for large rectangles; None computes all by strips.
        score_mod: the function on the scores; only without `fused`.
        grad_lse: [B, H, Lq] gradient of the global lse; only without `fused`.
        dropout: of the weights; only without `fused`.
    """
    assert fused is None or (score_mod is None and grad_lse is None and dropout is None)
    dtype = accumulation_dtype(q.dtype)
    # exp(score - inf) is 0, also for a score of -inf: rows that see nothing get zero gradients.
    lse = lse.to(dtype).masked_fill(lse == -torch.inf, torch.inf)
    captured = [] if score_mod is None else score_mod.new_sums()
    if fused is not None and not fused.multiplies(q.dtype):
        grad_out, q, k, v, out = (x.to(dtype) for x in (grad_out, q, k, v, out))
    groups = compiled.head_groups(q.shape[0], q.shape[1], k.shape[1])
    with deterministic_sums(needed=bool(captured)):
        if len(groups) == 1:
            dq, dk, dv = _backward_group(
                grad_out, q, k, v, out, lse, groups[0], compiled, scale, fused, score_mod, grad_lse,
                dropout, captured,
            )  # fmt: skip
            return PartialGradients(dq, dk, dv, tuple(captured))
        dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
        for group in groups:
            of_q = [
                None if x is None else select(x, group.batch_elements, group.q_heads)
                for x in (grad_out, q, out, lse, grad_lse)
            ]
            g, q_part, out_part, lse_part, grad_lse_part = of_q
            assert g is not None
            assert q_part is not None
            assert out_part is not None
            assert lse_part is not None
            parts = _backward_group(
                g, q_part, select(k, group.batch_elements, group.kv_heads),
                select(v, group.batch_elements, group.kv_heads), out_part, lse_part, group,
                compiled, scale, fused, score_mod, grad_lse_part, dropout, captured,
            )  # fmt: skip
            place(dq, group.batch_elements, group.q_heads, parts[0], add=False)
            place(dk, group.batch_elements, group.kv_heads, parts[1], add=True)
            place(dv, group.batch_elements, group.kv_heads, parts[2], add=True)
    return PartialGradients(dq, dk, dv, tuple(captured))


def _forward_group(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: HeadGroup,
    compiled: CompiledShapes,
    scale: float,
    fused: FusedOp | None,
    mod: ScoreMod | None,
    want_max: bool,
    dropout: Dropout | None,
) -> Partial:
    dtype = accumulation_dtype(q.dtype)
    program = compiled.program(
        group.plane,
        fused=fused is not None,
        causal_rows=_causal_rows(fused, q),
        bands=fused is not None and fused.masked_forward is not None,
    )
    if fused is not None and _is_one_call(program, q, k):
        out, lse = fused.mode(program.pieces[0].causal)(q, k, v, scale)
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
        fused_forward(fused, q, k, v, piece, scale, out, lse)
    if program.strips:
        tensors = _strip_tensors(q, k, v, group, mod, dropout, compiled)
        scoring = _scoring(tensors, program, compiled, scale, mod, dropout)
        work = Workspace(
            tensors,
            program.strip_sizes,
            scores=1,
            dropout=dropout is not None,
        )
        heads = k.shape[1]
        results = StripResults(
            _by_kv_head(out, heads),
            _by_kv_head(lse, heads),
            None if highest is None else _by_kv_head(highest, heads),
        )
        for chunk in work.chunks():
            own_tensors, own_results = of_chunk(tensors, chunk), of_chunk(results, chunk)
            begun = program.rectangles_meet_strips
            strips_forward(own_tensors, program.strips, scoring, work, own_results, begun=begun)
    return Partial(out, lse, highest)


def _backward_group(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    group: HeadGroup,
    compiled: CompiledShapes,
    scale: float,
    fused: FusedOp | None,
    mod: ScoreMod | None,
    grad_lse: Tensor | None,
    dropout: Dropout | None,
    captured: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = accumulation_dtype(q.dtype)
    rows = _causal_rows(fused, q)
    program = compiled.program(group.plane, fused=fused is not None, causal_rows=rows)
    if fused is not None and _is_one_call(program, q, k):
        own = fused.backward_mode(program.pieces[0].causal)
        grads = own(grad_out, q, k, v, out.to(q.dtype), lse, scale)
        return grads[0].to(dtype), grads[1].to(dtype), grads[2].to(dtype)
    make = torch.empty if program.writes_every_row else torch.zeros
    dq = make(q.shape, dtype=dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))
    if fused is not None:
        out_typed = out.to(q.dtype)
        for piece in program.rectangles:
            fused_backward(fused, (grad_out, q, k, v, out_typed, lse), piece, scale, (dq, dk, dv))
    if program.strips:
        heads = k.shape[1]
        tensors = _strip_tensors(q, k, v, group, mod, dropout, compiled)
        scoring = _scoring(tensors, program, compiled, scale, mod, dropout)
        work = Workspace(
            tensors,
            program.strip_sizes,
            scores=2 if mod is None else 3,
            dropout=dropout is not None,
        )
        minus_delta = (grad_out.to(dtype) * out.to(dtype)).sum(-1).neg_()
        if grad_lse is not None:
            minus_delta += grad_lse.to(dtype)
        given = BackwardInputs(
            _by_kv_head(grad_out.to(dtype), heads),
            _by_kv_head(lse * -scoring.change, heads),
            _by_kv_head(minus_delta, heads),
        )
        sums = GradientSums(_by_kv_head(dq, heads), dk.flatten(0, 1), dv.flatten(0, 1), captured)
        for chunk in work.chunks():
            own_tensors = of_chunk(tensors, chunk)
            own_given, own_sums = of_chunk(given, chunk), of_chunk(sums, chunk)
            strips_backward(own_tensors, program.strips, scoring, work, own_given, own_sums)
    return dq, dk, dv


def _causal_rows(fused: FusedOp | None, q: Tensor) -> int | None:
    """Rows from which triangles are for the op's causal mode, if it has one: all of q, or fewer."""
    if fused is None or fused.causal_forward is None:
        return None
    return min(fused.causal_rows(q.dtype) or q.shape[2], q.shape[2])


def _is_one_call(program: Program, q: Tensor, k: Tensor) -> bool:
    """Whether a single fused call computes everything, so that nothing has to be gathered."""
    if len(program.pieces) != 1:
        return False
    piece = program.pieces[0]
    whole = (piece.rows, piece.keys) == (q.shape[2], k.shape[2])
    return piece.fused and piece.blocks == 1 and whole


def _strip_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: HeadGroup,
    mod: ScoreMod | None,
    dropout: Dropout | None,
    compiled: CompiledShapes,
) -> StripTensors:
    dtype, device = accumulation_dtype(q.dtype), q.device
    heads = k.shape[1]
    found = StripTensors(
        _by_kv_head(q.to(dtype), heads), k.to(dtype).flatten(0, 1), v.to(dtype).flatten(0, 1)
    )
    if mod is None and dropout is None:
        return found
    b_n = torch.tensor(group.batch_elements, device=device).repeat_interleave(heads)
    own = torch.tensor(group.q_heads, device=device).view(heads, -1)
    h_nr = own.repeat(len(group.batch_elements), 1)
    if dropout is None:
        return replace(found, b_N=b_n, h_NR=h_nr)
    q_at, kv_at = dropout.positions or (compiled.positions(x, device) for x in ("q", "kv"))
    q_at, kv_at = (x if x.dim() == 1 else x[b_n] for x in (q_at, kv_at))
    row, second = dropout.rows(
        b_n[:, None, None], h_nr[:, :, None], q_at.view(-1, 1, q_at.shape[-1])
    )
    key = dropout.keys(kv_at).expand(b_n.numel(), -1)
    return replace(found, b_N=b_n, h_NR=h_nr, row_NRL=row, second_NRL=second, key_NL=key)


def _scoring(
    tensors: StripTensors,
    program: Program,
    compiled: CompiledShapes,
    scale: float,
    mod: ScoreMod | None,
    dropout: Dropout | None,
) -> Scoring:
    q, k = tensors.q_NRLD, tensors.k_NLD
    if not program.rectangles_meet_strips:  # else sums hold the scores of rectangles too
        (q0, q1), (k0, k1) = program.strip_sizes.q_span, program.strip_sizes.k_span
        q, k = q.narrow(2, q0, q1 - q0), k.narrow(1, k0, k1 - k0)
    base, small = exponential_for(q, k, scale)
    if mod is None:
        return Scoring(scale, None, dropout=dropout, base=base, small=small)
    device = tensors.q_NRLD.device
    positions = (compiled.positions("q", device), compiled.positions("kv", device))
    shapes = compiled.shapes
    consecutive = shapes.q_positions is None and shapes.kv_positions is None
    return Scoring(scale, mod, *positions, consecutive, dropout, base)


def _by_kv_head(x: Tensor, heads: int) -> Tensor:
    """[B, H, ...] as [B * G, H / G, ...]; a view if the strides allow it."""
    return x.view(x.shape[0], heads, x.shape[1] // heads, *x.shape[2:]).flatten(0, 1)
