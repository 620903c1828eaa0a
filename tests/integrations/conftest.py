"""Accelerate keeps state per process, and forked ranks inherit it: every test begins without."""

from __future__ import annotations

import pytest
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def no_state_of_accelerate():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
