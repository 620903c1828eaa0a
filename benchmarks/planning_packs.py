"""Plans of packs that nothing was tuned on, beside a plain greedy and a lower bound.

Documents whose lengths are uniform, exponential, log-normal or two-peaked are packed into 128K
tokens for 8 ranks and 1M for 8 and 64. Both layouts are priced by the same cost model, each with
the best schedule for it (32 query and 8 kv heads of 128, bfloat16, h100-ib): imbalance, bytes
received over a rank's own K and V (mean and most), predicted time relative to the greedy's and
to the bound, exposed communication, and the CPU seconds of `make_plan` on one thread.

    python benchmarks/planning_packs.py                 # two packs of each kind
    python benchmarks/planning_packs.py --packs 5 --out out/benchmarks
    python benchmarks/planning_packs.py --quick         # 128K tokens alone
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from flexcp import Mask, masks
from flexcp.layout import Layout
from flexcp.plan import Plan, make_plan

HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "machine": "h100-ib"}
CELLS = ((1 << 17, 8), (1 << 20, 8), (1 << 20, 64))
KINDS: dict[str, Callable[[random.Random], float]] = {
    "uniform 200-6,000": lambda draw: draw.uniform(200, 6000),
    "exponential 1,000": lambda draw: draw.expovariate(1 / 1000),
    "exponential 3,000": lambda draw: draw.expovariate(1 / 3000),
    "log-normal 7.5, 1.2": lambda draw: draw.lognormvariate(7.5, 1.2),
    "two-peaked": lambda draw: (
        draw.gauss(800, 200) if draw.random() < 0.9 else draw.gauss(24_000, 6000)
    ),
}
"""Lengths of documents, by kind; a draw below 1 is 1."""


def pack(kind: str, tokens: int, seed: int) -> list[int]:
    """Lengths of documents that fill a sequence; the last is cut to fit.

    >>> sum(pack("two-peaked", 50_000, seed=3))
    50000
    """
    draw, lengths, left = random.Random(f"{kind} {seed}"), [], tokens
    while left:
        lengths.append(min(left, max(1, round(KINDS[kind](draw)))))
        left -= lengths[-1]
    return lengths


def greedy(lengths: list[int], ranks: int, *, causal: bool) -> Layout:
    """Whole documents, largest first, to the rank with least work that has room for them.

    Those too large for a rank go head-tail over as few ranks as they need, those that fit nowhere
    are cut at room's end; then tails are traded for heads between the ranks with most and least
    work, until it is within 2 %.
    """
    total = sum(lengths)
    share, firsts, first = -(-total // ranks), [], 0
    for length in lengths:
        firsts.append(first)
        first += length
    work = _Work(lengths, causal=causal)
    mean = sum(work.of(d, 0, n) for d, n in enumerate(lengths)) / ranks
    runs: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]  # document, start, stop
    room, load = [share] * ranks, [0.0] * ranks

    def give(rank: int, document: int, start: int, stop: int) -> None:
        if start < stop:
            runs[rank].append((document, start, stop))
            room[rank] -= stop - start
            load[rank] += work.of(document, start, stop)

    small = []
    for d in sorted(range(len(lengths)), key=lambda d: -lengths[d]):
        n, area = lengths[d], work.of(d, 0, lengths[d])
        if n <= share and area <= 1.02 * mean:
            small.append(d)
            continue
        few = min(ranks, max(-(-n // share), round(area / mean + 0.49)))
        chosen = sorted(range(ranks), key=lambda r: (load[r], -room[r]))[:few]
        edges = [n * i // (2 * few) for i in range(2 * few + 1)]
        for i, rank in enumerate(chosen):
            for j in (i, 2 * few - 1 - i):
                give(rank, d, edges[j], edges[j + 1])
    heap = [(load[r], r) for r in range(ranks)]
    for d in small:
        aside, placed = [], False
        heapq.heapify(heap)
        while heap and not placed:
            _, rank = heapq.heappop(heap)
            if room[rank] >= lengths[d]:
                give(rank, d, 0, lengths[d])
                placed = True
            aside.append((load[rank], rank))
        heap += aside
        if not placed:
            at = 0
            for rank in sorted(range(ranks), key=lambda r: -room[r]):
                stop = min(lengths[d], at + max(0, room[rank]))
                give(rank, d, at, stop)
                at = max(at, stop)
            heap = [(load[r], r) for r in range(ranks)]
    for rank in range(ranks):  # what was spread evenly may exceed a share
        while room[rank] < 0:
            to = max(range(ranks), key=room.__getitem__)
            _move(runs, rank, to, min(-room[rank], room[to]), work, load, room, tail=False)
    _trade(runs, load, room, work, mean)
    return Layout.of_runs(
        [_joined(sorted((firsts[d] + a, firsts[d] + b) for d, a, b in own)) for own in runs],
        seq_len=total,
        name="greedy",
    )


class _Work:
    """Allowed pairs of stretches of documents."""

    def __init__(self, lengths: list[int], *, causal: bool) -> None:
        self.lengths, self.causal = lengths, causal

    def of(self, document: int, start: int, stop: int) -> float:
        if self.causal:
            return (stop * (stop + 1) - start * (start + 1)) / 2
        return (stop - start) * self.lengths[document]


def _move(
    runs: list[list[tuple[int, int, int]]],
    source: int,
    target: int,
    tokens: int,
    work: _Work,
    load: list[float],
    room: list[int],
    *,
    tail: bool,
) -> None:
    """Gives the densest end of a rank's rows to another, or the sparsest."""
    while tokens > 0:
        if tail:
            at = max(range(len(runs[source])), key=lambda i: _dense(runs[source][i], work, True))
        else:
            at = min(range(len(runs[source])), key=lambda i: _dense(runs[source][i], work, False))
        d, a, b = runs[source].pop(at)
        cut = min(tokens, b - a)
        part = (d, b - cut, b) if tail else (d, a, a + cut)
        rest = (d, a, b - cut) if tail else (d, a + cut, b)
        if rest[1] < rest[2]:
            runs[source].append(rest)
        runs[target].append(part)
        area = work.of(*part)
        load[source] -= area
        load[target] += area
        room[source] += cut
        room[target] -= cut
        tokens -= cut


