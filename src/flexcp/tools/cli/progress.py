"""A line on the terminal that says what takes so long; nothing where nobody watches."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE = 1.0
"""Seconds after which the line appears."""


def _nothing(text: str) -> None:
    """Nobody watches."""
    del text


@contextmanager
def progress(first: str) -> Iterator[Callable[[str], None]]:
    """Shows what is being done once it has taken a second; the function says what comes next.

    Nothing is shown unless stderr is a terminal.

    >>> with progress("thinking") as say:
    ...     say("thinking harder")
    """
    if not sys.stderr.isatty():
        yield _nothing
        return
    from rich.status import Status

    from flexcp.tools.cli.output import console

    status = Status(first, console=console(stderr=True))
    timer = threading.Timer(_PATIENCE, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield status.update
    finally:
        timer.cancel()
        timer.join()
        status.stop()
