"""Verdict: what was checked, what was found, and the first thing that is wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from textwrap import wrap
from typing import Any, Literal

Status = Literal["passed", "failed", "not observed"]


@dataclass(frozen=True)
class Check:
    """One comparison of the ranks with one process.

    >>> Check("loss", "passed", "the same", measured=0.0, tolerance=1e-9).passed
    True
    """

    name: str
    """What was compared: one of `CHECKS`."""
    status: Status
    """"not observed" if the step gave nothing to compare."""
    found: str
    """What was seen, in a few words."""
    measured: float | None = None
    """The largest deviation, relative to the largest entry, or a count."""
    tolerance: float | None = None
    """What `measured` may be."""
    where: str = ""
    """Parameter, position and rank of the deviation."""
    cause: str = ""
    """What most likely went wrong."""
    fix: str = ""
    """What to do about it."""

    @property
    def passed(self) -> bool:
        """Whether nothing was found to be wrong."""
        return self.status != "failed"


class VerificationError(AssertionError):
    """A verdict with a failed check; `verdict` has all of them."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


@dataclass(frozen=True)
class Verdict:
    """All checks, in the order in which one mistake leads to the next.

    The first failure is the one to look at: those after it are often its consequences.

    >>> good = Check("loss", "passed", "equal", 1e-16, 1e-10)
    >>> bad = Check("gradients", "failed", "differ", 0.5, 1e-10, "head.weight", "why", "how")
    >>> verdict = Verdict((good, bad), title="a model on 2 ranks")
    >>> verdict.passed, verdict.first_failure.name
    (False, 'gradients')
    >>> print(verdict)
    a model on 2 ranks: FAILED at gradients
    | check     | result | measured | allowed | what was seen |
    |-----------|--------|----------|---------|---------------|
    | loss      | passed | 1e-16    | 1e-10   | equal         |
    | gradients | FAILED | 0.5      | 1e-10   | differ        |
    <BLANKLINE>
    first failure: gradients
      where         head.weight
      likely cause  why
      fix           how
    """

    checks: tuple[Check, ...]
    """In order."""
    title: str = ""
    """What was verified."""
    error: BaseException | None = field(default=None, compare=False, repr=False)
    """What a rank raised, if one did."""

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.passed for check in self.checks)

    @property
    def first_failure(self) -> Check | None:
        """The check to look at, if one failed."""
        return next((check for check in self.checks if not check.passed), None)

    def __getitem__(self, name: str) -> Check:
        """The check of that name.

        >>> Verdict((Check("loss", "passed", "equal"),))["loss"].found
        'equal'
        """
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(name)

    def table(self) -> str:
        """The checks as a table that is valid Markdown."""
        rows = [
            [c.name, c.status if c.passed else "FAILED", _short(c.measured), _short(c.tolerance)]
            for c in self.checks
        ]
        cells = [[*row, c.found] for row, c in zip(rows, self.checks, strict=True)]
        return _table(["check", "result", "measured", "allowed", "what was seen"], cells)

    def _listed(self, columns: int) -> str:
        """The checks without figures, for narrow terminals."""
        names = max(len(c.name) for c in self.checks)
        states = max(len(c.status) for c in self.checks)
        lines = []
        for check in self.checks:
            begin = _line_of(check, names, states)
            found, *more = wrap(check.found, max(20, columns - len(begin))) or [""]
            lines += [begin + found, *(" " * len(begin) + line for line in more)]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Everything, for a program."""
        first = self.first_failure
        data: dict[str, Any] = {
            "title": self.title,
            "passed": self.passed,
            "first_failure": None if first is None else first.name,
            "checks": [asdict(check) for check in self.checks],
        }
        return json.dumps(data)

    def raise_if_failed(self) -> Verdict:
        """Itself, or a VerificationError with the table."""
        if not self.passed:
            raise VerificationError(self) from self.error
        return self

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, columns: int = 120) -> str:
        """For a person, on a terminal so wide: a table if it fits, else a paragraph per check.

        >>> print(Verdict((Check("loss", "passed", "summed: 2.5"),)).to_text(columns=30))
        passed
          passed  loss  summed: 2.5
        """
        first = self.first_failure
        outcome = "passed" if first is None else f"FAILED at {first.name}"
        table = self.table()
        if len(table.splitlines()[0]) > columns:
            table = self._listed(columns)
        lines = [f"{self.title}: {outcome}" if self.title else outcome, table]
        if first is not None:
            parts = {"where": first.where, "likely cause": first.cause, "fix": first.fix}
            lines += ["", f"first failure: {first.name}"]
            for label, text in parts.items():
                if text:
                    first_line, *others = wrap(text, max(20, min(100, columns - 16))) or [""]
                    lines.append(f"  {label:<13} {first_line}")
                    lines += [" " * 16 + line for line in others]
        return "\n".join(lines)


def _line_of(check: Check, name_width: int, status_width: int) -> str:
    status = check.status if check.passed else "FAILED"
    return f"  {status:<{status_width}}  {check.name:<{name_width}}  "


def _short(x: float | None) -> str:
    return "" if x is None else f"{x:.2g}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(x.ljust(w) for x, w in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([line(header), rule, *(line(row) for row in rows)])
