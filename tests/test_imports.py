"""What each stage may import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import flexcp

SOURCE = Path(flexcp.__file__).parent


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


@pytest.mark.parametrize("stage", ["masks", "blocks", "layout", "schedule", "plan", "kernels"])
def test_planning_and_kernels_need_no_process_group(stage):
    for path in (SOURCE / stage).glob("*.py"):
        assert not [n for n in imported(path) if n.startswith("torch.distributed")], path


def test_the_library_needs_nothing_but_torch():
    outside = {"hypothesis"}  # only for the strategies that tests draw from
    for path in SOURCE.rglob("*.py"):
        roots = {name.split(".")[0] for name in imported(path)}
        foreign = roots - set(sys.stdlib_module_names) - {"flexcp", "torch"}
        assert foreign <= (outside if path.name == "strategies.py" else set()), path


def test_importing_it_starts_no_compiler():
    code = "import flexcp, sys; print('torch._dynamo' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
