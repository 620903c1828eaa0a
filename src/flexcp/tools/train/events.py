"""What happens in a run, as data: for the screen, for the metrics file, and between processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Started:
    """A run begins, or goes on."""

    ranks: int
    parameters: int
    documents: int
    """Documents to train on."""
    epoch_tokens: int
    """Tokens of all of them."""
    tokens_per_step: int
    steps: int
    done: int
    """Steps that a checkpoint brings along."""
    layout: str
    """Layout and schedule of the first step's plan; empty for one process."""
    out: str


@dataclass(frozen=True)
class AfterStep:
    """Something that happens once a number of optimizer steps are done."""

    step: int
    """How many are done, those before a checkpoint included."""


@dataclass(frozen=True)
class Stepped(AfterStep):
    """An optimizer step."""

    loss: float
    gradient_norm: float
    """Before clipping."""
    lr: float
    documents: int
    """Documents in the batch."""
    seconds: float
    plan_seconds: float
    """Of `seconds`, what planning took."""


@dataclass(frozen=True)
class Evaluated(AfterStep):
    """The loss on held-out documents."""

    eval_loss: float


@dataclass(frozen=True)
class Compared(AfterStep):
    """A step on the ranks beside one in a single process on the same batch."""

    loss: float
    one_process_loss: float
    gradient_norm: float
    one_process_gradient_norm: float
    gradient_difference: float
    """Largest of any entry of any gradient, relative to the largest entry of that gradient."""
    parameter: str
    """Where that is."""
    tolerance: float
    """What rounding explains, for both."""

    @property
    def loss_difference(self) -> float:
        """How far the two losses are apart, relative to the one of a single process."""
        return abs(self.loss - self.one_process_loss) / max(abs(self.one_process_loss), 1e-30)

    @property
    def equal(self) -> bool:
        """Whether rounding explains the difference."""
        return max(self.loss_difference, self.gradient_difference) <= self.tolerance


@dataclass(frozen=True)
class CheckpointSaved(AfterStep):
    """A checkpoint is on disk."""

    path: str


@dataclass(frozen=True)
class Finished(AfterStep):
    """The run ends: all steps are done, or it was asked to stop."""

    steps: int
    first_loss: float | None
    last_loss: float | None
    eval_loss: float | None
    tokens_per_second: float | None
    """Over the steps of this process, the first excepted."""
    planning_share: float | None
    """Part of the time of a step that planning takes."""
    interrupted: bool
    """Whether a signal ended it."""
    equal: bool | None
    """Whether every comparison held; None without comparisons."""
    loss_difference: float | None
    """The largest of all comparisons, relative."""
    gradient_difference: float | None
    """The largest of all comparisons, relative."""
    files: tuple[str, ...]


@dataclass(frozen=True)
class Failed:
    """A rank can't go on."""

    rank: int
    expected: str
    """The parts of a FlexCPError, whatever the exception was."""
    got: str
    fix: str
    consequence: bool
    """Whether another rank's end caused it."""


Event = Started | Stepped | Evaluated | Compared | CheckpointSaved | Finished | Failed
"""What a run reports, as it happens."""
Listener = Callable[[Event], None]
_KINDS: dict[str, type[Event]] = {
    "started": Started,
    "stepped": Stepped,
    "evaluated": Evaluated,
    "compared": Compared,
    "saved": CheckpointSaved,
    "finished": Finished,
    "failed": Failed,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_MARK = '{"event": '


def to_line(event: Event) -> str:
    """One line of JSON; floats keep every bit.

    >>> to_line(Evaluated(25, 2.5))
    '{"event": "evaluated", "step": 25, "eval_loss": 2.5}'
    """
    return json.dumps({"event": _NAMES[type(event)], **asdict(event)})


def from_line(line: str) -> Event | None:
    """The event of a line, or None if the line is something else.

    >>> from_line('{"event": "evaluated", "step": 25, "eval_loss": 2.5}')
    Evaluated(step=25, eval_loss=2.5)
    >>> from_line("a warning")
    """
    if not line.startswith(_MARK):
        return None
    data = json.loads(line)
    if "files" in data:
        data["files"] = tuple(data["files"])
    return _KINDS[data.pop("event")](**data)


def ignore(_: Event) -> None:
    """Listens to nothing."""
