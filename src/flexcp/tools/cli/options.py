"""Options that several commands share, so that they are called and explained alike."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from flexcp.errors import FlexCPError, quote
from flexcp.units import parse_size


def size_of_option(text: str | int) -> int:
    """A size from the command line; typer shows the error with the option's name."""
    try:
        return parse_size(str(text))
    except FlexCPError as error:
        raise typer.BadParameter(str(error)) from None


def mesh_of_option(text: str) -> int | tuple[int, ...]:
    """A number of ranks, or groups x ranks that share heads."""
    try:
        sizes = tuple(parse_size(part) for part in str(text).lower().split("x"))
    except FlexCPError:
        sizes = ()
    if len(sizes) not in (1, 2) or min(sizes) < 1:
        raise typer.BadParameter(
            f"expected a number such as 64, or groups x ranks such as 8x8, got {quote(text)}"
        )
    return sizes if len(sizes) == 2 else sizes[0]


def require_groups(schedule: str, ranks: int | tuple[int, ...] | None) -> None:
    """Raises if ranks are to share heads, and nothing says how many at a time.

    >>> require_groups("hybrid", 8)
    Traceback (most recent call last):
    ...
    flexcp.errors.FlexCPError: expected groups of ranks that share heads, for the hybrid schedule, \
got --ranks 8; such as --ranks 4x2; auto finds a split by itself
    """
    if schedule == "hybrid" and not isinstance(ranks, tuple):
        raise FlexCPError(
            "groups of ranks that share heads, for the hybrid schedule",
            "no --ranks" if ranks is None else f"--ranks {ranks}",
            "such as --ranks 4x2; auto finds a split by itself",
        )


def unset(metavar: str | None, help: str, **more: Any) -> Any:
    """An option that need not be given, so that help shows no default.

    Args:
        metavar: What help calls its value; None leaves that to its type.
        help: What it is for.
        more: Further arguments of `typer.Option`.
    """
    return typer.Option(metavar=metavar, help=help, show_default=False, **more)


FUNCTION = "PACKAGE.MODULE:FUNCTION"
"""What help calls the name of a function of the user's."""
FLAG = ""
"""What help says of the value of an option that has none."""

MASK_HELP = (
    "A mask: `causal`, `causal & sliding_window(4096)`, `causal & document(lengths.csv)`, "
    "`~causal | prefix_lm(128)`, ..., or `package.module:function`."
)

MaskText = Annotated[str, typer.Argument(help=MASK_HELP, metavar="MASK", show_default=False)]
Tokens = Annotated[
    int | None,
    typer.Option(
        parser=size_of_option,
        metavar="SIZE",
        help="Length of the sequence, such as 4096, 128K or 1M. Known already where the mask "
        "consists of documents of given lengths.",
        show_default=False,
    ),
]
Mesh = Annotated[
    Any,
    typer.Option(
        parser=mesh_of_option,
        metavar="RANKS",
        help="Devices that share the sequence; 8x8 for 8 groups of 8 that share heads.",
    ),
]
Heads = Annotated[int, typer.Option(min=1, metavar="N", help="Query heads.")]
KvHeads = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Key and value heads; as many as query heads if not given."
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="TYPE",
        help="Type of Q, K and V.",
        autocompletion=lambda: ["bfloat16", "float16", "float32", "float64"],
    ),
]
LAYOUT_NAMES = (
    "auto", "contiguous", "head_tail", "striped", "per_document", "ptrr", "balanced",
)  # fmt: skip
SCHEDULE_NAMES = (
    "auto", "exchange", "ring", "allgather", "ulysses", "hybrid", "hierarchical",
)  # fmt: skip
LayoutName = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"{', '.join(LAYOUT_NAMES[:-1])} or {LAYOUT_NAMES[-1]}.",
        autocompletion=lambda: list(LAYOUT_NAMES),
    ),
]
ScheduleName = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"{', '.join(SCHEDULE_NAMES[:-1])} or {SCHEDULE_NAMES[-1]}.",
        autocompletion=lambda: list(SCHEDULE_NAMES),
    ),
]
BlockSize = Annotated[
    int, typer.Option(parser=size_of_option, metavar="SIZE", help="Tokens of a tile's side.")
]
Batch = Annotated[int, typer.Option(min=1, metavar="N", help="Batch elements.")]
Json = Annotated[bool, typer.Option("--json", metavar=FLAG, help="Print JSON, for programs.")]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug", metavar=FLAG, help="Show the traceback of an error.", rich_help_panel="Other"
    ),
]
