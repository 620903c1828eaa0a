"""Benchmarks over a slow network: what they need is said, and nothing is left behind."""

import importlib
import os
import subprocess
from pathlib import Path

import pytest

from flexcp import FlexCPError

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def namespaces(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("namespaces")


def test_without_iproute2_it_says_so(namespaces, monkeypatch):
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None)
    with pytest.raises(FlexCPError, match=r"ip and tc, of iproute2.*no ip and no tc"):
        namespaces.require_tools()


def test_without_root_it_says_so(namespaces, monkeypatch):
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    with pytest.raises(FlexCPError, match=r"root.*user 1000"):
        namespaces.require_tools()


def test_namespaces_are_gone_whatever_happens_within(namespaces):
    names = []

    def interrupted():
        with namespaces.hosts(2, 100.0) as found:
            names.extend(found)
            raise KeyboardInterrupt

    try:
        namespaces.require_tools()
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    except FlexCPError as error:
        pytest.skip(f"no namespaces here: {error}")
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert len(names) == 2
    assert not [name for name in names if name in left.stdout]
    assert f"flexcp-{os.getpid()}" not in left.stdout
