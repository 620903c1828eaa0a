"""The record of a run: metrics as lines of JSON, and the loss curve as text and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from flexcp.errors import FlexCPError
from flexcp.tools.train.events import Compared, Evaluated, Event, Stepped, from_line, to_line

METRICS = "metrics.jsonl"
CURVE = "loss.svg"
_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, eq=False)
class Record:
    """The metrics of a run so far, on disk and in memory."""

    folder: Path
    steps: list[Stepped] = field(default_factory=list)
    evaluations: list[Evaluated] = field(default_factory=list)

    @classmethod
    def opened(cls, folder: Path, done: int) -> Record:
        """What was recorded of the first `done` steps; what came after them is dropped."""
        record = cls(folder)
        path = folder / METRICS
        lines = path.read_text("utf-8", "replace").splitlines() if path.exists() and done else []
        kept = []
        for number, line in enumerate(lines, 1):
            event = _parsed(line)
            if event is None and number < len(lines):  # a kill can only cut the last line short
                raise FlexCPError(
                    f"a record of a run in {path}",
                    f"something else in line {number}",
                    "move the file away to go on without it, or pass --restart to begin anew",
                )
            if event is not None and event.step <= done:
                kept.append(line)
                record._remember(event)
        _replace(path, "".join(f"{line}\n" for line in kept))
        return record

    def add(self, event: Stepped | Evaluated | Compared) -> None:
        """Appends a line."""
        self._remember(event)
        with _room_for(self.folder / METRICS), (self.folder / METRICS).open("a") as file:
            file.write(to_line(event) + "\n")

    def draw(self) -> Path:
        """Writes the loss curve."""
        path = self.folder / CURVE
        _replace(path, loss_svg(self.steps, self.evaluations))
        return path

    def _remember(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self.steps.append(event)
        elif isinstance(event, Evaluated):
            self.evaluations.append(event)


@contextmanager
def _room_for(path: Path) -> Iterator[None]:
    """A full disk as an error that says what is kept."""
    try:
        yield
    except OSError as error:
        raise FlexCPError(
            f"room for {path}",
            error.strerror or str(error),
            "make room and go on: the last checkpoint is kept",
        ) from error


def _replace(path: Path, text: str) -> None:
    """Writes a file that is whole or as it was, and leaves nothing beside it."""
    beside = path.with_name(f"{path.name}.new")
    with _room_for(path):
        try:
            beside.write_text(text)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def _parsed(line: str) -> Stepped | Evaluated | Compared | None:
    try:
        event = from_line(line)
    except (ValueError, TypeError, KeyError):  # cut short by a kill
        return None
    if not isinstance(event, (Stepped, Evaluated, Compared)):
        return None
    numbers = [x for name, x in asdict(event).items() if name != "parameter"]
    return event if all(type(x) in (int, float) for x in numbers) else None


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """A curve of one line, the means of `width` stretches.

    >>> sparkline([4, 3, 2, 1])
    '█▆▃▁'
    """
    if not values:
        return ""
    width = min(width, len(values))
    cuts = [len(values) * n // width for n in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((m - low) * scale)] for m in means)


_WIDTH, _HEIGHT = 720, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 40, 44
_STYLE = """
  svg { background: #ffffff; font: 13px system-ui, sans-serif }
  text { fill: #3d4654 } .title { font-size: 15px; font-weight: 600; fill: #131a24 }
  .rule { stroke: #e3e7ec } .train { stroke: #2462b2 } .eval { stroke: #c2571a; fill: #c2571a }
  .train, .eval-line { fill: none; stroke-width: 2 } .eval-line { stroke: #c2571a }
  @media (prefers-color-scheme: dark) {
    svg { background: #14181f } text { fill: #b8c0cc } .title { fill: #f1f4f8 }
    .rule { stroke: #2c333d } .train { stroke: #6ea8f0 }
    .eval-line, .eval { stroke: #f0955c } .eval { fill: #f0955c }
  }
"""


def loss_svg(steps: Sequence[Stepped], evaluations: Sequence[Evaluated]) -> str:
    """The training loss by step, and the loss on held-out documents where it was measured."""
    points = [(e.step, e.loss) for e in steps]
    held_out = [(e.step, e.eval_loss) for e in evaluations]
    every = [y for _, y in points + held_out] or [0.0]
    last = max([x for x, _ in points + held_out], default=1)
    step = _tick_size(min(every), max(every))
    low, high = min(every) // step * step, -(-max(every) // step) * step
    high = high if high > low else low + step

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - 1) / max(last - 1, 1)
        up = (y - low) / (high - low)
        return (
            _LEFT + across * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="Loss by step"><style>{_STYLE}</style>',
        f'<text class="title" x="{_LEFT}" y="22">Loss in nats per byte</text>',
    ]
    for n in range(round((high - low) / step) + 1):
        value = low + n * step
        y = place(1, value)[1]
        parts.append(
            f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    for x, anchor in ((1, "start"), ((1 + last) // 2, "middle"), (last, "end")):
        at = place(x, low)[0]
        parts.append(
            f'<text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="{anchor}">'
            f"{'step ' if x == 1 else ''}{x:,}</text>"
        )
    parts.append(_line("train", [place(*p) for p in points]))
    parts.append(_line("eval-line", [place(*p) for p in held_out]))
    parts += [f'<circle class="eval" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in
              (place(*p) for p in held_out)]  # fmt: skip
    parts.append(
        f'<line class="train" x1="{_WIDTH - 250}" x2="{_WIDTH - 226}" y1="18" y2="18"/>'
        f'<text x="{_WIDTH - 220}" y="22">training</text>'
        f'<line class="eval-line" x1="{_WIDTH - 140}" x2="{_WIDTH - 116}" y1="18" y2="18"/>'
        f'<text x="{_WIDTH - 110}" y="22">held out</text></svg>'
    )
    return "\n".join(parts) + "\n"


def _line(kind: str, places: Sequence[tuple[float, float]]) -> str:
    return f'<polyline class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>'


def _tick_size(low: float, high: float) -> float:
    """A round number of which four to ten fit between low and high."""
    span = max(high - low, 1e-6)
    size = 1e-9
    while True:
        for factor in (1.0, 2.0, 5.0):
            if span / (size * factor) <= 6:
                return size * factor
        size *= 10
