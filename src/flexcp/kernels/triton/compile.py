"""Compiling the kernels for an architecture, without a device, and reading the machine code.

What is compiled is what a call launches: the arguments of a launch give the signature.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexcp.errors import FlexCPError
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.dropout import Dropout
from flexcp.kernels.interface import Partial, causal_shapes
from flexcp.kernels.score import ScoreFunction, examine
from flexcp.kernels.triton import kernel as launches
from flexcp.kernels.triton.available import captured_kernel, kernels, refuses, require_triton
from flexcp.kernels.triton.captured_sums import Walk, launch_walk
from flexcp.kernels.triton.launch import Launch
from flexcp.kernels.triton.scoring import ScoreArguments
from flexcp.kernels.triton.tuning import LESS_SHARED, Tuning, tuning_for

_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
}
_MATRIX_OPS = re.compile(r"\b(?:HMMA|HGMMA|UTC\w*MMA|v_mfma_\w+)")
SHARED_LIMIT = {
    "sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536,
    **dict.fromkeys(LESS_SHARED, 101_376),
}  # fmt: skip
"""Bytes of shared memory that one program may have."""


@dataclass(frozen=True)
class KernelReport:
    """What a compiler made of one kernel."""

    kernel: str
    """ "forward", "prep", "dq" and "dkdv"; or "dk" and "dv" where they are launched apart."""
    arch: str
    head_dim: int
    dtype: str
    config: str
    registers: int
    """Of a thread."""
    spills: int
    """Bytes of a thread's registers that are kept in memory."""
    shared: int
    """Bytes of shared memory of a program."""
    matrix_ops: int
    """Matrix instructions in the machine code."""
    seconds: float
    """That compiling took; Triton keeps what it has compiled."""


@dataclass(frozen=True)
class MachineCode:
    """A compiled kernel."""

    text: str
    """In assembly."""
    intermediate: str
    """In Triton's GPU dialect, which says the precision of products."""
    report: KernelReport


def compile_reports(
    archs: Sequence[str], head_dims: Sequence[int], dtypes: Sequence[torch.dtype]
) -> list[KernelReport]:
    """All kernels for some architectures, compiled by as many processes as there are cores."""
    require_triton()
    for arch in archs:
        _require_known(arch)
    for dim in head_dims:
        for dtype in dtypes:
            refusal = refuses(dim, dim, dtype)
            if refusal is not None:
                raise refusal
    wanted = [
        (arch, dim, dtype, number)
        for arch in archs
        for dtype in dtypes
        for dim in head_dims
        for number in range(len(names_of(tuning_for(arch, dim, dim, dtype)[0])))
    ]
    # Spawned, not forked: torch may have threads. Triton's interpreter is switched off in them.
    with ProcessPoolExecutor(
        min(os.cpu_count() or 1, len(wanted)), get_context("spawn"), _compile_for_real
    ) as pool:
        return list(pool.map(_report, wanted))


def _compile_for_real() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    torch.set_num_threads(1)


def _report(wanted: tuple[str, int, torch.dtype, int]) -> KernelReport:
    arch, dim, dtype, number = wanted
    tuning, _ = tuning_for(arch, dim, dim, dtype)
    return machine_code(arch, names_of(tuning)[number], dim, dtype).report


def names_of(tuning: Tuning) -> tuple[str, ...]:
    """The kernels of a call."""
    return ("forward", "prep", "dq", *(("dkdv",) if tuning.dv is None else ("dk", "dv")))


