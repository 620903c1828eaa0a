"""A Machine in a file: `flexcp doctor` writes what it measures, `flexcp plan` prices with it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, NoReturn

from flexcp.errors import FlexCPError, quote, require, writing
from flexcp.plan.machine import Machine

_KEY = "flexcp machine"
"""By which a file says that it is one; its value is the version of the format."""
_FORMAT = 1


def save_machine(machine: Machine, path: str | Path) -> None:
    """Writes a machine as JSON, to be read with `load_machine` or given to `flexcp plan`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_machine(Machine.preset("pcie"), f"{folder}/machine.json")
    ...     load_machine(f"{folder}/machine.json") == Machine.preset("pcie")
    True
    """
    require("machine", machine, Machine, "pass a preset, or Machine.measure()")
    content = {_KEY: _FORMAT, **dataclasses.asdict(machine)}
    with writing(path) as file:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_machine(path: str | Path) -> Machine:
    """The machine of a file.

    Numbers may be changed by hand; one that is missing, not a number or of no use is an error, as
    is one that this version does not know.
    """
    require("path", path, (str, Path), "pass a file that `flexcp doctor` has written")
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        _refuse(path, error.strerror or str(error))
    except (ValueError, RecursionError):
        _refuse(path, "something that is not JSON")
    if not isinstance(content, dict) or content.pop(_KEY, None) != _FORMAT:
        _refuse(path, f"no file with {json.dumps(_KEY)}: {_FORMAT}")
    fields = {field.name: field for field in dataclasses.fields(Machine)}
    unknown = sorted(set(content) - set(fields))
    missing = sorted(
        name
        for name, field in fields.items()
        if name not in content and field.default is dataclasses.MISSING
    )
    if unknown or missing:
        told = [f"no {name}" for name in missing] + [f"an unknown {name!r}" for name in unknown]
        _refuse(path, ", ".join(told))
    for name, value in content.items():
        if not _is_right(str(fields[name].type), value):
            _refuse(path, f"{name} = {json.dumps(value)}")
    return Machine(**content)


def _is_right(kind: str, value: Any) -> bool:
    """Whether a value is a name, or a number that a price can be computed with.

    >>> _is_right("float", 2), _is_right("int", 1.5), _is_right("float", -1.0)
    (True, False, False)
    """
    if kind == "str":
        return isinstance(value, str)
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool) and value >= 1
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0


def _refuse(path: str | Path, got: str) -> NoReturn:
    raise FlexCPError(
        f"a machine in {quote(str(path))}",
        got,
        "let `flexcp doctor` write one, or name a preset such as h100-ib",
    )
