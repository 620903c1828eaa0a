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


@pytest.mark.parametrize("stage", ["masks", "grid", "layout", "schedule", "plan", "kernels"])
def test_planning_and_kernels_need_no_process_group(stage):
    for path in (SOURCE / stage).rglob("*.py"):
        assert not [n for n in imported(path) if n.startswith("torch.distributed")], path


OUTSIDE = {  # who may import what beyond torch and NumPy
    "testing/strategies.py": {"hypothesis"},
    "tools": {"typer", "rich", "transformers"},
    "integrations": {"transformers", "accelerate"},
    "kernels/triton/tile_steps.py": {"triton"},  # the kernels themselves; loaded by the first call
    "kernels/triton/forward.py": {"triton"},
    "kernels/triton/backward.py": {"triton"},
    "kernels/triton/captured.py": {"triton"},
    "kernels/triton/score_steps.py": {"triton"},
    "kernels/triton/compile.py": {"triton"},
}


def test_the_library_needs_nothing_but_torch_and_numpy():
    for path in SOURCE.rglob("*.py"):
        roots = {name.split(".")[0] for name in imported(path)}
        foreign = roots - set(sys.stdlib_module_names) - {"flexcp", "torch", "numpy"}
        place = path.relative_to(SOURCE)
        allowed = OUTSIDE.get(place.as_posix(), set()) | OUTSIDE.get(place.parts[0], set())
        assert foreign <= allowed, path


def test_the_library_never_imports_its_tools():
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] == "tools" or path == SOURCE / "__init__.py":
            continue  # flexcp.verify is public, and loaded when it is used
        assert not [n for n in imported(path) if n.startswith("flexcp.tools")], path


def seen_after(*steps: tuple[str, str]) -> list[bool]:
    """Whether a module is loaded after each of some statements, in one new process."""
    looks = (f"{code}; print({module!r} in sys.modules)" for code, module in steps)
    run = subprocess.run(
        [sys.executable, "-c", "import sys; " + "; ".join(looks)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line == "True" for line in run.stdout.split()]


def test_torch_and_the_tools_are_loaded_by_those_who_use_them():
    stages = "batch compat.context_parallel integrations.context_parallel ops testing"
    imports = "; ".join(f"import flexcp.{stage}" for stage in stages.split())
    seen = seen_after(
        ("import flexcp", "torch"),
        (imports, "torch"),
        ("pass", "flexcp.tools"),
        ("flexcp.verify", "flexcp.tools"),
    )
    assert seen == [False, True, False, True]


def test_using_every_name_starts_no_compiler_nor_does_a_call_on_the_cpu_load_triton():
    call = "flexcp.flex_attention(x, x, x, block_mask=flexcp.masks.causal())"
    seen = seen_after(
        ("from flexcp import *", "torch._dynamo"),
        (f"import torch, flexcp; x = torch.ones(1, 1, 4, 4); {call}", "triton"),
    )
    assert seen == [False, False]


def test_every_public_name_is_there():
    assert all(hasattr(flexcp, name) for name in flexcp.__all__)
    assert set(flexcp.__all__) <= set(dir(flexcp))
    with pytest.raises(AttributeError, match="no attribute 'focus'"):
        _ = flexcp.focus
