"""Checkpoints: one file that is either the old one or the new one, and refuses other settings."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexcp.errors import FlexCPError
from flexcp.tools.train.config import TrainConfig

NAME = "checkpoint.pt"
_FORMAT = 1


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Everything that decides the steps to come. Batches follow from the step alone."""

    step: int
    """Steps that are done."""
    model: dict[str, Any]
    optimizer: dict[str, Any]
    config: dict[str, Any]
    data: str
    """Fingerprint of the documents."""

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Puts weights and moments where they were."""
        model.load_state_dict(self.model)
        optimizer.load_state_dict(self.optimizer)


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    data: str,
) -> Path:
    """Writes beside the old checkpoint, then takes its place: whenever killed, one is whole."""
    path, beside = folder / NAME, folder / f"{NAME}.new"
    content = {
        "format": _FORMAT,
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "config": asdict(config),
        "data": data,
    }
    with beside.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    return path


def load(folder: Path, config: TrainConfig, data: str) -> Checkpoint | None:
    """The checkpoint of a folder, if there is one; raises if it is that of another run."""
    path = folder / NAME
    if config.restart or not path.exists():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if content.pop("format") != _FORMAT:
            raise KeyError("format")
        found = Checkpoint(**content)
    except Exception as error:
        raise FlexCPError(
            f"a checkpoint of flexcp train in {path}",
            f"something else ({type(error).__name__})",
            "choose another --out, or pass --restart to begin anew",
        ) from error
    config.require_resumable(found.config)
    if found.data != data:
        raise FlexCPError(
            f"the documents of the run in {folder}",
            "others, or files of other sizes",
            "pass the same --data, choose another --out, or pass --restart to begin anew",
        )
    return found


@contextlib.contextmanager
def reserved(folder: Path) -> Iterator[None]:
    """Makes the folder, and keeps it to this process: two runs in one place would mix."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise FlexCPError(
            "an --out folder that can be written",
            f"{folder} ({error.strerror})",
            "choose another --out",
        ) from error
    with lock:
        _lock(lock.fileno(), folder)
        yield


def _lock(descriptor: int, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise FlexCPError(
            f"{folder} to be used by one run at a time",
            "another run that is using it now",
            "wait for that run, or choose another --out",
        ) from error