def machine_code(
    arch: str,
    name: str,
    head_dim: int,
    dtype: torch.dtype,
    tuning: Tuning | None = None,
    *,
    value_dim: int | None = None,
    dropout: Dropout | None = None,
    score_mod: ScoreFunction | None = None,
) -> MachineCode:
    """One kernel, compiled in this process; values have the same head dim if none is given."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    _require_known(arch)
    value_dim = value_dim or head_dim
    if tuning is None:
        drops, scored = dropout is not None, score_mod is not None
        tuning, _ = tuning_for(arch, head_dim, value_dim, dtype, dropout=drops, scored=scored)
    launch = dict(_launches(head_dim, value_dim, dtype, tuning, dropout, score_mod))[name]
    forward, backward = kernels()
    captured = {"lookup_gradients": captured_kernel()}
    function = captured.get(launch.kernel) or getattr(
        forward if name == "forward" else backward, launch.kernel
    )
    signature, constants = _signature(function, launch)
    is_amd = arch.startswith("gfx")
    target = GPUTarget("hip", arch, 64) if is_amd else GPUTarget("cuda", int(arch[3:]), 32)
    begun = time.perf_counter()
    compiled = triton_compile(
        ASTSource(function, signature, constants), target=target, options=launch.options
    )
    seconds = time.perf_counter() - begun
    found = _read_amd(compiled) if is_amd else _read_nvidia(compiled)
    text, registers, spills = found
    report = KernelReport(
        name, arch, head_dim, str(dtype).removeprefix("torch."), str(launch.config), registers,
        spills, compiled.metadata.shared, len(_MATRIX_OPS.findall(text)), round(seconds, 3),
    )  # fmt: skip
    return MachineCode(text, compiled.asm["ttgir"], report)


def _launches(
    dim: int,
    value_dim: int,
    dtype: torch.dtype,
    tuning: Tuning,
    dropout: Dropout | None,
    score_mod: ScoreFunction | None,
) -> Iterator[tuple[str, Launch]]:
    """The launches of a small call, by the names of the kernels.

    "captured 0" is for the first number that a score function reads from a tensor with a gradient.
    """
    q, v = (torch.zeros(1, 2, 128, d, dtype=dtype) for d in (dim, value_dim))
    dq, out = q.float(), v.float()
    lse = out[..., 0].contiguous()
    shapes = CompiledShapes(causal_shapes(128))
    mod = None if score_mod is None else examine(score_mod, torch.float32, q.device)
    score = ScoreArguments.of(mod, shapes, q.device, 1.0)
    more = (dropout, score)
    yield (
        "forward",
        launches.forward_launch(
            q, q, v, Partial(out, lse), shapes, 1.0, tuning.forward, False, *more
        ),
    )
    yield "prep", launches.prep_launch(v, v, None, lse)
    given = (v, q, q, v, lse, lse)
    yield "dq", launches.dq_launch(*given, dq, shapes, 1.0, tuning.dq, False, *more)
    apart = tuning.dv is not None
    for name, config, wanted in (
        ("dk" if apart else "dkdv", tuning.dkdv, {"DK": True, "DV_WANTED": not apart}),
        ("dv", tuning.dv, {"DK": False, "DV_WANTED": True}),
    ):
        if config is not None:
            made = launches.dkdv_launch(*given, dq, out, shapes, 1.0, config, wanted, *more)
            yield name, made
    if score is not None:
        for i, lookup in enumerate(score.emitted.lookups):
            config = tuning.captured(lookup.kind)
            whole = launches.lookup_launch(*given, shapes, 1.0, config, dropout, score)
            walk = Walk(1, size=128, width=128)
            yield f"captured {i}", launch_walk(score, lookup, whole, lookup.kind, walk)


def _signature(function: Any, launch: Launch) -> tuple[dict[str, Any], dict[str, Any]]:
    """Types of the parameters, and the values of those that are constants."""
    types: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    for parameter in function.params:
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            types[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, tuple):
            types[parameter.name] = tuple(map(_type_of, value))
        elif isinstance(value, Tensor):
            types[parameter.name] = _type_of(value)
        elif hasattr(value, "block_shape"):
            types[parameter.name] = f"tensordesc<{_TYPES[value.base.dtype]}{value.block_shape}>"
        else:
            types[parameter.name] = parameter.annotation_type
    return types, constants


def _type_of(value: Tensor | int | float) -> str:
    """The type of an argument that has no type of its own in the kernel."""
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i64"


def _read_nvidia(compiled: Any) -> tuple[str, int, int]:
    """Assembly, registers and bytes spilled, by the tools that come with Triton."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(compiled.asm["cubin"])
        usage = _output(tools / "cuobjdump", "-res-usage", str(file))
        text = _output(tools / "nvdisasm", "-c", str(file))
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, local = map(int, found.groups())
    return text, registers, stack + local


def _output(*command: object) -> str:
    return subprocess.run(
        [str(x) for x in command], capture_output=True, text=True, check=True
    ).stdout


def _read_amd(compiled: Any) -> tuple[str, int, int]:
    text: str = compiled.asm["amdgcn"]
    registers, scratch = (
        int(re.search(rf"\.{name}:\s*(\d+)", text)[1])  # type: ignore[index]
        for name in ("vgpr_count", "private_segment_fixed_size")
    )
    return text, registers, scratch


def _require_known(arch: str) -> None:
    if arch not in SHARED_LIMIT:
        raise FlexCPError(
            f"an architecture among {', '.join(SHARED_LIMIT)}",
            repr(arch),
            "name the one that is most like yours",
        )
