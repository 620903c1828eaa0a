"""Document lengths: from files as people have them, or drawn from a distribution."""

from __future__ import annotations

import csv
import io
import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

from flexcp.errors import FlexCPError, quote

_LENGTH_COLUMNS = ("length", "lengths", "tokens", "num_tokens", "n_tokens", "len", "size")
_COUNT_COLUMNS = ("number", "count", "frequency")


@dataclass(frozen=True)
class Bin:
    """Documents of about one length."""

    least: int
    """Tokens, at least 1."""
    most: int
    """Tokens, included."""
    weight: float
    """How many there are, relative to other bins."""


def read_lengths(path: str) -> list[int] | list[Bin]:
    """Lengths in order, or a table of how frequent each length is.

    Understands numbers separated by anything (.txt), a JSON list or an object with "lengths", lines
    of JSON, and CSV: a single column, or one called `length` or `tokens`; with columns `range` and
    `number` it is a distribution.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise FlexCPError(
            "a file with document lengths",
            f"{quote(path)}: {error.strerror}",
            "name a .txt, .csv, .json or .jsonl file, relative to this folder",
        ) from None
    except UnicodeDecodeError:
        raise _unreadable(path, "bytes that are not text") from None
    if file.suffix == ".json":
        return _whole(path, _of_json(path, text))
    if file.suffix == ".jsonl":
        return _whole(
            path, [_of_object(path, _json(path, line)) for line in text.split("\n") if line.strip()]
        )
    if file.suffix == ".csv":
        return _of_csv(path, text)
    return _whole(path, [x for x in re.split(r"[\s,;]+", text) if x])


def fill(lengths: list[int], tokens: int) -> list[int]:
    """The first documents that fill a sequence, the last one cut to fit.

    >>> fill([5, 5, 5], 12)
    [5, 5, 2]
    """
    return _until(iter(lengths), tokens)


def draw(bins: list[int] | list[Bin], tokens: int, seed: int) -> list[int]:
    """Documents drawn at random until they fill a sequence, the last one cut to fit.

    >>> draw([Bin(10, 20, 3.0), Bin(100, 100, 1.0)], 250, seed=0)
    [100, 18, 14, 100, 13, 5]
    """
    source = random.Random(seed)
    table = [x if isinstance(x, Bin) else Bin(x, x, 1.0) for x in bins]
    weights = [x.weight for x in table]
    picks = (source.choices(table, weights)[0] for _ in repeat(None))
    return _until((source.randint(pick.least, pick.most) for pick in picks), tokens)


def lognormal(mean: float, spread: float, tokens: int, seed: int) -> list[int]:
    """Documents whose lengths are spread log-normally, as those of text usually are.

    >>> lognormal(100, 1.0, 400, seed=0)
    [50, 63, 122, 55, 110]
    """
    source = random.Random(seed)
    middle = math.log(mean) - spread**2 / 2
    return _until(
        (max(1, round(source.lognormvariate(middle, spread))) for _ in repeat(None)), tokens
    )


def _until(source: Iterator[int], tokens: int) -> list[int]:
    found, left = [], tokens
    for length in source:
        if left <= 0:
            break
        found.append(min(length, left))
        left -= found[-1]
    return found


def _of_csv(path: str, text: str) -> list[int] | list[Bin]:
    rows = [row for row in csv.reader(io.StringIO(text)) if any(cell.strip() for cell in row)]
    if not rows:
        raise _unreadable(path, "an empty file")
    header = [cell.strip().lower() for cell in rows[0]]
    if all(_is_whole(cell) for cell in header):
        return _whole(path, [cell for row in rows for cell in row if cell.strip()])
    ranges = header.index("range") if "range" in header else None
    counts = next((header.index(x) for x in _COUNT_COLUMNS if x in header), None)
    at = next((header.index(x) for x in _LENGTH_COLUMNS if x in header), None)
    if at is None and ranges is None and len(header) == 1:
        at = 0
    if at is None and (ranges is None or counts is None):
        raise _unreadable(path, f"a table with the columns {', '.join(header)}")
    if any(len(row) != len(header) for row in rows):
        raise _unreadable(path, "rows with another number of cells than the header")
    if counts is None:
        assert at is not None
        return _whole(path, [row[at] for row in rows[1:]])
    column = at if ranges is None else ranges
    assert column is not None
    return [_bin(path, row[column], row[counts]) for row in rows[1:]]


def _bin(path: str, lengths: str, count: str) -> Bin:
    bounds = [int(x) for x in re.findall(r"\d+", lengths)]
    try:
        weight = float(count)
    except ValueError:
        raise _unreadable(path, f"{quote(count)} as a number of documents") from None
    if not 0 <= weight < math.inf:
        raise _unreadable(path, f"{quote(count)} as a number of documents")
    if not 1 <= len(bounds) <= 2 or max(bounds) < 1:
        raise _unreadable(path, f"{quote(lengths)} as a range of lengths")
    return Bin(max(1, bounds[0]), bounds[-1], weight)


def _of_json(path: str, text: str) -> list[Any]:
    data = _json(path, text)
    if isinstance(data, dict):
        data = next((data[x] for x in _LENGTH_COLUMNS if x in data), None)
    if not isinstance(data, list):
        raise _unreadable(path, "JSON without a list of lengths")
    return [_of_object(path, x) for x in data]


def _json(path: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _unreadable(path, f"JSON with an error in line {error.lineno}") from None


def _of_object(path: str, data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    for name in _LENGTH_COLUMNS:
        if name in data:
            return data[name]
    raise _unreadable(path, f"an object with the keys {', '.join(data)}")


def _whole(path: str, values: list[Any]) -> list[int]:
    if not values:
        raise _unreadable(path, "no lengths")
    wrong = next((x for x in values if isinstance(x, bool) or not _is_whole(x)), None)
    if wrong is not None:
        raise _unreadable(path, f"{quote(wrong)} as a length")
    return [int(x) for x in values]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, str) and value.strip().isdecimal())


def _unreadable(path: str, got: str) -> FlexCPError:
    return FlexCPError(
        f"document lengths in {quote(path)}",
        got,
        "write whole numbers: one a line (.txt), a list (.json), a column called length (.csv), or "
        "the columns range and number of a distribution (.csv)",
    )