def _dense(run: tuple[int, int, int], work: _Work, tail: bool) -> float:
    d, a, b = run
    return work.of(d, b - 1, b) if tail else work.of(d, a, a + 1)


def _trade(
    runs: list[list[tuple[int, int, int]]],
    load: list[float],
    room: list[int],
    work: _Work,
    mean: float,
) -> None:
    for _ in range(8 * len(runs)):
        high = max(range(len(runs)), key=load.__getitem__)
        low = min(range(len(runs)), key=load.__getitem__)
        if load[high] <= 1.02 * mean or not runs[low] or not runs[high]:
            return
        d, _, b = max(runs[high], key=lambda run: _dense(run, work, True))
        e, a, _ = min(runs[low], key=lambda run: _dense(run, work, False))
        gain = work.of(d, b - 1, b) - work.of(e, a, a + 1)
        if gain <= 0:
            return
        wish = min(load[high] - mean, (load[high] - load[low]) / 2)
        tokens = max(1, min(int(wish / gain), 4096))
        tokens = min(tokens, sum(y - x for _, x, y in runs[low]))
        _move(runs, high, low, tokens, work, load, room, tail=True)
        _move(runs, low, high, tokens, work, load, room, tail=False)


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for a, b in runs:
        if found and found[-1][1] == a:
            found[-1] = (found[-1][0], b)
        else:
            found.append((a, b))
    return found


