"""Checkpoints: the last two, each with a checksum, whole whenever killed, and of these settings."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexcp.errors import FlexCPError, quote
from flexcp.tools.train.config import TrainConfig

NAME = "checkpoint.pt"
PREVIOUS = "checkpoint.previous.pt"
_FORMAT = "flexcp checkpoint 2"


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
    """Writes beside the old checkpoint, then takes its place: whenever killed, one is whole.

    The old one is kept as the previous one. The first line of a file is a checksum of the rest.
    """
    path, beside = folder / NAME, folder / f"{NAME}.new"
    content = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "config": asdict(config),
        "data": data,
    }
    try:
        buffer = io.BytesIO()
        torch.save(content, buffer)
        with beside.open("wb") as file:
            file.write(_first_line(buffer.getvalue()))
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            path.replace(folder / PREVIOUS)
        beside.replace(path)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        kept = next((n for n in (NAME, PREVIOUS) if (folder / n).exists()), "none")
        raise FlexCPError(
            f"room for the checkpoint of step {step} in {folder}",
            str(error),
            f"make room and go on: the last checkpoint that was saved is kept ({kept})",
        ) from error
    return path


def load(folder: Path, config: TrainConfig, data: str) -> Checkpoint | None:
    """The checkpoint of a folder, if there is one; raises if it is that of another run.

    One that is damaged is passed over for the previous one, with a warning.
    """
    paths = [path for path in (folder / NAME, folder / PREVIOUS) if path.exists()]
    if config.restart or not paths:
        return None
    found = None
    for path in paths:
        try:
            found = _read(path)
            break
        except (OSError, ValueError) as error:
            last = path == paths[-1]
            if last:
                raise FlexCPError(
                    f"a checkpoint of flexcp train in {paths[0]}",
                    f"something else ({error})",
                    "choose another --out, or pass --restart to begin anew",
                ) from error
            warnings.warn(
                f"{path} is damaged ({error}): going on from the previous one", stacklevel=2
            )
    assert found is not None
    config.require_resumable(found.config)
    if not isinstance(found.step, int) or not 0 <= found.step <= config.steps:
        raise FlexCPError(
            f"a checkpoint in {folder} of one of the run's {config.steps} steps",
            f"one of step {found.step!r}",
            "choose another --out, or pass --restart to begin anew",
        )
    if found.data != data:
        raise FlexCPError(
            f"the documents of the run in {folder}",
            "others, or the same with other contents",
            "pass the same --data, choose another --out, or pass --restart to begin anew",
        )
    return found


def _first_line(content: bytes) -> bytes:
    return f"{_FORMAT} {hashlib.sha256(content).hexdigest()}\n".encode()


def _read(path: Path) -> Checkpoint:
    """A checkpoint whose checksum is right; a ValueError if it is not."""
    first, _, rest = path.read_bytes().partition(b"\n")
    if first + b"\n" != _first_line(rest):
        raise ValueError("its checksum is not that of its contents")
    try:
        return Checkpoint(**torch.load(io.BytesIO(rest), map_location="cpu", weights_only=True))
    except Exception as error:
        raise ValueError(f"{type(error).__name__}") from error


@contextlib.contextmanager
def reserved(folder: Path) -> Iterator[None]:
    """Makes the folder, and keeps it to this process: two runs in one place would mix."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except (OSError, ValueError) as error:  # ValueError: a name that no folder can have
        raise FlexCPError(
            "an --out folder that can be written",
            f"{quote(str(folder))} ({getattr(error, 'strerror', None) or error})",
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
