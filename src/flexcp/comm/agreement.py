"""Agreement: what ranks are about to do alike, and what to say if they do not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from flexcp.errors import FlexCPError, peer_error

_DIGEST = 16
"""Bytes of a digest."""


@dataclass(frozen=True, eq=False)
class Agreement:
    """What all ranks have to do alike in one kind of call: compared the first time it is made."""

    what: str
    """What ranks are expected to do, in errors: "unshard the same"."""
    step: str
    """What the call is called in errors: "unshard"."""
    facts: Mapping[str, str]
    """What must not differ, by its name in errors."""
    fix: str
    """What to do if it does."""
    digest: bytes = field(init=False, repr=False)
    """Equal on ranks that agree."""

    def __post_init__(self) -> None:
        text = json.dumps([self.step, dict(self.facts)])
        object.__setattr__(self, "digest", hashlib.sha256(text.encode()).digest()[:_DIGEST])

    def error(self, statements: Mapping[int, Statement], size: int) -> FlexCPError:
        """What to raise on every rank once one said that it can't, or differs."""
        return peer_error(f"all ranks to {self.what}", _told(statements, size), self.fix)


def failure_of(statements: Mapping[int, Statement], own: int, where: str) -> FlexCPError | None:
    """What to raise on rank `own` if some rank left a pass after it had begun it."""
    for rank, statement in sorted(statements.items()):
        if statement.failed:
            return peer_error(
                f"rank {rank} to go on in {where}",
                f"no answer on rank {own}: it failed with {statement.failed}",
                f"look at the output of rank {rank}",
            )
    return None


@dataclass(frozen=True)
class Statement:
    """What a rank says of a call that has failed.

    >>> Statement.of(Statement(step="unshard").as_text())
    Statement(refused='', failed='', step='unshard', facts={})
    """

    refused: str = ""
    """Why it did not begin the call."""
    failed: str = ""
    """Why it ended the call after it had begun."""
    step: str = ""
    """What it calls the call, if it is in one that is fine by itself."""
    facts: Mapping[str, str] = field(default_factory=dict)

    def as_text(self) -> str:
        """As the board keeps it."""
        return json.dumps([self.refused, self.failed, self.step, dict(self.facts)])

    @classmethod
    def of(cls, text: str) -> Statement:
        """From what `as_text` gave."""
        return cls(*json.loads(text))


def _told(statements: Mapping[int, Statement], size: int) -> str:
    """What keeps the ranks from doing the same, as far as they have said."""
    told = [f"rank {r} can't: {s.refused}" for r, s in sorted(statements.items()) if s.refused]
    if told:
        return "; ".join(told)
    found = _differences({r: s for r, s in statements.items() if s.step})
    silent = [r for r in range(size) if r not in statements]
    if silent:
        found.append(f"nothing was heard of ranks {silent}")
    return " | ".join(found) or "ranks that are not in the same call"


def _differences(statements: Mapping[int, Statement]) -> list[str]:
    """What differs between ranks, in the order in which they name it."""
    every = {r: {"call": s.step, **s.facts} for r, s in sorted(statements.items())}
    found = []
    for name in dict.fromkeys(name for facts in every.values() for name in facts):
        by_value: dict[str, list[int]] = {}
        for rank, facts in every.items():
            by_value.setdefault(facts.get(name, "nothing of the kind"), []).append(rank)
        if len(by_value) > 1:
            told = "; ".join(f"{value} on ranks {ranks}" for value, ranks in by_value.items())
            found.append(f"{name}: {told}")
    return found
