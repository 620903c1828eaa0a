"""Batches that make a step tell where its tokens are and what they see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexcp.errors import FlexCPError
from flexcp.tools.verify.observe import Observation

_NAMES = ("input_ids", "tokens", "inputs", "input", "ids", "idx", "x")


def tokens_name(batch: Mapping[str, Any]) -> str:
    """Which entry of a batch has the tokens: integers [B, S].

    >>> tokens_name({"labels": torch.zeros(1, 4).long(), "input_ids": torch.zeros(1, 4).long()})
    'input_ids'
    """
    whole = [
        n
        for n, x in batch.items()
        if isinstance(x, Tensor) and x.dim() == 2 and x.dtype in (torch.int64, torch.int32)
    ]
    for name in [*_NAMES, *(n for n in whole if "label" not in n and "pos" not in n)]:
        if name in whole:
            return name
    raise FlexCPError(
        "a batch with tokens: integers [B, S], under a name such as input_ids",
        ", ".join(batch) or "an empty batch",
        "pass the whole batch as the step takes it",
    )


@dataclass(frozen=True, eq=False)
class Numbering:
    """Batches whose tokens, read together, are the numbers of their places.

    A token's place in the whole batch is written in digits, one batch per digit; what a rank's
    embedding is given then says which tokens the rank has, in which order, without trusting it.
    0 is no place: rows that a step adds as padding read as nothing.
    """

    base: int
    """Token ids are below this."""
    shape: tuple[int, int]
    """(B, S)"""
    digits: int
    """How many batches."""

    @classmethod
    def of(cls, tokens: Tensor) -> Numbering:
        """For a batch of tokens [B, S].

        >>> Numbering.of(torch.tensor([[3, 0, 9, 1, 1, 4, 7, 7, 7, 7, 2]])).digits
        2
        """
        base = int(tokens.max()) + 1
        if base < 2:
            raise FlexCPError(
                "a batch with more than one kind of token",
                "one whose tokens are all 0",
                "pass a batch as the model is trained on",
            )
        digits = 1
        while base**digits < tokens.numel() + 2:
            digits += 1
        return cls(base, (tokens.shape[0], tokens.shape[1]), digits)

    def batches(self, batch: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
        """One per digit."""
        given: Tensor = batch[name]
        places = torch.arange(1, given.numel() + 1).view(given.shape)
        return [
            {**batch, name: (places // self.base**d % self.base).to(given)}
            for d in range(self.digits)
        ]

    def read(self, seen: Sequence[Observation], key: str) -> Tensor | None:
        """int64 [rows] The place of each row, b * S + s; -1 for rows that are no token."""
        if any(key not in one.integers for one in seen):
            return None
        digits = [one.integers[key].flatten().long() for one in seen]
        if len({d.numel() for d in digits}) > 1:
            return None
        place = sum(d * self.base**i for i, d in enumerate(digits)) - torch.ones(
            (), dtype=torch.int64
        )
        assert isinstance(place, Tensor)
        return torch.where((place < 0) | (place >= self.shape[0] * self.shape[1]), -1, place)

    def key(self, seen: Sequence[Observation]) -> str | None:
        """Where one process takes its tokens from: the first that reads as distinct places."""
        for key in sorted(seen[0].integers, key=lambda k: not k.startswith("embedding")):
            places = self.read(seen, key)
            if places is None or bool((places < 0).any()):
                continue
            if places.numel() > 1 and places.unique().numel() == places.numel():
                return key
        return None


def perturbed(batch: Mapping[str, Any], name: str, place: int, base: int) -> dict[str, Any]:
    """The batch with another token at one place."""
    tokens = batch[name].clone()
    flat = tokens.view(-1)
    flat[place] = (flat[place] + 1 + place % max(base - 2, 1)) % base
    return {**batch, name: tokens}


def unevenly_scored(batch: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The batch with a third of its labels ignored, so that no two ranks score as many tokens."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.shape[:2] != batch[name].shape[:2]:
        return None
    labels = labels.clone()
    labels[:, : labels.shape[1] // 3] = -100
    return {**batch, "labels": labels}
