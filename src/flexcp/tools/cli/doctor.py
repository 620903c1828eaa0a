"""`flexcp doctor`: whether this machine computes attention right, and what is fastest on it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexcp.errors import FlexCPError, finite_number, quote, whole_number, writing
from flexcp.tools.cli.options import Debug, Json, unset

if TYPE_CHECKING:
    from flexcp.kernels.triton.compile import KernelReport
    from flexcp.tools.cli.doctor_screen import DoctorScreen
    from flexcp.tools.doctor.examine import Request
    from flexcp.tools.doctor.findings import Diagnosis

_COMPILE, _FILES = "Compiling without a GPU", "Files"
_RESERVE = 45.0
"""Seconds of --minutes that are kept for what overruns, and for the reports."""


def doctor(
    minutes: Annotated[
        float,
        typer.Option(
            min=0.1, metavar="MINUTES", help="What it may take; the rest is listed as not run."
        ),
    ] = 5.0,
    ranks: Annotated[
        int | None,
        unset(
            "N",
            "Ranks to start on this machine: one for each GPU, or 2 on a CPU, unless given. Under "
            "torchrun, as many as it has started.",
            min=1,
        ),
    ] = None,
    device: Annotated[
        str | None, unset("DEVICE", "cpu or cuda; cuda if there is one, unless given.")
    ] = None,
    only: Annotated[
        list[str] | None,
        unset(
            "PART",
            "environment, kernels, ranks, speed or links: just that; may be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER",
            help="For the report (text, JSON, HTML) and the machine file of `flexcp plan`.",
            rich_help_panel=_FILES,
        ),
    ] = Path("out/doctor"),
    prefer: Annotated[
        bool,
        typer.Option(
            help="Let calls take the kernels that were measured as the fastest: writes the file "
            "that FLEXCP_DOCTOR names, or flexcp/doctor.json in the user's cache.",
            rich_help_panel=_FILES,
        ),
    ] = True,
    archs: Annotated[
        list[str] | None,
        typer.Option(
            "--compile",
            metavar="ARCH",
            help="Instead, compile all kernels for sm_80, sm_86, sm_90, sm_100 or gfx942; may "
            "be repeated.",
            show_default=False,
            rich_help_panel=_COMPILE,
        ),
    ] = None,
    head_dims: Annotated[
        list[int] | None,
        typer.Option(
            "--head-dim",
            metavar="N",
            help="Head dims to compile for; 64 and 128 if not given.",
            rich_help_panel=_COMPILE,
        ),
    ] = None,
    dtypes: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype",
            metavar="TYPE",
            help="Types to compile for; bfloat16 and float32 if not given.",
            rich_help_panel=_COMPILE,
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find out in five minutes whether this machine computes attention right, and what is fastest.

    Every kernel against float64 and against itself, ranks against one process, throughput beside
    PyTorch's own, bandwidth and latency. Each check passes, fails or says why it was not run.
    Ctrl-C ends it, and keeps what is done.

    Exit code 0 if all is right, 1 if a check failed.
    """
    if archs:
        _compile(archs, head_dims, dtypes, as_json)
        return
    finite_number("--minutes", minutes, fix="pass --minutes 5", least=0.1, most=1e5)
    begin = time.monotonic()
    _wait_without_spinning()
    request = _request(ranks, device, only)
    with writing(out):  # before minutes of work that could not be kept
        out.mkdir(parents=True, exist_ok=True)
    # Ranks will take as long to start as this process has, which can be long on a busy machine.
    start = time.monotonic() - begin
    seconds = max(0.4 * 60 * minutes, 60 * minutes - start - _RESERVE)
    request = replace(request, budget=replace(request.budget, seconds=seconds, start=start))
    from flexcp.tools.cli.doctor_screen import DoctorScreen
    from flexcp.tools.cli.output import print_json

    screen = DoctorScreen(as_json=as_json)
    with _ended_by_signals():
        found = _examine(request, screen, debug)
    if found is None:  # the first rank has the report
        return
    found = _keep(found, request, out, prefer)
    screen.end(found)
    if as_json:
        print_json(found.as_data())
    if found.failures:
        raise typer.Exit(1)
    if found.interrupted:
        raise typer.Exit(130)


