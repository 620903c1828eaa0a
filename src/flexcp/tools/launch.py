"""Starting ranks on this machine through torchrun, hearing what they say, and stopping them.

Imports no torch: the ranks do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping


def started_by_a_launcher(environment: Mapping[str, str]) -> bool:
    """Whether this process is a rank already: of torchrun, or of a cluster that sets the same.

    >>> started_by_a_launcher({"RANK": "0", "WORLD_SIZE": "4"})
    True
    """
    return "RANK" in environment and "WORLD_SIZE" in environment


def run_ranks(
    module: str,
    argument: str,
    ranks: int,
    *,
    hear: Callable[[str], None],
    when_asked_to_stop: Callable[[], None] = lambda: None,
    show_logs: bool = False,
) -> int:
    """Runs a module on `ranks` processes of this machine; torchrun's exit code.

    An interruption (SIGINT, SIGTERM) becomes a byte on the ranks' stdin, which asks them to end; a
    second one kills them.

    Args:
        module: What each rank runs, as `python -m` does.
        argument: Its only argument.
        ranks: Processes.
        hear: Called with every line that a rank writes to stdout.
        when_asked_to_stop: Called at the first interruption.
        show_logs: Whether to pass on what ranks and torchrun write to stderr.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)),
        *("--module", module, argument),
    ]
    threads = str(max(1, cores() // ranks))
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
            hear(line)
        return process.wait()


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


def follow_the_launcher(stop: threading.Event) -> None:
    """Sets `stop` when a byte on stdin asks for it, and ends the process when stdin ends.

    For a thread of a rank that `run_ranks` has started: the end of stdin says that the launcher is
    gone, and so must its ranks be.
    """
    if os.read(0, 1):
        stop.set()
        while os.read(0, 1):
            pass
    os._exit(1)


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load() -> float:
    """Processes that wanted to run in the last minute, on average."""
    return os.getloadavg()[0]


def is_busy() -> bool:
    """Whether other processes keep so many cores busy that threads will wait for each other."""
    return load() > 0.75 * cores()
