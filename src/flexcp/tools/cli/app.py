"""The commands, put together. A command is a module of its own, and imports torch when it runs."""

from __future__ import annotations

import typer

from flexcp.tools.cli.doctor import doctor
from flexcp.tools.cli.plan import plan
from flexcp.tools.cli.show import show
from flexcp.tools.cli.train import train
from flexcp.tools.cli.verify import verify

app = typer.Typer(
    help="Exact attention over a sequence that is sharded across devices: plan, see, prove, train.",
    epilog="Exit codes: 0 done, 1 the answer is no, 2 a request that can't be honoured. "
    "`flexcp --version` prints the version.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # A known answer to "help?" spares typer the import of pydantic, a third of the time to help.
    context_settings={"help_option_names": ["-h", "--help"], "default_map": {"help": False}},
)

app.command("plan")(plan)
app.command("show")(show)
app.command("verify")(verify)
app.command("train")(train)
app.command("doctor")(doctor)
