"""Help answers before torch loads, and errors speak to people."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flexcp.tools.cli.app import app

COMMANDS = sorted(command.name for command in app.registered_commands)


def flexcp(*args: str, code: int = 0, **options) -> subprocess.CompletedProcess[str]:
    run = subprocess.run(
        [sys.executable, "-m", "flexcp.tools.cli", *args], capture_output=True, text=True, **options
    )
    assert run.returncode == code, run.stderr
    return run


def modules_after(*args: str) -> set[str]:
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('\\nLOADED', *sys.modules))\n"
        "from flexcp.tools.cli import main\n"
        f"main({list(args)!r})\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return set(run.stdout.split("LOADED")[1].split())


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_answers_without_loading_torch(command):
    loaded = modules_after(*command, "--help")
    assert "typer" in loaded
    assert not {"torch", "numpy", "transformers", "pydantic"} & loaded


def test_help_lists_every_command_and_says_what_exit_codes_mean():
    text = flexcp("--help").stdout
    assert all(f" {name} " in text for name in COMMANDS)
    assert "0 done, 1 the answer is no, 2 a request" in text


def test_without_a_command_help_is_shown():
    assert "Commands" in flexcp(code=2).stdout + flexcp(code=2).stderr


def test_the_version_is_that_of_the_package():
    from importlib.metadata import version

    assert flexcp("--version").stdout.strip() == version("flexcp")


def test_errors_are_one_message_without_a_traceback(flexcp):
    run = flexcp("plan", "causal", "--tokens", "1K", "--layout", "round", code=2)
    assert run.out == ""
    assert run.err.startswith("flexcp: expected a layout among auto, contiguous")
    assert "Traceback" not in run.err


def test_debug_shows_where_an_error_came_from():
    run = flexcp("plan", "causal", "--tokens", "1K", "--layout", "round", "--debug", code=1)
    assert "Traceback" in run.stderr
    assert "FlexCPError: expected a layout" in run.stderr


def test_errors_of_ones_own_code_are_named_and_are_no_verdict(tmp_path, monkeypatch, request):
    (tmp_path / "mine.py").write_text("def make():\n    raise ValueError('no luck')\n")
    (tmp_path / "broken.py").write_text("def make(:\n")
    run = flexcp("plan", "mine:make", "--tokens", "1K", code=2, cwd=tmp_path)
    assert "ValueError: no luck (" in run.stderr
    assert "mine.py:2); pass --debug" in run.stderr
    here = request.getfixturevalue("flexcp")  # in this process, which has torch already
    monkeypatch.syspath_prepend(tmp_path)
    run = here("plan", "broken:make", "--tokens", "1K", code=2)
    assert "SyntaxError: invalid syntax (broken.py, line 1); pass --debug" in run.err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_does_not_ask_for_values_of_flags(command):
    lines = flexcp(command, "--help", env=os.environ | {"COLUMNS": "120"}).stdout.splitlines()
    flags = [line for line in lines if "--json" in line or "--debug" in line]
    assert len(flags) == 2
    assert not any("bool" in line.lower() for line in flags)


def test_a_wrong_size_names_its_option():
    run = flexcp("plan", "causal", "--tokens", "many", code=2)
    assert "--tokens" in run.stderr
    assert "4096, 128K" in run.stderr
