"""Examinations in one thread."""

from __future__ import annotations

import pytest
from tools.doctor.tiny import one_thread


@pytest.fixture(autouse=True)
def in_one_thread():
    with one_thread():
        yield
