"""The command line for people: help with examples, one style of errors, completion."""

from __future__ import annotations

import os
import shlex
import time

import pytest
import typer

from flexcp.tools.cli.app import EXAMPLES, app

GROUP = typer.main.get_command(app)


def help_of(command: str, columns: int, flexcp, monkeypatch) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    return flexcp(command, "--help").out


@pytest.mark.parametrize("command", EXAMPLES)
def test_help_has_examples_and_fits_60_columns(flexcp, monkeypatch, command):
    text = help_of(command, 60, flexcp, monkeypatch)
    assert "Examples:" in text
    assert all(example in text for example in EXAMPLES[command])
    assert max(map(len, text.splitlines())) <= 60


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_every_example_can_be_typed(line):
    name, *args = shlex.split(line)[1:]
    command = GROUP.commands[name]  # type: ignore[attr-defined]
    command.make_context(name, args)


def test_the_version_is_among_the_options(flexcp):
    assert "--version" in flexcp("--help").out


def test_shells_complete_commands(monkeypatch, capsys):
    for name, value in (("_FLEXCP_COMPLETE", "complete_bash"), ("COMP_WORDS", "flexcp pl"),
                        ("COMP_CWORD", "1")):  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        GROUP.main([], prog_name="flexcp")
    assert capsys.readouterr().out.split() == ["plan"]
    assert "--install-completion" in GROUP.get_help(typer.Context(GROUP))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["plna"], "expected a command, got 'plna'; did you mean plan?"),
        (["plan", "causal", "--machin", "x"], "got --machin; did you mean --machine?"),
        (["plan", "causal", "--tokens", "many"], "--tokens: expected a whole number"),
        (["plan", "causal", "--heads", "0"], "expected a value for --heads: "),
        (["show"], "expected a value for MASK"),
        (["plan", "causal", "--tokens"], "'--tokens' requires an argument"),
        (["plan", "causal", "full"], "unexpected extra argument"),
        (["plan", "causal", "--tokens", "1K", "--layout", "balancedd"], "did you mean balanced?"),
        (["plan", "causal", "--tokens", "1K", "--schedule", "rng"], "did you mean ring?"),
        (["plan", "causal", "--tokens", "1K", "--machine", "h1000"], "did you mean h100"),
        (["plan", "causal", "--tokens", "1K", "--ranks", "1", "--layout", "nope"], "a layout"),
        (["plan", "causal", "--tokens", "64G"], "at most 16,777,216 blocks along a side"),
        (["show", "causal", "--tokens", "64G"], "at most 16,777,216 blocks along a side"),
        (["plan", "documents(9)", "--tokens", "1G"], "tokens of documents, got 1,073,741,824"),
        (["plan", "causal", "--tokens", "1K", "--ranks", "1000000"], "at most 16,384 ranks"),
        (["plan", "document([0])"], "at least one token"),
        (["plan", "document([0, 0], seed=1)", "--tokens", "9"], "got only empty ones"),
        (["plan", "document([0])", "--tokens", "9"], "documents that fill 9 tokens"),
    ],
)
def test_what_is_wrong_is_said_in_one_way_and_at_once(flexcp, args, message):
    began = time.process_time()
    found = flexcp(*args, code=2)
    assert message in found.err
    assert found.err.startswith("flexcp: ")
    assert found.out == ""
    assert time.process_time() - began < 20


OWN = """
import flexcp
def tail(count, seq_len):
    return flexcp.masks.prefix_lm(seq_len - count)
def first(seq_len, count=1):
    return flexcp.masks.prefix_lm(min(seq_len, count))
"""


@pytest.mark.parametrize(
    ("text", "same"),
    [("{}:tail(24)", "prefix_lm(1000)"), ("{}:tail(count=24)", "prefix_lm(1000)"),
     ("{}:first(count=7)", "prefix_lm(7)"), ("{}:first(5, 9)", "prefix_lm(5)"),
     ("{}:tail(24, seq_len=100)", "prefix_lm(76)")],
)  # fmt: skip
def test_functions_that_take_the_length_get_it(tmp_path, monkeypatch, text, same):
    from flexcp.tools.cli.masks import read_mask

    name = f"masks_of_usage_{os.getpid()}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert read_mask(text.format(name), 1024).mask == read_mask(same, 1024).mask


def test_verify_takes_the_length_from_the_batch():
    import torch

    from flexcp import FlexCPError
    from flexcp.tools.cli.verify import _length_of

    batch = {"input_ids": torch.zeros(2, 31, dtype=torch.int64)}
    assert _length_of(batch, None) == 31
    assert _length_of(None, 5) == 5
    with pytest.raises(FlexCPError, match="a batch of 30 tokens, as --tokens says, got 31"):
        _length_of(batch, 30)
