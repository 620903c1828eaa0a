"""How fast is attention over ranks, beside PyTorch's own ring and beside one process?

Ranks are gloo processes with one thread each. For every mask, length and number of ranks, all
schedules and PyTorch's ring with both rotations run in the same processes, in turn; a time is that
of the slowest rank, the best of several turns. Beside documents and windows, PyTorch's ring is
causal: that is the nearest that it can do. One process with one thread runs flexcp's kernel on the
whole sequence, and all results are compared with its own before anything is timed. Memory is
measured apart, in fresh processes that do nothing else: growth of the resident set, and the most
that torch's tensors take.

All of it takes hours, most of it at 32K. Parts of it can be run one after the other with the same
`--out`: what is there already stays, unless it is measured again.

    python benchmarks/distributed.py --lengths 8192
    python benchmarks/distributed.py --lengths 32768 --masks causal --parts time --repeats 2
    python benchmarks/distributed.py --lengths 32768 --masks causal --parts memory
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torch.distributed as dist
from distributed_report import ALONE, MASKS, Row, line, merged, plot, read, table
from documents import packed_document_lengths
from torch import Tensor
from watch import Watch

import flexcp
from flexcp import masks, testing
from flexcp.plan import Machine
from flexcp.tools.doctor.torch_ring import ROTATIONS, bytes_received, ring_attention

HEADS, DIM = 8, 64
SCHEDULES = ("auto", "exchange", "ring", "allgather", "ulysses", "hybrid")
TIMEOUT = 1800.0
PARTS = ("time", "memory")


def make_mask(name: str, tokens: int) -> flexcp.Mask:
    match name:
        case "full":
            return masks.full()
        case "documents":
            lengths = packed_document_lengths(tokens, seed=0)
            return masks.causal() & masks.document(lengths=lengths)
        case "window 1024":
            return masks.sliding_window(1024)
        case _:
            return masks.causal()


def inputs(tokens: int) -> list[Tensor]:
    """q, k, v and the gradient of the output, whole, the same on every rank."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, tokens, DIM, generator=draw) for _ in range(4)]


@dataclass
class Contender:
    """Something that can be run, on one rank."""

    run: Callable[[], list[Tensor]]
    """This rank's output and gradients of q, k and v."""
    unshard: Callable[[Tensor], Tensor]
    watch: Watch | None = None
    promised: int | None = None
    predicted: float | None = None
    received: int = 0


