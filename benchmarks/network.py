"""How fast is attention over a real, slow network, beside PyTorch's own ring?

Ranks are processes in Linux network namespaces whose links are limited (`namespaces.py`): each rank
alone behind a link, or as two nodes whose ranks share one. PyTorch's ring, with both rotations, and
flexcp run in the same processes, in turn, forward and backward; a time is that of the slowest rank,
the best of several turns. Beside documents and windows, PyTorch's ring is causal: that is the
nearest that it can do. Results are compared with those of one process before anything is timed, and
times with what the plan had predicted. It needs root and iproute2.

    python benchmarks/network.py
    python benchmarks/network.py --masks causal --schedules auto exchange ring --megabits 200
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch
import torch.distributed as dist
from distributed import Contender, contender, one_process
from namespaces import hosts, require_tools, run_on

import flexcp
from flexcp.errors import FlexCPError
from flexcp.plan import Machine
from flexcp.tools.doctor.torch_ring import ROTATIONS

MASKS = ("documents", "window 1024", "causal")
PLACES = {"alone": 1, "nodes": 2}
"""Ranks of a host, by the name of the arrangement."""
OVERHEAD = 0.95
"""Share of a link's rate that is left for what is sent: headers take the rest."""


@dataclass
class Row:
    """What one contender took in one arrangement."""

    place: str
    mask: str
    tokens: int
    ranks: int
    megabits: float
    who: str
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of the rank that computed most, in the best turn: what it takes on a busy computer too."""
    of_torch: float = 0.0
    """PyTorch's faster ring over it."""
    predicted: float | None = None
    waited: float | None = None
    """Seconds that the rank that waited most waited for messages, in the best turn."""
    received_mb: float = 0.0


@dataclass
class Turns:
    """What one rank saw of one contender."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    received: int = 0
    predicted: float | None = None


def machine_for(place: str, ranks: int, megabits: float) -> Machine:
    """This computer as the ranks see it: cores are shared, and a node's ranks share its link."""
    here = Machine.measure(attention=flexcp.flex_attention)
    per_node = PLACES[place]
    share = min(1.0, (os.cpu_count() or 1) / ranks)
    link = megabits * 1e6 / 8 * OVERHEAD
    return replace(
        here, name="network", flops=here.flops * share, ranks_per_node=per_node,
        intra_bandwidth=here.intra_bandwidth * share, inter_bandwidth=link,
        latency=1e-3, message=2e-4, node_bandwidth=link if per_node > 1 else 0.0,
    )  # fmt: skip


def names_of(rotations: list[str], schedules: list[str]) -> list[str]:
    return [*(f"torch ring {r}" for r in rotations), *(f"flexcp {s}" for s in schedules)]


def run_rank(folder: Path, rank: int) -> None:
    """What the process of one rank does: all contenders in turn, each right before it is timed."""
    task = json.loads((folder / "task.json").read_text())
    mask, tokens, machine = task["mask"], task["tokens"], Machine(**task["machine"])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), task["ranks"])  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=task["ranks"],
        timeout=datetime.timedelta(seconds=300),
    )  # fmt: skip
    mesh = dist.device_mesh.init_device_mesh("cpu", (task["ranks"],))
    expected = torch.load(folder / "expected.pt", mmap=True)
    runners: dict[str, Contender] = {}
    for name in task["who"]:
        it = runners[name] = contender(name, mesh, mask, tokens, machine)
        results = it.run()
        if name.startswith("flexcp") or mask == "causal":
            for got, want in zip(results, expected, strict=True):
                torch.testing.assert_close(it.unshard(got), want, rtol=1e-3, atol=1e-4)
    found = {n: Turns(received=it.received, predicted=it.predicted) for n, it in runners.items()}
    for _ in range(task["repeats"]):
        for name, it in runners.items():
            if it.watch:
                it.watch.reset()
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            it.run()
            found[name].seconds.append(time.perf_counter() - begin)
            found[name].cpu_seconds.append(time.process_time() - cpu)
            found[name].waited.append(it.watch.seen.waited if it.watch else 0.0)
            if it.watch:
                found[name].received = it.watch.seen.received
    (folder / f"found{rank}.json").write_text(json.dumps({n: asdict(t) for n, t in found.items()}))
    dist.barrier()
    dist.destroy_process_group()


