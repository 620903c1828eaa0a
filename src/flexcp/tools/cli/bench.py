"""`flexcp bench`: runs the repository's benchmarks, and compares with a former run."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from flexcp.errors import FlexCPError
from flexcp.tools.cli.bench_results import Comparison, compare, figures_of, is_ours, load_run
from flexcp.tools.cli.files import writing
from flexcp.tools.cli.options import FLAG, Debug, Json


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME...", help="Which benchmarks; all if none is named.", show_default=False
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", metavar=FLAG, help="Smaller cases, fewer repetitions.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option(help="Write the results.", show_default=False)
    ] = None,
    load: Annotated[
        Path | None,
        typer.Option(help="Run nothing: take results that were saved.", show_default=False),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option("--compare", help="Compare with results that were saved.", show_default=False),
    ] = None,
    fail_over: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="End with exit code 1 if a benchmark's mean ratio is above this.",
            show_default=False,
        ),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", metavar=FLAG, help="Only say which there are.")
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where the benchmarks are, if not in this checkout.", show_default=False),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Run the benchmarks that come with the source, and compare with a former run.

    Ratios are new over old time or memory: above 1 is slower. Libraries that are measured
    alongside show how much the machine itself has changed.
    """
    from flexcp.tools.cli.output import note, print_json

    if fail_over is not None and against is None:
        raise FlexCPError("--compare FILE with --fail-over", "none", "name the former run")
    former = load_run(against) if against else None
    if load is not None:
        run = load_run(load)
    else:
        scripts = find_benchmarks(folder, names or [])
        if listed:
            _print_list(scripts, as_json)
            return
        run = run_benchmarks(scripts, quick=quick)
    if save is not None:
        with writing(save):
            save.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
        note(f"written: {save}")
    found = _compared(run, former, against) if former is not None else []
    if as_json:
        print_json({**run, "comparison": [asdict(c) for c in found]})
    else:
        _print_run(run, found)
    slower = [c for c in found if is_ours(c.library) and fail_over and c.mean > fail_over]
    for one in slower:
        note(f"{one.benchmark} is {one.mean:.2f} × the former run, above {fail_over:g}")
    if slower:
        raise typer.Exit(1)


def find_benchmarks(folder: Path | None, names: Sequence[str]) -> list[Path]:
    """The scripts by their names: those in a folder that take `--out`."""
    if folder is None:
        import flexcp

        assert flexcp.__file__ is not None
        folder = Path(flexcp.__file__).parents[2] / "benchmarks"
    known = {
        path.stem: path
        for path in sorted(folder.glob("*.py"))
        if '"--out"' in path.read_text(encoding="utf-8")
    }
    if not known:
        raise FlexCPError(
            "the benchmarks of flexcp's repository",
            f"none in {str(folder)!r}",
            "they are not part of the package: clone the repository and install it with "
            "`pip install -e .`, or pass --folder",
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
    from flexcp.tools.cli.output import console

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
    import os
    import platform
    from importlib.metadata import version

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
    from flexcp.tools.cli.output import print_json

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
    from rich.table import Table

    from flexcp.tools.cli.output import console
    from flexcp.units import format_seconds

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
