"""Generated programs of ranks that run passes in different orders, refuse, retry and checkpoint.

Each is run by `run_rank` on every rank; what comes out is right, or a FlexCPError was raised.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch.utils.checkpoint import checkpoint

import flexcp
from flexcp import FlexCPError, masks
from flexcp.plan.mesh import Ranks

HEADS, DIM = 2, 4
MASKS = {"causal": masks.causal(), "window": masks.sliding_window(9), "full": masks.full()}
SCHEDULES = ("ring", "exchange", "allgather", "ulysses")


@dataclass(frozen=True)
class PlanChoice:
    """What a plan is made of."""

    length: int
    mask: str
    schedule: str

    def make(self, mesh):
        """A new plan for a mesh; what it consists of is worked out once."""
        return replace(self.planned(mesh.size()), ranks=Ranks.of(mesh).connected())

    @cache  # noqa: B019
    def planned(self, ranks: int):
        return flexcp.make_plan(
            MASKS[self.mask], self.length, ranks, schedule=self.schedule, layout="contiguous",
            num_heads=HEADS, head_dim=DIM, block_size=8, dtype=torch.float64,
        )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One program: what each rank does, in which order."""

    seed: int
    ranks: int
    plans: tuple[PlanChoice, ...]
    calls: tuple[int, ...]
    """The plan of each call."""
    orders: tuple[tuple[int, ...], ...]
    """The order of the backward passes on each rank."""
    twice: int | None
    """A call whose backward pass runs twice."""
    refused: tuple[int, int] | None
    """A call before which one rank makes one that it refuses, and that rank; all go on."""
    checkpointed: bool | None
    """With or without reentry; None for no checkpointing."""
    astray: tuple[int, int] | None
    """A call in which one rank takes another plan, and that rank."""
    new_plans: bool
    """Whether one rank makes equal plans anew for every call."""
    thread: bool
    """Whether a second thread makes a call too."""

    @property
    def in_step(self) -> bool:
        """Whether all ranks do the same, so that everything has to be right."""
        plain = self.refused is None and self.astray is None and not self.thread
        return plain and len(set(self.orders)) == 1


def make_case(seed: int) -> Case:
    """A program, by its number."""
    rng = random.Random(seed)
    ranks = rng.choice([2, 2, 3, 4])
    schedules = SCHEDULES[:3] if ranks > HEADS else SCHEDULES
    plans = tuple(
        PlanChoice(rng.choice([19, 24, 33]), rng.choice(list(MASKS)), rng.choice(schedules))
        for _ in range(rng.choice([2, 3]))
    )
    calls = tuple(rng.randrange(len(plans)) for _ in range(rng.choice([2, 3, 4])))
    order = list(range(len(calls)))
    rng.shuffle(order)
    orders = [list(order) for _ in range(ranks)]
    if rng.random() < 0.5:
        for each in orders:
            rng.shuffle(each)
    maybe = lambda p, value: value if rng.random() < p else None  # noqa: E731
    return Case(
        seed, ranks, plans, calls, tuple(map(tuple, orders)),
        twice=maybe(0.3, rng.randrange(len(calls))),
        refused=maybe(0.3, (rng.randrange(len(calls)), rng.randrange(ranks))),
        checkpointed=maybe(0.3, rng.random() < 0.5),
        astray=maybe(0.15, (rng.randrange(len(calls)), rng.randrange(ranks))),
        new_plans=rng.random() < 0.3,
        thread=rng.random() < 0.1,
    )  # fmt: skip


@cache
def tensors(length: int, number: int):
    """q, k, v and the gradient of the output, different for every call."""
    generator = torch.Generator().manual_seed(1000 * length + number)
    shape = (1, HEADS, length, DIM)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(4)]


@cache
def expected(choice: PlanChoice, number: int):
    """Output and gradients of one process."""
    *given, weight = tensors(choice.length, number)
    given = [x.clone().requires_grad_() for x in given]
    out = flexcp.flex_attention(*given, block_mask=MASKS[choice.mask])
    return [out.detach(), *torch.autograd.grad(out, given, weight)]


def run_rank(mesh, case: Case, plans=None):
    """Runs one rank's part; returns how many results were right and what was raised."""
    rank, right, raised = mesh.get_rank(), 0, []
    made = plans or [choice.make(mesh) for choice in case.plans]
    outs: dict[int, tuple] = {}

    def local(x, plan):
        return plan.shard(x, 2)

    def check(number, found, which):
        nonlocal right
        choice = case.plans[case.calls[number]]
        plan = made[case.calls[number]]
        wanted = local(expected(choice, number)[which], plan)
        difference = (found - wanted).abs().max() if found.numel() else 0
        assert difference < 1e-9, f"call {number}, tensor {which}: off by {difference} in {case}"
        right += 1

    def attempt(step):
        try:
            step()
        except FlexCPError as error:
            raised.append(error)

    def forward(number):
        which = case.calls[number]
        plan = made[which]
        if case.new_plans and rank == 0:
            plan = case.plans[which].make(mesh)
        if case.astray == (number, rank):
            which = (which + 1) % len(made)
            plan = made[which]
        *given, _ = tensors(case.plans[which].length, number)
        given = [local(x, plan).requires_grad_() for x in given]
        call = lambda *x: flexcp.attention(*x, plan)  # noqa: E731
        if case.checkpointed is None:
            out = call(*given)
        else:
            out = checkpoint(call, *given, use_reentrant=case.checkpointed)
        if case.astray != (number, rank):
            check(number, out.detach(), 0)
            outs[number] = (out, given)

    def refuse(number):
        plan = made[case.calls[number]]
        x = local(tensors(plan.seq_len, number)[0], plan)
        bad = torch.cat([x, x], dim=2) if rank == case.refused[1] else x
        if x.numel() == 0:
            bad = x.new_zeros(1, HEADS, 1, DIM)
        flexcp.attention(bad, x, x, plan)

    def backward(number, retain):
        out, given = outs[number]
        weight = local(
            tensors(case.plans[case.calls[number]].length, number)[3], made[case.calls[number]]
        )
        for x in given:
            x.grad = None
        out.backward(weight, retain_graph=retain)  # what torch.autograd.grad can't with reentry
        for which, x in enumerate(given, start=1):
            check(number, x.grad, which)

    for number in range(len(case.calls)):
        if case.refused is not None and case.refused[0] == number:
            attempt(lambda number=number: refuse(number))
        attempt(lambda number=number: forward(number))
    if case.thread:
        other = threading.Thread(target=lambda: attempt(lambda: forward(0)))
        other.start()
        other.join()
    for number in case.orders[rank]:
        again = number == case.twice and case.checkpointed is not True
        if number in outs:
            attempt(lambda number=number, again=again: backward(number, again))
            if again:
                attempt(lambda number=number: backward(number, False))
    return right, [str(error) for error in raised]


def meet(mesh):
    """Returns once all ranks are here: some may still be told what went wrong before."""
    plan = PlanChoice(19, "causal", "ring").make(mesh)
    for _ in range(20):
        try:
            plan.unshard(plan.shard(torch.ones(19), 0), 0)
        except FlexCPError:
            continue
        return
    raise AssertionError("ranks do not come together")
