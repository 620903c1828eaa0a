"""What flexcp takes from torch beyond its public names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flexcp
from flexcp import FlexCPError, torch_names

SOURCE = Path(flexcp.__file__).parent

ELSEWHERE = {
    "ops/traced.py": {"torch._dynamo": "dynamo's documented way to fix a size"},
    "tools/doctor/examine.py": {"torch._dynamo": "a public setting of a private module, on GPUs"},
    "tools/doctor/torch_ring.py": {
        "torch.distributed.tensor.experimental._context_parallel": "PyTorch's own ring attention, "
        "which the doctor measures beside ours",
    },
}
"""By file: private names that are not looked up in `torch_names`, and why."""


def private_names(tree: ast.Module) -> Iterator[str]:
    """Full names of torch's in which some part begins with an underscore, operators excepted."""
    for node in ast.walk(tree):
        found: list[str] = []
        match node:
            case ast.Import(names=names):
                found = [name.name for name in names]
            case ast.ImportFrom(module=str(module), names=names):
                is_private = any(part.startswith("_") for part in module.split("."))
                found = [module] if is_private else [f"{module}.{name.name}" for name in names]
            case ast.Attribute():
                found = [name for name in [ast.unparse(node)] if re.fullmatch(r"[\w.]+", name)]
        for name in found:
            first, *parts = name.split(".")
            hidden = [p for p in parts if p.startswith("_") and not p.startswith("__")]
            if first == "torch" and hidden and parts[0] != "ops":
                yield name[: name.index(hidden[0]) + len(hidden[0])]


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("torch._C._nn.x()", {"torch._C"}),
        ("from torch.overrides import a, _b", {"torch.overrides._b"}),
        ("from torch.x._y import z", {"torch.x._y"}),
        ("import torch.x._y as z", {"torch.x._y"}),
        ("torch.ops.aten._x(); torch.__version__; self._x", set()),
    ],
)
def test_private_names_are_recognised(code: str, names: set[str]) -> None:
    assert set(private_names(ast.parse(code))) == names


def test_private_names_are_looked_up_in_one_file() -> None:
    found = {}
    for path in SOURCE.rglob("*.py"):
        names = set(private_names(ast.parse(path.read_text(encoding="utf-8"))))
        if names and path.name != "torch_names.py":
            found[path.relative_to(SOURCE).as_posix()] = names
    assert found == {name: set(reasons) for name, reasons in ELSEWHERE.items()}


def test_this_torch_has_every_name_of_its_time() -> None:
    own = [value for name, value in vars(torch_names).items() if not name.startswith("__")]
    late = [getattr(torch_names, name) for name in torch_names._LATER]
    every = (*own, *torch_names.fused_layers, *late)
    absent = {x._path for x in every if type(x) is torch_names.Absent}
    assert absent == {path for path, since in torch_names.NEWER.items() if is_before(since)}


def is_before(version: str) -> bool:
    mine, other = (tuple(map(int, v.split(".")[:2])) for v in (torch.__version__, version))
    return mine < other


def test_a_name_that_torch_lacks_says_so_when_it_is_used() -> None:
    missing = torch_names.find("torch._C._no_such_name")
    for use in (missing, lambda: missing.attribute, lambda: torch_names.require_present(missing)):
        with pytest.raises(
            FlexCPError, match=r"torch\._C\._no_such_name, .*got torch " + torch.__version__[:4]
        ):
            use()


def test_a_name_that_is_too_new_for_this_torch_says_since_when_torch_has_it() -> None:
    path, since = next(iter(torch_names.NEWER.items()))
    expected = rf"torch {since} or newer for .*{path.rpartition('.')[2]}, got torch "
    with pytest.raises(FlexCPError, match=expected):
        torch_names.Absent(path)()
