"""Agreement: before data moves, ranks compare what they are about to do."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from flexcp.errors import FlexCPError

_DIGEST = 16
"""Bytes that every rank sends to every other before each call."""
REFUSED = b"\xff" * _DIGEST
"""What a rank sends instead if it can't do what it was asked to."""


class Comparer(Protocol):
    """What finding out about a disagreement takes of a transport."""

    def all_agree(self, text: str) -> list[str]:
        """The texts of all ranks, by rank."""
        ...

    def refusals(self, ranks: Sequence[int]) -> list[str]:
        """Why some ranks refused."""
        ...


@dataclass(frozen=True, eq=False)
class Agreement:
    """What all ranks have to do alike, ready to be compared by `Transport.compare`."""

    what: str
    """What ranks are expected to do, in errors: "unshard the same"."""
    facts: Mapping[str, str]
    """What must not differ, by its name in errors."""
    fix: str
    """What to do if it does."""
    digest: bytes = field(init=False, repr=False)
    """What is compared first."""

    def __post_init__(self) -> None:
        digest = hashlib.sha256(self._text.encode()).digest()[:_DIGEST]
        object.__setattr__(self, "digest", digest)

    @property
    def _text(self) -> str:
        return json.dumps(dict(self.facts))

    def error(self, transport: Comparer, digests: Sequence[bytes]) -> FlexCPError:
        """What to raise on every rank if digests differ: what differs between whom."""
        refusing = [rank for rank, digest in enumerate(digests) if digest == REFUSED]
        if refusing:
            reasons = zip(refusing, transport.refusals(refusing), strict=True)
            told = "; ".join(f"rank {rank} can't: {why}" for rank, why in reasons)
        else:
            told = _differences(list(self.facts), transport.all_agree(self._text))
        return FlexCPError(f"all ranks to {self.what}", told, self.fix)


def _differences(names: Sequence[str], texts: Sequence[str]) -> str:
    every: list[dict[str, str]] = [json.loads(text) for text in texts]
    names = list(dict.fromkeys([*names, *(name for facts in every for name in facts)]))
    found = []
    for name in names:
        by_value: dict[str, list[int]] = {}
        for rank, facts in enumerate(every):
            by_value.setdefault(facts.get(name, "nothing of the kind"), []).append(rank)
        if len(by_value) > 1:
            told = "; ".join(f"{value} on ranks {ranks}" for value, ranks in by_value.items())
            found.append(f"{name}: {told}")
    return " | ".join(found)
