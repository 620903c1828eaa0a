"""The `flexcp` command. Importing it imports no torch: `--help` must answer at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flexcp.errors import FlexCPError


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line, and ends the process with its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args == ["--version"]:  # as an option of typer's, it would slow the help of all commands
        from importlib.metadata import version

        print(version("flexcp"))
        sys.exit(0)
    from flexcp.tools.cli.app import app

    try:
        app(args, prog_name="flexcp")
    except FlexCPError as error:
        if "--debug" in args:
            raise
        print(f"flexcp: {error}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:  # 1 would say that the answer is no
        if "--debug" in args:
            raise
        print(f"flexcp: {_unforeseen(error)}", file=sys.stderr)
        sys.exit(2)


def _unforeseen(error: Exception) -> FlexCPError:
    """What no part of the library has put into words, such as errors of a user's own functions."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    # torch's CPU allocator raises a plain RuntimeError, which only torch's own text tells apart;
    # this module must not import torch to look at its types.
    if isinstance(error, MemoryError) or "allocate memory" in text:
        return FlexCPError(
            "a request that fits into memory",
            text.rpartition("Allocator: ")[2],
            "pass fewer --tokens, or a larger --block-size",
        )
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = ""
    if frame is not None and not isinstance(error, SyntaxError):  # which says its own place
        place = f" ({frame.tb_frame.f_code.co_filename}:{frame.tb_lineno})"
    return FlexCPError(
        "the command to finish", f"{text}{place}", "pass --debug to see how it came there"
    )
