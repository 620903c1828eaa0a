"""Running a function on real processes that talk over gloo.

Ranks are forks, and a fork inherits the forking thread's OpenMP team without its other threads: the
first parallel region of a rank would wait for them for ever. A thread that is new has no team. So
ranks are forked from one, and make teams of their own, whatever the caller has run before.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from flexcp.comm.faults import names_of
from flexcp.comm.rank_errors import RankError
from flexcp.errors import FlexCPError, finite_number, whole_number
from flexcp.testing.world import mesh_shape, require_function

T = TypeVar("T")

_IN_ALL = 10
"""Times `timeout` that a call of `spawn` may take, however busy its ranks are."""
_TO_REPORT = 10.0
"""Seconds that ranks get to say that they waited for another in vain."""


_MOST_PROCESSES = 256

if not torch.accelerator.is_available():
    # torch built for GPUs, on a machine without one, counts one as soon as anything is compiled.
    # The first backward pass starts a thread for each, and from then on forks can run none.
    torch.ones((), requires_grad=True).backward()


def spawn(
    fn: Callable[[Any], T],
    world_size: int | tuple[int, ...],
    *,
    timeout: float = 60.0,
    threads: int = 1,
) -> list[T]:
    """Calls fn(mesh) on real processes, one per rank, that talk over gloo; the results by rank.

    The processes are forks of this one, so that fn may be any function, also one defined where it
    is used, and so that starting them takes a fraction of a second instead of an import of torch.
    They have the caller's gradient mode, as simulated ranks do, and nothing else that the caller
    has set for its thread alone. A process that has used CUDA can't be forked. An exception is
    raised as by `simulate`. No rank outlives the call.

    Args:
        fn: The code of one rank; it gets a DeviceMesh.
        world_size: How many ranks, or the shape of a mesh such as (2, 2).
        timeout: Seconds after which a rank that waits for another gives up. All of it may take ten
            times as long. Ranks that have not answered by then are killed, and the error names
            them.
        threads: Threads of each rank.

    >>> spawn(lambda mesh: mesh.get_rank() * 10, 2)
    [0, 10]
    """
    require_function(fn)
    shape = mesh_shape(world_size, at_most=_MOST_PROCESSES)
    timeout = finite_number("timeout", timeout, fix="pass seconds", least=1e-3, most=1e7)
    threads = whole_number("threads", threads, at_least=1, at_most=1024, fix="pass threads=1")
    if torch.cuda.is_initialized():
        raise FlexCPError(
            "a process that has not used CUDA, since ranks are forked from it",
            "one that has",
            "call spawn before CUDA is used, or start the ranks with torchrun",
        )
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        world = _World(shape, store, timeout, threads, torch.is_grad_enabled())
        with _running(fn, world) as ranks:
            return _results(ranks, timeout)


@dataclass(frozen=True)
class _World:
    """What the processes of one call have in common."""

    shape: tuple[int, ...]
    """Ranks along each dimension of the mesh."""
    store: str
    """The file through which they find each other."""
    timeout: float
    """Seconds that a rank waits for another."""
    threads: int
    """Threads of each rank."""
    grad: bool
    """Whether operations are recorded for gradients."""


@dataclass(frozen=True, eq=False)
class _RankProcess:
    """The process of a rank, and where its answer comes from."""

    process: BaseProcess
    answer: Connection

    def read(self) -> tuple[str, Any]:
        """What became of fn: "returned" and its result, or "failed", the error and its trace."""
        with contextlib.suppress(EOFError, OSError):
            if self.answer.poll():
                kind, payload = pickle.loads(self.answer.recv_bytes())
                return kind, payload
        self.process.join(1.0)
        return "failed", (RuntimeError(f"it ended with code {self.process.exitcode}"), "")


@contextlib.contextmanager
def _running(fn: Callable[[Any], Any], world: _World) -> Iterator[list[_RankProcess]]:
    """The processes of all ranks; none of them is left afterwards."""
    ranks: list[_RankProcess] = []
    try:
        _in_a_new_thread(lambda: _fork(fn, world, ranks))
        yield ranks
    finally:
        for rank in ranks:
            rank.process.join(1.0)
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join()
            rank.answer.close()


def _in_a_new_thread(fn: Callable[[], None]) -> None:
    """Calls fn in a thread that has never run an OpenMP region; raises what it raises."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            fn()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="fork")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _fork(fn: Callable[[Any], Any], world: _World, ranks: list[_RankProcess]) -> None:
    """Starts a process per rank, and adds it to `ranks`."""
    context = multiprocessing.get_context("fork")
    for rank in range(prod(world.shape)):
        ours, theirs = context.Pipe(duplex=False)
        # Not daemonic: ranks may have processes of their own, such as a DataLoader's workers.
        process = context.Process(target=_run, args=(fn, rank, world, theirs), daemon=False)
        _let_go_of_memory()
        with warnings.catch_warnings():  # Python's, about forks beside other threads: see above
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        ranks.append(_RankProcess(process, ours))


