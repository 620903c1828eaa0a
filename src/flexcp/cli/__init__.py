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
    from flexcp.cli.app import app

    try:
        app(args, prog_name="flexcp")
    except FlexCPError as error:
        if "--debug" in args:
            raise
        print(f"flexcp: {error}", file=sys.stderr)
        sys.exit(2)
