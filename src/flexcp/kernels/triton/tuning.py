"""The tuning table: tiles, warps and stages by architecture, head dim, type and Triton version.

Every entry was compiled for its architecture: all fit the shared memory, and none spills registers
but for what docs/limits.md says. Which is fastest only hardware can tell; a user names
others in the kernel's name: `kernel="triton: forward=128x64 w8 s3"`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from flexcp.errors import FlexCPError


@dataclass(frozen=True)
class TileConfig:
    """How one kernel is compiled."""

    rows: int
    """Queries of a tile."""
    cols: int
    """Keys of a tile."""
    warps: int
    stages: int
    tma: bool = False
    """Whether listed tiles are read through tensor descriptors, if the tensors allow it."""

    def __str__(self) -> str:
        text = f"{self.rows}x{self.cols} w{self.warps} s{self.stages}"
        return f"{text} tma" if self.tma else text


@dataclass(frozen=True)
class Tuning:
    """How the kernels of a call are compiled."""

    forward: TileConfig
    dq: TileConfig
    dkdv: TileConfig
    """Gradients of keys and values together; or, with `dv`, of keys alone."""
    dv: TileConfig | None = None
    """Gradients of values in a launch of their own, where registers don't suffice for both."""
    arch: str = "interpreter"
    """What the table has them for."""

    def captured(self, kind: str) -> TileConfig:
        """For gradients of what score functions capture, added up in a way that `Lookup` names.

        A "table" takes registers for twice a tile, and a comparison of its columns with each other.
        """
        rows, cols = min(self.dq.rows, 64), min(self.dq.cols, 32)
        config = replace(self.dq, stages=min(self.dq.stages, 2), tma=False)
        if kind != "table":
            return replace(config, rows=rows, cols=cols)
        return replace(config, rows=min(rows, 32), cols=cols)

    def __str__(self) -> str:
        named = ((f.name, getattr(self, f.name)) for f in fields(self))
        return ", ".join(f"{name}={x}" for name, x in named if isinstance(x, TileConfig))


_TILE = re.compile(r"(\d+)x(\d+)\s*w(\d+)\s*s(\d+)(\s*tma)?")


def parse_tile(text: str) -> TileConfig:
    """The configuration that a text such as "128x64 w8 s3" says; "tma" at its end for descriptors.

    >>> parse_tile("128x64 w8 s3")
    TileConfig(rows=128, cols=64, warps=8, stages=3, tma=False)
    """
    found = _TILE.fullmatch(text.strip())
    rows, cols, warps, stages = (0, 0, 0, 0) if found is None else map(int, found.groups()[:4])
    powers = all(n > 0 and n & (n - 1) == 0 for n in (rows, cols, warps))
    sane = 16 <= min(rows, cols) <= max(rows, cols) <= 512 and warps <= 32 and 1 <= stages <= 16
    if found is None or not powers or not sane:
        raise FlexCPError(
            "a tile such as '128x64 w8 s3': queries x keys (powers of two from 16 to 512), warps "
            "(up to 32), stages (1 to 16)",
            repr(text),
            "leave it out to have that of the table",
        )
    return TileConfig(rows, cols, warps, stages, found[5] is not None)


def _tuning(tiles: str) -> Tuning:
    """What a line of the table says: forward, dq, dkdv; or forward, dq, dk and dv."""
    forward, dq, dkdv, *dv = (parse_tile(tile) for tile in tiles.split("|"))
    return Tuning(forward, dq, dkdv, dv[0] if dv else None)


def _table(text: str) -> Iterator[tuple[tuple[str, str, int], Tuning]]:
    for line in text.strip().splitlines():
        arch, kind, dim, tiles = line.split(maxsplit=3)
        yield (arch, kind, int(dim)), _tuning(tiles)


INTERPRETER = _tuning("64x64 w4 s1 | 64x64 w4 s1 | 64x64 w4 s1")

