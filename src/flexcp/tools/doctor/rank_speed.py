"""What ranks reach together: links, as a Machine to plan for, and a plan beside torch's ring."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexcp import masks
from flexcp.comm.agreement import Agreement
from flexcp.comm.labels import PassLabel
from flexcp.kernels.preferences import device_name
from flexcp.ops import attention
from flexcp.plan import Machine, make_plan
from flexcp.tools.doctor.budget import Deadline
from flexcp.tools.doctor.cases import AttentionCase, Inputs, attend, inputs
from flexcp.tools.doctor.findings import Finding
from flexcp.tools.doctor.ranks import RankAnswer, RankCheck, RankContext
from flexcp.tools.doctor.torch_ring import ring_attention
from flexcp.units import format_bytes, format_seconds

_SMALL, _LARGE = 64, 1 << 20
"""Elements of float32 in the first small and the first large message."""
_MANY = 8
"""Messages of a round, to tell the cost of a message from that of a round."""
_TURNS = 5
"""Times that everything is timed; the best counts."""
_SMALL_TURNS = 20
"""Times that small messages are timed, which others disturb the most."""
_ALL = 1 << 30
"""Ranks of a node, where there is no other node."""


def check_links(context: RankContext, deadline: Deadline) -> RankAnswer:
    """Seconds and bytes between a rank and a peer of its node, and one of another node."""
    found: dict[str, Any] = {}
    nodes = -(-context.size // context.ranks_per_node)
    within, between = _peer(context, 1), _peer(context, context.ranks_per_node)
    if context.ranks_per_node > 1:
        found["within"] = _link(context, within, "within", deadline.share(0.5))
    if nodes > 1:
        found["between"] = _link(context, between, "between", deadline.share(0.8))
    return RankAnswer(data={**found, **_compute(context, deadline)})


def _peer(context: RankContext, step: int) -> int | None:
    """The rank that a rank forms a pair with, `step` apart; None for one that is left over."""
    rank = context.rank
    other = rank + step if (rank // step) % 2 == 0 else rank - step
    return other if other < context.size else None


def _link(
    context: RankContext, peer: int | None, what: str, deadline: Deadline
) -> dict[str, float] | None:
    """Latency, cost of a message, and bandwidth, with all pairs of ranks at work at once."""
    agreement = Agreement(f"time links {what}", f"timing of links {what}", {}, "run it again")
    labels = context.transport.calls.begin(agreement).passing("forward")
    rounds = iter(range(1 << 30))

    def seconds(elements: int, messages: int, turns: int = _TURNS) -> float:
        best = float("inf")
        for _ in range(turns):
            number = next(rounds)
            context.together()
            if peer is not None:
                taken = _exchange(context, peer, elements, messages, labels, number)
                best = min(best, taken)
        return best

    one = seconds(_SMALL, 1, _SMALL_TURNS)
    many = seconds(_SMALL, _MANY, _SMALL_TURNS)
    most = context.budget.largest_message // 4
    elements = min(_LARGE, most)
    large = seconds(elements, 1)
    while context.share(
        f"{what}/{elements}",
        float(8 * large * _TURNS < deadline.left and elements * 4 <= most),
    ):
        elements *= 4
        large = seconds(elements, 1)
    if peer is None:
        return None
    # A message costs the least that noise allows, and at most half of a round with one.
    message = min(max((many - one) / (_MANY - 1), 1e-8), one / 2)
    return {
        "latency": one - message,
        "message": message,
        "bandwidth": 4 * elements / max(large - one, 1e-9),
        "bytes": 4 * elements,
    }


def _exchange(
    context: RankContext,
    peer: int,
    elements: int,
    messages: int,
    labels: PassLabel,
    number: int,
) -> float:
    """Seconds of one round in which a pair sends messages both ways."""
    sends = [(peer, torch.ones(elements, device=context.device)) for _ in range(messages)]
    comes = [(peer, torch.empty(elements, device=context.device)) for _ in range(messages)]
    context.finish()
    begin = time.perf_counter()
    context.transport.exchange(sends, comes, label=labels.round("rows", number)).wait()
    context.finish()
    return time.perf_counter() - begin


def _compute(context: RankContext, deadline: Deadline) -> dict[str, float]:
    """What attention reaches on each rank while all others compute too, and what a call costs."""
    budget = context.budget
    dtype = getattr(torch, budget.timed_dtype)
    tokens, flops, ratio = 256, 0.0, 2.5
    while True:
        given = inputs(tokens, budget.heads, budget.heads, budget.head_dim, dtype, context.device)
        context.together()
        forward, both = _best(context, given)
        pairs = tokens * (tokens + 1) / 2
        flops = max(flops, 4.0 * pairs * budget.heads * budget.head_dim / forward)
        ratio = max(1.0, (both - forward) / forward)
        goes_on = tokens * 2 <= budget.longest and 8 * _TURNS * both < deadline.left
        if not context.share(f"compute/{tokens}", float(goes_on)):
            break
        tokens *= 2
    tiny = inputs(16, budget.heads, budget.heads, budget.head_dim, dtype, context.device)
    launch, _ = _best(context, tiny)
    return {"flops": flops, "backward": ratio, "launch": launch, "tokens": float(tokens)}


def _best(context: RankContext, given: Inputs) -> tuple[float, float]:
    """Seconds of causal attention, forward, and forward and backward: the best of several turns."""
    times, case = [], AttentionCase("causal", "causal", masks.causal())
    for _ in range(_TURNS + 1):
        context.finish()
        begin = time.perf_counter()
        out = attend(case, given.qkv)
        context.finish()
        middle = time.perf_counter()
        torch.autograd.grad(out, given.qkv, given.grad_out)
        context.finish()
        times.append((middle - begin, time.perf_counter() - begin))
    return min(t for t, _ in times[1:]), min(t for _, t in times[1:])


def machine_of(
    context: RankContext, answers: Sequence[RankAnswer]
) -> tuple[Finding, Machine | None]:
    """The links of all ranks as one Machine: the slowest pair counts."""
    found = [answer.data or {} for answer in answers]
    within = [one["within"] for one in found if one.get("within")]
    between = [one["between"] for one in found if one.get("between")]
    links = within + between
    intra = min((link["bandwidth"] for link in within or between), default=0.0)
    inter = min((link["bandwidth"] for link in between or within), default=0.0)
    device = device_name(context.device)
    machine = Machine(
        name=f"measured: {context.size} x {device}",
        flops=min(one["flops"] for one in found),
        ranks_per_node=context.ranks_per_node if between else _ALL,
        intra_bandwidth=intra,
        inter_bandwidth=inter,
        latency=max(link["latency"] for link in links),
        message=max(link["message"] for link in links),
        launch=max(one["launch"] for one in found),
        backward=max(one["backward"] for one in found),
    )
    said = f"{format_bytes(intra)}/s within a node" if within else ""
    if between:
        said += f"{', ' if said else ''}{format_bytes(inter)}/s between nodes"
    said += (
        f" per rank and direction, {format_seconds(machine.latency)} latency, "
        f"{format_seconds(machine.message)} a message; attention reaches "
        f"{machine.flops / 1e12:.3g} TFLOP/s a rank"
    )
    if not between:
        said += "; between nodes: not run, since there is one (start it with torchrun on several)"
    rows = tuple({"rank": r, **_flat(one)} for r, one in enumerate(found))
    return Finding("links", "bandwidth and latency", "measured", said, rows=rows), machine


def _flat(data: dict[str, Any] | Any) -> dict[str, Any]:
    """Nested numbers under names with a space between."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, dict):
            flat |= {f"{name} {inner}": number for inner, number in value.items()}
        elif value is not None:
            flat[name] = value
    return flat


