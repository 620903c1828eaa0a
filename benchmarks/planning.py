"""How good are flexcp's plans, and how long does making them take?

Every mask is planned by flexcp and by the strategies of others, as plans of our own on the same
cost model: imbalance (max/mean allowed pairs), the most rows of K and V that any rank receives as a
fraction of what an all-gather brings, predicted time on every machine preset, and planning time.

    python benchmarks/planning.py --out out/benchmarks            # the table of targets, and cells
    python benchmarks/planning.py --quick                         # up to 128K tokens
    python benchmarks/planning.py --packs 30                      # documents only, on many packs
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from documents import packed_document_lengths

from flexcp import BlockGrid, Mask, build_block_grid, masks
from flexcp.layout import (
    Layout,
    balanced,
    contiguous,
    dealt,
    head_tail,
    per_document_head_tail,
    ptrr,
    rows_needed,
)
from flexcp.layout.work import Work, area_per_rank
from flexcp.plan import PRESETS, AttentionShape, make_plan, price
from flexcp.plan.load import Load
from flexcp.plan.traffic import traffic
from flexcp.schedule import Schedule, make_schedule
from flexcp.schedule.ulysses import grouped

SHAPE = AttentionShape(32, 8, 128, torch.bfloat16, 1)
HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
PACKS = 3


@dataclass(frozen=True)
class Target:
    """A row of the table to be met: received rows and imbalance of the best known planner."""

    mask: str
    tokens: int
    ranks: int
    received: float | None


TARGETS = (
    Target("causal", 1 << 20, 64, 1.0),
    Target("documents, causal", 1 << 17, 32, 0.40),
    Target("documents, causal", 1 << 19, 32, 0.125),
    Target("documents, causal", 1 << 20, 64, 0.112),
    Target("documents, full", 1 << 19, 32, 0.22),
    Target("documents, full", 1 << 20, 64, 0.20),
    Target("window 4096", 1 << 19, 32, 0.065),
    Target("window 4096 + global", 1 << 19, 32, 1.0),
    Target("block-causal + global", 1 << 19, 32, 1.0),
)
MORE = ("prefix-LM", "block-causal", "shared prefix", "window 4096 + global", "window 4096")
CELLS = ((1 << 17, 8), (1 << 17, 32), (1 << 19, 32), (1 << 20, 64), (1 << 22, 512))
CELL_MASKS = (
    "causal",
    "full",
    "documents, causal",
    "documents, full",
    "window 4096",
    "window 4096 + global",
    "prefix-LM",
)


def mask_named(name: str, tokens: int, seed: int) -> Mask:
    lengths = packed_document_lengths(tokens, seed)
    documents = masks.document(lengths=lengths)
    branches = [tokens // 16] * 14
    return {
        "causal": masks.causal(),
        "full": masks.full(),
        "documents, causal": documents & masks.causal(),
        "documents, full": documents,
        "window 4096": masks.causal() & masks.sliding_window(4096),
        "window 4096 + global": (masks.causal() & masks.sliding_window(4096))
        | masks.global_tokens(1024),
        "block-causal + global": (documents & masks.block_causal(2048)) | masks.global_tokens(1024),
        "prefix-LM": masks.prefix_lm(tokens // 4),
        "block-causal": masks.block_causal(4096),
        "shared prefix": masks.shared_prefix(tokens // 8, branches),
    }[name]


def packs_of(name: str) -> int:
    return PACKS if "documents" in name or name == "block-causal + global" else 1


def greedy_chunks(grid: BlockGrid, ranks: int) -> Layout:
    """Fixed chunks, dearest first, each to the least loaded rank that has room."""
    blocks = Work.of([grid]).blocks
    chunk = max(1, blocks.numel() // ranks // 8)
    return dealt(blocks, grid.q_len, ranks, block_size=grid.block_size[0], chunk=chunk)


@dataclass(frozen=True)
class Strategy:
    """Somebody's way to plan."""

    name: str
    layout: Callable[[BlockGrid, int], Layout]
    schedule: str
    inner: int = 1


def _per_document(grid: BlockGrid, ranks: int) -> Layout:
    seams = Work.of([grid]).seams.tolist()
    edges = [0, *seams, grid.q_len]
    lengths = [b - a for a, b in pairwise(edges)]
    return per_document_head_tail(lengths, ranks)


