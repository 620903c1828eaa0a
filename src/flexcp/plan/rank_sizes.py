"""RankSizes: how large a rank's tensors are during attention, known before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexcp.schedule import Schedule
from flexcp.torch_names import mark_varying


def number_as_shape(number: int) -> Tensor:
    """[number + 2, 0], for compiled graphs: they let marked shapes vary from plan to plan.

    Not so 0 and 1, nor a number that they read from a module or a global.
    """
    carrier = torch.empty(number + 2, 0, device="cpu")
    mark_varying(carrier, 0)
    return carrier


@dataclass(frozen=True)
class RankSizes:
    """What one rank holds under one mask: plain numbers, which compiled graphs can depend on.

    Without groups (`swaps` is False), a rank computes its own rows for all heads.
    """

    swaps: bool
    """Whether ranks swap rows for heads."""
    rows: int
    """Rows whose queries the rank computes, in each batch element."""
    q_heads: int
    """Query heads that it computes them for."""
    kv_heads: int
    """Key-value heads, as the kernel gets them."""
    kept_rows: int
    """Rows of K and V that are kept for the backward pass, beside its own."""
    kept: Tensor = field(init=False, repr=False, compare=False)
    """`number_as_shape` of `kept_rows`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kept", number_as_shape(self.kept_rows))

    @classmethod
    def of(cls, schedule: Schedule, rank: int, num_heads: int, num_kv_heads: int) -> RankSizes:
        """From a schedule.

        >>> import flexcp
        >>> from flexcp.plan import make_plan
        >>> plan = make_plan(flexcp.masks.full(), 12, 2, schedule="ulysses", num_heads=4)
        >>> RankSizes.of(plan.schedule_of(), 0, 4, 4)
        RankSizes(swaps=True, rows=12, q_heads=2, kv_heads=2, kept_rows=0)
        """
        group, place = schedule.group_of(rank)
        heads = (num_heads, num_kv_heads)
        if schedule.heads_group_size > 1:
            parts = [slices[place] for slices in schedule.heads_by_part]
            shared = [own.shared_kv(num_heads, num_kv_heads) for own in parts]
            kv = (own.kv if x is None else x for own, x in zip(parts, shared, strict=True))
            heads = (len(schedule.heads[place].q), sum(map(len, kv)))
        return cls(
            schedule.heads_group_size > 1,
            int(schedule.groups.counts[group]),
            *heads,
            schedule.kept_rows(group),
        )
