"""Speed: each kernel beside SDPA and compiled FlexAttention, on the same tensors, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from flexcp.errors import FlexCPError
from flexcp.grid import build_block_grid
from flexcp.kernels.preferences import KernelOrder
from flexcp.kernels.registry import KERNELS, choose
from flexcp.tools.doctor.budget import Budget, Deadline, TimeIsUpError, at_most
from flexcp.tools.doctor.cases import AttentionCase, Inputs, attend, cases, inputs, needs, refusal
from flexcp.tools.doctor.findings import Finding
from flexcp.units import format_seconds

COMPILED = "compiled FlexAttention"
_SHORTEST = 256
"""Tokens that are timed at least, however slow the machine."""
_ROUNDS = 3
"""Times that everything should be timed; the best counts."""
_NEXT_LENGTH = 120.0
"""Times dense SDPA that a case takes at twice the length: 4 times as long, 5 contenders or so, in
4 rounds, some of them slower."""
_NOISE = 0.05
"""A kernel that the registry would choose anyway gives way to one that is faster by more."""
_LARGEST_MATRIX = 8192
"""Tokens up to which what holds a number for each pair is timed."""

Call = Callable[[], Tensor]


@dataclass
class Timed:
    """One way to compute a case, and how long it took."""

    who: str
    call: Call
    backward: bool = True
    """Whether it has a backward pass here."""
    kernel: str = ""
    """Its name, if it is one of `KERNELS`."""
    forward: float = float("inf")
    """Seconds, the best of all rounds."""
    both: float = float("inf")
    """Seconds of forward and backward, the best of all rounds."""
    slowest: float = 0.0
    """Seconds of forward and backward, the worst of all rounds."""
    rounds: int = 0
    why_not: str = ""
    """What kept it from being timed."""


@dataclass
class Timings:
    """What is known so far of how fast kernels are: by kind of mask, then by kernel."""

    budget: Budget
    device: torch.device
    right: frozenset[str] = frozenset()
    """Kernels that were checked and are right: others are timed too, but never preferred."""
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """By kind of mask and kernel, summed over the cases of a kind."""
    noise: dict[str, float] = field(default_factory=dict)
    """By kind of mask: how much rounds differed, relative to the best, for the steadiest kernel."""
    defaults: dict[str, str] = field(default_factory=dict)
    """The kernel that the registry chooses by its rules, by kind of mask."""
    certain: bool = True
    """Whether timings can be relied on: on a busy machine, what the rules choose stays first."""
    compile_seconds: float = 20.0
    """What compiling FlexAttention took, the last time."""

    def orders(self) -> tuple[KernelOrder, ...]:
        """Kernels by kind, the fastest first; what is chosen anyway must be beaten clearly."""
        found = []
        for kind, by_kernel in self.seconds.items():
            names = sorted(by_kernel, key=lambda name: by_kernel[name])
            default, noise = self.defaults.get(kind), max(_NOISE, self.noise.get(kind, 0.0))
            if default in names and (
                not self.certain or by_kernel[default] <= by_kernel[names[0]] * (1 + noise)
            ):
                names.remove(default)
                names.insert(0, default)
            if names:
                b = self.budget
                seconds = tuple(by_kernel[name] for name in names)
                found.append(KernelOrder(kind, b.timed_dtype, b.head_dim, tuple(names), seconds))
        return tuple(found)


def speed(name: str, timings: Timings, deadline: Deadline) -> Finding:
    """The throughput of one case with everything that can compute it."""
    budget, device = timings.budget, timings.device
    dtype = getattr(torch, budget.timed_dtype)
    tokens = _length(budget, device, dtype, deadline)
    given = inputs(tokens, budget.heads, budget.heads, budget.head_dim, dtype, device)
    case = next(case for case in cases(tokens, budget.heads, device) if case.name == name)
    found, left_out = _contenders(case, given, timings, deadline)
    _take_turns(found, given, deadline)
    pairs = tokens * tokens
    if case.mask is not None:
        pairs = build_block_grid(case.mask, tokens).area()
    flops = 4.0 * pairs * budget.heads * budget.head_dim
    timed = [one for one in found if one.rounds]
    left_out |= {one.who: one.why_not or "the time was up" for one in found if not one.rounds}
    _remember(case, timed, given, timings)
    if not timed:
        return Finding(
            "speed", name, "not run", "; ".join(f"{w}: {y}" for w, y in left_out.items())
        )
    return Finding("speed", name, "measured", *_told(timed, left_out, tokens, flops, budget))


def _told(
    timed: Sequence[Timed], left_out: Mapping[str, str], tokens: int, flops: float, budget: Budget
) -> tuple[str, str, float, tuple[Mapping[str, Any], ...]]:
    """A sentence, nothing to do, no seconds, and a table of everyone."""
    best = min(timed, key=lambda one: one.both if one.backward else float("inf"))
    rows: list[Mapping[str, Any]] = [
        {
            "who": one.who,
            "tokens": tokens,
            "forward ms": round(one.forward * 1e3, 3),
            "forward and backward ms": round(one.both * 1e3, 3) if one.backward else None,
            "forward TFLOP/s": round(flops / one.forward / 1e12, 4),
            "rounds": one.rounds,
        }
        for one in sorted(timed, key=lambda one: one.forward)
    ]
    rows += [{"who": who, "not run": why} for who, why in left_out.items()]
    said = f"{best.who} is the fastest, {format_seconds(best.both)} forward and backward"
    told = [
        f"{one.who} {format_seconds(one.both)}" if one.backward else
        f"{one.who} {format_seconds(one.forward)} forward alone "
        f"(where {best.who} takes {format_seconds(best.forward)})"
        for one in timed if one is not best
    ]  # fmt: skip
    said += f" ({tokens:,} tokens, {budget.timed_dtype})"
    said += f"; {', '.join(told)}" if told else ""
    # Kernels that this device can't run at all are told of where they are checked.
    peers = [f"{who} ({why})" for who, why in left_out.items() if who not in KERNELS]
    said += f"; not run: {', '.join(peers)}" if peers else ""
    return said, "", 0.0, tuple(rows)


def _length(budget: Budget, device: torch.device, dtype: torch.dtype, deadline: Deadline) -> int:
    """The most tokens at which everything can be timed several times: by timing dense SDPA."""
    tokens = min(_SHORTEST, budget.longest)
    while tokens * 2 <= budget.longest:
        given = inputs(tokens, budget.heads, budget.heads, budget.head_dim, dtype, device)
        one = Timed("SDPA", partial(sdpa, *given.qkv))
        time_once(one, given)
        if _NEXT_LENGTH * one.both > deadline.left:
            break
        tokens *= 2
    return tokens


def _contenders(
    case: AttentionCase, given: Inputs, timings: Timings, deadline: Deadline
) -> tuple[list[Timed], dict[str, str]]:
    """Everything that can compute a case, and why the rest can't."""
    q, k, v = given.qkv
    found: list[Timed] = []
    left_out: dict[str, str] = {}
    tokens = q.shape[2]

    has_score = case.score_mod is not None
    for kernel in KERNELS:
        if kernel == "reference":
            continue
        why_not = refusal(kernel, case, given)
        if why_not is not None:
            left_out[kernel] = why_not
            continue
        found.append(
            Timed(f"flexcp {kernel}", partial(attend, case, given.qkv, kernel), kernel=kernel)
        )
    if case.mask is None:
        found.append(Timed("SDPA", lambda: sdpa(q, k, v)))
    elif case.name == "causal":
        found.append(Timed("SDPA is_causal", lambda: sdpa(q, k, v, is_causal=True)))
    elif has_score:
        left_out["SDPA"] = "it takes no score function"
    elif tokens <= _LARGEST_MATRIX:
        i = torch.arange(tokens, device=q.device)
        zero = torch.zeros((), dtype=torch.int64, device=q.device)
        allowed = case.mask.mask_mod(zero, zero, i[:, None], i)
        found.append(Timed("SDPA with a mask", lambda: sdpa(q, k, v, allowed)))
    if q.device.type == "cpu":
        _add_compiled(case, given, timings, deadline, found, left_out)
    elif "flex" not in {one.kernel for one in found}:
        left_out[COMPILED] = left_out.get("flex", "the kernel 'flex' does not take it")
    return found, left_out


