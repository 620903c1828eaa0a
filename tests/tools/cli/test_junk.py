"""Junk for every option of every command: an exit that says what was expected."""

from __future__ import annotations

import os

import pytest

from tests.junk.commands import COMMANDS, TEXTS, complaint

EVERY = int(os.environ.get("FLEXCP_JUNK", "31"))
"""One call of so many is made; FLEXCP_JUNK=1 makes all, some 5,000."""


@pytest.mark.parametrize("name", COMMANDS)
def test_junk_ends_a_command_with_a_word(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = COMMANDS[name]
    tries = [(option, text) for option in command.options for text in TEXTS]
    found = {
        f"{option}={text[:40]}": wrong
        for option, text in tries[::EVERY]
        if (wrong := complaint(command, option, text))
    }
    assert found == {}
