"""From files of text to sequences of packed documents: which bytes are in which step.

A step's batch is a function of the step alone, so that a run can be resumed anywhere. Legend:
B batch, S sequence length.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import random
import sysconfig
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from flexcp.errors import FlexCPError, is_there, quote, require, whole_number

BEGIN = 256
"""The token that begins a document; the others are its bytes."""
VOCABULARY = 257
_HELD_OUT = 20
"""One byte in so many is held out for evaluation."""
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Document:
    """A stretch of a file."""

    path: Path
    start: int
    """First byte."""
    stop: int
    """After the last byte."""

    @property
    def tokens(self) -> int:
        """The bytes, after a BEGIN if it is the beginning of its file."""
        return self.stop - self.start + (self.start == 0)

    def read(self, start: int, stop: int) -> Tensor:
        """int64 [stop - start] The tokens of that range of them."""
        first = int(self.start == 0)
        begins = int(first and start == 0)
        with self.path.open("rb") as file:
            file.seek(self.start + max(start - first, 0))
            data = file.read(stop - start - begins)
        if len(data) != stop - start - begins:
            raise FlexCPError(
                f"{self.path} to keep its size during the run",
                "fewer bytes than it had",
                "leave the data alone while training, or train on a copy",
            )
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        return torch.cat([torch.full((begins,), BEGIN), values.to(torch.int64)])


@dataclass(frozen=True)
class Corpus:
    """The documents to train on, and those that are held out."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    fingerprint: str
    """Equal for files with the same contents under the same names."""


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Sequences of packed documents."""

    tokens: Tensor
    """int64 [B, S]"""
    lengths: tuple[tuple[int, ...], ...]
    """For each sequence, the lengths of the documents in it, or of the parts of them."""


@dataclass(frozen=True, eq=False)
class PackedDocuments:
    """An endless stream of documents, in a new order every epoch, cut into sequences.

    A document that does not fit into what is left of a sequence goes on in the next one, where the
    rest is a document by itself. So every byte is there once per epoch, and nothing is padded.
    """

    documents: tuple[Document, ...]
    seed: int
    """Decides the order."""
    _ends: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require("documents", self.documents, (list, tuple), "pass load_corpus(...).train")
        for document in self.documents:
            require("each document", document, Document, "pass load_corpus(...).train")
        if not self.epoch_tokens:
            raise FlexCPError("documents with tokens", "none", "pass load_corpus(...).train")

    @property
    def epoch_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(d.tokens for d in self.documents)

    def batch(self, step: int, batch: int, tokens: int) -> PackedBatch:
        """The batch of a step: the next batch * tokens tokens of the stream."""
        step, batch = (
            whole_number(name, value, at_least=least, fix="pass a step, and sizes of a batch")
            for name, value, least in (("step", step, 0), ("batch", batch, 1))
        )
        rows = [self.sequence(step * batch + b, tokens) for b in range(batch)]
        return PackedBatch(torch.stack([r[0] for r in rows]), tuple(r[1] for r in rows))

    def sequence(self, index: int, tokens: int) -> tuple[Tensor, tuple[int, ...]]:
        """int64 [tokens], and the lengths of the documents in it."""
        fix = "pass which sequence of the stream, and its length"
        index = whole_number("index", index, at_least=0, fix=fix)
        tokens = whole_number("tokens", tokens, at_least=1, at_most=10**9, fix=fix)
        parts: list[Tensor] = []
        at, end = index * tokens, (index + 1) * tokens
        while at < end:
            epoch, place = divmod(at, self.epoch_tokens)
            order, ends = self._order(epoch)
            nth = bisect.bisect_right(ends, place)
            document = self.documents[order[nth]]
            start = place - (ends[nth] - document.tokens)
            stop = min(document.tokens, start + end - at)
            parts.append(document.read(start, stop))
            at += stop - start
        return torch.cat(parts), tuple(len(p) for p in parts)

    def _order(self, epoch: int) -> tuple[list[int], list[int]]:
        """Which document comes when in an epoch, and where each ends."""
        if epoch not in self._ends:
            order = list(range(len(self.documents)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            ends = list(accumulate(self.documents[n].tokens for n in order))
            if len(self._ends) > 1:
                self._ends.clear()
            self._ends[epoch] = order, ends
        return self._ends[epoch]


def load_corpus(data: str | None, seed: int, *, longest: int) -> Corpus:
    """The documents of a file, of a folder, or of Python's standard library.

    Every file is a document, or several of at most `longest` tokens. Contents are read once, for
    their fingerprint, and are not kept: a document is read again when it is needed.

    Args:
        data: A file or a folder; None for the standard library.
        seed: Decides which documents are held out.
        longest: Tokens of a document.
    """
    fix = "pass the file or folder, a seed, and the tokens of a document"
    if data is not None:
        require("data", data, (str, Path), fix)
    whole_number("seed", seed, at_least=-(2**63), fix=fix)
    longest = whole_number("longest", longest, at_least=1, fix=fix)
    root = Path(sysconfig.get_path("stdlib")) if data is None else Path(data)
    if not is_there(root):
        raise FlexCPError(
            "a file or a folder of text",
            f"{quote(str(root))}, which does not exist",
            "pass another --data",
        )
    paths = [root] if root.is_file() else _files(root, only_python=data is None)
    documents = [Document(p, 0, p.stat().st_size) for p in paths]
    documents = [d for d in documents if d.stop]
    if sum(d.stop for d in documents) < 2 * _HELD_OUT:
        raise FlexCPError(
            f"text: at least {2 * _HELD_OUT} bytes in files that are not binary",
            f"{len(documents)} such files in {root}" if root.is_dir() else f"{root}, too short",
            "pass another --data",
        )
    fingerprint = hashlib.sha256()
    for document in documents:
        fingerprint.update(_name(document.path, root).encode(errors="surrogateescape"))
        with document.path.open("rb") as file:
            fingerprint.update(hashlib.file_digest(file, "sha256").digest())
    train, held_out = _split(documents, seed)
    return Corpus(_parts(train, longest), _parts(held_out, longest), fingerprint.hexdigest()[:16])


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if root.is_dir() else path.name


def _files(root: Path, *, only_python: bool) -> list[Path]:
    """All text files below a folder, by name, so that every machine finds the same order."""
    found = []
    for folder, folders, names in os.walk(root):
        left_out = _LEFT_OUT if only_python else {"__pycache__"}
        folders[:] = [f for f in folders if f not in left_out and not f.startswith(".")]
        for name in names:
            path = Path(folder, name)
            wanted = name.endswith(".py") if only_python else not name.startswith(".")
            if wanted and path.is_file() and _is_text(path):
                found.append(path)
    return sorted(found, key=lambda p: p.relative_to(root).as_posix())


def _is_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(4096)
    except OSError as error:
        raise FlexCPError(
            "files that can be read, in the folder of the text",
            f"{quote(str(path))} ({error.strerror})",
            "pass another --data",
        ) from None


def _parts(documents: tuple[Document, ...], longest: int) -> tuple[Document, ...]:
    """Documents cut into such of at most `longest` tokens; no byte is lost."""
    parts = []
    for document in documents:
        start = document.start
        while start < document.stop:
            # A BEGIN takes the place of a byte.
            stop = min(document.stop, start + max(longest - (start == 0), 1))
            parts.append(Document(document.path, start, stop))
            start = stop
    return tuple(parts)


def _split(
    documents: list[Document], seed: int
) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """One byte in twenty is held out: whole documents, or the end of the only one."""
    if len(documents) == 1:
        only = documents[0]
        cut = only.stop - max(only.stop // _HELD_OUT, 2)
        return (Document(only.path, 0, cut),), (Document(only.path, cut, only.stop),)
    order = list(range(len(documents)))
    random.Random(f"{seed}/held out").shuffle(order)
    goal = sum(d.stop for d in documents) // _HELD_OUT
    held_out: set[int] = set()
    size = 0
    for n in order[:-1]:
        if size + documents[n].stop <= goal or not held_out:
            held_out.add(n)
            size += documents[n].stop
    return (
        tuple(d for n, d in enumerate(documents) if n not in held_out),
        tuple(d for n, d in enumerate(documents) if n in held_out),
    )