def _add_compiled(
    case: AttentionCase,
    given: Inputs,
    timings: Timings,
    deadline: Deadline,
    found: list[Timed],
    left_out: dict[str, str],
) -> None:
    """FlexAttention compiled for a CPU, forward alone; on a GPU it is the kernel "flex"."""
    if not timings.budget.compiles:
        left_out[COMPILED] = "it was not asked for"
        return
    most = deadline.left * 0.8
    if timings.compile_seconds > most:
        took = f"compiling takes about {timings.compile_seconds:.0f} s, and {most:.0f} s are left"
        left_out[COMPILED] = f"{took}: pass more --minutes"
        return
    from torch.nn.attention import flex_attention as torchs

    mask, plain = case.mask, [x.detach() for x in given.qkv]
    block_mask = None
    if mask is not None:
        block_mask = build_block_grid(mask, given.q.shape[2]).to_block_mask()
    attend: Any = torch.compile(torchs.flex_attention)
    begin = time.monotonic()
    try:
        with at_most(most), torch.no_grad():
            attend(*plain, case.score_mod, block_mask)
    except TimeIsUpError:
        left_out[COMPILED] = f"compiling took more than {most:.0f} s"
    except Exception as error:
        told = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        left_out[COMPILED] = f"torch raised {told}"
    else:

        def compiled() -> Tensor:
            with torch.no_grad():
                out: Tensor = attend(*plain, case.score_mod, block_mask)
            return out

        found.append(Timed(COMPILED, compiled, backward=False))
    timings.compile_seconds = time.monotonic() - begin


