"""Running a function on real processes that talk over gloo."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from math import prod
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

from flexcp.comm.simulated import RankError
from flexcp.errors import FlexCPError
from flexcp.testing.world import mesh_shape

T = TypeVar("T")


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
    A process that has used CUDA can't be forked. An exception is raised as by `simulate`.

    Args:
        fn: The code of one rank; it gets a DeviceMesh.
        world_size: How many ranks, or the shape of a mesh such as (2, 2).
        timeout: Seconds after which a rank that waits for another gives up.
        threads: Threads of each rank.

    >>> spawn(lambda mesh: mesh.get_rank() * 10, 2)
    [0, 10]
    """
    shape = mesh_shape(world_size)
    if torch.cuda.is_initialized():
        raise FlexCPError(
            "a process that has not used CUDA, since ranks are forked from it",
            "one that has",
            "call spawn before CUDA is used, or start the ranks with torchrun",
        )
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes: list[Connection] = []
        ranks = []
        for rank in range(prod(shape)):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (fn, rank, shape, store, timeout, threads, theirs)
            process = context.Process(target=_run, args=arguments, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            ranks.append(process)
        try:
            return _results(pipes, ranks, timeout)
        finally:
            for process in ranks:
                process.join(1.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _results(pipes: list[Connection], ranks: list[Any], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, tuple[BaseException, str]] = {}
    open_: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    give_up: float | None = None
    while open_:
        limit = None if give_up is None else max(0.0, give_up - time.monotonic())
        ready = wait(list(open_), timeout=limit)
        if not ready:
            break
        for pipe in ready:
            rank = open_.pop(pipe)
            try:
                kind, payload = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                ranks[rank].join(1.0)
                code = ranks[rank].exitcode
                kind, payload = "failed", (RuntimeError(f"it ended with code {code}"), "")
            if kind == "returned":
                results[rank] = payload
            else:
                failures[rank] = payload
                # The others notice within their own time limit; leave them a little more.
                give_up = give_up or time.monotonic() + timeout + 10.0
    if failures:
        rank = _first_cause(failures)
        cause, text = failures[rank]
        error = RankError.of(rank, cause)
        error.failures = {r: e for r, (e, _) in sorted(failures.items())}
        error.add_note(text)
        raise error from cause
    return [results[rank] for rank in range(len(pipes))]


def _first_cause(failures: dict[int, tuple[BaseException, str]]) -> int:
    """The rank that failed by itself, rather than because it waited for another."""
    own = [r for r, (e, _) in failures.items() if not is_consequence(e)]
    return min(own or failures)


def is_consequence(error: BaseException) -> bool:
    """Whether a rank failed because another one did.

    >>> is_consequence(RuntimeError("Connection closed by peer [127.0.0.1]:2983"))
    True
    """
    signs = ("no answer on rank", "closed by peer", "reset by peer")
    return any(sign in str(error) for sign in signs)


def _run(
    fn: Callable[[Any], Any],
    rank: int,
    shape: tuple[int, ...],
    store: str,
    timeout: float,
    threads: int,
    pipe: Connection,
) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    # One thread keeps a fork away from the parent's thread pool, which does not exist here.
    torch.set_num_threads(threads)
    succeeded = False
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, prod(shape)),  # type: ignore[attr-defined]
            rank=rank,
            world_size=prod(shape),
            timeout=datetime.timedelta(seconds=timeout),
        )
        result = fn(init_device_mesh("cpu", shape))
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


def _portable(error: BaseException) -> BaseException:
    """The exception itself, if another process can read it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
