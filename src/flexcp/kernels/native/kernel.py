"""The C++ kernel behind the kernel contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexcp.kernels.flash import FlashKernel
from flexcp.kernels.interface import Partial, PartialGradients
from flexcp.kernels.native.library import Hashes, Library
from flexcp.kernels.native.scores import TILE, LookupSums, ScoreFields

if TYPE_CHECKING:
    from flexcp.kernels.compiled_shapes import CompiledShapes
    from flexcp.kernels.dropout import Dropout
    from flexcp.kernels.score import ScoreMod
    from flexcp.kernels.tiles import TileLists

_TASKS_OF_THREAD = 8
"""More than `sums.h` cuts heads into, where there are fewer heads than threads."""


@dataclass(frozen=True)
class NativeKernel:
    """Attention by the compiled C++ kernel."""

    library: Library

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
        assert former is None or not max_scores
        if former is None:
            out = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float32)
            lse = torch.empty(q.shape[:3], dtype=torch.float32)
            result = Partial(out, lse, torch.empty_like(lse) if max_scores else None)
        else:
            result = former
        q, k, v = (x.resolve_neg() for x in (q, k, v))
        self.library.run(
            self.library.forward,
            {"q": q, "k": k, "v": v, "out": result.out, "lse": result.lse,
             "largest": result.max_scores},
            _lists(compiled),
            scale=scale,
            has_former=former is not None,
            hashes=_hashes(dropout, compiled, q, k),
            score=self._score(score_mod, compiled),
        )  # fmt: skip
        return result

    def _score(self, mod: ScoreMod | None, compiled: CompiledShapes) -> ScoreFields | None:
        return None if mod is None else ScoreFields.of(mod, compiled, self.library.flags)

    def delta(self, grad_out: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor:
        """[B, H, Lq] What the backward pass needs of each row, over all rounds."""
        grad_out, out = grad_out.resolve_neg(), out.resolve_neg()
        grad_lse = None if grad_lse is None else grad_lse.to(torch.float32).resolve_neg()
        return self.library.delta(grad_out, out, grad_lse)

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
        delta: Tensor | None = None,
        grad_q: Tensor | None = None,
        grad_kv: tuple[Tensor, Tensor] | None = None,
        dropout: Dropout | None = None,
    ) -> PartialGradients:
        """The gradients' share of the pairs of `compiled`; that of q is added to `grad_q`.

        Where sums of what a score function captures would take too much memory, all is on strips.
        """
        sums = LookupSums.of(score_mod) if score_mod is not None and score_mod.captured else None
        tasks = max(k.shape[0] * k.shape[1], _TASKS_OF_THREAD * torch.get_num_threads())
        if sums is not None and not sums.fit(tasks):
            return FlashKernel(None).backward(
                grad_out, q, k, v, out, lse, compiled, scale=scale, score_mod=score_mod,
                grad_lse=grad_lse, grad_q=grad_q, grad_kv=grad_kv, dropout=dropout,
            )  # fmt: skip
        if delta is None:
            delta = self.delta(grad_out, out, grad_lse)
        found_q = torch.empty(q.shape, dtype=torch.float32) if grad_q is None else grad_q
        found_k, found_v = grad_kv or (torch.empty(x.shape, dtype=torch.float32) for x in (k, v))
        grad_out, q, k, v = (x.resolve_neg() for x in (grad_out, q, k, v))
        self.library.run(
            self.library.backward,
            {"q": q, "k": k, "v": v, "grad_out": grad_out, "lse": lse, "delta": delta,
             "grad_q": found_q, "grad_k": found_k, "grad_v": found_v},
            _lists(compiled),
            scale=scale,
            has_former=grad_q is not None,
            hashes=_hashes(dropout, compiled, q, k),
            score=self._score(score_mod, compiled),
            sums=sums,
        )  # fmt: skip
        captured = () if sums is None else sums.gradients()
        return PartialGradients(found_q, found_k, found_v, captured)


def _lists(compiled: CompiledShapes) -> TileLists:
    return compiled.tile_lists(TILE, TILE, "query", torch.device("cpu"), runs=True)


def _hashes(
    dropout: Dropout | None, compiled: CompiledShapes, q: Tensor, k: Tensor
) -> Hashes | None:
    if dropout is None:
        return None
    q_at, kv_at = dropout.positions or (compiled.positions(x, q.device) for x in ("q", "kv"))
    batch, heads = (torch.arange(n) for n in q.shape[:2])
    row, second = (
        x.expand(q.shape[:3]).contiguous()
        for x in dropout.rows(
            batch[:, None, None], heads[:, None], q_at.view(-1, 1, q_at.shape[-1])
        )
    )
    key = dropout.keys(kv_at.view(-1, kv_at.shape[-1]))
    key = torch.nn.functional.pad(key, (0, -k.shape[2] % TILE)).contiguous()
    return Hashes(row, second, key, dropout.threshold, dropout.factor)