TABLE: Mapping[tuple[str, str, int], Tuning] = dict(
    _table("""
sm_80  half   64  128x64 w4 s3      | 128x32 w8 s2    | 64x128 w8 s2
sm_80  half   128 128x64 w8 s3      | 64x64 w8 s2     | 64x64 w8 s2
sm_80  half   256 64x64 w8 s2       | 64x32 w8 s2     | 32x32 w8 s2
sm_80  single 64  32x32 w4 s2       | 32x32 w8 s2     | 32x32 w4 s2
sm_80  single 128 32x32 w8 s2       | 32x32 w8 s2     | 16x32 w8 s2
sm_80  single 256 16x16 w8 s2       | 16x16 w8 s2     | 16x16 w8 s2
sm_90  half   64  128x128 w8 s2 tma | 128x64 w8 s2    | 64x128 w8 s2 tma
sm_90  half   128 128x128 w8 s2 tma | 128x64 w8 s2    | 32x128 w8 s2 tma
sm_90  half   256 128x64 w8 s2 tma  | 64x32 w8 s2     | 32x32 w8 s2 tma
sm_90  single 64  32x32 w4 s2       | 32x32 w8 s2     | 16x32 w8 s2
sm_90  single 128 16x32 w8 s2       | 16x32 w8 s2     | 16x32 w8 s2
sm_90  single 256 16x16 w8 s2       | 16x16 w8 s2     | 16x16 w8 s1
sm_100 half   64  128x128 w8 s2 tma | 128x128 w8 s2   | 64x128 w8 s2 tma
sm_100 half   128 128x128 w8 s2 tma | 128x64 w8 s2    | 64x128 w8 s1 tma
sm_100 half   256 128x64 w8 s2 tma  | 64x64 w8 s1 tma | 64x64 w8 s1 tma | 64x128 w8 s1 tma
sm_100 single 64  32x32 w4 s2       | 32x32 w8 s2     | 16x32 w8 s2
sm_100 single 128 16x32 w8 s2       | 16x32 w8 s2     | 16x32 w8 s2
sm_100 single 256 16x16 w8 s2       | 16x16 w8 s2     | 16x16 w8 s1
gfx942 half   64  128x64 w4 s1      | 64x64 w4 s1     | 64x64 w4 s1
gfx942 half   128 128x64 w4 s1      | 64x32 w4 s1     | 32x32 w4 s1
gfx942 half   256 64x32 w4 s1       | 32x32 w4 s1     | 16x32 w4 s1
gfx942 single 64  64x32 w4 s1       | 32x32 w4 s1     | 32x32 w4 s1
gfx942 single 128 32x32 w4 s1       | 32x32 w4 s1     | 32x32 w4 s1
gfx942 single 256 32x16 w4 s1       | 16x16 w4 s1     | 16x16 w4 s1
""")
)
"""By architecture, type ("half" or "single") and largest head dim; made for Triton 3.9."""

LESS_SHARED = ("sm_86", "sm_89", "sm_120", "sm_121")
"""Architectures with the matrix instructions of sm_80, and 99 KB of shared memory for a program."""
_WITH_LESS_SHARED = {
    ("half", 64): _tuning("128x64 w8 s3 | 128x32 w8 s2 | 32x64 w8 s2"),
    ("half", 256): _tuning("64x32 w8 s2 | 32x32 w8 s2 | 32x32 w8 s2"),
}
"""What does not fit there otherwise, or spills on sm_120."""

_WITH_DROPOUT: Mapping[tuple[str, str, int], Mapping[str, Any]] = {
    ("sm_90", "half", 128): {"dkdv": parse_tile("32x64 w8 s2 tma")},
    ("sm_100", "half", 128): {"dkdv": parse_tile("64x64 w8 s2 tma")},
}
"""What spills otherwise when weights are dropped."""

_SCORED: Mapping[tuple[str, str, int], Mapping[str, Any]] = {
    ("sm_80", "half", 64): {"dkdv": parse_tile("32x128 w8 s2")},
    ("sm_90", "half", 64): {"dkdv": parse_tile("32x128 w8 s2 tma")},
    ("sm_90", "half", 128): {"dkdv": parse_tile("32x64 w8 s2 tma")},
    ("sm_100", "half", 64): {
        "dq": parse_tile("128x64 w8 s2"),
        "dkdv": parse_tile("32x128 w8 s2 tma"),
    },
    ("sm_100", "half", 128): {"dkdv": parse_tile("64x64 w8 s1 tma")},
}
"""Tiles for calls with a score function, where those of the table would spill registers."""

