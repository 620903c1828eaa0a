"""Starting ranks on this machine, hearing what they say, and stopping them.

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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def started_by_a_launcher(environment: Mapping[str, str]) -> bool:
    """Whether this process is a rank already: of torchrun, or of a cluster that sets the same.

    >>> started_by_a_launcher({"RANK": "0", "WORLD_SIZE": "4"})
    True
    """
    return "RANK" in environment and "WORLD_SIZE" in environment


@dataclass(frozen=True)
class RanksExit:
    """How the ranks that were started here have ended."""

    codes: tuple[int, ...]
    """Exit codes; negative for the signal that ended a rank."""
    ended_here: frozenset[int] = frozenset()
    """Ranks that were ended because another one had failed."""

    @property
    def failed(self) -> list[int]:
        """The ranks that ended by themselves before their work was done, killed ones first."""
        own = [r for r, code in enumerate(self.codes) if code and r not in self.ended_here]
        return sorted(own, key=lambda rank: self.codes[rank] >= 0)

    def __str__(self) -> str:
        """Who has ended, and how.

        >>> str(RanksExit((0, -9))), str(RanksExit((0, 0)))
        ('rank 1 was ended by SIGKILL', 'all ranks have ended')
        """
        if not self.failed:
            return "all ranks have ended"
        rank = self.failed[0]
        code = self.codes[rank]
        if code > 0:
            return f"rank {rank} has ended with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"rank {rank} was ended by {name}"


def run_ranks(
    module: str,
    argument: str,
    ranks: int,
    *,
    hear: Callable[[str], None],
    when_asked_to_stop: Callable[[], None] = lambda: None,
    show_logs: bool = False,
) -> RanksExit:
    """Runs a module on `ranks` processes of this machine, and waits for their end.

    They find each other through a file, and talk over the loopback interface unless
    GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names another: nothing listens to the network. If one
    fails, the others have a while to say what they saw. An interruption (SIGINT, SIGTERM) becomes a
    byte on the ranks' stdin, which asks them to end; a second one kills them.

    Args:
        module: What each rank runs, as `python -m` does.
        argument: Its first argument; the second is the file through which ranks find each other.
        ranks: Processes.
        hear: Called with every line that a rank writes to stdout.
        when_asked_to_stop: Called at the first interruption.
        show_logs: Whether to pass on what ranks write to stderr.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    about = {
        "OMP_NUM_THREADS": str(max(1, cores() // ranks)),
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        logs = None if show_logs else stack.enter_context(tempfile.TemporaryFile())
        (their_in, wishes), (lines, their_out) = os.pipe(), os.pipe()
        heard = stack.enter_context(os.fdopen(lines))
        stack.callback(os.close, wishes)
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, processes)
        stack.enter_context(_interruptions(processes, wishes, when_asked_to_stop))
        for rank in range(ranks):
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, argument, os.path.join(folder, "store")],
                    env={**about, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=their_in,
                    stdout=their_out,
                    stderr=logs,
                    start_new_session=True,  # interruptions of the terminal come to us alone
                )
            )
        os.close(their_in)
        os.close(their_out)
        watch = _RanksWatch(processes)
        thread = threading.Thread(target=watch.until_all_have_ended, daemon=True)
        thread.start()
        for line in heard:
            hear(line)
        thread.join()
        return RanksExit(tuple(p.wait() for p in processes), frozenset(watch.ended_here))


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with contextlib.suppress(OSError):
            process.kill()


class _RanksWatch:
    """Ends ranks that are left over some time after one has failed."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self.processes = processes
        self.ended_here: set[int] = set()

    def until_all_have_ended(self) -> None:
        """Waits for all ranks."""
        since: float | None = None
        while any(process.poll() is None for process in self.processes):
            if since is None and any(process.poll() for process in self.processes):
                since = time.monotonic()
            if since is not None and time.monotonic() - since > _TO_REPORT:
                left = {r for r, p in enumerate(self.processes) if p.poll() is None}
                self.ended_here |= left
                _end([self.processes[rank] for rank in left])
            time.sleep(0.05)


_TO_REPORT = 20.0
"""Seconds that ranks have after one has failed."""


@contextlib.contextmanager
def _interruptions(
    processes: Sequence[subprocess.Popen[bytes]], wishes: int, tell: Callable[[], None]
) -> Iterator[None]:
    """Hands interruptions on: the first as a wish, the second as an end."""
    asked = False

    def interrupted(_: int, __: object) -> None:
        nonlocal asked
        if asked:
            _end(processes)
            raise KeyboardInterrupt
        asked = True
        tell()
        with contextlib.suppress(OSError):
            os.write(wishes, b"s")

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, interrupted) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def place_of_ranks(store: str | None) -> dict[str, Any]:
    """Arguments of `init_process_group` for ranks that find each other through a file.

    None of them for ranks that torchrun or a cluster has started, which say it in the environment.
    """
    if store is None:
        return {}
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = dist.FileStore(store, size)  # type: ignore[attr-defined]
    return {"store": found, "rank": rank, "world_size": size}


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
