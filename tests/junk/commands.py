"""Every command of the command line, with junk texts for each of its options."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flexcp.tools.cli import main

TEXTS = (
    "", " ", "nope", "-1", "0", "7", "1.5", "NaN", "inf", "-inf", "1e9", "1e400", "9" * 40, "64G",
    "7K", "0x10", "1_000", "٣", "True", "None", "κέρνελ🦖", "\x00", "\u202e", "x" * 5000, "--",
    "-x", "a b", "/dev/null/flexcp/x", "/", ".", "[1, 2]", "1,2", "1,,2", "2x2x2", "2x0", "2x2",
    "0,0", "-3,5", "causal", "causal(", "causal &", "causal & & full", "document([0])",
    "document([-1])", "document(1e9)", "documents(mean=NaN)", "sliding_window(1e99)",
    "sliding_window(-1)", "sliding_window()", "chunked(0)", "nope(3)", "os:system", "os:nope",
    "nope.nope:nope", "math:pi", "(" * 3000, "~" * 3000 + "causal", "{'a': 1}", "../..", "$HOME",
)  # fmt: skip

Fits = Callable[[str], bool]


@dataclass(frozen=True)
class Command:
    """A command that ends well, and which texts each of its options takes."""

    base: tuple[str, ...]
    """Arguments of a call that is quick; None-valued options are added to it."""
    options: Mapping[str, Fits]
    """What fits, by option; the mask, which has no option, is called MASK."""
    only_refusals: bool = False
    """Whether texts that fit are left out, because what they ask for would take long."""

    def argv(self, option: str, text: str) -> list[str]:
        """The call with a text for one option."""
        if option == "MASK":
            return [self.base[0], text, *self.base[2:]]
        kept = [x for x in self.base if not x.startswith(f"{option}=")]
        return [*kept, f"{option}={text}"]


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


def run(argv: list[str]) -> Ended:
    """Runs a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    code = -1
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(argv)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
    return Ended(code, out.getvalue(), err.getvalue())


def complaint(command: Command, option: str, text: str) -> str:
    """What is wrong with how a command takes a text: empty if it is refused in words, or fits."""
    fits = command.options[option](text)
    if fits and command.only_refusals:
        return ""
    ended = run(command.argv(option, text))
    if ended.code == 0:
        return "" if fits else "is accepted"
    said = ended.err
    if ended.code != 2 or "flexcp: " not in said or "expected" not in said:
        return f"ends with {ended.code}: {said[-200:]}"
    if "Traceback" in said or "the command to finish" in said:
        return f"was not foreseen: {said[-200:]}"
    return "" if len(said) < _LONG else f"says {len(said)} characters"


_LONG = 1500
"""Characters of a message that nobody reads."""


def _whole(least: int, most: int = 10**9) -> Fits:
    """What click takes for an integer: Python's own syntax."""

    def ask(text: str) -> bool:
        try:
            return least <= int(text) <= most
        except ValueError:
            return False

    return ask


def _size(least: int, most: int) -> Fits:
    """4096, 128K, 1M."""

    def ask(text: str) -> bool:
        found = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?)([KMG]?)", text.strip(), re.I)
        if found is None:
            return False
        scale = 1024 ** (1 + "KMG".find(found[2].upper())) if found[2] else 1
        size = float(found[1].replace("_", "")) * scale
        return least <= size <= most and size == int(size)

    return ask


def _one_of(*texts: str) -> Fits:
    return lambda text: text in texts


def _number(least: float, most: float) -> Fits:
    def ask(text: str) -> bool:
        try:
            return least <= float(text) <= most
        except ValueError:
            return False

    return ask


def _none(text: str) -> bool:
    return False


def _any(text: str) -> bool:
    return True


_MASKS = _one_of("causal")
_RANKS = _one_of("7", "2x2", "7K", "1_000")
_LAYOUTS = _one_of("auto", "contiguous", "head_tail", "striped", "per_document", "ptrr", "balanced")
_FILES = _one_of()

COMMANDS = {
    "plan": Command(
        ("plan", "causal", "--tokens=64", "--ranks=2", "--heads=2", "--head-dim=4"),
        {
            "MASK": _MASKS,
            "--tokens": _size(1, 1 << 31),
            "--ranks": _RANKS,
            "--model": _none,
            "--heads": _whole(1, 1 << 20),
            "--kv-heads": _whole(1, 2),
            "--head-dim": _whole(1, 1 << 20),
            "--dtype": _none,
            "--batch": _whole(1, 1 << 20),
            "--block-size": _size(1, 1 << 20),
            "--mask": _none,
            "--machine": _none,
            "--gpus-per-node": _whole(1),
            "--layout": _LAYOUTS,
            "--schedule": _none,
            "--html": _FILES,
            "--svg": _FILES,
            "--save": _any,
            "--load": _FILES,
        },
        only_refusals=True,
    ),
    "show": Command(
        ("show", "causal", "--tokens=64", "--size=8"),
        {
            "MASK": _MASKS,
            "--tokens": _size(1, 1 << 31),
            "--ranks": _whole(1, 1 << 14),
            "--layout": _none,
            "--schedule": _none,
            "--heads": _whole(1, 1 << 20),
            "--batch": _whole(1, 1 << 20),
            "--head": _whole(0, 0),
            "--element": _whole(0, 0),
            "--block-size": _size(1, 1 << 40),
            "--size": _whole(2, 1 << 14),
            "--out": _FILES,
        },
    ),
    "verify": Command(
        ("verify", "tests.junk.samples:Tiny", "--ranks=2", "--tokens=9"),
        {
            "MASK": _none,
            "--ranks": _whole(1, 64),
            "--mask": _MASKS,
            "--documents": _none,
            "--step": _none,
            "--single": _none,
            "--batch": _none,
            "--tokens": _size(2, 1 << 20),
            "--batch-size": _whole(1, 1 << 20),
            "--gradients": _none,
            "--dtype": _none,
            "--layout": _LAYOUTS,
            "--schedule": _none,
            "--seed": _whole(-(2**63), 2**63 - 1),
        },
        only_refusals=True,
    ),
    "train": Command(
        (
            "train",
            "--ranks=1",
            "--steps=1",
            "--tokens=16",
            "--out=/dev/null/x",
            f"--data={__file__}",
        ),
        {
            "--ranks": _RANKS,
            "--data": _none,
            "--steps": _whole(1),
            "--tokens": _size(2, 10**9),
            "--batch": _whole(1),
            "--document-tokens": _size(1, 10**9),
            "--lr": _number(1e-320, 1e300),
            "--seed": _whole(-(2**63), 2**63 - 1),
            "--device": _none,
            "--timeout": _number(1e-320, 1e9),
            "--dim": _whole(1),
            "--layers": _whole(1),
            "--heads": _whole(1),
            "--kv-heads": _whole(1),
            "--window": _whole(1),
            "--dtype": _none,
            "--autocast": _none,
            "--layout": _LAYOUTS,
            "--schedule": _none,
            "--out": _any,
            "--checkpoint-every": _whole(1),
            "--eval-every": _whole(1),
            "--eval-sequences": _whole(0),
            "--stop-after": _whole(1),
        },
        only_refusals=True,
    ),
    "doctor": Command(
        ("doctor", "--out=/dev/null/x", "--no-prefer"),
        {
            "--minutes": _number(0.1, 1e6),
            "--ranks": _whole(1, 256),
            "--device": _none,
            "--only": _none,
            "--out": _any,
            "--compile": _none,
            "--head-dim": _whole(1, 1 << 12),
            "--dtype": _none,
        },
        only_refusals=True,
    ),
}
