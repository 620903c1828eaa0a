"""Starting the ranks of a run on this machine through torchrun, and listening to them.

Imports no torch: the ranks do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping

from flexcp.errors import FlexCPError
from flexcp.tools.train.config import TrainConfig
from flexcp.tools.train.events import Failed, Finished, Listener, from_line


def started_by_a_launcher(environment: Mapping[str, str]) -> bool:
    """Whether this process is a rank already: of torchrun, or of a cluster that sets the same.

    >>> started_by_a_launcher({"RANK": "0", "WORLD_SIZE": "4"})
    True
    """
    return "RANK" in environment and "WORLD_SIZE" in environment


def launch(
    config: TrainConfig,
    ranks: int,
    *,
    listen: Listener,
    when_asked_to_stop: Callable[[], None] = lambda: None,
    show_logs: bool = False,
) -> Finished:
    """Trains on `ranks` processes of this machine.

    An interruption (SIGINT, SIGTERM) asks them to save and end; a second one kills them.

    Args:
        config: What to train.
        ranks: Processes.
        listen: Called with everything that rank 0 reports.
        when_asked_to_stop: Called at the first interruption.
        show_logs: Whether to pass on what ranks and torchrun write to stderr.
    """
    config.require_ranks(ranks)
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)),
        *("--module", "flexcp.tools.train.worker", config.to_json()),
    ]
    threads = str(max(1, _cores() // ranks))
    failures: list[Failed] = []
    finished: Finished | None = None
    with contextlib.ExitStack() as stack:
        logs = None if show_logs else stack.enter_context(tempfile.TemporaryFile())
        process = stack.enter_context(
            subprocess.Popen(
                command,
                env={"OMP_NUM_THREADS": threads, **os.environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=logs,
                text=True,
                start_new_session=True,  # interruptions of the terminal come to us alone
            )
        )
        stack.enter_context(_interruptions(process, when_asked_to_stop))
        assert process.stdout is not None
        for line in process.stdout:
            event = from_line(line)
            if isinstance(event, Failed):
                failures.append(event)
            elif event is not None:
                finished = event if isinstance(event, Finished) else finished
                listen(event)
        process.wait()
    if failures:
        raise _cause(failures)
    if finished is None:
        raise FlexCPError(
            "every rank to finish",
            f"ranks that ended without a word (torchrun's exit code is {process.returncode})",
            "pass --debug to see what they wrote; if memory ran out, pass fewer --tokens",
        )
    return finished


@contextlib.contextmanager
def _interruptions(process: subprocess.Popen[str], tell: Callable[[], None]) -> Iterator[None]:
    """Hands interruptions on: the first as a wish, the second as an end."""
    asked = False

    def interrupted(_: int, __: object) -> None:
        nonlocal asked
        if asked:
            os.killpg(process.pid, signal.SIGKILL)
            raise KeyboardInterrupt
        asked = True
        tell()
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            os.write(process.stdin.fileno(), b"s")

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, interrupted) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _cause(failures: list[Failed]) -> FlexCPError:
    """What a rank did by itself says more than that others missed it."""
    first = next((f for f in failures if not f.consequence), failures[0])
    return FlexCPError(first.expected, first.got, first.fix)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
