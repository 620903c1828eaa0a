"""The `flexcp` command. Importing it imports no torch: `--help` must answer at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from flexcp.errors import FlexCPError, did_you_mean


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line, and ends the process with its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    from typer import Abort

    from flexcp.tools.cli.app import app

    try:
        code = app(args, prog_name="flexcp", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except (Abort, KeyboardInterrupt):
        print("flexcp: stopped", file=sys.stderr)
        sys.exit(130)
    except FlexCPError as error:
        if "--debug" in args:
            raise
        print(f"flexcp: {error}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:  # 1 would say that the answer is no
        if hasattr(error, "format_message"):  # typer's own; which click it has depends on its age
            _explain_usage(error)
            sys.exit(2)
        if "--debug" in args:
            raise
        print(f"flexcp: {_unforeseen(error)}", file=sys.stderr)
        sys.exit(2)


def _explain_usage(error: Any) -> None:
    """What was typed wrong, in the words of all other errors; or the help that was asked for."""
    kind = type(error).__name__
    command = error.ctx.command_path if getattr(error, "ctx", None) is not None else "flexcp"
    if kind == "NoArgsIsHelpError":
        error.show()
        return
    text, seek = error.format_message(), f"`{command} --help` lists what there is"
    if kind == "NoSuchOption":
        known = [name for option in error.ctx.command.params for name in option.opts]
        seek = did_you_mean(error.option_name, known) or seek
        text = f"expected an option of `{command}`, got {error.option_name}; {seek}"
    elif text.startswith("No such command"):
        name = text.split("'")[1]
        seek = did_you_mean(name, error.ctx.command.commands) or seek
        text = f"expected a command, got {name!r}; {seek}"
    elif kind in ("BadParameter", "MissingParameter") and error.param is not None:
        option = error.param.opts[0] if error.param.opts[0].startswith("-") else error.param.metavar
        text = error.message or "nothing"
        if not text.startswith("expected"):
            text = f"expected a value for {option}: {text.rstrip('.')}; {seek}"
        else:
            text = f"{option}: {text}"
    else:
        text = f"{text.rstrip('.')}; {seek}"
    print(f"flexcp: {text}", file=sys.stderr)


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
