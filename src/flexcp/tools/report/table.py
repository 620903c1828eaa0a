"""Plain-text tables that are valid Markdown as well."""

from __future__ import annotations

from collections.abc import Sequence

from flexcp.errors import FlexCPError, quote, require


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns padded to equal width; numbers to the right.

    >>> print(table(["mask", "ms"], [["causal", 8], ["window", 14]]))
    | mask   | ms |
    |--------|---:|
    | causal |  8 |
    | window | 14 |
    """
    require("header", header, (list, tuple), "pass a list of texts")
    require("rows", rows, (list, tuple), "pass a list of rows, each a list of cells")
    for name in header:
        require("each cell of the header", name, str, "pass a list of texts")
    for row in rows:
        require("each row", row, (list, tuple), "pass a list of cells")
        if len(row) != len(header):
            raise FlexCPError(
                f"rows of {len(header)} cells, as the header has", f"{len(row)}", "fill all of them"
            )
    cells = [
        [str(x) if isinstance(x, str | int | float) else quote(x) for x in row] for row in rows
    ]
    numeric = [all(_is_number(row[i]) for row in cells) and bool(cells) for i in range(len(header))]
    widths = [max(len(line[i]) for line in [list(header), *cells]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (
            x.rjust(w) if right else x.ljust(w)
            for x, w, right in zip(row, widths, numeric, strict=True)
        )
        return "| " + " | ".join(padded) + " |"

    rule = "|".join(
        "-" * (w + 1) + ":" if right else "-" * (w + 2)
        for w, right in zip(widths, numeric, strict=True)
    )
    return "\n".join([line(header), f"|{rule}|", *(line(row) for row in cells)])


def _is_number(text: str) -> bool:
    return (
        text in ("", "-")
        or text.lstrip("-~<>")
        .rstrip("%x×")
        .replace(",", "")
        .replace(".", "", 1)
        .replace("e-", "", 1)
        .isdigit()
    )
