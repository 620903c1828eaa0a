"""Running commands within the test's process."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from flexcp.tools.cli import main


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def flexcp(capsys, monkeypatch):
    """Runs `flexcp` with some arguments, and expects an exit code."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*args: object, code: int = 0) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(arg) for arg in args])
        captured = capsys.readouterr()
        found = ended.value.code or 0
        assert found == code, captured.err
        return Ran(int(found), captured.out, captured.err)

    return run
