"""Cases: a mask of every kind, and functions on the scores, that kernels are tried on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexcp import masks
from flexcp.errors import FlexCPError
from flexcp.kernels.mask_kinds import SCORE_FUNCTION
from flexcp.kernels.registry import choose
from flexcp.kernels.score import ScoreFunction
from flexcp.masks import Mask
from flexcp.ops import flex_attention

SEED = 1
"""Of dropout."""


@dataclass(frozen=True, eq=False)
class AttentionCase:
    """What a call of attention is asked, beside its tensors."""

    name: str
    kind: str
    """One of `mask_kinds.KINDS`, or `SCORE_FUNCTION`."""
    mask: Mask | None
    """None allows every pair."""
    score_mod: ScoreFunction | None = None
    captured: tuple[Tensor, ...] = ()
    """Tensors that the score function captures, which get gradients."""
    dropout_p: float = 0.0
    """Share of weights that are dropped."""

    @property
    def dropout(self) -> dict[str, Any]:
        """The arguments of a call that drop the same weights everywhere."""
        return {"dropout_p": self.dropout_p, "dropout_seed": SEED} if self.dropout_p else {}


def cases(tokens: int, heads: int, device: torch.device) -> tuple[AttentionCase, ...]:
    """All of them, for sequences of a length.

    >>> [case.name for case in cases(100, 4, torch.device("cpu"))][:4]
    ['full', 'causal', 'documents', 'window']
    """
    causal = masks.causal()
    slopes = torch.exp2(-torch.arange(1, heads + 1.0, device=device)).requires_grad_()

    def alibi(score: Tensor, _: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - slopes[h] * (q_idx - kv_idx)

    def softcap(score: Tensor, _: Tensor, __: Tensor, ___: Tensor, ____: Tensor) -> Tensor:
        return 20.0 * torch.tanh(score / 20.0)

    documents = causal & masks.document(lengths=_lengths(tokens))
    return (
        AttentionCase("full", "full", None),
        AttentionCase("causal", "causal", causal),
        AttentionCase("documents", "documents", documents),
        AttentionCase("window", "window", masks.sliding_window(max(1, tokens // 8))),
        AttentionCase("arbitrary", "arbitrary", Mask(_scattered)),
        AttentionCase("ALiBi", SCORE_FUNCTION, causal, alibi, (slopes,)),
        AttentionCase("softcap", SCORE_FUNCTION, causal, softcap),
        AttentionCase("dropout", "documents", documents, dropout_p=0.25),
    )


def bias_case(tokens: int, heads: int, device: torch.device) -> AttentionCase:
    """Learned biases of each distance and of each pair, whose gradients are added up in two ways.

    >>> len(bias_case(100, 4, torch.device("cpu")).captured)
    2
    """
    by_distance = torch.linspace(-1, 1, heads * tokens, device=device).view(heads, tokens)
    by_pair = torch.linspace(-1, 1, tokens * tokens, device=device).view(tokens, tokens)
    learned = (by_distance.sin().requires_grad_(), by_pair.cos().requires_grad_())

    def biased(score: Tensor, _: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + learned[0][h, q_idx - kv_idx] + learned[1][q_idx, kv_idx]

    return AttentionCase("biases", SCORE_FUNCTION, masks.causal(), biased, learned)


def _scattered(_: Tensor, __: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Half of all pairs, without a pattern that a tile could use; query 5 sees nothing."""
    return ((q_idx * 131 + kv_idx * 31) % 97 < 50) & (q_idx != 5)


def _lengths(tokens: int) -> list[int]:
    """Documents of very different lengths, the longest a third of the sequence.

    >>> _lengths(100)
    [34, 22, 15, 10, 7, 4, 3, 2, 1, 1, 1]
    """
    found = []
    while tokens:
        found.append(-(-tokens // 3))
        tokens -= found[-1]
    return found


def attend(case: AttentionCase, qkv: Sequence[Tensor], kernel: str | None = None) -> Tensor:
    """The output of one device, by a kernel of some name, or by the one that is chosen."""
    options = None if kernel is None else {"kernel": kernel}
    q, k, v = qkv
    out = flex_attention(q, k, v, case.score_mod, case.mask, kernel_options=options)
    assert isinstance(out, Tensor)
    return out


def refusal(kernel: str, case: AttentionCase, given: Inputs) -> str | None:
    """Why a kernel does not take a call; None if it does."""
    try:
        choose(
            given.q,
            given.v,
            score_mod=case.score_mod,
            is_one_rectangle=case.mask is None,
            kernel=kernel,
            dropout=case.dropout_p > 0,
        )
    except FlexCPError as error:
        return needs(error)
    return None


def needs(error: FlexCPError) -> str:
    """A refusal as the reason for which something was not run.

    >>> needs(FlexCPError("CUDA tensors", "tensors on cpu", "move them"))
    'it needs CUDA tensors, and got tensors on cpu'
    """
    return f"it needs {error.expected}, and got {error.got}"


@dataclass(frozen=True, eq=False)
class Inputs:
    """Tensors of a call and the gradients of what it returns."""

    q: Tensor
    """[1, H, S, D]"""
    k: Tensor
    """[1, G, S, D]"""
    v: Tensor
    """[1, G, S, D]"""
    grad_out: Tensor
    """[1, H, S, D]"""
    grad_lse: Tensor | None
    """[1, H, S]; None where nothing depends on lse."""

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """What attention takes."""
        return self.q, self.k, self.v


def inputs(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Inputs:
    """The same numbers in every process, drawn on the CPU; q, k and v ask for gradients."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(device, dtype)

    q, k, v = (random(1, h, tokens, head_dim) for h in (heads, kv_heads, kv_heads))
    grad_out, grad_lse = random(1, heads, tokens, head_dim), random(1, heads, tokens)
    for x in (q, k, v):
        x.requires_grad_()
    lse_type = torch.float64 if dtype == torch.float64 else torch.float32
    return Inputs(q, k, v, grad_out, grad_lse.to(lse_type))
