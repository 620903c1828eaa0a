"""`flexcp doctor`: what this environment can run, and the GPU kernels compiled without a GPU."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexcp.tools.cli.options import Debug, Json

if TYPE_CHECKING:
    from flexcp.kernels.triton.compile import KernelReport


def doctor(
    archs: Annotated[
        list[str] | None,
        typer.Option(
            "--compile",
            metavar="ARCH",
            help="Compile all kernels for sm_80, sm_86, sm_90, sm_100, gfx942; may be repeated.",
            show_default=False,
        ),
    ] = None,
    head_dims: Annotated[
        list[int] | None,
        typer.Option("--head-dim", help="Head dims to compile for; 64 and 128 if not given."),
    ] = None,
    dtypes: Annotated[
        list[str] | None,
        typer.Option("--dtype", help="Types to compile for; bfloat16 and float32 if not given."),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Say what this environment can run, or compile the GPU kernels for an architecture.

    Compiling needs no GPU. It lists the registers and the shared memory that each kernel takes,
    what it spills, and how many matrix instructions it has.
    """
    from flexcp.tools.cli.dtypes import dtype_of
    from flexcp.tools.cli.output import print_json

    if not archs:
        found = _environment()
        if as_json:
            print_json(found)
        else:
            print("\n".join(f"{name}: {value}" for name, value in found.items()))
        return
    from flexcp.kernels.triton.compile import compile_reports

    types = [dtype_of(name) for name in dtypes or ("bfloat16", "float32")]
    reports = compile_reports(archs, head_dims or (64, 128), types)
    if as_json:
        print_json({"kernels": [asdict(report) for report in reports]})
    else:
        _print(reports)


def _environment() -> dict[str, Any]:
    import torch

    from flexcp.kernels.triton.available import TESTED_VERSIONS, is_tested, triton_version

    version = triton_version()
    tested = f"tested: {', '.join(TESTED_VERSIONS)}"
    triton = "not installed" if version is None else version
    if version is not None and not is_tested(version):
        triton = f"{version}, not tested: the kernel 'triton' has to be asked for with its tiles"
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "torch": torch.__version__,
        "triton": f"{triton} ({tested})",
        "GPUs": ", ".join(devices) or "none",
        "CPU threads": torch.get_num_threads(),
    }


def _print(reports: list[KernelReport]) -> None:
    from rich.table import Table

    from flexcp.tools.cli.output import console

    table = Table(box=None, pad_edge=False)
    for name in asdict(reports[0]):
        table.add_column(name.replace("_", " "))
    for report in reports:
        table.add_row(*(str(value) for value in asdict(report).values()))
    console().print(table)
