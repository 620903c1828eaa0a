"""Ranks that are examined together: each check is run by all, and summed up by the first.

What ranks find goes through the store of their group, not through the transport that is examined:
a rank that has died or hangs is then known by its number, and the others go on or stop together.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from flexcp.comm.process import ProcessTransport
from flexcp.plan import Machine
from flexcp.tools.doctor.budget import Budget, Deadline
from flexcp.tools.doctor.findings import Doing, Finding, Listener

_GO = "go"
_HOURS = 3600.0
"""Seconds that a rank waits for the first to say what comes next: it may be at work alone."""


@dataclass(frozen=True, eq=False)
class RankContext:
    """What a check of ranks works with, on each of them."""

    mesh: Any
    """A DeviceMesh of one dimension, of all ranks."""
    transport: ProcessTransport
    device: torch.device
    budget: Budget
    ranks_per_node: int

    @classmethod
    def of(
        cls, mesh: Any, device: torch.device, budget: Budget, ranks_per_node: int
    ) -> RankContext:
        """For the ranks of a mesh."""
        transport = ProcessTransport.of_mesh(mesh)
        return cls(mesh, transport, device, budget, ranks_per_node)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """How many ranks."""
        return self.transport.world_size

    def share(self, key: str, number: float) -> float:
        """What the first rank passes, on every rank; a key is used once."""
        messages = RankMessages(self.transport.calls.store)
        if self.rank == 0:
            messages.say(f"shared/{key}", json.dumps(number))
            return number
        return float(messages.hear(f"shared/{key}", self.budget.patience))

    def together(self) -> None:
        """Returns once all ranks are here, and their devices have nothing left to do."""
        self.finish()
        dist.barrier(group=self.transport.group)

    def finish(self) -> None:
        """Returns once the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class RankAnswer:
    """What one rank says of a check."""

    wrong: str = ""
    """What it found to be wrong."""
    data: Mapping[str, Any] | None = None
    """What it measured."""


SumUp = Callable[[RankContext, Sequence[RankAnswer]], tuple[Finding, Machine | None]]
"""From what all ranks say to a finding, and what is known of the machine after it."""


@dataclass(frozen=True)
class RankCheck:
    """Something that all ranks do together."""

    section: str
    name: str
    weight: float
    """Share of the time, relative to the others'."""
    run: Callable[[RankContext, Deadline], RankAnswer]
    """On every rank."""
    sum_up: SumUp
    """On the first rank, if nothing was wrong."""
    fix: str
    """What to do if something was."""
    ranks: int = 2
    """At least so many are needed."""


def examine_ranks(
    context: RankContext,
    checks: Sequence[RankCheck],
    seconds: float,
    *,
    listen: Listener,
    hear_machine: Callable[[Machine], None],
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Runs all checks, on every rank; the first rank tells what was found."""
    board = RankMessages(context.transport.calls.store)
    deadline, weights = Deadline.within(seconds), sum(check.weight for check in checks)
    left_out = ""
    for number, check in enumerate(checks):
        part = check.weight / weights
        weights -= check.weight
        if context.rank == 0:
            if should_stop():
                left_out = left_out or "it was stopped"
            elif not deadline.left:
                left_out = left_out or "the time was up: pass more --minutes"
            board.say(f"{number}/next", left_out or json.dumps(deadline.left * part))
        word = board.hear(f"{number}/next", _HOURS)
        if left_out or not word or not word[0].isdigit():
            if context.rank == 0:
                listen(Finding(check.section, check.name, "not run", left_out))
                continue
            return
        if context.size < check.ranks:
            if context.rank == 0:
                why = f"it needs {check.ranks} ranks: pass --ranks, or start it with torchrun"
                listen(Finding(check.section, check.name, "not run", why))
            continue
        own = Deadline.within(float(word))
        if context.rank == 0:
            listen(Doing(check.section, check.name, own.left))
        begin = time.monotonic()
        board.say(f"{number}/{context.rank}", json.dumps(asdict(_answer(check, context, own))))
        if context.rank == 0:
            patience = own.left + 1.2 * context.budget.patience
            finding, machine = _conclusion(check, context, board, number, patience)
            listen(replace(finding, seconds=round(time.monotonic() - begin, 2)))
            if machine is not None:
                hear_machine(machine)
            if finding.said.startswith(_SILENT):
                left_out = "ranks were lost before"
    board.say(f"end/{context.rank}", _GO)
    if context.rank == 0:  # whoever serves the store must not leave first
        for rank in range(1, context.size):
            board.hear(f"end/{rank}", 0.0 if left_out else context.budget.patience)


_SILENT = "nothing was heard of"


def _answer(check: RankCheck, context: RankContext, deadline: Deadline) -> RankAnswer:
    try:
        return check.run(context, deadline)
    except Exception as error:
        told = f"{type(error).__name__}: {error}".splitlines()[0][:400]
        return RankAnswer(f"it raised {told}")


def _conclusion(
    check: RankCheck, context: RankContext, board: RankMessages, number: int, patience: float
) -> tuple[Finding, Machine | None]:
    until = Deadline.within(patience)
    heard = {r: board.hear(f"{number}/{r}", until.left) for r in range(context.size)}
    silent = [r for r, text in heard.items() if not text]
    answers = {r: RankAnswer(**json.loads(text)) for r, text in heard.items() if text}
    wrong = [f"rank {r}: {answer.wrong}" for r, answer in answers.items() if answer.wrong]
    if silent:
        wrong.insert(0, f"{_SILENT} ranks {silent} for {patience:.0f} s")
    if wrong:
        said = "; ".join(wrong[:4]) + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else "")
        return Finding(check.section, check.name, "failed", said, check.fix), None
    return check.sum_up(context, [answers[r] for r in range(context.size)])


class RankMessages:
    """Short texts that ranks leave for each other, under keys of their own."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def say(self, key: str, text: str) -> None:
        """Leaves a text, which must not be empty."""
        self._store.set(f"flexcp/doctor/{key}", text)

    def hear(self, key: str, seconds: float) -> str:
        """What was left there; "" if nothing came in time."""
        name, until = f"flexcp/doctor/{key}", Deadline.within(seconds)
        while True:
            try:
                # Waiting in pieces: an interruption is heard between two of them.
                piece = datetime.timedelta(seconds=max(0.05, min(1.0, until.left)))
                self._store.wait([name], piece)
                return str(self._store.get(name).decode())
            except Exception:
                if not until.left:
                    return ""