STRATEGIES = (
    Strategy("contiguous ring", lambda g, p: contiguous(g.q_len, p), "ring"),
    Strategy("contiguous exchange", lambda g, p: contiguous(g.q_len, p), "exchange"),
    Strategy("head-tail ring", lambda g, p: head_tail(g.q_len, p), "ring"),
    Strategy("per-document all-gather", _per_document, "allgather"),
    Strategy("PTRR all-gather", lambda g, p: ptrr(Work.of([g]).blocks, g.q_len, p), "allgather"),
    Strategy("greedy chunks, exact rows", greedy_chunks, "exchange"),
    Strategy("Ulysses", lambda g, p: contiguous(g.q_len, p), "ulysses"),
    Strategy("hybrid head-tail ring", lambda g, p: head_tail(g.q_len, p), "hybrid", 8),
)


def plan_of(strategy: Strategy, grid: BlockGrid, ranks: int) -> tuple[Schedule, Load]:
    layout = strategy.layout(grid, ranks)
    inner = ranks if strategy.schedule == "ulysses" else strategy.inner
    # What an all-gather moves does not depend on which tokens a rank has, only on how many.
    moved = contiguous(grid.q_len, ranks) if strategy.schedule == "allgather" else layout
    schedule = make_schedule(
        strategy.schedule,
        [grid],
        moved,
        num_heads=SHAPE.num_heads,
        num_kv_heads=SHAPE.num_kv_heads,
        inner=inner,
        between="ring" if strategy.schedule == "hybrid" else "exchange",
    )
    return schedule, Load.of([grid], grouped(layout, inner))


def measured(name: str, tokens: int, ranks: int, seed: int, **options: object) -> dict[str, float]:
    """Our own plan: imbalance, received rows, planning seconds (best of 3)."""
    mask = mask_named(name, tokens, seed)
    seconds = []
    for _ in range(3 if tokens <= 1 << 20 else 1):
        begin = time.perf_counter()
        plan = make_plan(mask, tokens, ranks, **options)
        seconds.append(time.perf_counter() - begin)
    stats = plan.stats()
    whole = tokens * (ranks - 1) / ranks
    rows = stats.tokens_received_per_rank
    return {
        "imbalance": stats.imbalance,
        "bound": stats.imbalance_lower_bound,
        "received": max(rows) / whole,
        "received_mean": sum(rows) / ranks / whole,
        "received_rows": max(rows),
        "planning": min(seconds),
    }


def greedy_measured(name: str, tokens: int, ranks: int, seed: int) -> dict[str, float]:
    grid = build_block_grid(mask_named(name, tokens, seed), tokens)
    layout = greedy_chunks(grid, ranks)
    areas = area_per_rank([grid], layout).double()
    schedule = make_schedule("exchange", [grid], layout)
    rows = schedule.forward.moves.received(ranks)
    return {
        "imbalance": float(areas.max() / areas.mean()),
        "received": float(rows.max()) / (tokens * (ranks - 1) / ranks),
    }


def unavoidable(row: Target) -> float:
    """What some rank has to receive: the longest document's last row needs all of it."""
    if "documents" not in row.mask:
        return 0.0
    share, packs = row.tokens // row.ranks, range(packs_of(row.mask))
    longest = [max(packed_document_lengths(row.tokens, seed)) for seed in packs]
    rows = sum(max(0, n - share) for n in longest) / len(longest)
    return rows / (row.tokens - share)


def targets(limit: int) -> Iterator[dict[str, object]]:
    rows = [*TARGETS, *(Target(m, 1 << 19, r, None) for m in MORE for r in (8, 32, 64))]
    for row in rows:
        if row.tokens > limit:
            continue
        ours = [measured(row.mask, row.tokens, row.ranks, s) for s in range(packs_of(row.mask))]
        theirs = [
            greedy_measured(row.mask, row.tokens, row.ranks, s) for s in range(packs_of(row.mask))
        ]
        yield {
            "mask": row.mask,
            "tokens": row.tokens,
            "ranks": row.ranks,
            "imbalance": max(x["imbalance"] for x in ours),
            "bound": max(x["bound"] for x in ours),
            "received": sum(x["received"] for x in ours) / len(ours),
            "received_mean": sum(x["received_mean"] for x in ours) / len(ours),
            "received_rows": max(x["received_rows"] for x in ours),
            "target": row.received,
            "unavoidable": unavoidable(row),
            "greedy_imbalance": max(x["imbalance"] for x in theirs),
            "greedy_received": sum(x["received"] for x in theirs) / len(theirs),
            "planning": max(x["planning"] for x in ours),
        }


