"""Plans in files: JSON that programs can read, and that becomes the same plan again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from flexcp.errors import FlexCPError, quote, require, writing
from flexcp.grid import BlockGrid
from flexcp.layout import Layout
from flexcp.masks import Mask, MaskMod
from flexcp.plan.cost import Cost
from flexcp.plan.machine import Machine
from flexcp.plan.make import grids_of
from flexcp.plan.mesh import Ranks
from flexcp.plan.plan import Plan
from flexcp.plan.saved_masks import mask_from_data
from flexcp.plan.shape import AttentionShape
from flexcp.schedule import Pass, Schedule, Transfers
from flexcp.schedule.heads import HeadSlice
from flexcp.schedule.tables import Tasks

_KEY = "flexcp plan"
"""By which a file says that it is one; its value is the version of the format."""
_FORMAT = 1


def save_plan(plan: Plan, path: str | Path) -> None:
    """Writes a plan as JSON, to be read with `load_plan` or `flexcp plan --load`.

    Masks are written as they were made: those of the catalogue as data, functions of your own by
    the name that they can be imported by.
    """
    require("plan", plan, Plan, "make one with flexcp.make_plan")
    content = {_KEY: _FORMAT, **json.loads(plan.to_json())}
    text = json.dumps({**content, "sha256": _digest(content)})
    with writing(path) as file:
        file.write_text(text + "\n", encoding="utf-8")


def load_plan(
    path: str | Path,
    *,
    mask: Mask | MaskMod | BlockGrid | Mapping[str, Mask | MaskMod | BlockGrid] | None = None,
) -> Plan:
    """The plan of a file: nothing is searched for again. `plan.on(mesh)` makes it run.

    Args:
        path: A file that `save_plan` or `flexcp plan --save` has written.
        mask: The mask, or masks by name, that the plan was made for; needed only where they are
            functions that can't be imported by name. Others would be an error.

    >>> import flexcp, tempfile
    >>> plan = flexcp.make_plan(flexcp.masks.causal() & flexcp.masks.chunked(100), 1000, 4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_plan(plan, f"{folder}/plan.json")
    ...     load_plan(f"{folder}/plan.json").fingerprint() == plan.fingerprint()
    True
    """
    content = _read(path)
    try:
        given = mask
        if given is None:
            found = {name: mask_from_data(m["steps"]) for name, m in content["masks"].items()}
            given = found[""] if list(found) == [""] else found
        shape = AttentionShape(
            **{**content["shape"], "dtype": getattr(torch, content["shape"]["dtype"])}
        )
        (block, _), *_ = (m["block_size"] for m in content["masks"].values())
        grids = grids_of(given, content["seq_len"], block, shape)
        layout = _layout(content["layout"], content["seq_len"])
        plan = Plan(
            grids,
            layout,
            {name: _schedule(s, layout) for name, s in content["schedules"].items()},
            {name: Cost(**cost) for name, cost in content["costs"].items()},
            shape,
            Machine(**content["machine"]),
            Ranks.of(tuple(content["ranks"])),
            tuple((name, seconds) for name, seconds in content["considered"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        _refuse(path, f"one of another version ({type(error).__name__}: {error})")
    steps = (step for saved in content["masks"].values() for step in saved["steps"])
    as_written = mask is None and all("make" in step for step in steps)
    if plan.fingerprint() != content["fingerprint"] or not (as_written or _does_all(plan)):
        raise FlexCPError(
            f"the masks that the plan in {str(path)!r} was made for",
            "others" if mask is not None else "functions that have changed since",
            "make the plan again, or pass the mask that it was made for",
        )
    return plan


def _does_all(plan: Plan) -> bool:
    """Whether a plan is right for its masks: others may have the same tiles, and as many pairs."""
    try:
        plan.check()
    except FlexCPError:
        return False
    return True


def _read(path: str | Path) -> dict[str, Any]:
    require("path", path, (str, Path), "pass a file that `flexcp plan --save` has written")
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        _refuse(path, error.strerror or str(error))
    except (ValueError, RecursionError):
        _refuse(path, "something that is not JSON")
    if not isinstance(content, dict) or content.get(_KEY) != _FORMAT:
        _refuse(path, f"no file with {json.dumps(_KEY)}: {_FORMAT}")
    if content.pop("sha256", None) != _digest(content):
        _refuse(path, "one that has changed since it was written")
    return content


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _layout(data: dict[str, Any], seq_len: int) -> Layout:
    runs = (_whole(data[x]) for x in ("rank", "start", "stop"))
    return Layout(data["name"], seq_len, data["ranks"], data["batch_elements"], *runs)


def _schedule(data: dict[str, Any], layout: Layout) -> Schedule:
    size = data["heads_group_size"]
    groups = layout if size == 1 else _layout(data["group_layout"], layout.seq_len)
    heads = tuple(HeadSlice(range(*s["q"]), range(*s["kv"])) for s in data["heads"])
    forward, backward = (_pass(data[x]) for x in ("forward", "backward"))
    return Schedule(
        data["name"],
        layout,
        groups,
        size,
        heads,
        forward,
        backward,
        outer_schedule=data["outer"],
        keeps_kv=data["keeps_kv"],
        head_parts=data.get("head_parts", 1),  # none in files of earlier versions
    )


def _pass(data: dict[str, Any]) -> Pass:
    return Pass(
        data["rounds"],
        Transfers(*_columns(Transfers, data["moves"])),
        Tasks(*_columns(Tasks, data["work"])),
        Transfers(*_columns(Transfers, data["returns"])),
    )


def _columns(kind: type[Transfers | Tasks], data: dict[str, Any]) -> list[Tensor]:
    return [_whole(data[f.name]) for f in fields(kind)]


def _whole(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _refuse(path: Any, got: str) -> NoReturn:
    raise FlexCPError(
        f"a plan in {quote(str(path))}", got, "let `flexcp plan --save` or save_plan write one"
    )
