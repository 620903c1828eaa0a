"""Collectives made of pairwise rounds: the same on every transport, summed in order of rank."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from flexcp.comm.agreement import REFUSED, Agreement
from flexcp.comm.interface import Pending, Receives, Sends
from flexcp.comm.labels import CollectiveLabel, CollectiveName, MessageLabel

_NOTE = 1024
"""Bytes of the note that says why a rank refuses."""


class PairwiseCollectives(ABC):
    """What a transport can do once it can exchange messages between pairs of ranks."""

    rank: int
    moment: ClassVar[float] = 0.0
    """Seconds that a rank that refuses stays around, so that the others hear of it."""
    _calls: dict[tuple[CollectiveName, tuple[int, ...]], int]
    """How often each collective was called, by the ranks that took part; () for all of them."""
    _notes: list[Pending]
    """Refusals on their way: nobody waits for them, but their memory is needed."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """How many ranks."""

    @property
    def device(self) -> torch.device:
        """Where tensors that the transport makes itself must be."""
        return torch.device("cpu")

    @abstractmethod
    def exchange(self, sends: Sends, receives: Receives, *, label: MessageLabel) -> Pending:
        """Starts the transfers of a round, and returns at once."""

    def all_gather(self, out: Tensor, x: Tensor, *, label: MessageLabel) -> Pending:
        """Starts to gather the tensors of all ranks, of equal shapes, into [ranks, *x.shape]."""
        others = [r for r in range(self.world_size) if r != self.rank]
        out[self.rank].copy_(x)
        return self.exchange([(r, x) for r in others], [(r, out[r]) for r in others], label=label)

    def all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        takes: Sequence[int],
        gives: Sequence[int],
        ranks: Sequence[int],
        *,
        label: MessageLabel,
    ) -> Pending:
        """Starts to swap parts of flat tensors: so many elements from and to each of `ranks`."""
        came, sent = out.split(list(takes)), x.split(list(gives))
        others = [i for i, r in enumerate(ranks) if r != self.rank]
        if len(others) < len(ranks):
            own = list(ranks).index(self.rank)
            came[own].copy_(sent[own])
        return self.exchange(
            [(ranks[i], sent[i]) for i in others],
            [(ranks[i], came[i]) for i in others],
            label=label,
        )

    def gather_parts(self, x: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """The tensors of all ranks, by rank."""
        return self._swap("all_gather", [x] * self.world_size, shapes)

    def swap_parts(
        self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], ranks: Sequence[int]
    ) -> list[Tensor]:
        """One tensor to each of `ranks`, one from each."""
        return self._swap("all_to_all", parts, shapes, tuple(ranks))

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, added up in order of rank: the same bits on every rank."""
        size = self.world_size
        parts = self._swap("all_reduce", [x] * size, [x.shape] * size)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def all_agree(self, text: str) -> list[str]:
        """The texts of all ranks, by rank."""
        mine = self._as_tensor(text.encode())
        size = torch.tensor([mine.numel()], device=self.device)
        sizes = self.gather_parts(size, [[1]] * self.world_size)
        parts = self.gather_parts(mine, [[int(n)] for n in sizes])
        return [bytes(part.tolist()).decode() for part in parts]

    def compare(self, agreement: Agreement) -> None:
        """Raises on every rank if what the ranks are about to do differs; before data moves."""
        own, size = self._as_tensor(agreement.digest), self.world_size
        parts = self._swap("compare", [own] * size, [own.shape] * size)
        digests = [bytes(x.tolist()) for x in parts]
        if len(set(digests)) > 1:
            raise agreement.error(self, digests)

    def refuse(self, why: str) -> None:
        """Tells the ranks that compare next that this one can't do what they do.

        It does not wait for them: they may be elsewhere.
        """
        others = [r for r in range(self.world_size) if r != self.rank]
        if not others:
            return
        label = self._next("compare")
        answer = self._as_tensor(REFUSED)
        note = self._as_tensor(why.encode()[:_NOTE].decode(errors="ignore").encode().ljust(_NOTE))
        theirs = [(r, torch.empty_like(answer)) for r in others]
        self._notes += [
            self.exchange([(r, answer) for r in others], theirs, label=label),
            self.exchange([(r, note) for r in others], [], label=replace(label, is_reason=True)),
        ]
        time.sleep(self.moment)

    def refusals(self, ranks: Sequence[int]) -> list[str]:
        """Why these ranks refused in the last comparison."""
        notes = [torch.empty(_NOTE, dtype=torch.uint8, device=self.device) for _ in ranks]
        label = CollectiveLabel("compare", self._calls["compare", ()], is_reason=True)
        self.exchange([], list(zip(ranks, notes, strict=True)), label=label).wait()
        return [bytes(x.tolist()).decode().strip() for x in notes]

    def _as_tensor(self, content: bytes) -> Tensor:
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.device)

    def barrier(self) -> None:
        """Returns once all ranks have come here."""
        here = torch.zeros(1, device=self.device)
        self._swap("barrier", [here] * self.world_size, [[1]] * self.world_size)

    def _swap(
        self,
        name: CollectiveName,
        parts: Sequence[Tensor],
        shapes: Sequence[Sequence[int]],
        among: tuple[int, ...] = (),
    ) -> list[Tensor]:
        """One part to each rank, and one from each; `among` some ranks only, if they are named."""
        label, ranks = self._next(name, among), among or range(self.world_size)
        others = [i for i, r in enumerate(ranks) if r != self.rank]
        came = {i: parts[0].new_empty(tuple(shapes[i])) for i in others}
        self.exchange(
            [(ranks[i], parts[i]) for i in others],
            [(ranks[i], came[i]) for i in others],
            label=label,
        ).wait()
        return [came[i] if i in came else parts[i].detach().clone() for i in range(len(ranks))]

    def _next(self, name: CollectiveName, among: tuple[int, ...] = ()) -> CollectiveLabel:
        """The label of the next call of a collective; ranks count alike."""
        number = self._calls.get((name, among), 0) + 1
        self._calls[name, among] = number
        return CollectiveLabel(name, number, among)
