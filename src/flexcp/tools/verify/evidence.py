"""Evidence: everything that was observed, arranged by token, for the checks to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flexcp.testing.tolerance import tolerance
from flexcp.tools.verify.observe import Observation
from flexcp.tools.verify.receptive_field import ReceptiveField
from flexcp.tools.verify.verdict import Check

Convention = Literal["summed", "averaged", "reduced"]


@dataclass(frozen=True, eq=False)
class Probe:
    """What changed when one token did."""

    place: int
    """The token, as b * S + s."""
    alone: Tensor
    """float [B * S] How much the logits of each token changed in one process; relative."""
    together: Tensor
    """float [B * S] How much they changed on the ranks; NaN for tokens that no rank has."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """Runs of one process and of the ranks, with the place of every row.

    A place is a token's number in the whole batch, b * S + s.
    """

    tokens: Tensor
    """int64 [B, S] The whole batch's."""
    alone: Observation
    """One process."""
    alone_again: Observation
    """One process once more, with another seed."""
    together: Sequence[Observation]
    """By rank."""
    together_again: Sequence[Observation]
    """By rank, with another seed."""
    uneven_alone: Observation | None
    """One process with fewer labels."""
    uneven_together: Sequence[Observation]
    """By rank, with fewer labels."""
    places_alone: Tensor | None
    """int64 [rows] Where one process's rows are."""
    places: Sequence[Tensor] | None
    """int64 [rows] by rank: where the rows of each are."""
    key: str | None
    """Where tokens enter the model."""
    probes: Sequence[Probe]
    """Empty if logits can't be told apart by token."""
    receptive_field: ReceptiveField | None
    """What the mask allows, if it was given."""
    gradients: Convention
    """What happens to the ranks' gradients after the step."""
    losses: Convention
    """What the ranks' losses add up to."""
    is_padding: Tensor
    """bool [B * S] Tokens that are none: nobody may see them, and what they compute is nobody's."""

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.together)

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence."""
        return self.tokens.shape[1]

    @property
    def coarsest(self) -> torch.dtype:
        """The least precise type that logits went through: many models normalise in float32."""
        runs = [self.alone, *self.together]
        types = [one.coarsest for one in runs] + [
            x.dtype for one in runs if (x := one.logits) is not None
        ]
        return max((t for t in types if t is not None), key=_eps, default=self._loss.dtype)

    @property
    def precision(self) -> float:
        """The allowed error of logits and of what comes before them."""
        return tolerance(self.coarsest)

    @property
    def loss_precision(self) -> float:
        """The allowed error of the loss and of gradients: many models take the loss in float32."""
        return tolerance(max(self.coarsest, self._loss.dtype, key=_eps))

    @property
    def noise(self) -> float:
        """A change of logits that rounding alone may bring about."""
        return 64 * _eps(self.coarsest)

    @property
    def _loss(self) -> Tensor:
        assert self.alone.loss is not None
        return self.alone.loss

    def name(self, place: int) -> str:
        """A token, for a person.

        Batch elements are named only if there are several.
        """
        b, s = divmod(place, self.seq_len)
        return f"position {s}" + (f" of batch element {b}" if self.tokens.shape[0] > 1 else "")

    def owner(self, place: int) -> int:
        """The rank that has a token; -1 if none does."""
        for rank, places in enumerate(self.places or ()):
            if bool((places == place).any()):
                return rank
        return -1

    def at(self, place: int) -> str:
        """A token and its rank, for a person."""
        return f"{self.name(place)}, rank {self.owner(place)}"

    def owners(self) -> Tensor:
        """int64 [B * S] The rank of every token; -1 for none."""
        found = torch.full((self.tokens.numel(),), -1)
        for rank, places in enumerate(self.places or ()):
            found[places[places >= 0]] = rank
        return found

    def by_place(self, values: Tensor | None, rows: Tensor | None) -> Tensor | None:
        """[B * S, ...] in float64: rows put to their places, NaN where there is none."""
        if values is None or rows is None or values.shape[0] != rows.numel():
            return None
        whole = values.new_full((self.tokens.numel(), *values.shape[1:]), torch.nan).double()
        kept = rows >= 0
        whole[rows[kept]] = values[kept].double()
        return whole

    def gathered(self, values: Sequence[Tensor | None]) -> Tensor | None:
        """[B * S, ...] in float64: the rows of all ranks put to their places."""
        if self.places is None:
            return None
        whole: Tensor | None = None
        for mine, rows in zip(values, self.places, strict=True):
            part = self.by_place(mine, rows)
            if part is None:
                return None
            whole = part if whole is None else torch.where(part.isnan(), whole, part)
        return whole


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def not_observed(name: str, why: str) -> Check:
    """A check that had nothing to look at."""
    return Check(name, "not observed", why)