def of_schedule(
    schedule: str, mesh: Any, mask: flexcp.Mask, tokens: int, machine: Machine
) -> Contender:
    if schedule == "hybrid":
        mesh = dist.device_mesh.init_device_mesh("cpu", (mesh.size() // 2, 2))
    plan = flexcp.make_plan(
        mask, tokens, mesh, schedule=schedule, num_heads=HEADS, head_dim=DIM,
        dtype=torch.float32, machine=machine,
    )  # fmt: skip
    *qkv, grad = (plan.shard(x, 2) for x in inputs(tokens))
    local = [x.requires_grad_() for x in qkv]

    def run() -> list[Tensor]:
        out = flexcp.attention(*local, plan)
        assert isinstance(out, Tensor)
        return [out.detach(), *torch.autograd.grad(out, local, grad)]

    stats, rank = plan.stats(), plan.ranks.rank
    assert rank is not None
    promised = stats.bytes_received_per_rank[rank] + stats.backward_bytes_received_per_rank[rank]
    unshard = lambda x: plan.unshard(x, 2)  # noqa: E731
    return Contender(run, unshard, Watch(plan), promised, stats.predicted_seconds)


def of_torch(rotation: str, mesh: Any, tokens: int, *, causal: bool) -> Contender:
    layout = flexcp.layout.head_tail if causal else flexcp.layout.contiguous
    plan = flexcp.make_plan(
        masks.full(), tokens, mesh, layout=layout(tokens, mesh.size()), schedule="ring"
    )
    local = [plan.shard(x, 2) for x in inputs(tokens)]
    ring = ring_attention(rotation, causal=causal)
    size = 2 * local[1].numel() * local[1].element_size()
    return Contender(
        lambda: list(ring(*local)),
        lambda x: plan.unshard(x, 2),
        received=bytes_received(mesh.size(), size),
    )


def contender(name: str, mesh: Any, mask: str, tokens: int, machine: Machine) -> Contender:
    kind, _, which = name.partition(" ")
    if kind == "torch":
        return of_torch(which.split()[1], mesh, tokens, causal=mask != "full")
    return of_schedule(which, mesh, make_mask(mask, tokens), tokens, machine)


def names_for(ranks: int) -> list[str]:
    """Everybody who takes part."""
    ours = [s for s in SCHEDULES if s != "hybrid" or (ranks > 2 and ranks % 2 == 0)]
    return [*(f"torch ring {r}" for r in ROTATIONS), *(f"flexcp {s}" for s in ours)]


@dataclass
class Measured:
    """What one rank found out about one contender."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    received: int = 0
    promised: int | None = None
    predicted: float | None = None
    hidden: float | None = None


def race(
    mesh: Any, mask: str, tokens: int, repeats: int, machine: Machine, expected: list[Tensor]
) -> dict[str, Measured]:
    """All contenders in turn; each is right before it is timed."""
    found = {}
    runners = {n: contender(n, mesh, mask, tokens, machine) for n in names_for(mesh.size())}
    for name, it in runners.items():
        results = it.run()
        ours = name.startswith("flexcp") or mask in ("causal", "full")
        for got, want in zip(results, expected if ours else [], strict=ours):
            torch.testing.assert_close(it.unshard(got), want, rtol=1e-3, atol=1e-4)
        found[name] = Measured(received=it.received, promised=it.promised, predicted=it.predicted)
    for _ in range(repeats):
        for name, it in runners.items():
            if it.watch:
                it.watch.reset()
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            it.run()
            found[name].seconds.append(time.perf_counter() - wall)
            found[name].cpu_seconds.append(time.process_time() - cpu)
            if it.watch:
                seen = it.watch.seen
                found[name].received = seen.received
                alone = it.watch.alone()
                hidden = 1 - seen.waited / alone if alone > 0 else 1.0
                found[name].hidden = max(found[name].hidden or 0.0, hidden)
    return found


def memory(mesh: Any, name: str, mask: str, tokens: int, machine: Machine) -> tuple[float, float]:
    """Growth of the resident set and most bytes in tensors, in MB, of one forward and backward."""
    if name == ALONE:
        run = one_process(mask, tokens)
    else:
        run = contender(name, mesh, mask, tokens, machine).run
    before = resident_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    kept = run()
    grown = resident_mb("VmHWM") - before
    del kept
    with torch.profiler.profile(profile_memory=True) as profile:
        kept = run()
    del kept
    kineto: Any = profile.profiler
    changes = [e for e in kineto.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(changes, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return grown, most / 2**20


def resident_mb(which: str) -> float:
    """VmRSS, or VmHWM for the most that it has been."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) / 1024


def one_process(mask: str, tokens: int) -> Callable[[], list[Tensor]]:
    """Flexcp's kernel on the whole sequence."""
    *qkv, grad = inputs(tokens)
    full = [x.requires_grad_() for x in qkv]
    chosen = make_mask(mask, tokens)

    def run() -> list[Tensor]:
        out = flexcp.flex_attention(*full, block_mask=chosen)
        assert isinstance(out, Tensor)
        return [out.detach(), *torch.autograd.grad(out, full, grad)]

    return run


def alone(mesh: Any, mask: str, tokens: int, repeats: int) -> tuple[float, float, list[Tensor]]:
    """Seconds and CPU seconds of one process, and what it computes."""
    del mesh
    run = one_process(mask, tokens)
    results = run()
    seconds, cpu_seconds = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        seconds.append(time.perf_counter() - wall)
        cpu_seconds.append(time.process_time() - cpu)
    return min(seconds), min(cpu_seconds), results


def area(mask: str, tokens: int) -> int:
    return flexcp.build_block_grid(make_mask(mask, tokens), tokens).area()


def timed(mask: str, tokens: int, ranks: list[int], repeats: int, machine: Machine) -> list[Row]:
    """One process, and everybody on every number of ranks."""
    seconds, cpu, expected = testing.spawn(
        lambda mesh: alone(mesh, mask, tokens, repeats), 1, timeout=TIMEOUT
    )[0]
    rows = [Row(mask, tokens, 1, ALONE, seconds, cpu, scaling=1.0)]
    ratio = area("full" if mask == "full" else "causal", tokens) / area(mask, tokens)
    for size in ranks:
        every = testing.spawn(
            lambda mesh: race(mesh, mask, tokens, repeats, machine, expected), size, timeout=TIMEOUT
        )
        mine = []
        for name in every[0]:
            of = [r[name] for r in every]
            row = Row(mask, tokens, size, name, area_ratio=ratio)
            row.seconds = min(map(max, zip(*(m.seconds for m in of), strict=True)))
            row.cpu_seconds = min(map(max, zip(*(m.cpu_seconds for m in of), strict=True)))
            row.received_mb = max(m.received for m in of) / 2**20
            row.predicted = of[0].predicted
            row.scaling = seconds / row.seconds / size
            if name.startswith("flexcp"):
                row.promised_mb = max(m.promised or 0 for m in of) / 2**20
                row.hidden = min(m.hidden or 0.0 for m in of)
            mine.append(row)
        best = min(r.seconds for r in mine if r.who.startswith("torch"))
        for row in mine:
            row.of_torch = best / row.seconds
        rows += mine
    return rows


def weighed(mask: str, tokens: int, ranks: list[int], machine: Machine) -> list[Row]:
    """The memory of the same."""
    rows = []
    everybody = [(1, [ALONE]), *((size, names_for(size)) for size in ranks)]
    for size, name in ((size, name) for size, names in everybody for name in names):
        found = testing.spawn(
            lambda mesh, who=name: memory(mesh, who, mask, tokens, machine), size, timeout=TIMEOUT
        )
        grown, in_tensors = (max(of_rank) for of_rank in zip(*found, strict=True))
        rows.append(Row(mask, tokens, size, name, memory_mb=grown, tensor_mb=in_tensors))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"))
    parser.add_argument("--quick", action="store_true", help="the first length and number of ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--masks", nargs="+", default=list(MASKS), choices=MASKS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=["time", "memory"], choices=PARTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = Machine.measure(attention=flexcp.flex_attention)
    print(f"{machine}\n", flush=True)
    lengths, ranks, repeats = options.lengths, options.ranks, options.repeats
    if options.quick:
        lengths, ranks, repeats = lengths[:1], ranks[:1], 2
    options.out.mkdir(parents=True, exist_ok=True)
    rows = read(options.out / "distributed.json")
    for tokens in lengths:
        for mask in options.masks:
            new: list[Row] = []
            if "time" in options.parts:
                new = timed(mask, tokens, ranks, repeats, machine)
            if "memory" in options.parts:
                new = merged(new, weighed(mask, tokens, ranks, machine))
            for row in new:
                print(f"  {line(row)}", flush=True)
            rows = merged(rows, new)
            found = {"machine": asdict(machine), "rows": [asdict(r) for r in rows]}
            (options.out / "distributed.json").write_text(json.dumps(found, indent=1))
            (options.out / "distributed.md").write_text(table(rows))
    with suppress(ImportError):
        plot(rows, options.out / "distributed.png")
    print(f"\n{table(rows)}\nwritten to {options.out}/distributed.json, .md and .png")


if __name__ == "__main__":
    main()
