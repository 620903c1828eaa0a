"""Whether Triton is there, of a version that the kernels were tested with, and for which tensors.

Nothing here or above imports Triton before a call needs it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from flexcp.errors import FlexCPError

TESTED_VERSIONS = ("3.7", "3.8", "3.9")
"""Versions (major.minor) that the kernels were run with in the interpreter and compiled with for
each architecture: torch 2.12 and 2.13 for CUDA bring 3.7, torch 2.15 brings 3.9."""
LARGEST_HEAD_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@lru_cache(maxsize=1)
def triton_version() -> str | None:
    """The version of Triton that is installed, without importing it."""
    if importlib.util.find_spec("triton") is None:
        return None
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return str(getattr(importlib.import_module("triton"), "__version__", "unknown"))


def is_tested(version: str) -> bool:
    """Whether the kernels were tested with a version of Triton.

    >>> is_tested("3.7.1"), is_tested("3.9.0"), is_tested("3.10.1")
    (True, True, False)
    """
    return ".".join(version.split(".")[:2]) in TESTED_VERSIONS


def require_triton(*, any_version: bool = False) -> None:
    """Raises unless Triton is installed, of a tested version."""
    version, newest = triton_version(), TESTED_VERSIONS[-1]
    if version is None:
        raise FlexCPError(
            "Triton for the kernel 'triton'",
            "an environment without it",
            f"pip install 'triton~={newest}.0' (or flexcp[triton]), or leave the kernel out",
        )
    if not any_version and not is_tested(version):
        raise FlexCPError(
            f"Triton {TESTED_VERSIONS[0]} to {newest}, with which the kernels were tested",
            f"Triton {version}",
            f"pip install 'triton~={newest}.0', leave the kernel out, or name the tiles of every "
            "kernel yourself: 'triton: forward=64x32 w4 s2, dq=64x32 w4 s2, dkdv=32x32 w4 s2'",
        )


def refuses(head_dim: int, value_dim: int, dtype: torch.dtype) -> FlexCPError | None:
    """Why the kernels can't compute with such tensors; None if they can."""
    if dtype not in DTYPES:
        return FlexCPError(
            "float32, bfloat16 or float16 for the kernel 'triton'",
            f"{dtype}",
            "convert the tensors, or leave the kernel out",
        )
    if max(head_dim, value_dim) > LARGEST_HEAD_DIM or min(head_dim, value_dim) < 1:
        return FlexCPError(
            f"head dims from 1 to {LARGEST_HEAD_DIM} for the kernel 'triton'",
            f"{head_dim} and {value_dim}",
            "leave the kernel out",
        )
    return None


def interprets() -> bool:
    """Whether Triton's interpreter runs kernels: the switch had to be set before its import."""
    if "triton" not in sys.modules:
        return os.environ.get("TRITON_INTERPRET") == "1"
    language = importlib.import_module("triton.language")
    return _is_interpreted(language.cdiv) and (
        "flexcp.kernels.triton.forward" not in sys.modules
        or _is_interpreted(importlib.import_module("flexcp.kernels.triton.forward").forward)
    )


def _is_interpreted(function: object) -> bool:
    return type(function).__name__ == "InterpretedFunction"


def require_device(device: torch.device) -> None:
    """Raises unless kernels can run on tensors of a device."""
    if device.type == "cuda" or (device.type == "cpu" and interprets()):
        return
    fix = "move the tensors, or leave the kernel out"
    if device.type == "cpu":
        fix = (
            "leave the kernel out, or set TRITON_INTERPRET=1 before Triton is first imported, to "
            "run it slowly in Triton's interpreter"
        )
        if os.environ.get("TRITON_INTERPRET") == "1":
            fix = "set TRITON_INTERPRET=1 earlier: Triton was imported before it was set"
    raise FlexCPError("CUDA tensors for the kernel 'triton'", f"tensors on {device.type}", fix)


def kernels() -> tuple[ModuleType, ModuleType]:
    """The modules with the forward and the backward kernels; imports Triton."""
    return (
        importlib.import_module("flexcp.kernels.triton.forward"),
        importlib.import_module("flexcp.kernels.triton.backward"),
    )


def captured_kernel() -> Any:
    """The kernel for gradients of what score functions capture; imports Triton."""
    return importlib.import_module("flexcp.kernels.triton.captured").lookup_gradients


def arch_of(device: torch.device) -> str:
    """The architecture of a device, as the tuning table names them."""
    if device.type != "cuda" or interprets():
        return "interpreter"
    if not torch.cuda.is_available():  # tensors without numbers
        return "sm_80"
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
