"""Where output goes: JSON for programs, rich text for people, plain text into pipes."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH = 100


def console(*, stderr: bool = False) -> Console:
    """A rich console that honours NO_COLOR, and writes lines of 100 columns into pipes."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, emoji=False, markup=False)


def print_json(data: Any) -> None:
    """One JSON document on stdout: indented for a terminal, one line for a pipe."""
    indent = 2 if sys.stdout.isatty() else None
    print(json.dumps(data, indent=indent, ensure_ascii=False))


def note(text: str) -> None:
    """A remark for the person, on stderr, so that stdout stays what was asked for."""
    print(f"flexcp: {text}", file=sys.stderr)
