"""Heads in parts: attention of ranks that swap rows for heads, one part after the other.

While a part is computed, the rows of the next one are swapped for its heads, and the results of the
former for rows: of all swaps only the first and the last are waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from flexcp.comm import PassLabel, Transport
from flexcp.kernels.dropout import Dropout
from flexcp.kernels.merge import add_sinks
from flexcp.ops.executor import RoundKernel, run_backward, run_forward
from flexcp.ops.interface import OutputGradients, Saved
from flexcp.ops.program import RankPrograms
from flexcp.ops.swap import HeadsOnTheirWay, Swap, whole_rows

SWAPPED = 5
"""Extras of each part: q, k and v after the swap, and the result for them with its lse."""
_SWAPS = 4
"""Labels of a part's swaps in one pass."""


@dataclass(frozen=True, eq=False)
class HeadPart:
    """What a rank computes in one go: all heads, or a part of those that it has after a swap."""

    programs: RankPrograms
    kernel: RoundKernel
    first_head: int
    """The global number of the first query head that the kernel gets."""
    swap: Swap | None
    """How rows are swapped for the part's heads; None if ranks have all heads of their rows."""

    def dropping(self, p: float, seed: int) -> HeadPart:
        """The same, with a share of the weights dropped."""
        dropout = Dropout(p, seed, first_head=self.first_head)
        return replace(self, kernel=replace(self.kernel, dropout=dropout))

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads, and key-value heads as the kernel gets them."""
        assert self.swap is not None
        return self.swap.kernel_heads


def swapped_forward(
    parts: Sequence[HeadPart],
    transport: Transport,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    labels: PassLabel,
) -> Saved:
    """This rank's rows of the output.

    The extras are, for each part, q, k, v, out and lse on the other side of the swap; then, where
    the schedule keeps what forward received, the rows of each.
    """
    given: deque[tuple[HeadsOnTheirWay, HeadsOnTheirWay]] = deque()
    to_come = enumerate(parts)

    def fetch_next() -> None:
        for number, part in islice(to_come, 1):
            swap, label = _swap_of(part), _SWAPS * number
            kv = swap.to_heads(k, v, label=labels.round("swap", label), kv=True)
            given.append((kv, swap.to_heads(q, label=labels.round("swap", label + 1))))

    swapped, all_kept, outs, lses = [], [], [], []
    for number, part in enumerate(parts):
        swap = _swap_of(part)
        if not given:  # the first, or there was nothing to compute before
            fetch_next()
        moving, moving_q = given.popleft()
        kv = swap.own_keys(moving.wait())
        inputs = (moving_q.wait(), kv[..., : k.shape[3]], kv[..., k.shape[3] :])
        out, lse, kept = run_forward(
            part.programs.forward,
            transport,
            part.kernel,
            *inputs,
            labels.of_part(number),
            meanwhile=fetch_next,
        )
        label = _SWAPS * number + 2
        outs.append(swap.to_rows(out.to(q.dtype), label=labels.round("swap", label)))
        lses.append(swap.to_rows(lse.unsqueeze(-1), label=labels.round("swap", label + 1)))
        dtype = out.dtype
        if sinks is not None:
            own = swap.heads[swap.place].q
            out, lse = add_sinks(out, lse, sinks[own.start : own.stop])
        swapped += [*inputs, out.to(q.dtype), lse]
        all_kept += [] if kept is None else [kept]
    out, lse = whole_rows(outs).to(dtype), whole_rows(lses).squeeze(-1)
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    return Saved(q, k, v, sinks, out.to(q.dtype), lse, (*swapped, *all_kept))


def swapped_backward(
    parts: Sequence[HeadPart],
    transport: Transport,
    saved: Saved,
    grads: OutputGradients,
    labels: PassLabel,
    captured: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of this rank's own rows, from what `swapped_forward` returned.

    Those of what a score function captures are added to `captured`.
    """
    swapped, all_kept = split_extras(parts, saved.extras)
    given: deque[tuple[HeadsOnTheirWay, HeadsOnTheirWay | None]] = deque()
    to_come = enumerate(parts)

    def fetch_next() -> None:
        for number, part in islice(to_come, 1):
            swap, label, from_lse = _swap_of(part), _SWAPS * number, None
            out = swap.to_heads(grads.out, label=labels.round("swap", label))
            if grads.lse is not None:
                lse = grads.lse.unsqueeze(-1)
                from_lse = swap.to_heads(lse, label=labels.round("swap", label + 1))
            given.append((out, from_lse))

    grads_kv, grads_q = [], []
    for number, part in enumerate(parts):
        swap = _swap_of(part)
        if not given:
            fetch_next()
        q, k, v, out, lse = swapped[number]
        moving, moving_lse = given.popleft()
        grad_lse = None if moving_lse is None else moving_lse.wait().squeeze(-1)
        grad_q, grad_k, grad_v = run_backward(
            part.programs.backward,
            transport,
            part.kernel,
            Saved(q, k, v, None, out, lse),
            OutputGradients(moving.wait(), grad_lse),
            all_kept[number] if all_kept else None,
            labels.of_part(number),
            captured=captured,
            meanwhile=fetch_next,
        )
        both = swap.own_keys_gradient(torch.cat([grad_k, grad_v], dim=-1)).to(q.dtype)
        label = _SWAPS * number + 2
        grads_kv.append(swap.to_rows(both, label=labels.round("swap", label), kv=True))
        label += 1
        grads_q.append(swap.to_rows(grad_q.to(q.dtype), label=labels.round("swap", label)))
    both, d = whole_rows(grads_kv), saved.k.shape[3]
    return whole_rows(grads_q), both[..., :d], both[..., d:]


def split_extras(
    parts: Sequence[HeadPart], extras: Sequence[Tensor]
) -> tuple[list[Sequence[Tensor]], Sequence[Tensor]]:
    """What was swapped, by part; and the kept rows, by part, if the schedule keeps any."""
    count = SWAPPED * len(parts) if parts[0].swap is not None else 0
    return [extras[i : i + SWAPPED] for i in range(0, count, SWAPPED)], extras[count:]


def all_heads(swapped: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """q, k, v, out and lse of all parts' heads; none if nothing was swapped."""
    if len(swapped) == 1:
        return list(swapped[0])
    return [torch.cat(of_parts, dim=1) for of_parts in zip(*swapped, strict=True)]


def split_heads(parts: Sequence[HeadPart], whole: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The extras of all parts again, from what `all_heads` made of them."""
    if not whole or len(parts) == 1:
        return tuple(whole)
    heads = [part.heads for part in parts]
    q, kv = ([of_part[i] for of_part in heads] for i in (0, 1))
    split = [x.split(n, dim=1) for x, n in zip(whole, (q, kv, kv, q, q), strict=True)]
    return tuple(x for of_part in zip(*split, strict=True) for x in of_part)


def _swap_of(part: HeadPart) -> Swap:
    assert part.swap is not None
    return part.swap
