"""Where the examined ranks come from: started here, or by a launcher before."""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flexcp.plan import Machine
from flexcp.tools.doctor.budget import Budget
from flexcp.tools.doctor.examine import RankRunner, RanksEnd, Request, examine
from flexcp.tools.doctor.findings import Diagnosis, Doing, Finding, Listener, hear_nothing
from flexcp.tools.doctor.ranks import RankContext, examine_ranks
from flexcp.tools.launch import place_of_ranks, run_ranks

_MARK = '{"doctor": '
"""How a line of a rank begins that is meant for the doctor."""


@dataclass(frozen=True)
class LocalRanks:
    """Starts ranks on this machine, as many as a request says, and listens to them."""

    when_asked_to_stop: Callable[[], None] = lambda: None
    show_logs: bool = False

    def __call__(
        self,
        request: Request,
        seconds: float,
        *,
        listen: Listener,
        hear_machine: Callable[[Machine], None],
    ) -> RanksEnd:
        """Runs the checks of ranks in processes of their own."""
        interrupted, failures, ended = [False], [""], [False]

        def stop() -> None:
            interrupted[0] = True
            self.when_asked_to_stop()

        def hear(line: str) -> None:
            if not line.startswith(_MARK):
                return
            event = json.loads(line)
            kind = event.pop("doctor")
            if kind == "finding":
                listen(Finding(**{**event, "rows": tuple(event["rows"])}))
            elif kind == "doing":
                listen(Doing(**event))
            elif kind == "machine":
                hear_machine(Machine(**event))
            elif kind == "failed":
                failures[0] = failures[0] or event["said"]
            else:
                ended[0] = True

        listen(Doing("ranks", f"starting {request.ranks} ranks", 60.0))
        argument = as_argument(request, seconds)
        exits = run_ranks(
            "flexcp.tools.doctor.worker",
            argument,
            request.ranks,
            hear=hear,
            when_asked_to_stop=stop,
            show_logs=self.show_logs,
        )
        lost = failures[0] or f"{exits}; --debug shows what ranks wrote"
        return RanksEnd("" if ended[0] else lost, interrupted[0])


def as_line(kind: str, content: Any = None) -> str:
    """An event of a rank as a line for the doctor that has started it."""
    data = {} if content is None else content if isinstance(content, dict) else asdict(content)
    return json.dumps({"doctor": kind, **data})


def as_argument(request: Request, seconds: float) -> str:
    """What a rank is started with."""
    return json.dumps(
        {
            "device": request.device.type,
            "ranks": request.ranks,
            "sections": request.sections,
            "budget": asdict(request.budget),
            "seconds": seconds,
        }
    )


def of_argument(text: str) -> tuple[Request, float]:
    """From what `as_argument` gave."""
    data = json.loads(text)
    budget = Budget(**{**data["budget"], "dtypes": tuple(data["budget"]["dtypes"])})
    device = torch.device(data["device"])
    return Request(device, data["ranks"], budget, tuple(data["sections"])), data["seconds"]


@contextlib.contextmanager
def joined(request: Request, store: str | None = None) -> Iterator[RankContext]:
    """This process as one of the ranks that a launcher has started: NCCL for GPUs, else gloo."""
    device = request.device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=request.budget.patience),
        **place_of_ranks(store),
    )
    size = dist.get_world_size()
    mesh = init_device_mesh(device.type, (size,))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    try:
        yield RankContext.of(mesh, device, request.budget, per_node)
    finally:
        dist.destroy_process_group()
        gc.collect()  # gloo aborts if a group is only let go when Python ends


def examine_as_rank(request: Request, *, listen: Listener) -> Diagnosis | None:
    """The examination by ranks that a launcher has started; on all but the first, None.

    The first does alone what needs one device, while the others wait to be called.
    """
    with joined(request) as context:
        called = [False]

        def here(
            request: Request,
            seconds: float,
            *,
            listen: Listener,
            hear_machine: Callable[[Machine], None],
        ) -> RanksEnd:
            called[0] = True
            examine_ranks(
                context, request.rank_checks(), seconds, listen=listen, hear_machine=hear_machine
            )
            return RanksEnd()

        run: RankRunner = here
        if context.rank:
            run(request, 0.0, listen=hear_nothing, hear_machine=lambda _: None)
            return None
        found = examine(request, run, listen=listen)
        if not called[0]:  # it was stopped: so are the others
            run(request, 0.0, listen=hear_nothing, hear_machine=lambda _: None)
        return found
