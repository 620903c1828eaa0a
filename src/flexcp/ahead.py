"""plan_ahead: batches with their plans, each made while the steps before it run."""

from __future__ import annotations

import multiprocessing
import pickle
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from flexcp.errors import FlexCPError, quote, require_function, told, whole_number
from flexcp.ops.sharded import programs_of
from flexcp.plan import Plan, Ranks

Batch = TypeVar("Batch")


def plan_ahead(
    batches: Iterable[Batch],
    plan_of: Callable[[Any], Plan],
    mesh: Any = None,
    *,
    ahead: int = 1,
    processes: int = 0,
    depends_on: Callable[[Batch], Any] | None = None,
) -> Generator[tuple[Batch, Plan], None, None]:
    """Yields each batch with its plan, which was made while the steps before it ran.

    Where every batch has a mask of its own (packed documents), a plan is made for every step. Here
    that happens in a thread or in other processes, `ahead` batches before the plan is needed, with
    what the rank has to work out before the first call. Every rank does so by itself, and nothing
    is communicated: ranks compare the plan at its first call, as always.

    Plans come in the order of the batches, which are drawn by the caller's own thread: a loader
    is `ahead` batches further than the loop. What `batches` or `plan_of` raise is raised when the
    loop comes to that batch. Leaving the loop, `close()` and the end of the iterator stop what is
    under way.

    Args:
        batches: Such as a DataLoader.
        plan_of: Makes the plan of a batch: calls `flexcp.make_plan` with the mesh, or with its
            size, and returns what that returns. Within processes it has to be a function at the
            top level of a module, and gets no mesh.
        mesh: What plans that were made for a number of ranks are run on: a DeviceMesh, or the one
            that `testing.simulate` gives. None leaves plans as they are.
        ahead: How many batches are planned before they are needed.
        processes: How many processes make plans. 0 is a thread of this process: enough unless
            planning holds up Python in the step itself.
        depends_on: What `plan_of` is called with, of a batch: document lengths, say. The whole
            batch by default. With processes, this is what travels to them.

    >>> import flexcp
    >>> def plan_of(lengths):
    ...     mask = flexcp.masks.causal() & flexcp.masks.document(lengths=lengths)
    ...     return flexcp.make_plan(mask, sum(lengths), 2, num_heads=2, block_size=4)
    >>> def rank(mesh):
    ...     x = torch.randn(1, 2, 8, 4)
    ...     shapes = []
    ...     for lengths, plan in plan_ahead([[3, 5], [8]], plan_of, mesh):
    ...         local = plan.shard(x, 2)
    ...         shapes.append((lengths, flexcp.attention(local, local, local, plan).shape[2]))
    ...     return shapes
    >>> flexcp.testing.simulate(rank, 2)
    [[([3, 5], 4), ([8], 4)], [([3, 5], 4), ([8], 4)]]
    """
    ahead = whole_number("ahead", ahead, at_least=1, fix="pass ahead=1 or more")
    processes = whole_number(
        "processes", processes, at_least=0, at_most=1024, fix="pass processes=0 or more"
    )
    fix = "pass an iterable of batches, such as a DataLoader"
    try:
        source = iter(batches)
    except Exception:  # of an object's own
        raise FlexCPError("batches", told(batches), fix) from None
    if isinstance(batches, str | bytes):
        raise FlexCPError("batches", told(batches), fix)
    for name, function in (("plan_of", plan_of), ("depends_on", depends_on)):
        if function is not None or name == "plan_of":
            require_function(f"{name}, a function of one argument", function, 1, "pass one")
    if processes:
        _require_picklable(plan_of)
    # Here and not in the thread: some meshes make a process group first, which ranks do together.
    ranks = None if mesh is None else Ranks.of(mesh).connected()
    return _planned(source, plan_of, ranks, ahead, processes, depends_on)


def _planned(
    source: Iterator[Batch],
    plan_of: Callable[[Any], Plan],
    ranks: Ranks | None,
    ahead: int,
    processes: int,
    depends_on: Callable[[Batch], Any] | None,
) -> Generator[tuple[Batch, Plan], None, None]:
    waiting: deque[tuple[Batch, Future[Plan]]] = deque()
    failure: BaseException | None = None
    with ExitStack() as stack:
        pool = None
        if processes:
            context = multiprocessing.get_context("spawn")  # others break CUDA
            pool = ProcessPoolExecutor(processes, context, initializer=_use_one_thread)
            stack.callback(_stop, pool)
        thread = ThreadPoolExecutor(1, thread_name_prefix="flexcp-planner")
        stack.callback(_stop, thread)
        while True:
            while failure is None and len(waiting) <= ahead:
                try:
                    batch = next(source)
                    given = batch if depends_on is None else depends_on(batch)
                except BaseException as error:  # raised when the loop comes to it
                    failure = error
                    break
                made = None if pool is None else pool.submit(plan_of, given)
                waiting.append((batch, thread.submit(_ready, plan_of, given, made, ranks)))
            if not waiting:
                break
            batch, plan = waiting.popleft()
            yield batch, plan.result()
    assert failure is not None
    if not isinstance(failure, StopIteration):
        raise failure


def _ready(
    plan_of: Callable[[Any], Plan], given: Any, made: Future[Plan] | None, ranks: Ranks | None
) -> Plan:
    """A plan that runs on this rank, with the programs of its masks."""
    try:
        plan = plan_of(given) if made is None else made.result()
    except BrokenProcessPool as error:
        raise FlexCPError(
            "a process that makes plans to answer",
            "one that has ended",
            "look at its output; a script that is started again by its processes needs "
            'if __name__ == "__main__"',
        ) from error
    if not isinstance(plan, Plan):
        raise FlexCPError(
            "plan_of to return a plan",
            told(plan),
            "return what flexcp.make_plan returns",
        )
    if ranks is not None:
        plan = plan.on(ranks)
    if plan.ranks.transport is not None:
        for mask, schedule in plan.schedules.items():
            for part in range(schedule.head_parts):
                programs = programs_of(plan, mask, part=part)
                _ = programs.forward, programs.backward
    return plan


def _stop(executor: Executor) -> None:
    executor.shutdown(wait=True, cancel_futures=True)


def _use_one_thread() -> None:
    torch.set_num_threads(1)


def _require_picklable(plan_of: Callable[[Any], Plan]) -> None:
    try:
        pickle.dumps(plan_of)
    except Exception as error:
        raise FlexCPError(
            "plan_of to be a function at the top level of a module, since processes call it",
            f"{quote(plan_of)} ({error})",
            "move it to the top level, and make plans for a number of ranks there; or leave out "
            "processes",
        ) from error
