"""Results of benchmarks: finding the figures in them, and comparing two runs.

A benchmark NAME.py takes `--out FOLDER` and `--quick`, and writes FOLDER/NAME.json: any tree of
JSON in which objects are cases. Those of their entries that are listed in `CASE` say which case it
is; times and memory, by their names, are figures of which less is better. All else is for people.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexcp.errors import FlexCPError

CASE = (
    "library", "who", "name", "mask", "model", "what", "path", "kernel", "schedule", "layout",
    "dtype", "machine", "mode", "tokens", "length", "ranks", "world_size", "batch", "heads",
    "kv_heads", "head_dim",
)  # fmt: skip
"""Entries that say which case an object is."""
FIGURES = ("seconds", "forward", "backward", "both", "planning", "step")
"""Figures of which less is better, by name; others by the endings below."""
_ENDINGS = ("_seconds", "_ms", "_us", "_mb", "_bytes")
OURS = "flexcp"
"""What figures belong to if their case names no library."""


@dataclass(frozen=True)
class Figure:
    """One number of a benchmark."""

    benchmark: str
    library: str
    """Whose it is: ours, or a peer's, which shows how much the machine itself has changed."""
    case: str
    name: str
    value: float


@dataclass(frozen=True)
class Comparison:
    """How a library's figures in a benchmark have changed; ratios above 1 are slower or larger."""

    benchmark: str
    library: str
    cases: int
    """Figures that both runs have."""
    mean: float
    """Geometric mean of new over old."""
    worst: float
    """The largest ratio."""
    worst_case: str
    """Whose it is."""
    best: float
    """The smallest ratio."""


def figures_of(benchmark: str, data: Any) -> Iterator[Figure]:
    """All figures in the results of a benchmark.

    >>> rows = [{"who": "torch", "tokens": 1024, "seconds": 0.5, "note": "x"}]
    >>> list(figures_of("speed", rows))
    [Figure(benchmark='speed', library='torch', case='tokens=1024', name='seconds', value=0.5)]
    """
    seen: dict[tuple[str, str, str], int] = {}
    for library, case, name, value in _walk(data, OURS, ()):
        text = " ".join(case)
        count = seen[library, text, name] = seen.get((library, text, name), 0) + 1
        yield Figure(benchmark, library, text if count == 1 else f"{text} #{count}", name, value)


def _walk(
    data: Any, library: str, case: tuple[str, ...]
) -> Iterator[tuple[str, tuple[str, ...], str, float]]:
    if isinstance(data, list):
        for item in data:
            yield from _walk(item, library, case)
    if not isinstance(data, dict):
        return
    library = str(data.get("library") or data.get("who") or library)
    known = (k for k in CASE if k not in ("library", "who") and isinstance(data.get(k), str | int))
    case = (*case, *(f"{k}={data[k]}" for k in known))
    for key, value in data.items():
        if isinstance(value, list | dict):
            yield from _walk(value, library, (*case, key) if isinstance(value, dict) else case)
        elif _is_figure(key) and isinstance(value, float) and value > 0:
            yield library, case, key, value


def _is_figure(name: str) -> bool:
    return name in FIGURES or name.endswith(_ENDINGS)


def compare(new: Mapping[str, Any], old: Mapping[str, Any]) -> list[Comparison]:
    """One line for every benchmark and library that both runs have, ours first."""
    before, after = (
        {
            (f.benchmark, f.library, f.case, f.name): f.value
            for name, data in run["results"].items()
            for f in figures_of(name, data)
        }
        for run in (old, new)
    )
    ratios: dict[tuple[str, str], dict[str, float]] = {}
    for key in before.keys() & after.keys():
        benchmark, library, case, name = key
        ratios.setdefault((benchmark, library), {})[f"{case} {name}"] = after[key] / before[key]
    found = []
    for (benchmark, library), by_case in ratios.items():
        worst = max(by_case, key=lambda c: (by_case[c], c))
        mean = math.exp(sum(map(math.log, by_case.values())) / len(by_case))
        found.append(
            Comparison(
                benchmark,
                library,
                len(by_case),
                mean,
                by_case[worst],
                worst.strip(),
                min(by_case.values()),
            )
        )
    return sorted(found, key=lambda c: (c.benchmark, not is_ours(c.library), c.library))


def is_ours(library: str) -> bool:
    """Whether figures are of this library, not of one that it is compared with.

    >>> is_ours("flexcp, 2 ranks"), is_ours("torch")
    (True, False)
    """
    return OURS in library


def load_run(path: Path) -> dict[str, Any]:
    """A run that `--save` wrote."""
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _no_run(path, error.strerror or str(error)) from None
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise _no_run(path, "something else than JSON") from None
    if not isinstance(run, dict) or not isinstance(run.get("results"), dict):
        raise _no_run(path, "JSON without results")
    return run


def _no_run(path: Path, got: str) -> FlexCPError:
    return FlexCPError(
        f"a former run in {str(path)!r}",
        got,
        "make one with `python benchmarks/run.py --save FILE`",
    )
