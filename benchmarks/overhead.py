"""How much host time does a call of attention over ranks take, besides its kernels?

The kernels do nothing but make tensors of the right shape, in flexcp and in PyTorch's own ring
template alike, and tensors are tiny: what is left is what a rank's CPU does to agree, copy, send,
receive and merge. Ranks are gloo processes with one thread each, and contenders run in the same
processes, in turn. Several calls in a row, as of several layers, make as many rounds as asked for.

A figure is the CPU time of a rank's main thread, warm, the best of several turns, of the rank where
that is most. `process` also counts the threads of gloo. The last columns say how the forward pass
splits, by a profiler that slows all of it: they are shares of what it saw.

    python benchmarks/overhead.py --ranks 2 4 8 --rounds 16
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch
import torch.distributed as dist
from torch import Tensor

import flexcp
from flexcp import masks, testing
from flexcp.kernels import flash
from flexcp.kernels.interface import Partial, PartialGradients
from flexcp.tools.doctor.torch_ring import ROTATIONS, ring_passes

HEADS, DIM, ROWS = 4, 32, 64
"""Of a rank's tensors: small, so that copies cost next to nothing."""
SCHEDULES = ("ring", "exchange", "allgather")
PARTS = {
    "agreement": ("/comm/", ("compare",)),
    "copies": ("/ops/rows.py", ("fill",)),
    "exchange": ("/comm/process.py", ("exchange", "wait")),
}
"""Which functions called by flexcp/ops make up a part of the forward pass: file and names."""
TIMEOUT = 600.0


@dataclass
class Row:
    """One contender on so many ranks."""

    ranks: int
    who: str
    what: str
    """How many rounds of all calls together, and how many calls."""
    rounds: int
    forward: float
    """Seconds of CPU of a rank's main thread, for all calls together."""
    backward: float
    process_seconds: float
    """CPU of all threads of a rank, in both passes."""
    of_torch: float | None = None
    """The forward's CPU time over that of PyTorch's ring with as many rounds, or in one call."""
    backward_of_torch: float | None = None
    """The backward's CPU time over that of the same ring."""
    shares: dict[str, float] = field(default_factory=dict)
    """Of the forward: agreement, copies, exchange, and the rest."""


@dataclass
class Contender:
    """Something that can be run, on one rank."""

    rounds: int
    forward: Callable[[], Any]
    backward: Callable[[Any], Any]
    """Takes what the forward pass returned."""
    calls: int = 1
    """How many in a row."""

    def run(self) -> tuple[float, float, float]:
        """Seconds of CPU: main thread forward and backward, all threads in both."""
        dist.barrier()
        whole, begin = time.process_time(), time.thread_time()
        outs = [self.forward() for _ in range(self.calls)]
        between, whole_between = time.thread_time(), time.process_time()
        dist.barrier()
        whole_again, again = time.process_time(), time.thread_time()
        for out in reversed(outs):
            self.backward(out)
        end, whole_end = time.thread_time(), time.process_time()
        return between - begin, end - again, whole_between - whole + whole_end - whole_again


