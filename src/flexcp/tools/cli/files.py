"""Writing files that people name on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flexcp import errors
from flexcp.errors import FlexCPError, quote


def require_ending(path: Path | None, *endings: str) -> None:
    """Raises if a file's name says that it is something else than what would be written.

    >>> require_ending(Path("plan.pdf"), ".svg")
    Traceback (most recent call last):
    ...
    flexcp.errors.FlexCPError: expected a file that ends in .svg, got 'plan.pdf'; name one
    """
    if path is not None and path.suffix not in endings:
        raise FlexCPError(
            f"a file that ends in {' or '.join(endings)}", quote(str(path)), "name one"
        )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what goes wrong with a file into a message; folders are made."""
    with errors.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