def check_ring(context: RankContext, deadline: Deadline) -> RankAnswer:
    """Seconds of a causal plan, and of PyTorch's ring on as many tokens, forward and backward."""
    budget = context.budget
    dtype = getattr(torch, budget.timed_dtype)
    tokens = 256 * context.size
    while True:
        flexcp, torchs, why_not = _ring(context, tokens, dtype)
        slowest = max(flexcp, torchs or 0.0)
        goes_on = tokens * 2 <= budget.longest and 40 * slowest < deadline.left
        if not context.share(f"ring/{tokens}", float(goes_on)):
            return RankAnswer(
                data={"tokens": tokens, "flexcp": flexcp, "torch": torchs, "why not": why_not}
            )
        tokens *= 2


def _ring(context: RankContext, tokens: int, dtype: torch.dtype) -> tuple[float, float | None, str]:
    """Seconds of flexcp, of PyTorch's ring, and why that was not run."""
    budget = context.budget
    given = inputs(tokens, budget.heads, budget.heads, budget.head_dim, dtype, context.device)
    plan = make_plan(
        masks.causal(),
        tokens,
        context.mesh,
        num_heads=budget.heads,
        head_dim=budget.head_dim,
        dtype=dtype,
        machine="cpu-gloo" if context.device.type == "cpu" else None,
    )
    local = [plan.shard(x.detach(), 2).requires_grad_() for x in given.qkv]
    grad = plan.shard(given.grad_out, 2)
    q, k, v = local
    flexcp = _turns(context, lambda: torch.autograd.grad(attention(q, k, v, plan), local, grad))
    part = tokens // context.size
    own = [x.detach()[:, :, :part].contiguous() for x in (*given.qkv, given.grad_out)]
    try:
        ring = ring_attention("alltoall", causal=True, mesh=context.mesh)
        return flexcp, _turns(context, lambda: ring(*own)), ""
    except Exception as error:
        return flexcp, None, f"torch raised {type(error).__name__}: {error}".splitlines()[0][:200]


def _turns(context: RankContext, run: Callable[[], tuple[Tensor, ...]]) -> float:
    best = float("inf")
    for turn in range(3):
        context.together()
        begin = time.perf_counter()
        run()
        context.finish()
        if turn:
            best = min(best, time.perf_counter() - begin)
    return best


def ring_said(
    context: RankContext, answers: Sequence[RankAnswer]
) -> tuple[Finding, Machine | None]:
    """The slowest rank's time counts."""
    found = [answer.data or {} for answer in answers]
    flexcp, tokens = max(one["flexcp"] for one in found), found[0]["tokens"]
    said = f"a causal plan takes {format_seconds(flexcp)} forward and backward"
    said += f" ({tokens:,} tokens on {context.size} ranks)"
    torchs = [one["torch"] for one in found]
    if None in torchs:
        said += f"; PyTorch's ring: not run, {next(one['why not'] for one in found)}"
    else:
        said += f", PyTorch's ring {format_seconds(max(torchs))}"
    rows = tuple({"rank": r, **_flat(one)} for r, one in enumerate(found))
    return Finding("speed", "over ranks", "measured", said, rows=rows), None


_AGAIN = "run it again on an idle machine; if it fails there too, report it with the report's files"

CHECKS = (
    RankCheck("speed", "over ranks", 3.0, check_ring, ring_said, _AGAIN),
    RankCheck("links", "bandwidth and latency", 3.0, check_links, machine_of, _AGAIN),
)
"""Measurements; they follow the checks, since what is wrong need not be timed."""