@contextmanager
def no_kernels() -> Iterator[list[int]]:
    """Replaces the kernel "flash" by one that computes nothing; gives a list with its calls."""
    calls = [0]

    def forward(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Partial:
        calls[0] += 1
        return Partial(*nothing(q, v))

    def backward(
        grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any
    ) -> PartialGradients:
        calls[0] += 1
        return PartialGradients(*map(torch.zeros_like, (q, k, v)))

    before = flash.forward, flash.backward
    flash.forward, flash.backward = forward, backward
    try:
        yield calls
    finally:
        flash.forward, flash.backward = before


def nothing(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """An output and a logsumexp."""
    return q.new_zeros((*q.shape[:3], v.shape[3])), q.new_zeros(q.shape[:3])


def of_schedule(schedule: str, mesh: Any) -> Contender:
    """A call of `flexcp.attention` over a plan."""
    plan = flexcp.make_plan(
        masks.full(), ROWS * mesh.size(), mesh, layout="contiguous", schedule=schedule,
        num_heads=HEADS, head_dim=DIM, dtype=torch.float32,
    )  # fmt: skip
    q, k, v = (torch.randn(1, HEADS, ROWS, DIM, requires_grad=True) for _ in range(3))
    grad = torch.ones(1, HEADS, ROWS, DIM)
    (chosen,) = plan.schedules.values()
    return Contender(
        chosen.forward.rounds,
        lambda: flexcp.attention(q, k, v, plan, kernel="flash"),
        lambda out: torch.autograd.grad(out, (q, k, v), grad),
    )


def of_torch(rotation: str, mesh: Any) -> Contender:
    """PyTorch's ring template around kernels that compute nothing."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        return nothing(q, v)

    def gradients(*, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> tuple[Tensor, ...]:
        return tuple(map(torch.zeros_like, (query, key, value)))

    forward, backward = ring_passes(rotation, causal=False, forward=kernel, backward=gradients)
    q, k, v = (torch.randn(1, HEADS, ROWS, DIM) for _ in range(3))
    grad = torch.ones(1, HEADS, ROWS, DIM)
    return Contender(
        mesh.size(), lambda: forward(q, k, v), lambda out: backward(grad, q, k, v, *out)
    )


@dataclass
class Measured:
    """What one rank found out about one contender."""

    rounds: int
    calls: int
    turns: list[tuple[float, float, float]] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)


def race(mesh: Any, rounds: int, repeats: int) -> dict[str, Measured]:
    """All contenders in turn, with one call, and with calls that make so many rounds together."""
    makers = {f"torch ring {r}": (of_torch, r) for r in ROTATIONS}
    makers |= {f"flexcp {s}": (of_schedule, s) for s in SCHEDULES}
    runners: dict[str, Contender] = {}
    with no_kernels() as kernel_calls:
        for name, (make, which) in makers.items():
            one, before = make(which, mesh), kernel_calls[0]
            one.run()
            ours = name.startswith("flexcp")
            assert kernel_calls[0] - before == (2 * one.rounds if ours else 0), "not our kernels"
            runners[f"{name} x1"] = one
            if (calls := rounds // one.rounds) > 1:
                runners[f"{name} x{calls}"] = replace(one, calls=calls)
        found = {n: Measured(it.rounds * it.calls, it.calls) for n, it in runners.items()}
        for _ in range(repeats):
            for name, it in runners.items():
                found[name].turns.append(it.run())
        for name, it in runners.items():
            if name.startswith("flexcp"):
                found[name].shares = shares_of(it)
    return found


def shares_of(it: Contender, times: int = 20) -> dict[str, float]:
    """How the CPU time of the main thread splits over the parts of a forward pass."""
    profile = cProfile.Profile(time.thread_time)
    for _ in range(times):
        dist.barrier()
        profile.enable()
        it.forward()
        profile.disable()
    seen: Any = pstats.Stats(profile)
    whole = float(seen.total_tt)
    parts = dict.fromkeys(PARTS, 0.0)
    for (file, _, name), (*_, callers) in seen.stats.items():
        for part, (where, names) in PARTS.items():
            if where in file and name in names:
                ours = [c for (f, _, _), c in callers.items() if "/flexcp/ops/" in f]
                parts[part] += sum(c[3] for c in ours)
    shares = {part: seconds / whole for part, seconds in parts.items()}
    return {**shares, "rest": 1 - sum(shares.values())}


def measured(ranks: int, rounds: int, repeats: int) -> list[Row]:
    """All contenders on one number of ranks."""
    every = testing.spawn(lambda mesh: race(mesh, rounds, repeats), ranks, timeout=TIMEOUT)
    rows = []
    for name, first in every[0].items():
        # The best turn of each rank; then the rank where that is most.
        worst = [max(min(t[i] for t in of[name].turns) for of in every) for i in range(3)]
        what = f"{first.rounds} in {first.calls} call{'s' if first.calls > 1 else ''}"
        who = name.rsplit(" ", 1)[0]
        rows.append(Row(ranks, who, what, first.rounds, *worst, shares=first.shares))
    rings = {row.rounds: row for row in rows if row.who == "torch ring alltoall"}
    for row in rows:
        peer = rings.get(row.rounds, rings[ranks])
        row.of_torch = row.forward / peer.forward
        row.backward_of_torch = row.backward / peer.backward
    return rows


def table(rows: list[Row]) -> str:
    """As Markdown."""
    parts = [*PARTS, "rest"]
    head = ["ranks", "who", "rounds", "forward ms", "backward ms", "process ms"]
    head += ["forward × torch", "backward × torch"]
    lines = ["| " + " | ".join([*head, *parts]) + " |", "|---" * (len(head) + len(parts)) + "|"]
    for r in rows:
        numbers = [f"{1e3 * x:.2f}" for x in (r.forward, r.backward, r.process_seconds)]
        ratios = [f"{x:.2f}" if x else "" for x in (r.of_torch, r.backward_of_torch)]
        shares = [f"{r.shares[p]:.0%}" if r.shares else "" for p in parts]
        lines.append("| " + " | ".join([str(r.ranks), r.who, r.what, *numbers, *ratios, *shares]))
        lines[-1] += " |"
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"))
    parser.add_argument("--quick", action="store_true", help="2 ranks, fewer turns")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=16, help="of the longest row of calls")
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args()
    ranks, repeats = options.ranks, options.repeats
    if options.quick:
        ranks, repeats = ranks[:1], 10
    rows: list[Row] = []
    for size in ranks:
        rows += measured(size, options.rounds, repeats)
        print(f"{size} ranks measured", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    found = {"rows": [asdict(r) for r in rows]}
    (options.out / "overhead.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.out / "overhead.md").write_text(table(rows))
    print(f"\n{table(rows)}\nwritten to {options.out}/overhead.json and .md")


if __name__ == "__main__":
    main()
