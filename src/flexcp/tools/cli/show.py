"""`flexcp show`: a mask as a picture, in the terminal or as a file, coloured by rank."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexcp.errors import FlexCPError
from flexcp.tools.cli.options import (
    Batch,
    Debug,
    Heads,
    Json,
    LayoutName,
    MaskText,
    ScheduleName,
    Tokens,
    size_of_option,
    unset,
)

if TYPE_CHECKING:
    from flexcp.grid import BlockGrid
    from flexcp.plan import Plan
    from flexcp.tools.report import Picture

_TILES = 256
"""Rows of tiles that a picture should have at least, unless a block size is asked for."""
_COLOURS = {"truecolor": 24, "256": 8, "standard": 8, "windows": 8}


def show(
    mask: MaskText,
    tokens: Tokens = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Colour each tile by the rank that computes it, among so many."
        ),
    ] = None,
    layout: LayoutName = "auto",
    schedule: ScheduleName = "exchange",
    heads: Heads = 1,
    batch: Batch = 1,
    head: Annotated[int, typer.Option(min=0, metavar="N", help="Which head to show.")] = 0,
    element: Annotated[
        int, typer.Option(min=0, metavar="N", help="Which batch element to show.")
    ] = 0,
    block_size: Annotated[
        int | None,
        typer.Option(
            parser=size_of_option,
            metavar="SIZE",
            help="Tokens of a tile's side; chosen to suit the picture if not given.",
        ),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(
            min=2, metavar="N", help="Pixels of the picture's side; the terminal's if not given."
        ),
    ] = None,
    out: Annotated[Path | None, unset("FILE", "Write a .png or .svg file instead.")] = None,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Show which queries see which keys: queries downwards, keys across.

    With --ranks, tiles have the colour of the rank that computes them. Pipes and NO_COLOR get
    plain characters: shades, or a digit or letter for each rank.
    """
    from flexcp.tools.cli.files import require_ending

    require_ending(out, ".png", ".svg")
    if ranks is None and (layout != "auto" or schedule != "exchange"):
        raise FlexCPError("--ranks with --layout or --schedule", "none", "such as --ranks 8")
    from flexcp.tools.cli.masks import read_mask
    from flexcp.tools.cli.output import note, print_json

    read = read_mask(mask, tokens)
    from flexcp.grid import build_block_grid
    from flexcp.plan import make_plan

    block = block_size or _suitable_block(read.tokens)
    grid = build_block_grid(read.mask, read.tokens, block_size=block, batch=batch, heads=heads)
    _require_plane(grid, element, head)
    plan = None
    if ranks is not None:
        plan = make_plan(
            grid, read.tokens, ranks, layout=layout, schedule=schedule, num_heads=heads, batch=batch
        )
    for line in read.notes:
        note(line)
    wish = _Wish(grid, plan, element, head, mask)
    if as_json:
        print_json(_summary(mask, grid, plan))
    if out is not None:
        _write(wish, size or 512, out)
        note(f"written: {out}")
    elif not as_json:
        _print(wish, size)


@dataclass(frozen=True)
class _Wish:
    """What is to be drawn."""

    grid: BlockGrid
    plan: Plan | None
    element: int
    head: int
    title: str

    def picture(self, height: int, width: int) -> Picture:
        from flexcp.tools.report import picture_by_rank, picture_of

        where = {"height": height, "width": width, "b": self.element, "h": self.head}
        if self.plan is None:
            return picture_of(self.grid, title=self.title, **where)
        group_size = self.plan.schedule_of().heads_group_size
        return picture_by_rank(
            self.grid, self.plan.layout, group_size=group_size, title=self.title, **where
        )


def _write(wish: _Wish, size: int, out: Path) -> None:
    from flexcp.tools.cli.files import writing
    from flexcp.tools.report.annotated import AnnotatedPicture

    picture = wish.picture(size, size)
    ranks = None if wish.plan is None else wish.plan.ranks.size
    annotated = AnnotatedPicture(picture, wish.grid.q_len, ranks)
    with writing(out):
        if out.suffix == ".svg":
            annotated.save_svg(out)
        else:
            # Small pictures are enlarged, so that they can be looked at.
            annotated.save_png(out, scale=max(1, 512 // max(picture.share.shape)))


def _print(wish: _Wish, size: int | None) -> None:
    from flexcp.tools.cli.output import console

    screen = console()
    colour = _COLOURS.get(screen.color_system or "", 0) if not screen.no_color else 0
    if size is None:
        lines = screen.height - 6 if sys.stdout.isatty() else 40
        size = max(8, min(screen.width - 2, 2 * lines, 120))
    if colour:
        text = wish.picture(size, size).to_text(colour=colour)
    else:  # a character is twice as high as it is wide
        text = wish.picture(size // 2, size).to_text()
    print(text, "", *_legend(wish.grid, wish.plan, colour), sep="\n")


def _legend(grid: BlockGrid, plan: Plan | None, colour: int) -> list[str]:
    from flexcp.tools.report.palette import rank_colours
    from flexcp.units import format_count, format_size

    counts = grid.counts()
    share = grid.area() / (grid.q_len * grid.kv_len * grid.batch * grid.heads)
    lines = [
        f"{format_size(grid.q_len)} tokens, {100 * share:.3g}% of pairs allowed; tiles of "
        f"{grid.block_size[0]}: {format_count(counts['full'])} full, "
        f"{format_count(counts['partial'])} partial, {format_count(counts['empty'])} empty"
    ]
    if plan is None:
        return lines
    stats = plan.stats()
    lines.append(
        f"{plan.layout.name} layout on {plan.ranks.size} ranks, {stats.imbalance:.3f} × the mean "
        f"work on the busiest, {100 * stats.received_fraction:.3g}% of an all-gather received"
    )
    if colour == 24:
        shown = rank_colours(plan.ranks.size)
        swatches = "".join(f"\x1b[38;2;{r};{g};{b}m■" for r, g, b in shown[:: -(-len(shown) // 64)])
        lines.append(f"rank 0 {swatches}\x1b[0m rank {plan.ranks.size - 1}")
    return lines


def _summary(mask: str, grid: BlockGrid, plan: Plan | None) -> dict[str, Any]:
    pairs = grid.q_len * grid.kv_len * grid.batch * grid.heads
    found: dict[str, Any] = {
        "mask": mask,
        "tokens": grid.q_len,
        "block_size": list(grid.block_size),
        "tiles": grid.counts(),
        "allowed_pairs": grid.area(),
        "allowed_share": grid.area() / pairs,
    }
    if plan is not None:
        stats = plan.stats()
        found["layout"] = plan.layout.name
        found["pairs_per_rank"] = list(stats.area_per_rank)
        found["imbalance"] = stats.imbalance
    return found


def _suitable_block(tokens: int) -> int:
    """The largest power of two up to 128 that gives enough tiles."""
    block = 128
    while block > 1 and tokens / block < _TILES:
        block //= 2
    return block


def _require_plane(grid: BlockGrid, element: int, head: int) -> None:
    if element >= grid.batch or head >= grid.heads:
        raise FlexCPError(
            f"a batch element below {grid.batch} and a head below {grid.heads}",
            f"element {element}, head {head}",
            "say how many there are with --batch and --heads",
        )
