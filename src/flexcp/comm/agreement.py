"""Agreement: before data moves, ranks compare what they are about to do."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Protocol

from flexcp.errors import FlexCPError

_DIGEST = 16
"""Bytes that every rank sends to every other before each call."""
REFUSED = b"\xff" * _DIGEST
"""What a rank sends instead if it can't do what it was asked to."""


class Comparer(Protocol):
    """What comparing takes of a transport."""

    def all_bytes(self, mine: bytes) -> list[bytes]:
        """Bytes of all ranks, by rank; all give as many."""
        ...

    def all_agree(self, text: str) -> list[str]:
        """The texts of all ranks, by rank."""
        ...

    def refuse(self, why: str) -> None:
        """Tells the ranks that compare next that this one can't do what they do."""
        ...

    def refusals(self, ranks: Sequence[int]) -> list[str]:
        """Why some ranks refused."""
        ...


def agree(transport: Comparer, what: str, facts: Mapping[str, str], fix: str) -> None:
    """Raises on every rank if the ranks' facts differ, saying what differs between whom."""
    mine = json.dumps(dict(facts))
    every = transport.all_bytes(hashlib.sha256(mine.encode()).digest()[:_DIGEST])
    if len(set(every)) == 1:
        return
    refusing = [rank for rank, short in enumerate(every) if short == REFUSED]
    if refusing:
        reasons = zip(refusing, transport.refusals(refusing), strict=True)
        told = "; ".join(f"rank {rank} can't: {why}" for rank, why in reasons)
        raise FlexCPError(f"all ranks to {what}", told, fix)
    raise FlexCPError(
        f"all ranks to {what}", _differences(list(facts), transport.all_agree(mine)), fix
    )


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
