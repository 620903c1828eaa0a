"""What tests of layouts share with the benchmarks: packs of documents, and a rival."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def of_benchmarks() -> Callable[[str], ModuleType]:
    """A module of the folder `benchmarks`, by its name."""

    def load(name: str) -> ModuleType:
        path = Path(__file__).parents[3] / "benchmarks" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
