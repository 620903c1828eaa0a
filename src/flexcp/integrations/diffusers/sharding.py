"""How the tokens of a forward pass are shared among the ranks, and the plans for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from flexcp.errors import FlexCPError
from flexcp.integrations.diffusers.structures import TokenRows
from flexcp.layout import Layout
from flexcp.masks import full
from flexcp.plan import Plan, Ranks, make_plan

_MOST_KEPT = 16
"""Shapes of calls whose plans are kept: sizes of images, and with and without guidance."""


@dataclass(eq=False)
class TokenSharding:
    """Whose tokens are whose, stream by stream; plans are made when they are asked for."""

    lengths: Mapping[str, int]
    """Tokens of each stream."""
    batch: int
    dtype: torch.dtype
    mesh: Any
    options: Mapping[str, Any]
    """What `flexcp.make_plan` takes."""
    _plans: dict[tuple[str, ...], Plan] = field(default_factory=dict)

    def plan(self, streams: tuple[str, ...]) -> Plan:
        """The plan of attention over streams that are laid end to end on every rank."""
        if streams not in self._plans:
            ranks = Ranks.of(self.mesh).size
            runs: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
            first = 0
            for stream in streams:
                for own, (start, stop) in zip(runs, self._cut(stream, ranks), strict=True):
                    own.append((first + start, first + stop))
                first += self.lengths[stream]
            self._plans[streams] = make_plan(
                full(),
                first,
                self.mesh,
                layout=Layout.of_runs(runs, seq_len=first, name="each stream contiguous"),
                batch=self.batch,
                dtype=self.dtype,
                **self.options,
            )
        return self._plans[streams]

    def shard(self, x: Any, rows: TokenRows, what: str) -> Any:
        """This rank's rows of a tensor, or of each of a list of tensors."""
        if isinstance(x, list | tuple):
            return type(x)(self.shard(one, rows, what) for one in x)
        length = self.lengths[rows.stream]
        if not isinstance(x, Tensor) or not -x.dim() <= rows.dim < x.dim():
            return x  # such as one timestep for all tokens
        if x.shape[rows.dim] != length:
            raise FlexCPError(
                f"{what} with {length} tokens along dim {rows.dim}, as the {rows.stream} has",
                f"shape {tuple(x.shape)}",
                "pass the whole tensors to every rank, as in one process",
            )
        ranks = Ranks.of(self.mesh)
        assert ranks.rank is not None
        start, stop = self._cut(rows.stream, ranks.size)[ranks.rank]
        return x.narrow(rows.dim, start, stop - start)

    def _cut(self, stream: str, ranks: int) -> list[tuple[int, int]]:
        """(start, stop) of each rank; leftovers go to the first ranks, of text to the last."""
        least, more = divmod(self.lengths[stream], ranks)
        counts = [least + (rank < more) for rank in range(ranks)]
        if stream == "text":
            counts.reverse()
        return list(pairwise(accumulate(counts, initial=0)))


@dataclass(eq=False)
class TokenShardings:
    """The last ones that were made; calls of the same shapes share one."""

    mesh: Any
    options: Mapping[str, Any]
    _kept: OrderedDict[object, TokenSharding] = field(default_factory=OrderedDict)

    def of(self, lengths: Mapping[str, int], hidden_states: Tensor) -> TokenSharding:
        """The sharding of a call."""
        key = (tuple(lengths.items()), hidden_states.shape[0], hidden_states.dtype)
        if key not in self._kept:
            batch, dtype = hidden_states.shape[0], hidden_states.dtype
            self._kept[key] = TokenSharding(lengths, batch, dtype, self.mesh, self.options)
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]
