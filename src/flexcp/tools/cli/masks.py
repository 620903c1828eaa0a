"""Masks by what people type: expressions of the catalogue, and functions of their own modules."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexcp.errors import FlexCPError, quote
from flexcp.tools.cli.lengths import Bin, draw, fill, lognormal, read_lengths
from flexcp.tools.cli.mask_syntax import (
    CATALOGUE,
    Combined,
    MaskSyntaxError,
    NamedMask,
    Negated,
    Node,
    Value,
    fail_at,
    parse_mask,
)
from flexcp.tools.import_by_name import import_name

if TYPE_CHECKING:
    from flexcp.masks import Mask


@dataclass(frozen=True)
class ReadMask:
    """A mask with what had to be known to make it."""

    mask: Mask
    tokens: int
    """Length of the sequence: as asked for, or as the documents add up to."""
    notes: tuple[str, ...]
    """What was done to the documents to make them fit."""


def read_mask(text: str, tokens: int | None) -> ReadMask:
    """The mask that an expression stands for.

    >>> read_mask("causal & document([600, 400])", None)
    ReadMask(mask=Mask(causal & document), tokens=1000, notes=())
    """
    tree = parse_mask(text)
    builder = _Builder(text, tokens)
    if tokens is None:
        builder.tokens = builder.length_of(tree)
    if builder.tokens is None:
        raise FlexCPError("a sequence length", "none", "pass --tokens, such as --tokens 128K")
    if builder.tokens < 1:
        raise FlexCPError("at least one token", f"{builder.tokens}", "such as --tokens 128K")
    mask = builder.mask(tree)
    return ReadMask(mask, builder.tokens, tuple(builder.notes))


def read_masks(
    text: str | None, named: list[str], tokens: int | None
) -> tuple[Mask | Mapping[str, Mask], int, tuple[str, ...]]:
    """One mask, or several by name from `name=expression` texts, and the sequence length."""
    if (text is None) == (not named):
        raise FlexCPError(
            "one MASK, or several --mask name=MASK",
            "both" if named else "neither",
            "such as `causal`, or --mask full=causal --mask local='causal & sliding_window(4K)'",
        )
    if text is not None:
        read = read_mask(text, tokens)
        return read.mask, read.tokens, read.notes
    found: dict[str, Mask] = {}
    notes: list[str] = []
    for item in named:
        name, equals, expression = item.partition("=")
        if not equals or not name.strip().isidentifier() or name.strip() in found:
            raise FlexCPError(
                "--mask name=MASK with a new name each", quote(item), "such as --mask full=causal"
            )
        read = read_mask(expression, tokens)
        tokens = read.tokens
        found[name.strip()] = read.mask
        notes += read.notes
    assert tokens is not None
    return found, tokens, tuple(dict.fromkeys(notes))


class _Builder:
    """Walks the tree of one expression."""

    def __init__(self, text: str, tokens: int | None) -> None:
        self.text = text
        self.tokens = tokens
        self.notes: list[str] = []

    def length_of(self, node: Node) -> int | None:
        """What the documents in an expression add up to, if there are any of given lengths."""
        if isinstance(node, Negated):
            return self.length_of(node.part)
        if isinstance(node, Combined):
            return next((n for part in node.parts if (n := self.length_of(part))), None)
        given = self._bound(node) if node.name in ("document", "shared_prefix") else {}
        if "lengths" not in given or "seed" in given:
            return None
        prefix = 0 if node.name == "document" else self._number(node, given, "prefix", None)
        lengths = self._lengths(node, given["lengths"])
        whole = [x for x in lengths if isinstance(x, int)]
        if len(whole) != len(lengths):
            return None
        return sum(whole) + int(prefix)

    def mask(self, node: Node) -> Mask:
        """The mask of a node and all below it."""
        if isinstance(node, Negated):
            return ~self.mask(node.part)
        if isinstance(node, Combined):
            parts = [self.mask(part) for part in node.parts]
            whole = parts[0]
            for part in parts[1:]:
                whole = whole & part if node.operator == "&" else whole | part
            return whole
        if ":" in node.name:
            return self._own(node)
        try:
            return self._from_catalogue(node)
        except MaskSyntaxError:
            raise
        except FlexCPError as error:
            raise self._at(node, error.expected, error.got, error.fix) from None

    def _from_catalogue(self, call: NamedMask) -> Mask:
        from flexcp import masks

        given = self._bound(call)
        if "document" in call.name or "lengths" in given:
            self._require_few(call)
        if call.name == "document":
            return masks.document(lengths=self._documents(call, given))
        if call.name == "documents":
            return self._drawn(call, given)
        if "lengths" in given:
            given["lengths"] = self._lengths(call, given["lengths"])
            if isinstance(given["lengths"][0], Bin):
                raise self._at(
                    call, "lengths of branches", "a distribution of lengths", "list them in order"
                )
        try:
            made: Mask = getattr(masks, call.name)(**given)
        except TypeError:
            needed = ", ".join(CATALOGUE[call.name])
            raise self._at(
                call,
                f"{call.name}({needed})",
                f"{len(call.arguments)} argument{'s' * (len(call.arguments) != 1)}",
                "give all that have no default",
            ) from None
        return made

    def _bound(self, call: NamedMask) -> dict[str, Any]:
        """Arguments by the names of the mask's parameters."""
        names = CATALOGUE[call.name]
        found: dict[str, Any] = {}
        for place, argument in enumerate(call.arguments):
            if argument.name is None and place >= len(names):
                raise fail_at(
                    self.text,
                    argument.at,
                    f"at most {len(names)} arguments of {call.name}",
                    str(len(call.arguments)),
                    f"call {call.name}({', '.join(names)})",
                )
            name = argument.name or names[place]
            if name in found:
                raise fail_at(self.text, argument.at, f"{name} once", "two of them", "drop one")
            found[name] = argument.value
        return found

    def _require_few(self, call: NamedMask) -> None:
        from flexcp.masks.catalog import MOST_TOKENS_OF_DOCUMENTS

        assert self.tokens is not None
        if self.tokens > MOST_TOKENS_OF_DOCUMENTS:
            raise self._at(
                call,
                f"at most {MOST_TOKENS_OF_DOCUMENTS:,} tokens of documents",
                f"{self.tokens:,}",
                "pass fewer --tokens",
            )

    def _documents(self, call: NamedMask, given: Mapping[str, Any]) -> list[int]:
        assert self.tokens is not None
        if "lengths" not in given:
            raise self._at(
                call, "document(lengths)", "no lengths", "pass a file or a list such as [600, 400]"
            )
        lengths = self._lengths(call, given["lengths"])
        if "seed" in given or isinstance(lengths[0], Bin):
            seed = int(self._number(call, given, "seed", 0))
            if not any(x.most if isinstance(x, Bin) else x for x in lengths):
                raise self._at(
                    call, "a document of at least 1 token", "only empty ones", "such as [600, 400]"
                )
            found = draw(lengths, self.tokens, seed)
            self._note(f"{len(found):,} documents drawn at random (seed {seed})")
            return found
        whole = [int(x) for x in lengths if not isinstance(x, Bin)]
        if sum(whole) < self.tokens:
            raise self._at(
                call,
                f"documents that fill {self.tokens:,} tokens",
                f"{len(whole):,} documents with {sum(whole):,} tokens",
                f"pass --tokens {sum(whole)}, or document(..., seed=0) to draw documents from "
                "these until the sequence is full",
            )
        found = fill(whole, self.tokens)
        if len(found) < len(whole) or found[-1] < whole[len(found) - 1]:
            self._note(f"the first {len(found):,} of {len(whole):,} documents, the last one cut")
        return found

    def _drawn(self, call: NamedMask, given: Mapping[str, Any]) -> Mask:
        from flexcp import masks

        assert self.tokens is not None
        mean, spread = (
            self._number(call, given, name, usual)
            for name, usual in (("mean", 2000), ("spread", 1))
        )
        seed = int(self._number(call, given, "seed", 0))
        if mean < 1 or spread < 0:
            raise FlexCPError(
                "a mean of at least 1 token and a spread of at least 0",
                f"mean={mean:g}, spread={spread:g}",
                "such as documents(mean=2000, spread=1, seed=0)",
            )
        found = lognormal(mean, spread, self.tokens, seed)
        self._note(f"{len(found):,} documents drawn at random (seed {seed})")
        return masks.document(lengths=found)

    def _number(
        self, call: NamedMask, given: Mapping[str, Any], name: str, usual: float | None
    ) -> float:
        value = given.get(name, usual)
        if not isinstance(value, int | float) or not math.isfinite(value):
            got = "none" if value is None else quote(value)
            raise self._at(call, f"{name} as a number", got, f"such as {name}=1")
        return value

    def _lengths(self, call: NamedMask, given: Value) -> list[int] | list[Bin]:
        if isinstance(given, str):
            return read_lengths(given)
        if not isinstance(given, list) or not given or not all(isinstance(x, int) for x in given):
            raise self._at(
                call, "a file name or a list of lengths", quote(given), "such as [600, 400]"
            )
        found = [int(x) for x in given if isinstance(x, int)]
        if min(found) < 0:
            raise self._at(
                call, "lengths of 0 or more tokens", quote(min(found)), "such as [600, 400]"
            )
        return found

    def _own(self, call: NamedMask) -> Mask:
        """`package.module:function`: a Mask, a mask_mod, or a function that makes either."""
        from flexcp.masks import Mask

        found = self._imported(call)
        if isinstance(found, Mask):
            return found
        if not callable(found):
            raise self._at(
                call, "a Mask or a function", type(found).__name__, "name a mask_mod or a factory"
            )
        if call.called or not _takes(found, (0, 0, 0, 0), {}):
            positional = [x.value for x in call.arguments if not x.name]
            named: dict[str, Any] = {x.name: x.value for x in call.arguments if x.name}
            known = inspect.signature(found).parameters
            for name in ("seq_len", "tokens"):
                # Injected, unless it was given: by name, or by its place.
                if name in known and name not in named:
                    with_length = {**named, name: self.tokens}
                    named = with_length if _takes(found, positional, with_length) else named
            if not _takes(found, positional, named):
                raise self._at(
                    call,
                    f"arguments for {call.name}{inspect.signature(found)}",
                    f"{len(call.arguments)} of them",
                    "give them in parentheses; a mask_mod takes (b, h, q_idx, kv_idx)",
                )
            found = found(*positional, **named)
        if isinstance(found, Mask):
            return found
        if not callable(found):
            raise self._at(
                call,
                "a function that returns a Mask or a mask_mod",
                f"one that returns {type(found).__name__}",
                "return flexcp.Mask(...) or a function of (b, h, q_idx, kv_idx)",
            )
        return Mask(found, call.name.partition(":")[2])

    def _imported(self, call: NamedMask) -> Any:
        try:
            return import_name(call.name)
        except FlexCPError as error:
            raise self._at(call, error.expected, error.got, error.fix) from None

    def _at(self, call: NamedMask, expected: str, got: str, fix: str) -> FlexCPError:
        return fail_at(self.text, call.at, expected, got, fix)

    def _note(self, text: str) -> None:
        self.notes.append(text)


def _takes(function: Any, positional: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether it can be called so; with four positions it is a mask_mod."""
    try:
        inspect.signature(function).bind(*positional, **named)
    except TypeError:
        return False
    return True
