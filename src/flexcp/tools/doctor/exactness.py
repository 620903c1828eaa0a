"""Exactness: a kernel's results and gradients against float64, and against its own, repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flexcp.errors import FlexCPError
from flexcp.kernels.dropout import Dropout
from flexcp.kernels.reference import dense_attention, dense_mask
from flexcp.ops import flex_attention
from flexcp.testing.tolerance import relative_error, tolerance
from flexcp.tools.doctor.budget import Budget, Deadline
from flexcp.tools.doctor.cases import (
    SEED,
    AttentionCase,
    Inputs,
    bias_case,
    cases,
    inputs,
    needs,
    refusal,
)
from flexcp.tools.doctor.findings import Finding

RESULTS = (
    "out", "lse", "dq", "dk", "dv",
    "d of what the score function captures", "d of the next that it captures",
)  # fmt: skip
"""What a call gives, in this order."""
_ORDERED = {"flex": 5, "varlen": 2}
"""How many of them have the same bits in every call: torch adds up gradients of what its compiled
kernels look up in no order, and FlashAttention those of queries and of shared keys."""
_NO_GRADIENT_OF_LSE = ("varlen",)
"""Kernels that have none."""

_REPORT = "don't train with it; please report it with the report's files"


@dataclass(frozen=True, eq=False)
class Oracle:
    """What every case should give, computed once in float64 by the definition."""

    budget: Budget
    device: torch.device
    _kept: dict[tuple[str, torch.dtype, bool], tuple[Tensor, ...]]

    @classmethod
    def of(cls, budget: Budget, device: torch.device) -> Oracle:
        """For the cases of a budget."""
        return cls(budget, device, {})

    def inputs(self, dtype: torch.dtype, kernel: str = "") -> Inputs:
        """Two query heads to each key head, if the heads allow it; for a kernel, or for any."""
        b = self.budget
        kv_heads = b.heads // 2 if b.heads % 2 == 0 else b.heads
        made = inputs(b.tokens, b.heads, kv_heads, b.head_dim, dtype, self.device)
        return replace(made, grad_lse=None) if kernel in _NO_GRADIENT_OF_LSE else made

    def cases(self) -> tuple[AttentionCase, ...]:
        """All that kernels are tried on."""
        given = (self.budget.tokens, self.budget.heads, self.device)
        return (*cases(*given), bias_case(*given))

    def expected(self, case: AttentionCase, given: Inputs) -> tuple[Tensor, ...]:
        """Results and gradients, from inputs that were rounded to some type."""
        key = (case.name, given.q.dtype, given.grad_lse is None)
        if key not in self._kept:
            self._kept[key] = _by_definition(case, given)
        return self._kept[key]


def exactness(
    kernel: str,
    dtype: torch.dtype,
    oracle: Oracle,
    deadline: Deadline,
    *,
    repeats: int | None = None,
) -> Finding:
    """Whether a kernel is right in all cases, and gives the same bits in all repeats."""
    name = f"{kernel}, {str(dtype).removeprefix('torch.')}"
    given, every = oracle.inputs(dtype, kernel), oracle.cases()
    wanted = oracle.budget.repeats if repeats is None else repeats
    rows: list[dict[str, Any]] = []
    for i, case in enumerate(every):
        why_not = refusal(kernel, case, given)
        if why_not is not None:
            rows.append({"case": case.name, "outcome": "not run", "why": why_not})
        elif not deadline.left:
            rows.append({"case": case.name, "outcome": "not run", "why": "the time was up"})
        else:
            own = deadline.share(1 / (len(every) - i))
            rows.append(_compare(kernel, case, oracle, dtype, given, own, wanted))
    return _summed_up(name, tolerance(dtype), wanted, rows)


def runs_here(kernel: str, dtype: torch.dtype, oracle: Oracle) -> bool:
    """Whether a kernel takes any case on the device at hand."""
    given = oracle.inputs(dtype, kernel)
    return any(refusal(kernel, case, given) is None for case in oracle.cases())


def call(kernel: str | None, case: AttentionCase, given: Inputs) -> tuple[Tensor, ...]:
    """Results and gradients of one call, as `RESULTS` names them."""
    found = flex_attention(
        *given.qkv,
        case.score_mod,
        case.mask,
        enable_gqa=True,
        return_lse=True,
        kernel_options=None if kernel is None else {"kernel": kernel},
        **case.dropout,
    )
    out, lse = found
    assert isinstance(lse, Tensor)
    leaves = (*given.qkv, *case.captured)
    if given.grad_lse is None:
        grads = torch.autograd.grad(out, leaves, given.grad_out)
    else:
        grads = torch.autograd.grad((out, lse), leaves, (given.grad_out, given.grad_lse))
    return out.detach(), lse.detach(), *grads


def _compare(
    kernel: str,
    case: AttentionCase,
    oracle: Oracle,
    dtype: torch.dtype,
    given: Inputs,
    deadline: Deadline,
    repeats: int,
) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case.name, "outcome": "passed"}
    try:
        found = call(kernel, case, given)
        errors = {
            what: relative_error(actual, expected)
            for what, actual, expected in zip(
                RESULTS, found, oracle.expected(case, given), strict=False
            )
        }
        worst = max(errors, key=lambda what: errors[what])
        row |= {"error": errors[worst], "in": worst, "allowed": tolerance(dtype)}
        if not errors[worst] <= tolerance(dtype):
            return row | {"outcome": "failed", "why": f"{worst} is off by {errors[worst]:.1e}"}
        results = _ORDERED.get(kernel, len(found))
        again = lambda: call(kernel, case, given)[:results]  # noqa: E731
        done, different = _repeat(again, found[:results], repeats, deadline)
    except FlexCPError as error:  # of a mask that the kernel can't express
        return row | {"outcome": "not run", "why": needs(error)}
    except Exception as error:
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        return row | {"outcome": "failed", "why": f"it raised {told}"}
    row["repeats"] = done
    if different is not None:
        why = f"{RESULTS[different]} differs between two calls with the same tensors"
        return row | {"outcome": "failed", "why": why}
    return row


def _repeat(
    again: Callable[[], tuple[Tensor, ...]],
    first: tuple[Tensor, ...],
    repeats: int,
    deadline: Deadline,
) -> tuple[int, int | None]:
    """How often it was called, and which result differed, if one did."""
    for done in range(1, repeats):
        if not deadline.left:
            return done, None
        for which, (x, y) in enumerate(zip(again(), first, strict=True)):
            if not torch.equal(x, y):
                return done + 1, which
    return repeats, None


def _summed_up(name: str, allowed: float, repeats: int, rows: list[dict[str, Any]]) -> Finding:
    ran = [row for row in rows if row["outcome"] != "not run"]
    wrong = [row for row in ran if row["outcome"] == "failed"]
    if not ran:
        return Finding("kernels", name, "not run", rows[0]["why"], rows=tuple(rows))
    if wrong:
        told = "; ".join(f"{row['case']}: {row['why']}" for row in wrong)
        kernel = name.partition(",")[0]
        fix = f"{_REPORT}, and name another kernel than {kernel!r} (flexcp.kernels.KERNELS)"
        return Finding("kernels", name, "failed", told, fix, rows=tuple(rows))
    worst = max(row["error"] for row in ran)
    said = f"{len(ran)} kinds of calls within {worst:.1e} of float64 ({allowed:.1e} allowed)"
    fewest = min(row["repeats"] for row in ran)
    said += f", the same bits in {fewest} repeats"
    said += f" (of {repeats}: the time was up)" if fewest < repeats else ""
    left_out = [f"{row['case']} ({row['why']})" for row in rows if row["outcome"] == "not run"]
    said += f"; not run: {', '.join(left_out)}" if left_out else ""
    return Finding("kernels", name, "passed", said, rows=tuple(rows))


def _by_definition(case: AttentionCase, given: Inputs) -> tuple[Tensor, ...]:
    q, k, v = (x.detach().double().requires_grad_() for x in given.qkv)
    positions = torch.arange(q.shape[2], device=q.device)
    allowed = None
    if case.mask is not None:
        allowed = dense_mask(case.mask.mask_mod, positions, positions, batch=1, heads=1)
    dropout = Dropout(case.dropout_p, SEED) if case.dropout_p else None
    found = dense_attention(q, k, v, allowed=allowed, score_mod=case.score_mod, dropout=dropout)
    leaves = (q, k, v, *case.captured)
    results, gradients = [found.out], [given.grad_out.double()]
    if given.grad_lse is not None:
        results, gradients = [*results, found.lse], [*gradients, given.grad_lse.double()]
    grads = torch.autograd.grad(results, leaves, gradients)
    return found.out.detach(), found.lse.detach(), *grads
