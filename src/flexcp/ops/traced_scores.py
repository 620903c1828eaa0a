"""What a graph computes of a block of scores: a score_mod on each of them, and attention."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from flexcp.kernels.merge import accumulation_dtype
from flexcp.kernels.score import ScoreFunction, changes_dtype
from flexcp.kernels.wide_sums import WideEntries, is_half

MOST_KEPT_SCORES = 1 << 24
"""Of one call: up to so many (64 MB in float32) stay in memory until the backward pass."""
_LOOKUPS = (operator.getitem, torch.Tensor.__getitem__)
_OF_NUMBERS = frozenset(
    {
        "add", "sub", "mul", "div", "true_divide", "truediv", "floordiv", "floor_divide", "mod",
        "remainder", "pow", "lt", "le", "gt", "ge", "eq", "ne", "minimum", "maximum", "rsub",
        "__radd__", "__rsub__", "__rmul__", "__rdiv__", "__rtruediv__", "__rfloordiv__", "__rmod__",
        "__rpow__",
    }
)  # fmt: skip
"""Names of torch's functions of two operands, either of which may be a number."""


class ScoreSemantics(TorchFunctionMode):
    """What a score_mod captures is data of the graph, in what is compiled.

    A lookup by tensors is a gather: torch reads the number in a tensor without dimensions and looks
    up by that, which a graph can't. And a captured int, which may be another one in the next call,
    is a tensor, since `torch.func.vmap` can't compute with symbols. Gradients of captured
    half-precision tensors are summed in float32. And what is looked up at a place that was computed
    is looked up for pairs that may attend alone: at others the place may be outside of the table,
    as that of a relative bias which is as wide as a window.

    Args:
        copies: Of half-precision tensors, each beside its float32 copy, that are known already.
    """

    def __init__(self, copies: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        super().__init__()
        self.copies = list(copies)
        """Half-precision tensors that were looked up, each beside its float32 copy."""
        self._entries = WideEntries()
        self._allowed: Tensor | None = None
        self._arguments: tuple[Tensor, ...] = ()

    def modify(
        self,
        score_mod: ScoreFunction,
        scores: Tensor,
        allowed: Tensor | None,
        b: Tensor,
        h: Tensor,
        q: Tensor,
        kv: Tensor,
    ) -> Tensor:
        """Scores [B, H, rows, columns] as a score_mod changes each of them.

        Args:
            score_mod: The score function.
            scores: [B, H, rows, columns].
            allowed: Bool, of the same shape, which pairs may attend; None if all.
            b: int64 [B] Batch elements.
            h: int64 [H] Query heads.
            q: int64 [rows] Queries.
            kv: int64 [columns] Keys.
        """

        def on_one(score: Tensor, *of_pair: Tensor) -> Tensor:
            self._allowed = None if allowed is None else of_pair[0]
            self._arguments = of_pair[-4:]
            return score_mod(score, *self._arguments)

        given = (scores,) if allowed is None else (scores, allowed)
        with self:
            found = over_axes(on_one, given, (b, h, q, kv))
        self._allowed, self._arguments = None, ()
        if not found.is_floating_point():
            raise changes_dtype(scores.dtype, f"{found.dtype}")
        return found.to(scores.dtype)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._entries.forget_if_changed(func, kwargs or {})
        if func in _LOOKUPS:
            table, index = args
            indices = list(index) if isinstance(index, tuple) else [index]
            if all(isinstance(i, Tensor) for i in indices):
                if len(indices) == table.dim():  # rows of a table would be one for every pair
                    indices = [self._within(i) for i in indices]
                copy = self._copy_of(table)
                if copy is None:
                    return torch.ops.aten.index.Tensor(table, indices)
                found = torch.ops.aten.index.Tensor(copy, indices)
                return self._entries.narrow(found, table.dtype)
        elif len(args) == 2 and not kwargs and func.__name__ in _OF_NUMBERS:
            return self._entries.call(func, tuple(_as_tensor(x) for x in args), {})
        name: str = func.__name__
        if isinstance(func, FunctionType) and getattr(Tensor, name, None) is func:
            # torch.compile knows such a method of a tensor, but not the function that it is.
            return getattr(args[0], name)(*args[1:], **(kwargs or {}))
        return self._entries.call(func, args, kwargs or {})

    def _within(self, index: Tensor) -> Tensor:
        """An index, without what pairs ask for that may not attend."""
        is_given = any(index is x for x in self._arguments)
        if self._allowed is None or is_given or index.dtype == torch.bool:
            return index
        return torch.where(self._allowed, index, 0)

    def _copy_of(self, table: Tensor) -> Tensor | None:
        """In float32, of a half-precision tensor that gets a gradient; one for all blocks."""
        copy: Tensor | None = self._entries.of(table)
        for known, of_known in self.copies:
            copy = of_known if known is table else copy
        if copy is None and is_half(table) and table.requires_grad:
            copy = table.float()
            self.copies.append((table, copy))
        return copy


def _as_tensor(operand: Any) -> Any:
    is_whole = isinstance(operand, int) and not isinstance(operand, bool)
    return torch.scalar_tensor(operand, dtype=torch.int64) if is_whole else operand


def is_recomputed(needs_gradients: bool, scores: int) -> bool:
    """Whether so many scores are computed again in the backward pass, and not kept for it."""
    return needs_gradients and scores > MOST_KEPT_SCORES


def semantics_of(
    recomputed: bool, score_mod: ScoreFunction | None, b: Tensor, h: Tensor, q: Tensor, kv: Tensor
) -> ScoreSemantics:
    """What holds in all blocks of a call.

    Args:
        recomputed: Whether blocks are checkpoints. Dynamo enters no mode inside of one unless it
            has entered one before, and float32 copies that all of them share are made before them;
            so the function is called here once, on a score whose result nobody reads.
        score_mod: The score function; None if there is none.
        b: int64 Batch elements.
        h: int64 Query heads.
        q: int64 Queries.
        kv: int64 Keys.
    """
    semantics = ScoreSemantics()
    if recomputed and score_mod is not None:
        score = torch.zeros(1, 1, 1, 1, device=b.device)
        semantics.modify(score_mod, score, None, b[:1], h[:1], q[:1], kv[:1])
    return semantics


def run_block(
    recomputed: bool,
    semantics: ScoreSemantics,
    block: Callable[..., list[Tensor]],
    *tensors: Tensor,
) -> list[Tensor]:
    """What a block of rows gives, a function of semantics and tensors.

    All blocks of a call have the same semantics.
    """
    if not recomputed:
        return block(semantics, *tensors)
    copies = semantics.copies

    def again(*tensors: Tensor) -> list[Tensor]:
        return block(ScoreSemantics(copies), *tensors)

    found: list[Tensor] = checkpoint(again, *tensors, use_reentrant=False, preserve_rng_state=False)
    return found


def over_axes(
    function: Callable[..., Tensor],
    given: tuple[Tensor, ...],
    axes: tuple[Tensor, ...],
    at: tuple[Tensor, ...] = (),
) -> Tensor:
    """What a function of numbers gives for all of them: [B, H, rows, columns], say.

    Every axis is mapped with no more than what it changes, since a compiler follows each step by
    which torch takes arguments apart.

    Args:
        function: Of an element of each of `given`, and one of each of `axes`.
        given: Tensors with a dimension for each axis.
        axes: int64 [n] each.
        at: Elements of axes that came before.
    """
    if not axes:
        return function(*given, *at)

    def of_one(number: Tensor, *given: Tensor) -> Tensor:
        return over_axes(function, given, axes[1:], (*at, number))

    found: Tensor = torch.func.vmap(of_one)(axes[0], *given)
    return found


def attend_to_scores(
    scores: Tensor, v: Tensor, sink: Tensor | None, kept: Tensor | None, factor: float
) -> list[Tensor]:
    """out, lse and largest score of rows whose scores are known; -inf marks forbidden pairs.

    `kept` says which weights are not dropped, and are multiplied with `factor`.
    """
    highest = scores.detach().amax(-1)
    logits = scores
    if sink is not None:
        logits = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], dim=-1)
    hidden = (logits == -torch.inf).all(-1, keepdim=True)
    # Zeros in place of a row of -inf keep autograd away from inf - inf.
    safe = logits.masked_fill(hidden, 0.0)
    lse = torch.logsumexp(safe, dim=-1, keepdim=True)
    # Closer than exp(safe - lse), which has the rounding of lse in all weights of a row.
    weights = torch.softmax(safe, dim=-1).masked_fill(hidden, 0.0)[..., : scores.shape[-1]]
    if kept is not None:
        weights = torch.where(kept, weights * factor, 0.0)
    return [weights @ v, lse.masked_fill(hidden, -torch.inf).squeeze(-1), highest]


def fully_masked(q: Tensor, v: Tensor, sink: Tensor | None) -> list[Tensor]:
    """out, lse and largest score of rows that see no key."""
    nothing = q.new_full(q.shape[:3], -torch.inf)
    return [
        q.new_zeros((*q.shape[:3], v.shape[-1])),
        nothing if sink is None else sink.squeeze(-1).expand(q.shape[:3]),
        nothing,
    ]


def fully_masked_rows(
    query: Tensor, value: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and largest score of queries that see no key, in the types that others have."""
    dtype = accumulation_dtype(query.dtype)
    sink = None if sinks is None else sinks.to(dtype)[None, :, None, None]
    out, lse, highest = fully_masked(query.to(dtype), value, sink)
    # Of nothing, so that a backward pass finds what it starts from, and gives zeros.
    return out.to(query.dtype) + query[..., :0].sum(), lse, highest