def race(place: str, mask: str, options: argparse.Namespace) -> list[Row]:
    """Everybody in one arrangement, under one mask."""
    ranks, megabits, tokens = options.ranks, options.megabits, options.tokens
    per_host = PLACES[place]
    if ranks % per_host:
        raise FlexCPError(f"a multiple of {per_host} ranks", str(ranks), "pass --ranks 4")
    with tempfile.TemporaryDirectory() as name, hosts(ranks // per_host, megabits) as places:
        folder = Path(name)
        task = {
            "mask": mask, "tokens": tokens, "ranks": ranks,
            "who": names_of(options.rotations, options.schedules),
            "repeats": options.repeats, "machine": asdict(machine_for(place, ranks, megabits)),
        }  # fmt: skip
        (folder / "task.json").write_text(json.dumps(task))
        torch.save(one_process(mask, tokens)(), folder / "expected.pt")
        arguments = [["--rank", str(r), "--folder", name] for r in range(ranks)]
        at = [places[r // per_host] for r in range(ranks)]
        run_on(at, Path(__file__).resolve(), arguments, folder)
        every = [json.loads((folder / f"found{r}.json").read_text()) for r in range(ranks)]
    rows = []
    for who in every[0]:
        of = [Turns(**found[who]) for found in every]
        slowest = [max(turn) for turn in zip(*(t.seconds for t in of), strict=True)]
        best = min(range(len(slowest)), key=slowest.__getitem__)
        row = Row(place, mask, tokens, ranks, megabits, who, slowest[best])
        row.cpu_seconds = max(t.cpu_seconds[best] for t in of)
        row.predicted = of[0].predicted
        row.received_mb = max(t.received for t in of) / 2**20
        if row.predicted is not None:
            row.waited = max(t.waited[best] for t in of)
        rows.append(row)
    torch_best = min(r.seconds for r in rows if r.who.startswith("torch"))
    return [replace(row, of_torch=torch_best / row.seconds) for row in rows]


def table(rows: list[Row]) -> str:
    """As Markdown."""
    lines = [
        "| ranks | mask | who | s | × torch's ring | CPU s | predicted s | waited s | MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(line, rows)]) + "\n"


def line(row: Row) -> str:
    told = ("-" if x is None else f"{x:.2f}" for x in (row.predicted, row.waited))
    times = f"{row.seconds:.2f} | {row.of_torch:.2f} | {row.cpu_seconds:.2f} | {' | '.join(told)}"
    who = f"{row.who} | {times}"
    return f"| {row.ranks} {row.place} | {row.mask} | {who} | {row.received_mb:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"))
    parser.add_argument("--quick", action="store_true", help="1,024 tokens, one mask, one turn")
    parser.add_argument("--places", nargs="+", default=list(PLACES), choices=PLACES)
    parser.add_argument("--masks", nargs="+", default=list(MASKS), choices=(*MASKS, "full"))
    parser.add_argument("--schedules", nargs="+", default=["auto"])
    parser.add_argument("--rotations", nargs="+", default=list(ROTATIONS), choices=ROTATIONS)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabits", type=float, default=400.0, help="of each link, per second")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.folder, options.rank)
        return
    if options.quick:
        options.tokens, options.masks, options.repeats = 1024, options.masks[:1], 1
    try:
        require_tools()
        rows: list[Row] = []
        options.out.mkdir(parents=True, exist_ok=True)
        for place in options.places:
            for mask in options.masks:
                rows += race(place, mask, options)
                print(line(rows[-1]), flush=True)
                (options.out / "network.json").write_text(
                    json.dumps([asdict(r) for r in rows], indent=1)
                )
                (options.out / "network.md").write_text(table(rows))
    except FlexCPError as error:
        sys.exit(f"network: {error}")
    print(f"\n{table(rows)}\nwritten to {options.out}/network.json and .md")


if __name__ == "__main__":
    main()
