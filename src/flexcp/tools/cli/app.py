"""The commands, put together. A command is a module of its own, and imports torch when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from flexcp.tools.cli.doctor import doctor
from flexcp.tools.cli.options import FLAG
from flexcp.tools.cli.plan import plan
from flexcp.tools.cli.show import show
from flexcp.tools.cli.train import train
from flexcp.tools.cli.verify import verify

EXAMPLES = {
    "plan": (
        "flexcp plan causal --tokens 1M --ranks 64",
        "flexcp plan --model llama-3-70b --tokens 128K",
        "flexcp plan 'causal & document(lengths.csv)'",
        "flexcp plan causal --tokens 1M --html plan.html",
        "flexcp plan causal --tokens 1M --save plan.json",
        "flexcp plan --load plan.json",
    ),
    "show": (
        "flexcp show causal --tokens 64K --ranks 8",
        "flexcp show 'causal & sliding_window(4K)' --tokens 64K",
        "flexcp show causal --tokens 1M --out mask.svg",
    ),
    "verify": (
        "flexcp verify qwen3 --ranks 3",
        "flexcp verify gemma3_text --documents 40,25,32",
        "flexcp verify mine.models:tiny --step mine.train:step",
    ),
    "train": (
        "flexcp train --ranks 2 --steps 100 --compare",
        "flexcp train --data texts/ --tokens 16K --ranks 4",
        "flexcp train --autocast bfloat16 --dim 256",
    ),
    "doctor": (
        "flexcp doctor",
        "flexcp doctor --only kernels --minutes 2",
        "flexcp doctor --compile sm_90",
    ),
}
"""What people type, by command; help shows them."""
IN_SHORT = {
    "plan": "Plan who owns which tokens, and price it.",
    "show": "Draw a mask: which queries see which keys.",
    "verify": "Compare a model on ranks with one process.",
    "train": "Train a small model on local ranks.",
    "doctor": "Check and measure this machine.",
}
"""Commands in the list of them, each in one line of a terminal of 60 columns."""

app = typer.Typer(
    help="Exact attention over a sequence that is sharded across devices: plan, see, prove, train.",
    epilog="Exit codes: 0 done, 1 the answer is no, 2 a request that can't be honoured.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        # Known answers spare typer the import of pydantic, a third of the time to help.
        "default_map": dict.fromkeys(
            ("help", "version", "install_completion", "show_completion"), False
        ),
    },
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(version("flexcp"))
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            metavar=FLAG,
            help="Print the version and end.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Exact attention over a sequence that is sharded across devices: plan, see, prove, train."""


for _command in (plan, show, verify, train, doctor):
    # \b keeps lines as they are.
    _examples = "\n".join(f"  {line}" for line in EXAMPLES[_command.__name__])
    app.command(
        _command.__name__,
        short_help=IN_SHORT[_command.__name__],
        epilog=f"\b\nExamples:\n{_examples}",
    )(_command)
