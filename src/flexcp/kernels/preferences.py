"""Measured preferences: which kernel is the fastest here, by kind of mask, from a small file.

`flexcp doctor` measures and writes it; the registry reads it once. It only puts kernels in order
that compute the same, and a file that was not made here, by these versions, is not used.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import tempfile
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from flexcp.kernels.mask_kinds import KINDS, SCORE_FUNCTION
from flexcp.kernels.triton.available import triton_version

VARIABLE = "FLEXCP_DOCTOR"
"""Environment variable with the file's place; empty for no file at all."""
_FORMAT = 1
"""Of the file: another one is not understood."""
_MEASURE = "run `flexcp doctor` to measure anew"


@dataclass(frozen=True)
class KernelOrder:
    """Kernels for one kind of mask, the fastest first."""

    kind: str
    """One of `mask_kinds.KINDS`, or `SCORE_FUNCTION`."""
    dtype: str
    """Of the tensors: "bfloat16"."""
    head_dim: int
    """At which it was measured."""
    kernels: tuple[str, ...]
    """Names, the fastest first."""
    seconds: tuple[float, ...]
    """Of a forward and a backward pass with each."""


@dataclass(frozen=True)
class Preferences:
    """What is known of the kernels on one device; nothing, where nothing was measured."""

    path: str = ""
    """The file that says so."""
    orders: tuple[KernelOrder, ...] = ()
    ignored: str = ""
    """Why there is a file that is not used."""

    def order(self, kind: str, dtype: torch.dtype, head_dim: int) -> KernelOrder | None:
        """The kernels for a kind of mask, measured at the nearest head dim.

        >>> Preferences().order("causal", torch.bfloat16, 64) is None
        True
        """
        name = str(dtype).removeprefix("torch.")
        found = [order for order in self.orders if (order.kind, order.dtype) == (kind, name)]
        return min(found, key=lambda order: abs(order.head_dim - head_dim), default=None)


def preferences_path() -> Path | None:
    """Where the file is: where FLEXCP_DOCTOR says, else in the user's cache; None for no file."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return Path(given) if given.strip() else None
    folder = cache_folder()
    return None if folder is None else folder / "doctor.json"


def cache_folder() -> Path | None:
    """Where what was found out about this machine is kept; None for a user without a home."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / "flexcp"


def preferences_for(device: torch.device) -> Preferences:
    """What was measured on a device of this machine, with these versions."""
    return _known(os.environ.get(VARIABLE), os.environ.get("XDG_CACHE_HOME"), device)


@lru_cache(maxsize=64)
def _known(_: str | None, __: str | None, device: torch.device) -> Preferences:
    """What there was when it was first asked, by the variables that say where: no call waits."""
    path = preferences_path()
    return Preferences() if path is None else _read(str(path), device.type, device_name(device))


def forget_preferences() -> None:
    """Makes the next call read the file again."""
    _known.cache_clear()


@lru_cache(maxsize=64)
def device_name(device: torch.device) -> str:
    """The model of a device: of the GPU, or of the processor.

    >>> device_name(torch.device("cpu")) != ""
    True
    """
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        with suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        return os.uname().machine
    return device.type


def versions() -> dict[str, str]:
    """What preferences depend on, beside the device."""
    try:
        own = importlib.metadata.version("flexcp")
    except importlib.metadata.PackageNotFoundError:  # a source tree that was never installed
        own = "unknown"
    return {"flexcp": own, "torch": torch.__version__, "triton": triton_version() or "none"}


def write_preferences(path: Path, device: torch.device, orders: Iterable[KernelOrder]) -> None:
    """Writes the file at once or not at all; what it says of other types of devices stays."""
    devices: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        devices = _devices(path.read_text(encoding="utf-8"))
    rows = [asdict(order) for order in orders]
    devices[device.type] = {"name": device_name(device), "orders": rows}
    text = json.dumps({"format": _FORMAT, "versions": versions(), "devices": devices})
    content = json.loads(text) | {"checksum": _checksum(json.loads(text))}
    replace_file(path, json.dumps(content, indent=1) + "\n")
    forget_preferences()


def replace_file(path: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    """Writes a file so that whoever reads it finds the former content or this one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(handle)
        Path(name).chmod(mode)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _read(path: str, device_type: str, name: str) -> Preferences:
    try:
        text = Path(path).read_text(encoding="utf-8")
        section = _devices(text).get(device_type)
        if section is None:  # it speaks of other types of devices
            return Preferences()
        if section["name"] != name:
            raise ValueError(f"it was measured on {section['name']}, and this is {name}")
        return Preferences(path, _orders(section))
    except FileNotFoundError:
        return Preferences()
    except OSError as error:
        why = f"it can't be read: {error.strerror or error}"
    except ValueError as error:
        why = str(error)
    ignored = f"the doctor's file {path} is not used: {why}; {_MEASURE}"
    warnings.warn(f"flexcp: {ignored}", stacklevel=2)
    return Preferences(path, (), ignored)


def _devices(text: str) -> dict[str, Any]:
    """What a file says of each type of device; raises ValueError if it can't be believed."""
    try:
        content = json.loads(text)
        stated = content.pop("checksum")
        sections: dict[str, Any] = content["devices"]
        made_by, form = dict(content["versions"]), content["format"]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError("it is damaged") from None
    if form != _FORMAT:
        raise ValueError(f"it has format {form}, and this version reads {_FORMAT}")
    if stated != _checksum(content) or not isinstance(sections, dict):
        raise ValueError("it is damaged")
    for what, here in versions().items():
        if made_by.get(what) != here:
            raise ValueError(f"it was made with {what} {made_by.get(what)}, and this is {here}")
    return sections


def _orders(section: dict[str, Any]) -> tuple[KernelOrder, ...]:
    try:
        orders = tuple(
            KernelOrder(
                str(row["kind"]),
                str(row["dtype"]),
                int(row["head_dim"]),
                tuple(map(str, row["kernels"])),
                tuple(map(float, row["seconds"])),
            )
            for row in section["orders"]
        )
    except (ValueError, TypeError, KeyError):
        raise ValueError("it is damaged") from None
    if any(order.kind not in (*KINDS, SCORE_FUNCTION) for order in orders):
        raise ValueError("it speaks of kinds of masks that this version does not know")
    return orders


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
