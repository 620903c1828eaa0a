"""The commands, put together. A command is a module of its own, and imports torch when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from flexcp.cli.bench import bench
from flexcp.cli.plan import plan
from flexcp.cli.show import show
from flexcp.cli.train import train
from flexcp.cli.verify import verify

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 the answer is no, 2 a request that can't be honoured.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("flexcp"))
        raise typer.Exit


@app.callback()
def _flexcp(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Exact attention over a sequence that is sharded across devices: plan, see, prove, measure."""


app.command("plan")(plan)
app.command("show")(show)
app.command("train")(train)
app.command("bench")(bench)
app.command("verify")(verify)