def numbers(plan: Plan) -> dict[str, float]:
    """What the comparison is about."""
    stats = plan.stats()
    own = plan.seq_len / plan.layout.ranks * plan.shape.kv_bytes(plan.shape.num_kv_heads)
    received = stats.bytes_received_per_rank
    return {
        "imbalance": stats.imbalance,
        "mean": sum(received) / len(received) / own,
        "most": max(received) / own,
        "seconds": stats.predicted_seconds,
        "exposed": 1 - stats.compute_seconds / stats.predicted_seconds,
    }


def least_seconds(plan: Plan) -> float:
    """No plan takes less: the mean work, computed without a transfer or a second round."""
    shape, machine = plan.shape, plan.machine
    pairs = sum(plan.stats().area_per_rank) / plan.layout.ranks
    both = 1 + machine.backward
    return both * pairs * shape.flops_per_pair / machine.flops + 2 * machine.launch


def mask_of(lengths: list[int], *, causal: bool) -> Mask:
    documents = masks.document(lengths=lengths)
    return documents & masks.causal() if causal else documents


def compared(kind: str, tokens: int, ranks: int, seed: int, *, causal: bool) -> dict[str, Any]:
    """One pack: our plan, and the greedy layout with the best schedule for it."""
    lengths = pack(kind, tokens, seed)
    seconds = []
    for _ in range(3):
        fresh = Mask(mask_of(lengths, causal=causal).mask_mod)
        begin = time.process_time()
        plan = make_plan(fresh, tokens, ranks, **HEADS)
        seconds.append(time.process_time() - begin)
    ours = numbers(plan)
    layout = greedy(lengths, ranks, causal=causal)
    rival = make_plan(mask_of(lengths, causal=causal), tokens, ranks, layout=layout, **HEADS)
    theirs = numbers(rival)
    return {
        "kind": kind,
        "mask": "causal" if causal else "full",
        "tokens": tokens,
        "ranks": ranks,
        "seed": seed,
        "chosen": plan.considered[0][0],
        "ours": ours,
        "greedy": theirs,
        "over_greedy": ours["seconds"] / theirs["seconds"],
        "over_bound": ours["seconds"] / least_seconds(plan),
        "planning": min(seconds),
    }


def short_of(row: dict[str, Any]) -> list[str]:
    """What a plan should reach and does not."""
    ours, theirs, found = row["ours"], row["greedy"], []
    if ours["imbalance"] > 1.02:
        found.append("uneven")
    if row["over_greedy"] > 1.02:
        found.append("slower")
    for what in ("mean", "most"):
        if row["over_greedy"] > 0.95 and ours[what] > 1.15 * theirs[what] + 0.1:
            found.append(f"{what} bytes")
    return found


def rows(packs: int, *, quick: bool) -> Iterator[dict[str, Any]]:
    for tokens, ranks in CELLS[:1] if quick else CELLS:
        for kind in KINDS:
            for causal in (True, False):
                for seed in range(packs):
                    yield compared(kind, tokens, ranks, seed, causal=causal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packs", type=int, default=2, help="packs of each kind")
    parser.add_argument("--quick", action="store_true", help="128K tokens alone")
    parser.add_argument("--out", type=Path, help="where the numbers go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "documents            mask   tokens ranks  imbal. (greedy)   mean  (greedy)   most  "
        "(greedy)  time/greedy  /bound  exposed  plan s"
    )
    found = []
    for row in rows(options.packs, quick=options.quick):
        found.append(row)
        ours, theirs = row["ours"], row["greedy"]
        print(
            f"{row['kind']:20} {row['mask']:6} {row['tokens'] >> 10:5}K {row['ranks']:5}  "
            f"{ours['imbalance']:6.3f} ({theirs['imbalance']:6.3f})  {ours['mean']:5.2f} "
            f"({theirs['mean']:6.2f})  {ours['most']:5.2f} ({theirs['most']:6.2f})  "
            f"{row['over_greedy']:11.3f}  {row['over_bound']:6.3f}  {ours['exposed']:7.3f}  "
            f"{row['planning']:6.3f}  {row['chosen']}  {', '.join(short_of(row))}",
            flush=True,
        )
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "planning_packs.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
