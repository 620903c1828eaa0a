"""What ranks are examined for: every device, the transport, the agreement, plans against one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from flexcp import masks
from flexcp.comm.agreement import Agreement
from flexcp.errors import FlexCPError
from flexcp.ops import attention
from flexcp.plan import Plan, make_plan
from flexcp.testing.tolerance import relative_error, tolerance
from flexcp.tools.doctor.budget import Deadline
from flexcp.tools.doctor.cases import AttentionCase, Inputs, cases
from flexcp.tools.doctor.exactness import RESULTS, Oracle, call
from flexcp.tools.doctor.findings import Finding
from flexcp.tools.doctor.ranks import RankAnswer, RankCheck, RankContext, SumUp

_SIZES = (1, 1000, 1 << 16)
"""Elements of messages: one, a few, and more than fits into a socket's buffer."""
SCHEDULES = ("exchange", "ring", "allgather", "ulysses")
_CASES = ("causal", "documents", "window", "dropout")
_DTYPE = torch.float32
_HALF = torch.bfloat16
"""In which GPUs compute many masks by FlashAttention, which has no gradient of lse."""
_REPEATS = 10
"""Calls over ranks that must give the same bits."""


def check_devices(context: RankContext, _: Deadline) -> RankAnswer:
    """Whether attention is right on the device of every rank: one of several may be broken."""
    oracle = Oracle.of(context.budget, context.device)
    for dtype in (getattr(torch, name) for name in context.budget.dtypes):
        given = oracle.inputs(dtype)
        for case in _few_cases(context):
            found = call(None, case, given)[:5]
            wrong = _wrong(found, oracle.expected(case, given)[:5], dtype)
            if wrong:
                return RankAnswer(f"{context.device}, {case.name}: {wrong}")
    return RankAnswer()


def check_transport(context: RankContext, _: Deadline) -> RankAnswer:
    """Whether every rank gets from every other what that one sent, in every way of sending."""
    transport, rank, size = context.transport, context.rank, context.size
    agreement = Agreement("test the transport", "a test of the transport", {}, "run it again")
    labels = transport.calls.begin(agreement).passing("forward")
    peers = [peer for peer in range(size) if peer != rank]
    wrong: list[str] = []

    def sent(sender: int, receiver: int, count: int) -> Tensor:
        first = 1000 * sender + receiver
        return torch.arange(first, first + count, device=context.device).float()

    def compare(x: Tensor, sender: int, receiver: int, how: str) -> None:
        different = int((x != sent(sender, receiver, x.numel())).sum())
        if different:
            told = f"{how}: {different} of {x.numel()} elements from rank {sender} are wrong"
            wrong.append(told)

    for number, count in enumerate(_SIZES):
        sends = [(peer, sent(rank, peer, count)) for peer in peers]
        comes = [(peer, torch.full_like(x, torch.nan)) for peer, x in sends]
        transport.exchange(sends, comes, label=labels.round("rows", number)).wait()
        for peer, x in comes:
            compare(x, peer, rank, "messages")
        own = sent(rank, 0, count)
        every = torch.full((size, count), torch.nan, device=context.device)
        transport.all_gather(every, own, label=labels.round("gradients", number)).wait()
        for peer in range(size):
            compare(every[peer], peer, 0, "all-gather")
        parts = torch.cat([sent(rank, peer, count) for peer in range(size)])
        came = torch.full_like(parts, torch.nan)
        counts, ranks = [count] * size, range(size)
        label = labels.round("swap", number)
        transport.all_to_all(came, parts, counts, counts, ranks, label=label).wait()
        for peer, x in enumerate(came.view(size, count)):
            compare(x, peer, rank, "all-to-all")
    return RankAnswer("; ".join(wrong[:3]))


def check_agreement(context: RankContext, _: Deadline) -> RankAnswer:
    """Whether ranks that call differently are told so, and can go on."""
    oracle = Oracle.of(context.budget, context.device)
    plan, _given, local = _planned(context, oracle, _few_cases(context)[0], "exchange")
    q, k, v = local
    differs = context.rank == context.size - 1
    try:
        attention(q, k, v, plan, scale=0.5 if differs else 0.25)
    except FlexCPError as error:
        if "scale" not in str(error):
            return RankAnswer(f"it raised {error}, which does not name the scale that differed")
    else:
        return RankAnswer("a call with another scale than that of other ranks was not noticed")
    attention(q, k, v, plan)
    return RankAnswer()


