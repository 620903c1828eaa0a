"""One rank of a run: joins the others, trains, and says on stdout what happens.

`flexcp train` starts it: python -m flexcp.tools.train.worker '{"steps": 100}' STORE
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flexcp.errors import FlexCPError
from flexcp.testing.processes import is_consequence
from flexcp.tools.launch import follow_the_launcher, place_of_ranks
from flexcp.tools.train.config import TrainConfig
from flexcp.tools.train.events import Event, Failed, Finished, Listener, to_line
from flexcp.tools.train.loop import require_device, train
from flexcp.tools.train.team import Team

_LONGEST = 1000
"""Characters of a message: what ranks write to one pipe must not mix."""


def train_on_ranks(
    config: TrainConfig,
    *,
    listen: Listener,
    should_stop: Callable[[], bool],
    store: str | None = None,
) -> Finished:
    """Trains as one of the ranks that torchrun, a cluster, or `run_ranks` has started.

    The last of them has a file, `store`, through which ranks find each other.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if config.device == "cuda":
        require_device(config, local_rank)
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        "nccl" if config.device == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=config.timeout),
        **place_of_ranks(store),
    )
    try:
        mesh = _mesh(config)
        ended = train(config, mesh, listen=listen, should_stop=should_stop)
        Team(
            mesh
        ).wait_for_all()  # whoever leaves first would cut off those that still read from it
        return ended
    finally:
        dist.destroy_process_group()
        gc.collect()  # gloo aborts if a group is only let go when Python ends


def _mesh(config: TrainConfig) -> Any:
    ranks = dist.get_world_size()
    config.require_ranks(ranks)
    if config.head_ranks == 1:
        return init_device_mesh(config.device, (ranks,))
    return init_device_mesh(config.device, (ranks // config.head_ranks, config.head_ranks))


@contextlib.contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An interruption ends the run after the step that is under way; a second one, at once."""
    stop = threading.Event()

    def ask(number: int, _: object) -> None:
        if stop.is_set():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, ask) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def main() -> None:
    """Reads the settings from the command line, and trains."""
    with stop_on_signals() as stop:
        threading.Thread(target=follow_the_launcher, args=(stop,), daemon=True).start()
        try:
            config, store = TrainConfig.from_json(sys.argv[1]), sys.argv[2]
            train_on_ranks(config, listen=_say, should_stop=stop.is_set, store=store)
        except Exception as error:
            traceback.print_exc()
            with contextlib.suppress(BrokenPipeError):
                _say(_failure(error))
            sys.exit(1)


def _say(event: Event) -> None:
    sys.stdout.write(to_line(event) + "\n")
    sys.stdout.flush()


def _failure(error: Exception) -> Failed:
    rank = int(os.environ.get("RANK", "0"))
    if isinstance(error, FlexCPError):
        parts = (error.expected, error.got, error.fix)
    else:
        text = f"{type(error).__name__} on rank {rank}: {error}"
        parts = ("every rank to finish", text, "pass --debug to see where it happened")
    expected, got, fix = (part[:_LONGEST] for part in parts)
    return Failed(rank, expected, got, fix, is_consequence(error))


if __name__ == "__main__":
    main()
