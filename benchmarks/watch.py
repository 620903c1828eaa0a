"""What a plan's transport does while it is timed: bytes, and seconds that it was waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flexcp


@dataclass
class Traffic:
    """What a transport did, and how long it was waited for."""

    waited: float = 0.0
    received: int = 0
    again: list[Callable[[], Any]] = field(default_factory=list)
    """Each makes memory for one of the transfers, and returns what starts it once more there."""


class Watch:
    """Notes every transfer of a plan's transport, and can run the same transfers alone."""

    def __init__(self, plan: flexcp.Plan) -> None:
        self.transport: Any = plan.ranks.transport
        self.seen = Traffic()
        self._is_part = False  # of an all-to-all, which gloo's transport makes of messages
        for name in ("exchange", "all_gather", "all_to_all"):
            start = getattr(self.transport, name)
            vars(self.transport)[name] = partial(getattr(self, f"_{name}"), start)

    def reset(self) -> None:
        self.seen = Traffic()

    def _exchange(self, start: Any, sends: Any, receives: Any, *, label: Any) -> Any:
        if self._is_part:
            return start(sends, receives, label=label)
        received = sum(x.nbytes for _, x in receives)
        sizes = [[(peer, x.shape, x.dtype) for peer, x in xs] for xs in (sends, receives)]

        def again() -> Any:
            copies = ([(p, torch.zeros(s, dtype=d)) for p, s, d in xs] for xs in sizes)
            return partial(start, *copies, label=label)

        return self._noted(start(sends, receives, label=label), received, again)

    def _all_gather(self, start: Any, out: Tensor, x: Tensor, *, label: Any) -> Any:
        again = _on_other_memory(start, out, x, (), label)
        return self._noted(start(out, x, label=label), out.nbytes - x.nbytes, again)

    def _all_to_all(
        self, start: Any, out: Tensor, x: Tensor, takes: Any, gives: Any, ranks: Any, *, label: Any
    ) -> Any:
        rest = (takes, gives, ranks)
        own = takes[list(ranks).index(self.transport.rank)] * out.element_size()
        again = _on_other_memory(start, out, x, rest, label)
        self._is_part = True
        try:
            pending = start(out, x, *rest, label=label)
        finally:
            self._is_part = False
        return self._noted(pending, out.nbytes - own, again)

    def _noted(self, pending: Any, received: int, again: Callable[[], Any]) -> Any:
        self.seen.received += received
        self.seen.again.append(again)
        return _Watched(pending, self.seen)

    def alone(self) -> float:
        """Seconds of the same transfers without any compute."""
        starts = [again() for again in self.seen.again]
        dist.barrier()
        begin = time.perf_counter()
        for start in starts:
            start().wait()
        return time.perf_counter() - begin


def _on_other_memory(start: Any, out: Tensor, x: Tensor, rest: Any, label: Any) -> Any:
    """The same collective on memory of its own, made when it is run: not while others are timed."""
    sizes = [(y.shape, y.dtype) for y in (out, x)]
    copies = lambda: (torch.zeros(s, dtype=d) for s, d in sizes)  # noqa: E731
    return lambda: partial(start, *copies(), *rest, label=label)


@dataclass
class _Watched:
    pending: Any
    seen: Traffic

    def wait(self) -> None:
        begin = time.perf_counter()
        self.pending.wait()
        self.seen.waited += time.perf_counter() - begin