def check_plans(schedule: str, context: RankContext, _: Deadline) -> RankAnswer:
    """Whether ranks compute what one process does by the definition, forward and backward.

    A rank that finds a fault makes all calls nevertheless: the others wait for its rows.
    """
    oracle = Oracle.of(context.budget, context.device)
    wrong: list[str] = []
    for case in _few_cases(context):
        plan, given, local = _planned(context, oracle, case, schedule, _HALF)
        expected = [plan.shard(x, 2) for x in oracle.expected(case, given)[:5]]
        off = _wrong(_run(plan, local, given, case), expected, _HALF)
        if off:
            wrong.append(f"{case.name} in bfloat16: {off}")
        plan, given, local = _planned(context, oracle, case, schedule)
        expected = [plan.shard(x, 2) for x in oracle.expected(case, given)[:5]]
        found = _run(plan, local, given, case)
        off = _wrong(found, expected, _DTYPE)
        again = [_run(plan, local, given, case) for _turn in range(_REPEATS - 1)]
        if off:
            wrong.append(f"{case.name}: {off}")
        elif not all(torch.equal(x, y) for r in again for x, y in zip(r, found, strict=True)):
            wrong.append(f"{case.name}: two calls with the same tensors differ")
    return RankAnswer("; ".join(wrong))


def _planned(
    context: RankContext,
    oracle: Oracle,
    case: AttentionCase,
    schedule: str,
    dtype: torch.dtype = _DTYPE,
) -> tuple[Plan, Inputs, list[Tensor]]:
    """A plan for a case, its whole tensors, and this rank's rows of q, k and v."""
    given, budget = oracle.inputs(dtype, "varlen" if dtype == _HALF else ""), context.budget
    plan = make_plan(
        masks.full() if case.mask is None else case.mask,
        budget.tokens,
        context.mesh,
        schedule=schedule,
        block_size=32,
        num_heads=budget.heads,
        num_kv_heads=given.k.shape[1],
        head_dim=budget.head_dim,
        dtype=dtype,
    )
    return plan, given, [plan.shard(x.detach(), 2).requires_grad_() for x in given.qkv]


def _run(
    plan: Plan, local: Sequence[Tensor], given: Inputs, case: AttentionCase
) -> tuple[Tensor, ...]:
    """out, lse, dq, dk and dv of this rank's rows."""
    q, k, v = local
    out, lse = attention(q, k, v, plan, return_lse=True, **case.dropout)
    results, grads = [out], [given.grad_out]
    if given.grad_lse is not None:
        results, grads = [out, lse], [given.grad_out, given.grad_lse]
    found = torch.autograd.grad(results, local, [plan.shard(x, 2) for x in grads])
    return out.detach(), lse.detach(), *found


def _wrong(found: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype) -> str:
    """Which results are off, and by how much; empty if none is."""
    told = []
    for what, actual, wanted in zip(RESULTS, found, expected, strict=False):
        error = relative_error(actual, wanted)
        if not error <= tolerance(dtype):
            told.append(f"{what} is off by {error:.1e} ({tolerance(dtype):.1e} allowed)")
    return ", ".join(told)


def _few_cases(context: RankContext) -> list[AttentionCase]:
    budget = context.budget
    every = cases(budget.tokens, budget.heads, context.device)
    return [case for case in every if case.name in _CASES]


def _passed(section: str, name: str, said: str) -> SumUp:
    """Nothing more to say than that it passed."""
    return lambda context, _: (
        Finding(section, name, "passed", said.format(ranks=context.size)),
        None,
    )


_NETWORK = (
    "look at the links between these ranks (NCCL_DEBUG=INFO says what NCCL uses), and run it "
    "again; nothing that these ranks compute can be believed"
)
_OURS = "please report it with the report's files"


def _plan_check(schedule: str) -> RankCheck:
    name = f"plan by {schedule}"
    said = (
        f"{', '.join(_CASES)} on {{ranks}} ranks equal one process in float64, forward and "
        f"backward, in float32 with the same bits in {_REPEATS} repeats, and in bfloat16"
    )
    run = partial(check_plans, schedule)
    return RankCheck("ranks", name, 2.0, run, _passed("ranks", name, said), _OURS)


CHECKS = (
    RankCheck(
        "ranks",
        "devices",
        2.0,
        check_devices,
        _passed("ranks", "devices", "attention is right on the devices of all {ranks} ranks"),
        "take this device out of the job (CUDA_VISIBLE_DEVICES), and have it looked at",
        ranks=1,
    ),
    RankCheck(
        "ranks",
        "transport",
        1.0,
        check_transport,
        _passed(
            "ranks",
            "transport",
            "messages, all-gathers and all-to-alls between {ranks} ranks arrive as they were sent",
        ),
        _NETWORK,
    ),
    RankCheck(
        "ranks",
        "agreement",
        1.0,
        check_agreement,
        _passed("ranks", "agreement", "ranks that call differently are told what differs"),
        _OURS,
    ),
    *(_plan_check(schedule) for schedule in SCHEDULES),
)
"""In the order in which one fault leads to the next."""
