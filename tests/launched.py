"""Ranks as a launcher starts them: processes of their own, with the variables that torchrun sets.

They are forks, which have torch already: starting torchrun takes seconds, and a test or two of the
examples do so.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Ended:
    """What a rank left behind."""

    code: int | None
    out: str
    err: str


def launched(function: Callable[[], object], ranks: int, folder: Path) -> list[Ended]:
    """Runs a function on every rank; `folder` is for what they print."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    context = multiprocessing.get_context("fork")
    processes, printed = [], []
    for rank in range(ranks):
        own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        printed.append((folder / f"{rank}.out", folder / f"{rank}.err"))
        process = context.Process(target=_run, args=(function, own, printed[-1]), daemon=True)
        process.start()
        processes.append(process)
    for process in processes:
        process.join(120)
    return [
        Ended(process.exitcode, out.read_text(), err.read_text())
        for process, (out, err) in zip(processes, printed, strict=True)
    ]


def _run(
    function: Callable[[], object], environment: dict[str, str], printed: tuple[Path, Path]
) -> None:
    with printed[0].open("w") as out, printed[1].open("w") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.stdout, sys.stderr = out, err
        os.environ.update(environment)
        torch.set_num_threads(1)
        function()
