"""Things by the name "package.module:attribute", as people type them."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from flexcp.errors import FlexCPError, quote


def import_name(name: str) -> Any:
    """What "package.module:attribute" stands for; modules of the current folder count.

    >>> import_name("os.path:join").__name__
    'join'
    >>> import_name("os.path:jion")
    Traceback (most recent call last):
    ...
    flexcp.errors.FlexCPError: expected a name in os.path, got 'jion'; did you mean join?
    """
    module, _, path = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        if not all(part.isidentifier() for part in module.split(".")):
            raise ModuleNotFoundError(name=module)
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # something that the module imports is missing
        raise FlexCPError(
            "a module that Python can import",
            quote(module),
            "run from the folder that it is in, or install its package",
        ) from None
    for part in path.split("."):
        if not hasattr(found, part):
            raise FlexCPError(f"a name in {module}", quote(part), _hint(part, found))
        found = getattr(found, part)
    return found


def _hint(part: str, found: Any) -> str:
    from difflib import get_close_matches

    names = [
        n
        for n, value in getattr(found, "__dict__", {}).items()
        if n[0].isalpha() and callable(value)
    ]
    if not part:
        return "name a function after the :"
    close = get_close_matches(part, names, 1, cutoff=0.7)
    if close:
        return f"did you mean {close[0]}?"
    return f"it has {', '.join(names[:8])}" if names else "it has no functions"
