"""What a person sees of a training run: a bar in a terminal, lines in a pipe, a summary."""

from __future__ import annotations

from dataclasses import asdict
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from flexcp.tools.cli.output import console
from flexcp.tools.train.curve import sparkline
from flexcp.tools.train.events import Compared, Evaluated, Event, Finished, Started, Stepped
from flexcp.units import format_count, format_size

_LINES = 10
"""Lines of a whole run in a pipe."""


class Screen:
    """Listens to a run. A bar moves and a curve grows, so it has state."""

    def __init__(self, *, quiet: bool) -> None:
        self.started: Started | None = None
        self._quiet = quiet
        self._console = console()
        self._losses: list[float] = []
        self._eval: float | None = None
        self._worst: Compared | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
        )
        self._task = self._progress.add_task("starting the ranks", total=None, text="")

    def __enter__(self) -> Screen:
        if self._is_drawing:
            self._progress.start()
        return self

    @property
    def _is_drawing(self) -> bool:
        return not self._quiet and self._console.is_terminal

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._end_drawing()

    def _end_drawing(self) -> None:
        if self._is_drawing:
            self._progress.update(self._task, visible=False)
            self._progress.stop()

    def stopping(self) -> None:
        """Says that an interruption was heard."""
        if not self._quiet:
            self._console.print("Stopping after this step; once more to stop at once.")

    def __call__(self, event: Event) -> None:
        """Shows an event."""
        if isinstance(event, Started):
            self.started = event
        if self._quiet:
            return
        if isinstance(event, Started):
            self._start(event)
        elif isinstance(event, Stepped):
            self._step(event)
        elif isinstance(event, Evaluated):
            self._eval = event.eval_loss
            if not self._is_drawing:
                self._console.print(f"step {event.step:>6,}  held out {event.eval_loss:.4f}")
        elif isinstance(event, Compared):
            self._compare(event)
        elif isinstance(event, Finished):
            self._finish(event)

    def _start(self, run: Started) -> None:
        print_ = self._console.print
        print_(
            f"A transformer of {run.parameters:,} parameters, {run.documents:,} "
            f"document{'s' * (run.documents != 1)} of "
            f"{format_count(run.epoch_tokens)} tokens"
        )
        size = format_size(run.tokens_per_step)
        if run.layout:
            print_(f"{run.ranks} ranks share each step's {size} tokens: {run.layout}")
        else:
            print_(f"One process, {size} tokens a step")
        if run.done >= run.steps:
            print_(
                f"The run in {run.out} has ended with step {run.done:,}: nothing is left to do. "
                "Choose another --out, or pass --restart to begin anew"
            )
        elif run.done:
            print_(f"Going on after step {run.done:,}, from the checkpoint in {run.out}")
        self._move(run.done, "")

    def _step(self, event: Stepped) -> None:
        assert self.started is not None
        self._losses.append(event.loss)
        rate = self.started.tokens_per_step / event.seconds
        planning = event.plan_seconds / event.seconds
        held_out = "" if self._eval is None else f"  held out {self._eval:.3f}"
        if self._is_drawing:
            curve = sparkline(self._losses, 16)
            text = f"loss {event.loss:.3f} {curve}{held_out}  {rate:,.0f} tokens/s"
            self._move(event.step, text)
        elif self._is_shown(event.step):
            self._console.print(
                f"step {event.step:>6,}  loss {event.loss:.4f}  {rate:,.0f} tokens/s, "
                f"{event.documents} document{'s' * (event.documents > 1)}, planning {planning:.1%}"
            )

    def _move(self, step: int, text: str) -> None:
        assert self.started is not None
        total = self.started.steps
        words = f"step {step:,}/{total:,}"
        self._progress.update(self._task, total=total, completed=step, description=words, text=text)

    def _is_shown(self, step: int) -> bool:
        assert self.started is not None
        return len(self._losses) == 1 or step % max(1, self.started.steps // _LINES) == 0

    def _compare(self, event: Compared) -> None:
        assert self.started is not None
        worst = self._worst
        if worst is None or event.gradient_difference > worst.gradient_difference:
            self._worst = event
        if self._is_shown(event.step) or not event.equal:
            begin = f"step {event.step:>6,}  " if self._is_drawing else " " * 13
            self._console.print(
                f"{begin}loss {event.loss:.9f}, in one process {event.one_process_loss:.9f}; "
                f"gradients differ by {event.gradient_difference:.1e}"
                f"{'' if event.equal else ': MORE THAN ROUNDING'}"
            )

    def _finish(self, run: Finished) -> None:
        self._end_drawing()
        print_ = self._console.print
        if run.first_loss is not None and run.last_loss is not None:
            held_out = "" if run.eval_loss is None else f", held out {run.eval_loss:.3f}"
            print_(
                f"\nLoss {run.first_loss:.3f} → {run.last_loss:.3f} in {run.step:,} steps"
                f"{held_out}  {sparkline(self._losses, 32)}".rstrip()
            )
        if run.tokens_per_second is not None and run.planning_share is not None:
            print_(
                f"{run.tokens_per_second:,.0f} tokens/s; planning every step's mask anew took "
                f"{run.planning_share:.1%} of the time"
            )
        if self._worst is not None:
            self._verdict(run, self._worst)
        print_(f"{'Written' if self._losses else 'Files'}: {', '.join(run.files)}")
        if run.step < run.steps:
            print_(
                f"Stopped after step {run.step:,} of {run.steps:,}. The same command goes on from "
                "there, with the losses of a run that was never stopped."
            )

    def _verdict(self, run: Finished, worst: Compared) -> None:
        assert self.started is not None
        word = "equal" if run.equal else "DIFFER FROM"
        self._console.print(
            f"Losses and gradients of {self.started.ranks} ranks {word} those of one process: "
            f"losses within {run.loss_difference:.1e}, every entry of every gradient within "
            f"{worst.gradient_difference:.1e} of the largest ({worst.parameter}); rounding may "
            f"explain {worst.tolerance:.1e}"
        )


def summary(started: Started | None, ended: Finished) -> dict[str, Any]:
    """The run for a program."""
    about = {} if started is None else asdict(started)
    return {**about, **asdict(ended)}