def _results(ranks: list[_RankProcess], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, tuple[BaseException, str]] = {}
    begin = time.monotonic()
    give_up = begin + _IN_ALL * timeout + _TO_REPORT
    while silent := [r for r in range(len(ranks)) if r not in results and r not in failures]:
        # Both: a process that the rank has started may hold its pipe open after it has ended.
        sources = {source: r for r in silent for source in _sources(ranks[r])}
        ready = wait(list(sources), timeout=max(0.0, give_up - time.monotonic()))
        if not ready:
            error = _no_answer(silent, time.monotonic() - begin)
            failures |= dict.fromkeys(silent, (error, ""))
        for rank in {sources[source] for source in ready}:
            kind, payload = ranks[rank].read()
            if kind == "returned":
                results[rank] = payload
            else:
                failures[rank] = payload
                # The others notice within their own time limit; leave them a little more.
                give_up = min(give_up, time.monotonic() + timeout + _TO_REPORT)
    if failures:
        rank = _first_cause(failures)
        cause, text = failures[rank]
        raised = RankError.of(rank, cause)
        raised.failures = {r: e for r, (e, _) in sorted(failures.items())}
        raised.add_note(text)
        raise raised from cause
    return [results[rank] for rank in range(len(ranks))]


def _sources(rank: _RankProcess) -> tuple[Any, Any]:
    return rank.answer, rank.process.sentinel


class _NoAnswerError(FlexCPError):
    """Ranks were killed since they neither returned nor raised."""


def _no_answer(ranks: list[int], seconds: float) -> FlexCPError:
    return _NoAnswerError(
        f"{names_of(ranks)} to return or raise",
        f"nothing within {seconds:.0f} s, so that spawn killed what did not answer",
        "pass a longer timeout= if that was too short; else look for what a rank waits for",
    )


def _first_cause(failures: dict[int, tuple[BaseException, str]]) -> int:
    """The rank that failed by itself, rather than because it waited for another."""

    def removed(rank: int) -> tuple[int, int]:
        error = failures[rank][0]
        return (2 if is_consequence(error) else int(isinstance(error, _NoAnswerError))), rank

    return min(failures, key=removed)


def is_consequence(error: BaseException) -> bool:
    """Whether a rank failed because another one did.

    >>> is_consequence(RuntimeError("Connection closed by peer [127.0.0.1]:2983"))
    True
    """
    signs = ("no answer on rank", "closed by peer", "reset by peer", "Timed out waiting")
    return any(sign in str(error) for sign in signs)


def _run(fn: Callable[[Any], Any], rank: int, world: _World, pipe: Connection) -> None:
    """One rank: what its process does."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    _forget_compile_threads()
    _forget_memory_of_threads()
    torch.set_num_threads(world.threads)
    succeeded = False
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(world.store, prod(world.shape)),  # type: ignore[attr-defined]
            rank=rank,
            world_size=prod(world.shape),
            timeout=datetime.timedelta(seconds=world.timeout),
        )
        with torch.set_grad_enabled(world.grad):
            result = fn(init_device_mesh("cpu", world.shape))
        message = pickle.dumps(("returned", result))
        succeeded = True
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        message = pickle.dumps(("failed", (_portable(error), text)))
    pipe.send_bytes(message)
    pipe.close()
    if dist.is_initialized():
        if succeeded:  # whoever leaves first would cut off those that still read from it
            with contextlib.suppress(RuntimeError):
                dist.barrier()
        dist.destroy_process_group()


def _forget_memory_of_threads() -> None:
    """Makes MKL take memory from the system: its own tables of threads may not survive a fork."""
    _ask_mkl("mkl_serv_disable_fast_mm")


def _let_go_of_memory() -> None:
    """Waits for threads that hold a lock of MKL's tables, such as those that are just ending.

    A rank that was forked meanwhile would have the lock without the thread, and spin for ever.
    """
    _ask_mkl("mkl_serv_free_buffers")


def _ask_mkl(function: str) -> None:
    with contextlib.suppress(OSError, AttributeError):  # a build without MKL
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        getattr(library, function)()


def _forget_compile_threads() -> None:
    """Makes torch start new threads for compiling: those that it knows of are the parent's.

    Torch itself forgets the parent's compile processes after a fork, but not these threads, and
    would wait for one of them.
    """
    compiler = sys.modules.get("torch._inductor.async_compile")
    if compiler is not None:
        compiler.AsyncCompile.pool.cache_clear()


def _portable(error: BaseException) -> BaseException:
    """The exception itself, if another process can read it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
