"""What a person sees of an examination: what runs now, and what was found, as it happens."""

from __future__ import annotations

import time

from rich.status import Status
from rich.table import Table
from rich.text import Text

from flexcp.tools.cli.output import console
from flexcp.tools.doctor.findings import NOT_ASKED, SECTIONS, Diagnosis, Doing, Finding

_STYLES = {"passed": "green", "failed": "bold red", "measured": "cyan", "not run": "dim"}


class DoctorScreen:
    """Findings go to stdout, or beside JSON to stderr; what runs now always to stderr."""

    def __init__(self, *, as_json: bool) -> None:
        self._out = console(stderr=as_json)
        self._err = console(stderr=True)
        self._begin = time.monotonic()
        self._section = ""
        self._status: Status | None = None

    def __call__(self, event: Doing | Finding) -> None:
        """Shows an event."""
        if isinstance(event, Doing):
            self._do(event)
        else:
            self._find(event)

    def _do(self, event: Doing) -> None:
        passed = time.monotonic() - self._begin
        text = f"{event.section}: {event.name} (up to {event.seconds:.0f} s)"
        if not self._err.is_terminal:
            self._err.print(f"[{passed:4.0f} s] {text}")
            return
        if self._status is None:
            self._status = self._err.status(text)
            self._status.start()
        self._status.update(f"[{passed:.0f} s] {text}")

    def _find(self, finding: Finding) -> None:
        if finding.said == NOT_ASKED:  # the report lists them
            return
        if finding.section != self._section:
            self._section = finding.section
            self._out.print(Text(f"\n{SECTIONS[finding.section]}", "bold"))
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_column(width=9)
        word = "FAILED" if finding.outcome == "failed" else finding.outcome
        line.add_row(Text(word, _STYLES[finding.outcome]), f"{finding.name}: {finding.said}")
        if finding.fix:
            line.add_row("", Text(f"what to do: {finding.fix}", "yellow"))
        self._out.print(line)

    def stopping(self) -> None:
        """Says that an interruption was heard."""
        self._err.print("Stopping after this check; once more to stop at once.")

    def end(self, found: Diagnosis) -> None:
        """Shows the verdict and where everything is."""
        if self._status is not None:
            self._status.stop()
        self._out.print()
        for order in found.orders:
            self._out.print(f"preferred for {order.kind}: {order.kernels[0]}")
        for note in found.notes:
            self._out.print(note)
        style = _STYLES["failed" if found.failures else "passed"]
        self._out.print(Text(f"{found.verdict} ({found.seconds:.0f} s)", style))
