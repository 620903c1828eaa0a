"""Environment: versions, devices and the links between them, as far as they can be seen at once."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flexcp.kernels.preferences import device_name, versions
from flexcp.kernels.triton.available import TESTED_VERSIONS, is_tested, triton_version
from flexcp.tools.doctor.findings import Finding
from flexcp.tools.launch import cores, is_busy, load


def environment() -> dict[str, Any]:
    """What this environment is, by name; the first entries are those that a person asks for."""
    version = triton_version()
    tested = f"tested: {', '.join(TESTED_VERSIONS)}"
    triton = "not installed" if version is None else version
    if version is not None and not is_tested(version):
        triton = f"{version}, not tested: the kernel 'triton' has to be asked for with its tiles"
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "flexcp": versions()["flexcp"],
        "torch": torch.__version__,
        "triton": f"{triton} ({tested})",
        "CUDA": torch.version.cuda or "none",
        "ROCm": torch.version.hip or "none",
        "NCCL": _nccl(),
        "Python": platform.python_version(),
        "system": platform.platform(),
        "processor": device_name(torch.device("cpu")),
        "cores": cores(),
        "CPU threads": torch.get_num_threads(),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "GPUs": ", ".join(gpus) or "none",
        "settings": {n: v for n, v in sorted(os.environ.items()) if n.startswith(_SETTINGS)},
    }


_SETTINGS = (
    "CUDA_", "FLEXCP_", "GLOO_", "HIP_", "KMP_", "MKL_", "NCCL_", "OMP_", "ONEDNN_", "PYTORCH_",
    "ROCR_", "TORCH", "TRITON_",
)  # fmt: skip
"""Beginnings of environment variables that change what is computed, where, and how fast."""


def environment_findings(device: torch.device) -> list[Finding]:
    """What is noteworthy about versions, devices and links."""
    return [_versions(), _devices(device), _load(), _links()]


def _versions() -> Finding:
    found = environment()
    said = f"flexcp {found['flexcp']}, torch {found['torch']}, Triton {found['triton']}"
    return Finding("environment", "versions", "measured", said)


def _devices(device: torch.device) -> Finding:
    if device.type == "cpu":
        said = f"{cores()} cores of {device_name(device)}, {torch.get_num_threads()} threads"
        return Finding("environment", "devices", "measured", said)
    rows: list[dict[str, Any]] = []
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        rows.append(
            {
                "device": i,
                "name": about.name,
                "memory GB": round(about.total_memory / 1e9, 1),
                "multiprocessors": about.multi_processor_count,
                "capability": f"{about.major}.{about.minor}",
            }
        )
    names = sorted({row["name"] for row in rows})
    said = f"{len(rows)} GPUs: {', '.join(names)}"
    if len(names) > 1:
        said += "; ranks with different GPUs wait for the slowest"
    return Finding("environment", "devices", "measured", said, rows=tuple(rows))


def _load() -> Finding:
    said = f"{load():.1f} processes want to run on {cores()} cores"
    if is_busy():
        said += ": timings are less certain than on an idle machine"
    return Finding("environment", "load", "measured", said)


def _links() -> Finding:
    """Which links there are: what they reach is measured between ranks."""
    rows: list[dict[str, Any]] = []
    count = torch.cuda.device_count()
    if count > 1:
        blocked = [
            (i, j)
            for i in range(count)
            for j in range(count)
            if i != j and not torch.cuda.can_device_access_peer(i, j)
        ]
        rows.append({"link": "peer access", "found": f"all but {blocked}" if blocked else "all"})
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        rows.append({"link": "nvidia-smi topo -m", "found": _output(tool, "topo", "-m")})
    for kind, folder in (("InfiniBand", "infiniband"), ("network", "net")):
        place = Path("/sys/class") / folder
        names = sorted(p.name for p in place.iterdir()) if place.is_dir() else []
        rows.append({"link": kind, "found": ", ".join(names) or "none"})
    said = "; ".join(f"{r['link']}: {r['found']}" for r in rows if "\n" not in r["found"])
    return Finding("environment", "links", "measured", said, rows=tuple(rows))


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}"
    return done.stdout.strip()


def _nccl() -> str:
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))
