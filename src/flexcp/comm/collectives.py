"""Collectives made of pairwise rounds: the same on every transport, summed in order of rank."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from flexcp.comm.agreement import REFUSED
from flexcp.comm.interface import Pending

_COMPARING = "round 0, in which ranks compare what they are about to do,"
_NOTE = 1024
"""Bytes of the note that says why a rank refuses."""


class PairwiseCollectives(ABC):
    """What a transport can do once it can exchange messages between pairs of ranks."""

    rank: int
    moment: ClassVar[float] = 0.0
    """Seconds that a rank that refuses stays around, so that the others hear of it."""
    _calls: dict[str, int]
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
    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Sequence[int]]],
        *,
        like: Tensor,
        label: str,
    ) -> Pending:
        """Starts the transfers of a round, and returns at once."""

    def all_gather(self, x: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """The tensors of all ranks, by rank."""
        everyone = range(self.world_size)
        return self._swap("all_gather", [x] * self.world_size, shapes, everyone)

    def all_to_all(
        self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], ranks: Sequence[int]
    ) -> list[Tensor]:
        """One tensor to each of `ranks`, one from each."""
        name = "all_to_all of ranks " + ",".join(map(str, ranks))
        return self._swap(name, parts, shapes, ranks)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, added up in order of rank: the same bits on every rank."""
        everyone = range(self.world_size)
        parts = self._swap("all_reduce", [x] * self.world_size, [x.shape] * len(everyone), everyone)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def all_agree(self, text: str) -> list[str]:
        """The texts of all ranks, by rank."""
        mine = self._as_tensor(text.encode())
        size = torch.tensor([mine.numel()], device=self.device)
        sizes = self.all_gather(size, [[1]] * self.world_size)
        parts = self.all_gather(mine, [[int(n)] for n in sizes])
        return [bytes(part.tolist()).decode() for part in parts]

    def all_bytes(self, mine: bytes) -> list[bytes]:
        """As many bytes of every rank, by rank."""
        own = self._as_tensor(mine)
        size = self.world_size
        parts = self._swap(_COMPARING, [own] * size, [own.shape] * size, range(size))
        return [bytes(x.tolist()) for x in parts]

    def refuse(self, why: str) -> None:
        """Tells the ranks that compare next that this one can't do what they do.

        It does not wait for them: they may be elsewhere.
        """
        others = [r for r in range(self.world_size) if r != self.rank]
        if not others:
            return
        label = self._next(_COMPARING)
        answer = self._as_tensor(REFUSED)
        note = self._as_tensor(why.encode()[:_NOTE].decode(errors="ignore").encode().ljust(_NOTE))
        theirs = [(r, answer.shape) for r in others]
        self._notes += [
            self.exchange([(r, answer) for r in others], theirs, like=answer, label=label),
            self.exchange([(r, note) for r in others], [], like=note, label=f"{label} and why"),
        ]
        time.sleep(self.moment)

    def refusals(self, ranks: Sequence[int]) -> list[str]:
        """Why these ranks refused in the last comparison."""
        like = torch.empty(0, dtype=torch.uint8, device=self.device)
        label = f"{_COMPARING} #{self._calls[_COMPARING]} and why"
        pending = self.exchange([], [(r, [_NOTE]) for r in ranks], like=like, label=label)
        return [bytes(x.tolist()).decode().strip() for x in pending.wait()]

    def _as_tensor(self, content: bytes) -> Tensor:
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.device)

    def barrier(self) -> None:
        """Returns once all ranks have come here."""
        here = torch.zeros(1, device=self.device)
        everyone = range(self.world_size)
        self._swap("barrier", [here] * self.world_size, [[1]] * self.world_size, everyone)

    def _swap(
        self,
        name: str,
        parts: Sequence[Tensor],
        shapes: Sequence[Sequence[int]],
        ranks: Sequence[int],
    ) -> list[Tensor]:
        label = self._next(name)
        others = [i for i, r in enumerate(ranks) if r != self.rank]
        pending = self.exchange(
            [(ranks[i], parts[i]) for i in others],
            [(ranks[i], shapes[i]) for i in others],
            like=parts[0],
            label=label,
        )
        came = dict(zip(others, pending.wait(), strict=True))
        return [came[i] if i in came else parts[i].detach().clone() for i in range(len(ranks))]

    def _next(self, name: str) -> str:
        """The label of the next call of that name; ranks count alike."""
        self._calls[name] = self._calls.get(name, 0) + 1
        return f"{name} #{self._calls[name]}"
