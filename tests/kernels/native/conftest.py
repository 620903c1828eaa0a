"""The compiled kernel, for tests that call it."""

from __future__ import annotations

import pytest

from flexcp.kernels.native.kernel import NativeKernel
from flexcp.kernels.native.library import Library, library


@pytest.fixture
def native() -> NativeKernel:
    found = library()
    if not isinstance(found, Library):
        pytest.skip(f"there is no compiled kernel: {found}")
    return NativeKernel(found)
