"""Collectives made of pairwise rounds: the same on every transport, summed in order of rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from flexcp.comm.interface import Pending


class PairwiseCollectives(ABC):
    """What a transport can do once it can exchange messages between pairs of ranks."""

    rank: int
    _calls: dict[str, int]

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
        mine = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.device)
        size = torch.tensor([mine.numel()], device=self.device)
        sizes = self.all_gather(size, [[1]] * self.world_size)
        parts = self.all_gather(mine, [[int(n)] for n in sizes])
        return [bytes(part.tolist()).decode() for part in parts]

    def all_bytes(self, mine: bytes) -> list[bytes]:
        """As many bytes of every rank, by rank."""
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self.device)
        return [bytes(x.tolist()) for x in self.all_gather(own, [own.shape] * self.world_size)]

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
        self._calls[name] = self._calls.get(name, 0) + 1
        others = [i for i, r in enumerate(ranks) if r != self.rank]
        pending = self.exchange(
            [(ranks[i], parts[i]) for i in others],
            [(ranks[i], shapes[i]) for i in others],
            like=parts[0],
            label=f"{name} #{self._calls[name]}",
        )
        came = dict(zip(others, pending.wait(), strict=True))
        return [came[i] if i in came else parts[i].detach().clone() for i in range(len(ranks))]