def _take_turns(found: Iterable[Timed], given: Inputs, deadline: Deadline) -> None:
    """Times everyone once, then everyone again; the first round warms up and plans."""
    for turn in range(_ROUNDS + 1):
        for one in found:
            if one.why_not or (turn > 1 and not deadline.left):
                continue
            try:
                time_once(one, given, counts=turn > 0)
            except FlexCPError as error:  # of a mask that a kernel can't express
                one.why_not, one.rounds = needs(error), 0
            except Exception as error:
                one.why_not = f"it raised {type(error).__name__}: {error}".splitlines()[0][:200]
                one.rounds = 0


def time_once(one: Timed, given: Inputs, *, counts: bool = True) -> None:
    """Runs it forward, and backward if it can; keeps the better times."""
    _finish(given.q.device)
    begin = time.perf_counter()
    out = one.call()
    _finish(given.q.device)
    forward = time.perf_counter() - begin
    if one.backward:
        torch.autograd.grad(out, given.qkv, given.grad_out)
        _finish(given.q.device)
    both = time.perf_counter() - begin
    if counts:
        one.forward, one.both = min(one.forward, forward), min(one.both, both)
        one.slowest = max(one.slowest, both)
        one.rounds += 1


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _remember(case: AttentionCase, timed: Iterable[Timed], given: Inputs, timings: Timings) -> None:
    """Adds the times of kernels that are right to those of their kind."""
    right = {one.kernel: one.both for one in timed if one.kernel in timings.right}
    spread = [one.slowest / one.both - 1 for one in timed if one.kernel in timings.right]
    timings.noise[case.kind] = max(timings.noise.get(case.kind, 0.0), min(spread, default=0.0))
    before = timings.seconds.get(case.kind)
    if before is None:
        timings.seconds[case.kind] = right
    else:  # a kind with several cases: whoever computes all of them
        timings.seconds[case.kind] = {n: before[n] + right[n] for n in before if n in right}
    by_rules = choose(
        given.q, given.v, score_mod=case.score_mod, is_one_rectangle=case.mask is None
    )
    has_varlen = by_rules.varlen is not None and "varlen" in right
    timings.defaults[case.kind] = "varlen" if has_varlen else by_rules.kernel
