"""One plan for a global batch over all ranks, beside fixed groups of data × context parallelism.

Samples as in fine-tuning, many short ones and a few of up to 256K tokens, are trained on by 64
ranks, at most 32K tokens each. Fixed groups are what the longest sample asks for, 8 rows of 8
ranks: samples are dealt out to the rows, heaviest first, and each row shares its own, as rings do
it (each document head-tail) or by a plan of ours. Dynamic is one plan over all 64 ranks. Everything
is priced by the same cost model, for one layer of Llama 3 8B on `h100-ib`, forward and backward: a
rank's attention and its tokens through the rest of the model, then what is exposed of transfers.

    python benchmarks/dynamic_cp.py --packs 3
"""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from flexcp import Plan, make_plan, masks

RANKS, ROW, CAPACITY, LONGEST = 64, 8, 1 << 15, 1 << 18
FILLED = 0.92
"""Tokens of a batch, of what fits: fixed rows can hardly be packed fuller."""
HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "machine": "h100-ib"}
FLOPS_PER_TOKEN = 2.0 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336 + 4096 * 128256 / 32)
"""Projections, feed-forward and a layer's share of the output layer, forward."""
BACKWARD = 2.0
"""Work of the backward pass of all but attention, relative to forward."""
LONG = {"fine-tuning, 2 % long": 0.02, "fine-tuning, 10 % long": 0.1, "all short": 0.0}
"""Share of samples whose length is log-uniform from 16K to 256K; others are log-normal."""


@dataclass
class Row:
    """What one way to train on one batch takes."""

    kind: str
    seed: int
    who: str
    seconds: float
    """Of a layer, forward and backward, on the slowest rank."""
    imbalance: float
    """Of attention and the rest together, most over mean."""
    most_tokens: int
    received_mb: float
    """By a rank in forward, on average."""
    between_nodes_mb: float


def samples(kind: str, seed: int) -> list[int]:
    """Lengths that fill a batch; none is longer than a row of ranks can hold.

    >>> 0.9 < sum(samples("all short", 0)) / (RANKS * CAPACITY) < FILLED
    True
    """
    draw, found = random.Random(f"{kind} {seed}"), []
    left = int(FILLED * RANKS * CAPACITY)
    while True:
        if draw.random() < LONG[kind]:
            length = math.exp(draw.uniform(math.log(1 << 14), math.log(LONGEST)))
        else:
            length = draw.lognormvariate(7.0, 1.1)
        length = min(LONGEST, max(16, round(length)))
        if length > left:
            return found
        found.append(length)
        left -= length


def dealt_to_rows(lengths: list[int]) -> list[list[int]]:
    """The samples of each row: heaviest first, to the row with least work that has room."""
    rows: list[list[int]] = [[] for _ in range(RANKS // ROW)]
    work, room = [0.0] * len(rows), [ROW * CAPACITY] * len(rows)
    per_token = FLOPS_PER_TOKEN * (1 + BACKWARD) / (4 * 128 * 32 * 3.5)
    for length in sorted(lengths, reverse=True):
        fitting = [r for r in range(len(rows)) if room[r] >= length]
        row = min(fitting, key=work.__getitem__)
        rows[row].append(length)
        work[row] += length * length / 2 + length * per_token
        room[row] -= length
    return rows


def of_rank(plan: Plan) -> torch.Tensor:
    """float64 [ranks] Seconds of each rank's own work, in attention and in the rest."""
    flops, shape = plan.machine.flops, plan.shape
    pairs = torch.tensor(plan.stats().area_per_rank, dtype=torch.float64)
    attention = pairs * shape.flops_per_pair * (1 + plan.machine.backward)
    rest = plan.layout.counts.double() * FLOPS_PER_TOKEN * (1 + BACKWARD)
    return (attention + rest) / flops


def row_of(kind: str, seed: int, who: str, plans: list[Plan]) -> Row:
    """What some plans, each on ranks of its own, take together."""
    stats = [plan.stats() for plan in plans]
    own = torch.cat([of_rank(plan) for plan in plans])
    exposed = [s.predicted_seconds - s.compute_seconds for s in stats]
    seconds = max(float(of_rank(p).max()) + e for p, e in zip(plans, exposed, strict=True))
    received = sum(sum(s.bytes_received_per_rank) for s in stats) / RANKS
    between = sum(sum(s.bytes_received_between_nodes_per_rank) for s in stats) / RANKS
    return Row(
        kind, seed, who, seconds, float(own.max() / own.mean()),
        max(int(plan.layout.counts.max()) for plan in plans), received / 2**20, between / 2**20,
    )  # fmt: skip


def mask_of(lengths: list[int]) -> masks.Mask:
    return masks.causal() & masks.document(lengths=lengths)


def compared(kind: str, seed: int) -> list[Row]:
    """One batch, in three ways."""
    lengths = samples(kind, seed)
    rows, total = [r for r in dealt_to_rows(lengths) if r], sum(lengths)
    ring = {"layout": "per_document", "schedule": "ring"}
    slack = RANKS * CAPACITY / total - 1
    dynamic = make_plan(
        mask_of(lengths), total, RANKS, flops_per_token=FLOPS_PER_TOKEN, token_slack=slack, **HEADS
    )
    rings = [make_plan(mask_of(r), sum(r), ROW, **ring, **HEADS) for r in rows]
    planned = [
        make_plan(mask_of(r), sum(r), ROW, flops_per_token=FLOPS_PER_TOKEN, **HEADS) for r in rows
    ]
    return [
        row_of(kind, seed, "fixed 8 x 8, rings", rings),
        row_of(kind, seed, "fixed 8 x 8, planned", planned),
        row_of(kind, seed, "dynamic", [dynamic]),
    ]


def line(row: Row, dynamic: float) -> str:
    return (
        f"{row.kind:22} {row.who:20} {row.seconds * 1e3:8.2f} {row.seconds / dynamic:8.2f} "
        f"{row.imbalance:8.3f} {row.most_tokens:8} {row.received_mb:9.1f} "
        f"{row.between_nodes_mb:9.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packs", type=int, default=2, help="batches of each kind")
    parser.add_argument("--quick", action="store_true", help="one batch of the first kind")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'samples':22} {'who':20} ms/layer   × dyn.   imbal.   tokens   MB rec.   between")
    found: list[Row] = []
    for kind in list(LONG)[:1] if options.quick else LONG:
        for seed in range(1 if options.quick else options.packs):
            rows = compared(kind, seed)
            found += rows
            for row in rows:
                print(line(row, rows[-1].seconds), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "dynamic_cp.json").write_text(json.dumps([asdict(r) for r in found], indent=1))


if __name__ == "__main__":
    main()
