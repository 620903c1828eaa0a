"""Ranks of these tests notice at once what has happened: the others wait less for their word."""

from __future__ import annotations

import pytest

from flexcp.comm import faults


@pytest.fixture(autouse=True)
def impatient_judge(monkeypatch):
    monkeypatch.setattr(faults, "_AFTER_CLOSING", 1.0)
    monkeypatch.setattr(faults, "_AFTER_TIMEOUT", 2.0)
