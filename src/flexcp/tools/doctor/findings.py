"""Findings: what the doctor saw, each with its outcome, and all of them as one report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from flexcp.kernels.preferences import KernelOrder
from flexcp.plan import Machine

Outcome = Literal["passed", "failed", "measured", "not run"]

SECTIONS = {
    "environment": "Versions, devices and links",
    "kernels": "Every kernel against float64, and against itself",
    "ranks": "Transport, agreement and plans over ranks",
    "speed": "Throughput beside PyTorch's own",
    "links": "Bandwidth and latency between ranks",
}
"""What is looked at, in this order, and what each part is called in the report."""


NOT_ASKED = "not asked for"
"""Why something was not run that a request left out."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at, or was not.

    >>> Finding("ranks", "transport", "not run", "there is one rank").line
    'not run   transport: there is one rank'
    """

    section: str
    """One of `SECTIONS`."""
    name: str
    outcome: Outcome
    said: str
    """What was seen, or why nothing was, in a sentence."""
    fix: str = ""
    """What to do about a failure."""
    seconds: float = 0.0
    """How long it took."""
    rows: tuple[Mapping[str, Any], ...] = ()
    """The numbers behind it, as rows of a table."""

    @property
    def line(self) -> str:
        """For a terminal; failures stand out."""
        mark = "FAILED" if self.outcome == "failed" else self.outcome
        return f"{mark:<9} {self.name}: {self.said}"


@dataclass(frozen=True)
class Diagnosis:
    """Everything that a run of the doctor found."""

    environment: Mapping[str, Any]
    """Versions and devices, by name."""
    findings: tuple[Finding, ...]
    orders: tuple[KernelOrder, ...] = ()
    """Kernels by kind of mask, the fastest first; of those that are right."""
    machine: Machine | None = None
    """What the ranks reach, for `flexcp plan --machine`."""
    seconds: float = 0.0
    interrupted: bool = False
    """Whether it was stopped before its end."""
    notes: tuple[str, ...] = field(default=())
    """Remarks on the whole run: which files were written, and why one was not."""

    @property
    def failures(self) -> tuple[Finding, ...]:
        """What is wrong."""
        return tuple(f for f in self.findings if f.outcome == "failed")

    @property
    def verdict(self) -> str:
        """The whole run in a sentence."""
        count = {o: sum(f.outcome == o for f in self.findings) for o in ("passed", "not run")}
        stopped = "stopped before its end; " if self.interrupted else ""
        rest = f"{count['passed']} checks passed, {count['not run']} not run"
        if self.failures:
            names = ", ".join(f"{f.section}: {f.name}" for f in self.failures)
            return f"{stopped}{len(self.failures)} FAILED ({names}); {rest}"
        return f"{stopped}all right: {rest}"

    def as_data(self) -> dict[str, Any]:
        """Everything, for a program; versions and devices are keys of their own."""
        return {
            **self.environment,
            "passed": not self.failures,
            "interrupted": self.interrupted,
            "verdict": self.verdict,
            "seconds": round(self.seconds, 1),
            "findings": [asdict(finding) for finding in self.findings],
            "winners": [asdict(order) for order in self.orders],
            "machine": None if self.machine is None else asdict(self.machine),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Doing:
    """Something begins that may take a while."""

    section: str
    name: str
    seconds: float
    """How long it may take at most."""


Listener = Callable[[Doing | Finding], None]
"""Hears of everything as it happens."""


def hear_nothing(_: Doing | Finding) -> None:
    """Listens to nothing."""