def _wait_without_spinning() -> None:
    """On a busy machine, threads that wait for each other must let others run meanwhile."""
    from flexcp.tools.launch import is_busy

    if is_busy() and "torch" not in sys.modules:  # OpenMP reads it once
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _request(ranks: int | None, device: str | None, only: list[str] | None) -> Request:
    import torch

    from flexcp.tools.doctor.budget import Budget
    from flexcp.tools.doctor.examine import Request
    from flexcp.tools.doctor.findings import SECTIONS
    from flexcp.tools.launch import started_by_a_launcher

    for part in only or ():
        if part not in SECTIONS:
            raise FlexCPError(f"--only {', '.join(SECTIONS)}", quote(part), "name one of these")
    if device not in (None, "cpu", "cuda"):
        raise FlexCPError("--device cpu or cuda", quote(device), "or leave it away")
    gpus = torch.cuda.device_count()
    if device == "cuda" and not gpus:
        raise FlexCPError("a GPU that torch can use", "none", "pass --device cpu")
    place = torch.device(device or ("cuda" if gpus else "cpu"))
    count = ranks or (gpus if place.type == "cuda" else 2)
    whole_number("--ranks", count, at_least=1, at_most=256, fix="pass as many as there are devices")
    if started_by_a_launcher(os.environ):
        count = int(os.environ["WORLD_SIZE"])
        if ranks not in (None, count):
            raise FlexCPError(
                f"--ranks {count}, as many as the launcher has started",
                f"--ranks {ranks}",
                "leave --ranks away",
            )
    elif place.type == "cuda" and count > gpus:
        raise FlexCPError(f"at most {gpus} ranks, one for each GPU", f"{count}", "pass fewer")
    return Request(place, count, Budget.of_device(place), tuple(dict.fromkeys(only or SECTIONS)))


def _examine(request: Request, screen: DoctorScreen, debug: bool) -> Diagnosis | None:
    """By ranks of a launcher if this is one of them, else by ranks that are started here."""
    from flexcp.tools.doctor.examine import examine
    from flexcp.tools.doctor.findings import hear_nothing
    from flexcp.tools.doctor.start_ranks import LocalRanks, examine_as_rank
    from flexcp.tools.launch import started_by_a_launcher

    if started_by_a_launcher(os.environ):
        leads = os.environ["RANK"] == "0"
        return examine_as_rank(request, listen=screen if leads else hear_nothing)
    return examine(request, LocalRanks(screen.stopping, debug), listen=screen)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM ends an examination as Ctrl-C does: what is done is kept."""

    def interrupt(_: int, __: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _keep(found: Diagnosis, request: Request, out: Path, prefer: bool) -> Diagnosis:
    """Writes the file that the registry reads, then the report, which says so."""
    from flexcp.kernels.preferences import preferences_path, write_preferences
    from flexcp.tools.cli.files import writing
    from flexcp.tools.doctor.report import save_reports

    path = preferences_path() if prefer else None
    if not prefer:
        note = "kernels are chosen as before: --no-prefer was passed"
    elif path is None:
        note = "kernels are chosen as before: FLEXCP_DOCTOR is set to no file"
    elif found.interrupted or not found.orders:
        why = "it was stopped" if found.interrupted else "no kernel was both checked and timed"
        note = f"kernels are chosen as before: {why}"
    else:
        with writing(path):
            write_preferences(path, request.device, found.orders)
        note = f"kernels are chosen by what was measured, from now on: {path}"
    names = ["report.txt", "report.json", "report.html"]
    names += ["machine.json"] if found.machine is not None else []
    written = f"written: {', '.join(str(out / name) for name in names)}"
    notes = [note, written]
    if found.machine is not None:
        notes.append(f"to plan for this machine: flexcp plan --machine {out / 'machine.json'}")
    found = replace(found, notes=(*found.notes, *notes))
    with writing(out / "report.txt"):
        save_reports(found, out)
    return found


def _compile(
    archs: list[str], head_dims: list[int] | None, dtypes: list[str] | None, as_json: bool
) -> None:
    """Registers, spills, shared memory and matrix instructions of each kernel, without a GPU."""
    from flexcp.kernels.triton.compile import compile_reports
    from flexcp.tools.cli.dtypes import dtype_of
    from flexcp.tools.cli.output import print_json

    types = [dtype_of(name) for name in dtypes or ("bfloat16", "float32")]
    reports = compile_reports(archs, head_dims or (64, 128), types)
    if as_json:
        print_json({"kernels": [asdict(report) for report in reports]})
    else:
        _print(reports)


def _print(reports: list[KernelReport]) -> None:
    from rich.table import Table

    from flexcp.tools.cli.output import console

    table = Table(box=None, pad_edge=False)
    for name in asdict(reports[0]):
        table.add_column(name.replace("_", " "))
    for report in reports:
        table.add_row(*(str(value) for value in asdict(report).values()))
    console().print(table)
