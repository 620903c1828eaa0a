"""The whole examination: what is checked, in which order, within how much time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch

from flexcp.errors import FlexCPError
from flexcp.kernels.registry import KERNELS
from flexcp.plan import Machine
from flexcp.tools.doctor import rank_checks, rank_speed
from flexcp.tools.doctor.budget import Budget, Deadline
from flexcp.tools.doctor.cases import cases
from flexcp.tools.doctor.environment import environment, environment_findings
from flexcp.tools.doctor.exactness import Oracle, exactness, runs_here
from flexcp.tools.doctor.findings import NOT_ASKED, SECTIONS, Diagnosis, Doing, Finding, Listener
from flexcp.tools.doctor.ranks import RankCheck
from flexcp.tools.doctor.speed import Timings, speed
from flexcp.tools.launch import is_busy

_KERNELS, _RANKS = 0.45, 0.4
"""Of the time that is left when they begin, what kernels and ranks may take."""
_CAUSAL = 4.0
"""Weight of the first case that is timed, for which FlexAttention is compiled at any rate."""
_BUSY = "the machine was busy: the kernels that the rules choose stay the preferred ones"
_NOTHING = 1e-3
"""Weight of a check that only says why it is not run."""


@dataclass(frozen=True)
class Request:
    """What is to be examined."""

    device: torch.device
    ranks: int
    budget: Budget
    sections: tuple[str, ...] = tuple(SECTIONS)
    """Those that are asked for; the others are listed as not run."""

    def rank_checks(self) -> tuple[RankCheck, ...]:
        """What ranks are examined for together."""
        every = (*rank_checks.CHECKS, *rank_speed.CHECKS)
        return tuple(check for check in every if check.section in self.sections)


class RankRunner(Protocol):
    """Runs the checks of several ranks, wherever they come from."""

    def __call__(
        self,
        request: Request,
        seconds: float,
        *,
        listen: Listener,
        hear_machine: Callable[[Machine], None],
    ) -> RanksEnd:
        """Tells what was found, and how it ended."""
        ...


@dataclass(frozen=True)
class RanksEnd:
    """How a run of ranks ended."""

    lost: str = ""
    """What became of them, if they did not come to the end."""
    interrupted: bool = False


@dataclass
class Chart:
    """What is known so far: kept whatever happens next."""

    request: Request
    listen: Listener
    begin: float = field(default_factory=time.monotonic)
    findings: list[Finding] = field(default_factory=list)
    machines: list[Machine] = field(default_factory=list)
    timings: Timings | None = None
    was_busy: bool = False
    """Whether others kept the CPU busy at the beginning, so that its timings say little."""
    lost_device: str = ""
    """Since when the device does not answer any more."""

    def hear(self, event: Doing | Finding) -> None:
        """Passes on what happens, and keeps what was found."""
        if isinstance(event, Finding):
            self.findings.append(event)
        self.listen(event)

    def has(self, section: str, name: str) -> bool:
        """Whether something was found of a check already."""
        return any((f.section, f.name) == (section, name) for f in self.findings)


PlannedCheck = tuple[str, str, float, Callable[[Deadline], Finding]]
"""Section, name, weight when time is shared out, and what to run on one device."""


def examine(request: Request, run_ranks: RankRunner, *, listen: Listener) -> Diagnosis:
    """Runs everything that was asked for; an interruption (Ctrl-C) ends it, and keeps what is done.

    Args:
        request: What to examine.
        run_ranks: How to run what several ranks do together.
        listen: Hears what runs now and what was found.
    """
    chart = Chart(request, listen, was_busy=request.device.type == "cpu" and is_busy())
    interrupted = False
    try:
        with _many_compilations(request.device):
            interrupted = _run(chart, run_ranks)
    except KeyboardInterrupt:
        interrupted = True
    for section, name in _everything(request):
        if not chart.has(section, name):
            why = "it was stopped" if section in request.sections else NOT_ASKED
            chart.hear(Finding(section, name, "not run", why))
    order = list(SECTIONS)
    return Diagnosis(
        environment(),
        tuple(sorted(chart.findings, key=lambda finding: order.index(finding.section))),
        () if chart.timings is None else chart.timings.orders(),
        chart.machines[-1] if chart.machines else None,
        time.monotonic() - chart.begin,
        interrupted,
        (_BUSY,) if chart.was_busy else (),
    )


def _many_compilations(device: torch.device) -> AbstractContextManager[None]:
    """Lets torch compile FlexAttention for all cases: it gives up after a few, unless told."""
    if device.type == "cpu":
        return nullcontext()
    import torch._dynamo

    allowed: AbstractContextManager[None] = torch._dynamo.config.patch(recompile_limit=256)
    return allowed


def _run(chart: Chart, run_ranks: RankRunner) -> bool:
    """All parts, one after the other; whether it was interrupted between ranks."""
    request = chart.request
    deadline = Deadline.within(request.budget.seconds)
    start = request.budget.start if request.rank_checks() else 0.0
    if "environment" in request.sections:
        for finding in environment_findings(request.device):
            chart.hear(finding)
    if "kernels" in request.sections:
        usable = max(0.0, deadline.left - start)
        _one_by_one(chart, _kernel_checks(request), Deadline.within(usable * _KERNELS))
    if request.rank_checks():
        if request.device.type == "cuda":
            torch.cuda.empty_cache()
        seconds = max(0.0, deadline.left - start) * _RANKS
        end = run_ranks(request, seconds, listen=chart.hear, hear_machine=chart.machines.append)
        _account_for_lost_ranks(chart, end)
        if end.interrupted:
            return True
    if "speed" in request.sections:
        right = _right_kernels(chart.findings)
        chart.timings = Timings(request.budget, request.device, right, certain=not chart.was_busy)
        _one_by_one(chart, _speed_checks(chart.timings), deadline)
    return False


def _kernel_checks(request: Request) -> list[PlannedCheck]:
    oracle = Oracle.of(request.budget, request.device)
    found: list[PlannedCheck] = []
    for kernel in KERNELS:
        for name in request.budget.dtypes:
            dtype = getattr(torch, name)
            weight = 1.0 if runs_here(kernel, dtype, oracle) else _NOTHING
            run = partial(exactness, kernel, dtype, oracle)
            found.append(("kernels", f"{kernel}, {name}", weight, run))
    return found


def _speed_checks(timings: Timings) -> list[PlannedCheck]:
    return [
        ("speed", name, _CAUSAL if name == "causal" else 1.0, partial(speed, name, timings))
        for name in _case_names()
    ]


def _case_names() -> list[str]:
    """Of what is timed: the causal case first, as what people ask for first."""
    every = cases(64, 1, torch.device("cpu"))
    names = [case.name for case in every if not case.dropout_p]
    return sorted(names, key=lambda name: name != "causal")


def _everything(request: Request) -> list[tuple[str, str]]:
    """Section and name of all that there is to find."""
    env = [("environment", name) for name in ("versions", "devices", "load", "links")]
    kernels = [("kernels", f"{k}, {dtype}") for k in KERNELS for dtype in request.budget.dtypes]
    ranks = [(c.section, c.name) for c in (*rank_checks.CHECKS, *rank_speed.CHECKS)]
    return [*env, *kernels, *ranks, *(("speed", name) for name in _case_names())]


def _one_by_one(chart: Chart, planned: Sequence[PlannedCheck], deadline: Deadline) -> None:
    """Runs checks of one device, each within its part of the time that is left."""
    weights = sum(weight for _, _, weight, _ in planned)
    for section, name, weight, run in planned:
        if chart.lost_device:
            weights -= weight
            chart.hear(Finding(section, name, "not run", chart.lost_device))
            continue
        own = deadline.share(weight / weights)
        weights -= weight
        chart.listen(Doing(section, name, own.left))
        begin = time.monotonic()
        try:
            finding = run(own)
        except Exception as error:
            told = error.got if isinstance(error, FlexCPError) else type(error).__name__
            said = f"it raised {told}: {error}".splitlines()[0][:400]
            fix = "please report it with the report's files"
            finding = Finding(section, name, "failed", said, fix)
        chart.hear(replace(finding, seconds=round(time.monotonic() - begin, 2)))
        if finding.outcome == "failed" and chart.request.device.type == "cuda":
            chart.lost_device = _lost_device(chart.request.device, name)


def _lost_device(device: torch.device, name: str) -> str:
    """What to say of later checks if a kernel has left the device unusable; "" if it has not."""
    try:
        torch.ones(2, device=device).sum().item()
    except RuntimeError:
        return f"the GPU does not answer any more in this process, since {name!r}"
    return ""


def _account_for_lost_ranks(chart: Chart, end: RanksEnd) -> None:
    """Names the check in which ranks ended, and those that they did not come to."""
    if not end.lost:
        return
    for check in chart.request.rank_checks():
        if chart.has(check.section, check.name):
            continue
        if not any(f.said.startswith("the ranks ended") for f in chart.findings):
            said = f"the ranks ended while it ran: {end.lost}"
            chart.hear(Finding(check.section, check.name, "failed", said, check.fix))
        else:
            chart.hear(Finding(check.section, check.name, "not run", "the ranks had ended"))


def _right_kernels(findings: Collection[Finding]) -> frozenset[str]:
    """Kernels that passed a check, and failed none."""
    by_outcome: dict[str, set[str]] = {"passed": set(), "failed": set()}
    for finding in findings:
        if finding.section == "kernels" and finding.outcome in by_outcome:
            by_outcome[finding.outcome].add(finding.name.partition(",")[0])
    return frozenset(by_outcome["passed"] - by_outcome["failed"])