_NARROW_VALUES: Mapping[tuple[str, str, int], Mapping[str, Any]] = {
    ("sm_90", "half", 256): {"forward": parse_tile("128x32 w8 s2 tma")},
}
"""Where values have at most half of the table's head dim, what spills registers otherwise."""

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
"""What the table has entries for."""

_HEAD_DIMS = (64, 128, 256)


def nearest_known(arch: str) -> str:
    """The architecture of the table that is most like a given one.

    Consumer Blackwell (sm_120) has the matrix instructions of sm_80, not those of sm_100.

    >>> nearest_known("sm_90"), nearest_known("sm_89"), nearest_known("sm_120")
    ('sm_90', 'sm_80', 'sm_80')
    """
    if arch in (*ARCHITECTURES, "interpreter"):
        return arch
    if arch.startswith("gfx"):
        return "gfx942"
    major = int(re.sub(r"\D", "", arch) or 0) // 10
    return {9: "sm_90", 10: "sm_100", 11: "sm_100"}.get(major, "sm_80")


def tuning_for(
    arch: str,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    wishes: str = "",
    *,
    dropout: bool = False,
    scored: bool = False,
) -> tuple[Tuning, tuple[str, ...]]:
    """How to compile the kernels for an architecture, and what there is to say about it.

    Args:
        arch: "sm_90", "gfx942", ..., or "interpreter".
        head_dim: of queries and keys.
        value_dim: of values.
        dtype: of all of them.
        wishes: "forward=128x64 w8 s3, dq=..." overrides what the table says.
        dropout: whether weights are dropped, which takes registers.
        scored: whether there is a function on the scores, which takes registers.

    >>> found, why = tuning_for("sm_86", 64, 64, torch.bfloat16, "forward=64x64 w4 s2")
    >>> str(found.forward), why[0]
    ('64x64 w4 s2', 'tiles of sm_80, the nearest to sm_86 that was tuned')
    """
    known = nearest_known(arch)
    reasons = [
        f"tiles of {known}"
        if known == arch
        else f"tiles of {known}, the nearest to {arch} that was tuned"
    ]
    found = INTERPRETER
    if known != "interpreter":
        kind = "single" if dtype == torch.float32 else "half"
        size = next((n for n in _HEAD_DIMS if n >= max(head_dim, value_dim)), _HEAD_DIMS[-1])
        found = TABLE[known, kind, size]
        if arch in LESS_SHARED:
            found = _WITH_LESS_SHARED.get((kind, size), found)
        if value_dim <= size // 2:
            found = replace(found, **_NARROW_VALUES.get((known, kind, size), {}))
        if dropout:
            found = replace(found, **_WITH_DROPOUT.get((known, kind, size), {}))
        if scored and arch not in LESS_SHARED:
            found = replace(found, **_SCORED.get((known, kind, size), {}))
    found = replace(found, arch=known)
    if wishes:
        named: dict[str, Any] = dict(_wish(part) for part in wishes.split(","))
        if "dkdv" in named and "dv" not in named:
            found = replace(found, dv=None)
        found = replace(found, **named)
        reasons.append("some tiles were asked for by name")
    return found, (*reasons, str(found))


def names_every_kernel(wishes: str) -> bool:
    """Whether nothing is left to the table."""
    return {"forward", "dq", "dkdv"} <= {
        part.partition("=")[0].strip() for part in wishes.split(",")
    }


def _wish(text: str) -> tuple[str, TileConfig]:
    name, _, tile = text.partition("=")
    if name.strip() not in ("forward", "dq", "dkdv", "dv"):
        raise FlexCPError(
            "tiles for 'forward', 'dq', 'dkdv' or 'dv', such as 'triton: forward=128x64 w8 s3'",
            repr(text.strip()),
            "leave it out to have that of the table",
        )
    return name.strip(), parse_tile(tile)
