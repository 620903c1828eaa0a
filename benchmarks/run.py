"""Runs the benchmarks beside this file, keeps their results, and compares with a former run.

    python benchmarks/run.py --list
    python benchmarks/run.py attention planning --quick --save before.json
    python benchmarks/run.py attention planning --quick --compare before.json --fail-over 1.1

Ratios are new over old time or memory: above 1 is slower. Libraries that are measured alongside
show how much the machine itself has changed. Exit codes: 0 done, 1 slower than `--fail-over`
allows, 2 a request that can't be honoured.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from results import Comparison, compare, figures_of, is_ours, load_run
from rich.table import Table

from flexcp.errors import FlexCPError
from flexcp.tools.cli.files import writing
from flexcp.tools.cli.output import console, note, print_json
from flexcp.units import format_seconds


def main() -> None:
    try:
        sys.exit(bench(_options().parse_args()))
    except FlexCPError as error:
        note(str(error))
        sys.exit(2)


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which benchmarks; all if none")
    parser.add_argument("--quick", action="store_true", help="smaller cases, fewer repetitions")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the results")
    parser.add_argument("--load", type=Path, metavar="FILE", help="run nothing: take saved results")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="compare with saved results")
    parser.add_argument(
        "--fail-over", type=float, metavar="RATIO",
        help="end with exit code 1 if a benchmark's mean ratio is above this",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="only say which there are")
    parser.add_argument(
        "--folder", type=Path, default=Path(__file__).parent, help="where the benchmarks are"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    return parser


def bench(options: argparse.Namespace) -> int:
    """Does what the options ask for; the exit code."""
    against: Path | None = options.compare
    if options.fail_over is not None and against is None:
        raise FlexCPError("--compare FILE with --fail-over", "none", "name the former run")
    former = load_run(against) if against else None
    if options.load is not None:
        run = load_run(options.load)
    else:
        scripts = find_benchmarks(options.folder, options.names)
        if options.list:
            _print_list(scripts, options.json)
            return 0
        run = run_benchmarks(scripts, quick=options.quick)
    if options.save is not None:
        with writing(options.save):
            options.save.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
        note(f"written: {options.save}")
    found = _compared(run, former, against) if former is not None else []
    if options.json:
        print_json({**run, "comparison": [asdict(c) for c in found]})
    else:
        _print_run(run, found)
    allowed = options.fail_over
    slower = [c for c in found if is_ours(c.library) and allowed and c.mean > allowed]
    for one in slower:
        note(f"{one.benchmark} is {one.mean:.2f} × the former run, above {allowed:g}")
    return 1 if slower else 0


def find_benchmarks(folder: Path, names: Sequence[str]) -> list[Path]:
    """The scripts by their names: those in a folder that take `--out`."""
    this = Path(__file__).resolve()
    known = {
        path.stem: path
        for path in sorted(folder.glob("*.py"))
        if '"--out"' in path.read_text(encoding="utf-8") and path.resolve() != this
    }
    if not known:
        raise FlexCPError(
            "scripts that take --out",
            f"none in {str(folder)!r}",
            "leave --folder away for the benchmarks of this repository",
        )
    for name in names:
        if name not in known:
            raise FlexCPError(
                f"a benchmark among {', '.join(known)}", repr(name), "name one of those"
            )
    return [known[name] for name in (names or known)]


def run_benchmarks(scripts: Sequence[Path], *, quick: bool) -> dict[str, Any]:
    """Runs scripts one after the other, and gathers what they write."""
    results: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="flexcp-bench-") as out:
        for number, script in enumerate(scripts, 1):
            begin = time.perf_counter()
            title = f"[{number}/{len(scripts)}] {script.stem}"
            _run(script, Path(out), title, quick=quick)
            seconds[script.stem] = time.perf_counter() - begin
            written = Path(out) / f"{script.stem}.json"
            if not written.exists():
                raise FlexCPError(
                    f"{script.name} to write {written.name} into the folder given by --out",
                    "no such file",
                    "see what the other benchmarks do",
                )
            results[script.stem] = json.loads(written.read_text(encoding="utf-8"))
    return {"setting": _setting(quick), "took_seconds": seconds, "results": results}


def _run(script: Path, out: Path, title: str, *, quick: bool) -> None:
    """One script, with its latest line of output as progress."""
    command = [sys.executable, str(script), "--out", str(out), *(["--quick"] if quick else [])]
    screen = console(stderr=True)
    lines: list[str] = []
    with (
        screen.status(title) as status,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process,
    ):
        assert process.stdout is not None
        if not screen.is_terminal:
            screen.print(title)
        for line in process.stdout:
            if line.strip():
                lines = [*lines[-19:], line.rstrip()]
                status.update(f"{title}  {line.strip()[: max(20, screen.width - len(title) - 8)]}")
    if process.returncode:
        raise FlexCPError(
            f"{script.name} to run to its end",
            f"exit code {process.returncode}; its last lines:\n\n" + "\n".join(lines) + "\n",
            f"run `python {script}` to see more",
        )


def _setting(quick: bool) -> dict[str, Any]:
    return {
        "quick": quick,
        "flexcp": version("flexcp"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
    }


def _compared(
    run: dict[str, Any], former: dict[str, Any], against: Path | None
) -> list[Comparison]:
    sizes = [bool(r.get("setting", {}).get("quick")) for r in (run, former)]
    if sizes[0] != sizes[1]:
        raise FlexCPError(
            f"a former run {'with' if sizes[0] else 'without'} --quick",
            f"{str(against)!r} {'with' if sizes[1] else 'without'} it",
            "compare runs of the same size",
        )
    found = compare(run, former)
    if not found:
        raise FlexCPError(
            "figures that both runs have",
            f"none in common with {str(against)!r}",
            "compare with a run of the same benchmarks",
        )
    return found


def _print_list(scripts: Sequence[Path], as_json: bool) -> None:
    about = {
        s.stem: (ast.get_docstring(ast.parse(s.read_text(encoding="utf-8"))) or "").split("\n")[0]
        for s in scripts
    }
    if as_json:
        print_json(about)
        return
    wide = max(map(len, about))
    for name, text in about.items():
        print(f"{name:<{wide}}  {text}")


def _print_run(run: dict[str, Any], found: Sequence[Comparison]) -> None:
    out = console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    if found:
        for name in ("benchmark", "whose", "figures", "mean ×", "best ×", "worst ×", "worst case"):
            right = name == "figures" or name.endswith("×")
            table.add_column(name, justify="right" if right else "left", no_wrap=right)
        for c in found:
            style = None if is_ours(c.library) else "dim"
            ratios = (f"{x:.2f}" for x in (c.mean, c.best, c.worst))
            table.add_row(c.benchmark, c.library, str(c.cases), *ratios, c.worst_case, style=style)
    else:
        for name in ("benchmark", "figures", "of flexcp", "took"):
            table.add_column(name, justify="left" if name == "benchmark" else "right")
        for name, data in run["results"].items():
            figures = list(figures_of(name, data))
            ours = sum(is_ours(f.library) for f in figures)
            took = run.get("took_seconds", {}).get(name, 0.0)
            table.add_row(name, str(len(figures)), str(ours), format_seconds(took))
    out.print(table)
    if not found:
        out.print("--save keeps the figures, --compare sets them against a former run", style="dim")


if __name__ == "__main__":
    main()
