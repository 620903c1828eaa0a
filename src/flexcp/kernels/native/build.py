"""Compiling C++: once for a processor and a compiler, into the user's cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from flexcp.kernels.preferences import cache_folder, replace_file

_FOLDER = Path(__file__).parent
_ATTENTION = (
    "attention.cpp", "forward.h", "backward.h", "sums.h", "scored.h", "operands.h", "sweep.h",
    "tiles.h", "score_tile.h", "vectors.h",
)  # fmt: skip
_SCORES = ("score_math.h", "score_steps.h", "score_tile.h", "vectors.h")
_COMPILERS = ("g++", "c++")
FLAGS = (
    "-std=c++17", "-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-fPIC", "-fopenmp",
    "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
"""-O3 takes twice as long to compile, and gains nothing that was measured."""
_OF_SCORES = ("-fwrapv",)
"""Whole numbers of score functions wrap around, as torch's do."""
_PATIENCE = 120.0
"""Seconds after which a compiler is given up: it takes two on a quiet machine."""


class BuildError(Exception):
    """Why there is no compiled kernel."""


@lru_cache(maxsize=1)
def compiler() -> str | None:
    """The C++ compiler's path, if there is one."""
    return next(filter(None, map(shutil.which, _COMPILERS)), None)


def built(*, extra: tuple[str, ...] = (), score: str | None = None) -> Path:
    """The compiled kernel's file, made if it is not there; raises `BuildError`.

    Or that of a score function, given its source. `extra` are more flags for the compiler.
    """
    if not sys.platform.startswith(("linux", "darwin")):
        raise BuildError(f"it was not tried on {sys.platform}")
    command = compiler()
    if command is None:
        raise BuildError(f"no C++ compiler was found ({', '.join(_COMPILERS)})")
    extra = extra if score is None else (*_OF_SCORES, *extra)
    name = f"{'attention' if score is None else 'score'}-{_key(command, extra, score)}.so"
    folder = cache_folder()
    if folder is not None:
        path = folder / "native" / name
        if path.exists():
            return path
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with _alone(path):
                if not path.exists():
                    _compile(command, extra, score, path)
            return path
    # Nothing can be kept here: this process has its own.
    path = Path(_own_folder()) / name
    if not path.exists():
        _compile(command, extra, score, path)
    return path


@lru_cache(maxsize=1)
def _own_folder() -> str:
    return tempfile.mkdtemp(prefix="flexcp-")


def _key(command: str, extra: tuple[str, ...], score: str | None) -> str:
    """What the result depends on: sources, flags, the compiler and the processor."""
    found = hashlib.sha256((score or "").encode())
    for name in _ATTENTION if score is None else _SCORES:
        found.update((_FOLDER / name).read_bytes())
    real = os.path.realpath(command)
    seen = os.stat(real)
    for part in (FLAGS, extra, real, seen.st_size, seen.st_mtime_ns, _processor()):
        found.update(repr(part).encode())
    return found.hexdigest()[:32]


def _processor() -> str:
    """What the processor can do, as far as the system says."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
        kept = ("model name", "flags", "Features", "CPU part", "CPU implementer")
        return "\n".join(line for line in text.splitlines() if line.startswith(kept))
    return f"{platform.machine()} {platform.processor()}"


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process compiles, the others wait for it."""
    import fcntl

    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(command: str, extra: tuple[str, ...], score: str | None, to: Path) -> None:
    """Writes the file at once or not at all."""
    with tempfile.TemporaryDirectory(prefix="flexcp-") as folder:
        compiled, linked = Path(folder, "made.o"), Path(folder, "made.so")
        source = _FOLDER / _ATTENTION[0]
        if score is not None:
            source = Path(folder, "score.cpp")
            source.write_text(score, encoding="utf-8")
        flags = (*FLAGS, *extra, f"-I{_FOLDER}", "-c", str(source), "-o", str(compiled))
        said = _run([command, "-march=native", *flags])
        if said is not None:  # on some processors the flag has another name
            other = _run([command, "-mcpu=native", *flags])
            if other is not None:
                raise BuildError(f"{command} failed: {other if 'native' in said else said}")
        # Not with OpenMP's library: its functions are those that torch has loaded, and its threads.
        shared = ["-shared"] if sys.platform != "darwin" else ["-shared", "-undefined", "suppress"]
        made = _run([command, *shared, str(compiled), "-o", str(linked)])
        if made is not None:
            raise BuildError(f"{command} failed to link: {made}")
        replace_file(to, linked.read_bytes(), mode=0o755)


def _run(command: list[str]) -> str | None:
    """What went wrong with a command, in a line; None if nothing did."""
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    if found.returncode == 0:
        return None
    lines = [line for line in found.stderr.splitlines() if "error" in line.lower()]
    return (lines or found.stderr.splitlines() or [f"exit code {found.returncode}"])[0][:300]
