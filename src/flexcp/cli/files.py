"""Writing files that people name on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flexcp.errors import FlexCPError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what goes wrong with a file into a message; folders are made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise FlexCPError(
            f"a file that can be written at {str(path)!r}",
            error.strerror or str(error),
            "choose another place",
        ) from None
