"""Attention of ranks that swap rows for heads, one part of the heads after the other.

While a part is computed, the rows of the next one are swapped for its heads, and the results of the
former for rows. While the first ones and the last ones are swapped, a rank computes what takes no
swap: its own rows with its own keys, for the heads that it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice

import torch
from torch import Tensor

from flexcp.comm import PassLabel, RoundLabel, Transport
from flexcp.kernels.dropout import Dropout
from flexcp.kernels.interface import Partial
from flexcp.kernels.merge import add_sinks
from flexcp.ops.executor import RoundKernel, nothing_seen, run_backward, run_forward
from flexcp.ops.head_extras import of_parts
from flexcp.ops.interface import OutputGradients, Saved
from flexcp.ops.program import RankPrograms
from flexcp.ops.rows import HeadsOnTheirWay, RowsOnTheirWay, whole_rows
from flexcp.ops.work import OwnPairs
from flexcp.schedule import Schedule
from flexcp.schedule.heads import HeadSlice, are_even

_SWAPS = 4
"""Labels of a part's swaps in one pass."""


@dataclass(frozen=True, eq=False)
class Swap:
    """What one rank exchanges with the other ranks of its group.

    Outside of attention a rank has some rows of all heads; inside, all rows of its group for some
    heads. Tensors are [B, heads, rows, D]. What travels has its rows first, so that what comes is
    in the order of the group's rows.
    """

    transport: Transport
    members: tuple[int, ...]
    """The ranks of the group."""
    place: int
    """This rank's place among them."""
    heads: tuple[HeadSlice, ...]
    """The heads of each member, or those of one part of them."""
    rows: tuple[int, ...]
    """The rows of each member, in each batch element."""
    num_heads: int
    num_kv_heads: int
    shares_kv: bool
    """Whether several members use the same kv head, in this part or another."""

    @classmethod
    def of(
        cls, schedule: Schedule, transport: Transport, num_heads: int, num_kv_heads: int
    ) -> tuple[Swap, ...]:
        """One for each part of the heads; none if there is nothing to swap."""
        if schedule.heads_group_size == 1:
            return ()
        members = tuple(schedule.members(transport.rank))
        counts = schedule.layout.counts.tolist()
        shares_kv = sum(len(s.kv) for s in schedule.heads) > num_kv_heads
        return tuple(
            cls(
                transport,
                members,
                transport.rank - members[0],
                heads,
                tuple(counts[m] for m in members),
                num_heads,
                num_kv_heads,
                shares_kv,
            )
            for heads in schedule.heads_by_part
        )

    def to_heads(self, *tensors: Tensor, label: RoundLabel, kv: bool = False) -> HeadsOnTheirWay:
        """Starts to swap for all rows of the group; several tensors are put side by side."""
        slices = self._slices(kv)
        b, _, rows, _ = tensors[0].shape
        each = b * sum(x.shape[3] for x in tensors)
        gives = [rows * len(s) * each for s in slices]
        packed = tensors[0].new_empty(sum(gives))
        by_row = [x.permute(2, 0, 1, 3) for x in tensors]
        if self._even(kv):
            count, first = len(slices[0]), slices[0].start
            into = packed.view(len(slices), rows, b, count, each // b if b else 0)
            of_members = [x.unflatten(2, (len(slices), -1)).narrow(3, first, count) for x in by_row]
            torch.cat([x.permute(2, 0, 1, 3, 4) for x in of_members], -1, out=into)
        else:
            for s, into in zip(slices, packed.split(gives), strict=True):
                if into.numel():
                    parts = [x.narrow(2, s.start, len(s)) for x in by_row]
                    torch.cat(parts, -1, out=into.view(rows, b, len(s), -1))
        own = len(slices[self.place])
        takes = [n * own * each for n in self.rows]
        came = packed.new_empty(sum(self.rows), b, own, each // b if b else 0)
        pending = self.transport.all_to_all(
            came.view(-1), packed, takes, gives, self.members, label=label
        )
        return HeadsOnTheirWay(pending, came)

    def to_rows(self, x: Tensor, *, label: RoundLabel, kv: bool = False) -> RowsOnTheirWay:
        """Starts to swap for all heads of this rank's own rows."""
        slices = self._slices(kv)
        b, heads, _, d = x.shape
        own = self.rows[self.place]
        gives = [n * b * heads * d for n in self.rows]
        takes = [own * b * len(s) * d for s in slices]
        came = x.new_empty(sum(takes))
        pending = self.transport.all_to_all(
            came,
            x.permute(2, 0, 1, 3).contiguous().view(-1),
            takes,
            gives,
            self.members,
            label=label,
        )
        split = zip(slices, came.split(takes), strict=True)
        pieces = tuple(piece.view(own, b, len(s), d) for s, piece in split)
        first = tuple(s.start for s in slices)
        of_all = self.num_kv_heads if kv else self.num_heads
        return RowsOnTheirWay(pending, pieces, first, of_all, kv and self.shares_kv)

    def own_heads(self, x: Tensor, *, kv: bool = False) -> Tensor:
        """Those of a tensor of own rows that this rank has after the swap."""
        own = self._slices(kv)[self.place]
        return x.narrow(1, own.start, len(own))

    def own_keys(self, x: Tensor) -> Tensor:
        """K and V with heads that the query heads can share evenly; repeated if they can't."""
        index = self._kv_index
        if index is None:
            return x
        rows = x.permute(2, 0, 1, 3).index_select(2, index.to(x.device))
        return rows.permute(1, 2, 0, 3)

    def own_keys_gradient(self, grad: Tensor) -> Tensor:
        """The gradient of what `own_keys` was given."""
        index = self._kv_index
        if index is None:
            return grad
        heads = len(self.heads[self.place].kv)
        total = grad.new_zeros(grad.shape[0], heads, *grad.shape[2:])
        return total.index_add_(1, index.to(grad.device), grad)

    @property
    def kernel_heads(self) -> tuple[int, int]:
        """Own query heads, and own key-value heads as `own_keys` gives them."""
        own, index = self.heads[self.place], self._kv_index
        return len(own.q), len(own.kv) if index is None else index.numel()

    def _slices(self, kv: bool) -> list[range]:
        return [s.kv if kv else s.q for s in self.heads]

    def _even(self, kv: bool) -> bool:
        """Whether all members have the same number of heads, at the same places of their share."""
        return self._even_kv if kv else self._even_q

    @cached_property
    def _even_q(self) -> bool:
        return are_even(self._slices(kv=False), self.num_heads)

    @cached_property
    def _even_kv(self) -> bool:
        return are_even(self._slices(kv=True), self.num_kv_heads)

    @cached_property
    def _kv_index(self) -> Tensor | None:
        """int64 The kv head of each of the own ones, if the kernel needs them repeated."""
        each = self.heads[self.place].shared_kv(self.num_heads, self.num_kv_heads)
        return None if each is None else torch.tensor(each)


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

    @property
    def own_pairs(self) -> OwnPairs | None:
        """What can be computed before rows are swapped for heads, if anything can.

        The rounds have left it out.
        """
        return self.programs.own_pairs if 0 not in self.heads else None

    def own_forward(self, q: Tensor, k: Tensor, v: Tensor) -> Partial | None:
        """Results for own rows and heads, from own keys."""
        own, swap, kernel = self.own_pairs, _swap_of(self), self.kernel
        if own is None or 0 in q.shape:
            return None
        q, k, v = swap.own_heads(q), *(swap.own_heads(x, kv=True) for x in (k, v))
        return kernel.kernel.forward(
            q, swap.own_keys(k), swap.own_keys(v), own.shapes,
            scale=kernel.scale, score_mod=kernel.score_mod(None), dropout=kernel.dropout_of(None),
        )  # fmt: skip

    def among_the_group(self, seen: Partial | None, q: Tensor, v: Tensor) -> Partial | None:
        """Results for the group's rows, of which own ones alone have seen anything yet."""
        if seen is None or self.own_pairs is None:
            return None
        out, lse = nothing_seen(q, v)
        out.narrow(2, self.own_pairs.first, self.own_pairs.rows).copy_(seen.out)
        lse.narrow(2, self.own_pairs.first, self.own_pairs.rows).copy_(seen.lse)
        return Partial(out, lse)

    def own_backward(
        self, swapped: Sequence[Tensor], grads: OutputGradients, captured: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Gradients of own rows from own keys, for own heads: of q; and of k and v side by side.

        `swapped` are the part's extras, `grads` those of own rows and all heads. Gradients of what
        a score function captures are added to `captured`.
        """
        own, swap, kernel = self.own_pairs, _swap_of(self), self.kernel
        if own is None or 0 in swapped[0].shape:
            return None
        q, k, v, out, lse = (x.narrow(2, own.first, own.rows) for x in swapped)
        grad_out = swap.own_heads(grads.out)
        grad_lse = None if grads.lse is None else swap.own_heads(grads.lse)
        found = kernel.kernel.backward(
            grad_out, q, k, v, out, lse, own.shapes,
            scale=kernel.scale, score_mod=kernel.score_mod(None), grad_lse=grad_lse,
            delta=kernel.kernel.delta(grad_out, out, grad_lse),
            dropout=kernel.dropout_of(None),
        )  # fmt: skip
        for total, part in zip(captured, found.captured, strict=True):
            total += part
        return found.q, swap.own_keys_gradient(torch.cat([found.k, found.v], dim=-1))


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
    seen: dict[int, Partial | None] = {}

    def see_own(number: int) -> None:
        if number < len(parts) and number not in seen:
            seen[number] = parts[number].own_forward(q, k, v)

    fetch_next()
    for number, part in enumerate(parts):
        swap = _swap_of(part)
        if not given:  # there was nothing to compute before
            fetch_next()
        see_own(number)
        moving, moving_q = given.popleft()
        kv = swap.own_keys(moving.wait())
        inputs = (moving_q.wait(), kv[..., : k.shape[3]], kv[..., k.shape[3] :])
        out, lse, kept = run_forward(
            part.programs.forward,
            transport,
            part.kernel,
            *inputs,
            labels.of_part(number),
            former=part.among_the_group(seen.pop(number), *inputs[::2]),
            meanwhile=fetch_next,
            before_waiting=partial(see_own, number + 1),
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
    swapped, all_kept = of_parts(saved.extras, len(parts))
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

    fetch_next()
    # What is left for the last swaps, which are the longest: own pairs of all parts but the first.
    first = [parts[0].own_backward(swapped[0], grads, captured)] if len(parts) > 1 else []
    grads_kv, grads_q = [], []
    kept: list[tuple[Tensor, Tensor] | None] = []
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
        both = swap.own_keys_gradient(torch.cat([grad_k, grad_v], dim=-1))
        apart = part.own_pairs
        kept.append(None if apart is None else (apart.of_group(grad_q), apart.of_group(both)))
        label, both = _SWAPS * number + 2, both.to(q.dtype)
        grads_kv.append(swap.to_rows(both, label=labels.round("swap", label), kv=True))
        label += 1
        grads_q.append(swap.to_rows(grad_q.to(q.dtype), label=labels.round("swap", label)))
    own = first + [
        part.own_backward(swapped[number], grads, captured)
        for number, part in islice(enumerate(parts), len(first), None)
    ]
    for number, (found, of_rounds) in enumerate(zip(own, kept, strict=True)):
        if found is None or of_rounds is None:
            continue
        place = _swap_of(parts[number]).place
        own_q, own_kv = (x.add_(y) for x, y in zip(of_rounds, found, strict=True))
        grads_q[number] = grads_q[number].with_own(place, own_q)
        grads_kv[number] = grads_kv[number].with_own(place, own_kv)
    grad_q, both, d = whole_rows(grads_q), whole_rows(grads_kv), saved.k.shape[3]
    return grad_q, both[..., :d], both[..., d:]


def _swap_of(part: HeadPart) -> Swap:
    assert part.swap is not None
    return part.swap