def many_packs(count: int) -> Iterator[dict[str, object]]:
    """Layouts alone, on many packs of documents: a few packs may be unlike most others."""
    for row in TARGETS:
        if not row.mask.startswith("documents"):
            continue
        share = row.tokens // row.ranks
        found = []
        for seed in range(count):
            grid = build_block_grid(mask_named(row.mask, row.tokens, seed), row.tokens)
            longest = max(packed_document_lengths(row.tokens, seed))
            pair = [balanced([grid], row.ranks), greedy_chunks(grid, row.ranks)]
            areas = [area_per_rank([grid], layout).double() for layout in pair]
            rows = [rows_needed([grid], layout).counts(row.ranks).max() for layout in pair]
            found.append(
                [
                    *(float(r) / (row.tokens - share) for r in rows),
                    *(float(a.max() / a.mean()) for a in areas),
                    max(0, longest - share) / (row.tokens - share),
                ]
            )
        ours, theirs, even, uneven, least = zip(*found, strict=True)
        groups = [sum(ours[i : i + PACKS]) / PACKS for i in range(0, count - PACKS + 1, PACKS)]
        yield {
            "mask": row.mask,
            "tokens": row.tokens,
            "ranks": row.ranks,
            "received": sum(ours) / count,
            "groups": groups,
            "unavoidable": sum(least) / count,
            "imbalance": max(even),
            "greedy_received": sum(theirs) / count,
            "greedy_imbalance": max(uneven),
            "worse": sum(a > b for a, b in zip(ours, theirs, strict=True)),
        }


def print_packs(rows: list[dict[str, object]], count: int) -> None:
    print(
        f"{count} packs          tokens ranks  received (3 packs: from, to)  least  imbal. | "
        "greedy  imbal. | packs on which greedy receives less"
    )
    for r in rows:
        print(
            f"{r['mask']:18} {r['tokens'] >> 10:6}K {r['ranks']:4}  {r['received']:8.3f} "
            f"({min(r['groups']):.3f}, {max(r['groups']):.3f}) {r['unavoidable']:12.3f} "
            f"{r['imbalance']:7.4f} | {r['greedy_received']:6.3f} {r['greedy_imbalance']:7.3f} | "
            f"{r['worse']}"
        )


def cells(limit: int) -> Iterator[dict[str, object]]:
    for tokens, ranks in CELLS:
        if tokens > limit:
            continue
        for name in CELL_MASKS:
            mask = mask_named(name, tokens, 0)
            grid = build_block_grid(mask, tokens, heads=SHAPE.num_heads)
            ours: dict[str, float] = {}
            chosen: dict[str, str] = {}
            begin = time.perf_counter()
            for machine in PRESETS:
                plan = make_plan(grid, tokens, ranks, machine=machine, **HEADS)
                ours[machine.name] = plan.costs[""].seconds
                chosen[machine.name] = plan.considered[0][0]
            planning = (time.perf_counter() - begin) / len(PRESETS)
            others: dict[str, dict[str, float]] = {}
            for strategy in STRATEGIES:
                if strategy.inner > 1 and ranks % strategy.inner:
                    continue
                schedule, load = plan_of(strategy, grid, ranks)
                found = {m.name: price(schedule, load, m, SHAPE).seconds for m in PRESETS}
                found["bytes"] = float(traffic(schedule, SHAPE).forward.max())
                areas = load.before[:, -1]
                found["imbalance"] = float(areas.max() / areas.mean())
                others[strategy.name] = found
            yield {
                "mask": name,
                "tokens": tokens,
                "ranks": ranks,
                "ours": ours,
                "chosen": chosen,
                "others": others,
                "planning": planning,
            }


