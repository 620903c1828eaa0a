"""Generated source made into Triton functions: compiled once for each text, by any number of calls.

Triton reads a function's source by its file's name; the text is put where Python looks for lines of
files, so that nothing is written to disk, and processes don't meet.
"""

from __future__ import annotations

import hashlib
import linecache
import threading
import weakref
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

_lock = threading.Lock()


def functions_of(source: str) -> Mapping[str, Any]:
    """The Triton functions that a text defines, by their names; the same ones for all threads."""
    with _lock:
        return _defined(source)


@lru_cache(maxsize=256)
def _defined(source: str) -> Mapping[str, Any]:
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    name = f"<flexcp score function {digest}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": f"flexcp_score_{digest}"}
    exec(compile(source, name, "exec"), space)
    weakref.finalize(space["score"], linecache.cache.pop, name, None)
    return space