def special() -> dict[str, object]:
    """The targets that are not rows of the table."""
    tokens, ranks = 1 << 20, 64
    found: dict[str, object] = {}
    documents = mask_named("documents, causal", tokens, 0)
    window = mask_named("window 4096", tokens, 0)
    for name, other in (("causal + documents", documents), ("causal + window", window)):
        plan = make_plan({"full": masks.causal(), "other": other}, tokens, ranks)
        found[f"imbalance of {name}"] = plan.stats().imbalance
    plan = make_plan(masks.full(), tokens, ranks, machine="h100-ib", **HEADS)
    ring = make_plan(
        masks.full(),
        tokens,
        ranks,
        machine="h100-ib",
        layout="contiguous",
        schedule="ring",
        **HEADS,
    )
    ours, theirs = (max(p.stats().bytes_received_per_rank) for p in (plan, ring))
    found["full mask: chosen"] = plan.considered[0][0]
    found["full mask: bytes relative to the ring"] = ours / theirs
    return found


def print_targets(rows: list[dict[str, object]]) -> None:
    print(
        f"{'mask':24} {'tokens':>7} {'ranks':>5} {'imbal.':>7} {'bound':>6} {'recv':>6} "
        f"{'mean':>6} {'least':>6} {'target':>6} | {'greedy':>7} {'recv':>6} | {'plan s':>6}"
    )
    for r in rows:
        target = "" if r["target"] is None else f"{r['target']:.3f}"
        print(
            f"{r['mask']:24} {r['tokens'] >> 10:6}K {r['ranks']:5} {r['imbalance']:7.4f} "
            f"{r['bound']:6.3f} {r['received']:6.3f} {r['received_mean']:6.3f} "
            f"{r['unavoidable']:6.3f} {target:>6} | "
            f"{r['greedy_imbalance']:7.3f} {r['greedy_received']:6.3f} | {r['planning']:6.2f}"
        )


def print_cells(rows: list[dict[str, object]]) -> None:
    print(
        f"\n{'mask':22} {'tokens':>6} {'ranks':>5} {'machine':12} {'flexcp ms':>10}  "
        "others relative to flexcp (below 1 would be better)"
    )
    for r in rows:
        for machine in PRESETS:
            ours = r["ours"][machine.name]
            ratios = ", ".join(f"{n} {o[machine.name] / ours:.3f}" for n, o in r["others"].items())
            best = min(o[machine.name] / ours for o in r["others"].values())
            mark = "" if best >= 1 - 1e-9 else "  <-- not the best"
            print(
                f"{r['mask']:22} {r['tokens'] >> 10:5}K {r['ranks']:5} {machine.name:12} "
                f"{ours * 1e3:10.3f}  {ratios}{mark}"
            )
        print(f"{'':22} planning {r['planning']:.2f} s; {r['chosen']['h100-ib']}")


def draw(rows: list[dict[str, object]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    machine = "h100-ib"
    labels = [f"{r['mask']}\n{r['tokens'] >> 10}K/{r['ranks']}" for r in rows]
    figure, axes = plt.subplots(figsize=(max(8, 0.5 * len(rows)), 5))
    for strategy in STRATEGIES:
        values = [
            r["others"].get(strategy.name, {}).get(machine, float("nan")) / r["ours"][machine]
            for r in rows
        ]
        axes.plot(range(len(rows)), values, "o", label=strategy.name)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_yscale("log")
    axes.set_xticks(range(len(rows)), labels, rotation=90, fontsize=7)
    axes.set_ylabel(f"predicted time relative to flexcp's plan ({machine})")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the plot and the numbers go")
    parser.add_argument("--quick", action="store_true", help="up to 128K tokens")
    parser.add_argument("--targets-only", action="store_true")
    parser.add_argument("--packs", type=int, help="only documents, on this many packs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.packs:
        if options.packs < PACKS:
            parser.error(f"--packs has to be {PACKS} or more")
        print_packs(list(many_packs(options.packs)), options.packs)
        return
    limit = 1 << 17 if options.quick else 1 << 22
    table = list(targets(limit))
    print_targets(table)
    extra = {} if options.quick else special()
    for name, value in extra.items():
        print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")
    found = [] if options.targets_only else list(cells(limit))
    if found:
        print_cells(found)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        data = {"targets": table, "special": extra, "cells": found}
        (options.out / "planning.json").write_text(json.dumps(data, indent=1))
        if found:
            draw(found, options.out / "planning.svg")


if __name__ == "__main__":
    main()
