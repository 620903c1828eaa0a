"""How good are flexcp's plans, and how long does making them take?

Every mask is planned by flexcp and by the strategies of others, as plans of our own on the same
cost model: imbalance (max/mean allowed pairs), the most rows of K and V that any rank receives as a
fraction of what an all-gather brings, predicted time on four machines, and planning time.

    python benchmarks/planning.py --out out/benchmarks            # the table of targets, and cells
    python benchmarks/planning.py --quick                         # up to 128K tokens
    python benchmarks/planning.py --packs 30                      # documents only, on many packs

The table of targets has the packs of documents on which its figures were published; the cells have
packs whose longest documents are not cut to a quarter, and "--packs" tries many of both kinds.
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
from chunks import greedy_chunks
from documents import packed_document_lengths, published_packs
from planning_report import MACHINES, SHOWN, draw, print_cells, print_packs, print_targets

from flexcp import BlockGrid, Mask, build_block_grid, masks
from flexcp.layout import (
    Layout,
    balanced,
    contiguous,
    head_tail,
    per_document_head_tail,
    ptrr,
)
from flexcp.layout.work import Work, area_per_rank
from flexcp.plan import AttentionShape, make_plan, price
from flexcp.plan.traffic import traffic
from flexcp.plan.work_profile import WorkProfile
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


def mask_named(name: str, tokens: int, lengths: list[int]) -> Mask:
    """A mask by its name; those with documents have documents of these lengths."""
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


def packs_of(name: str, tokens: int) -> list[list[int]]:
    """Packs on which a row of the table is measured."""
    several = "documents" in name or name == "block-causal + global"
    return published_packs(tokens, PACKS)[: PACKS if several else 1]


@dataclass(frozen=True)
class Strategy:
    """Somebody's way to plan."""

    name: str
    layout: Callable[[BlockGrid, int], Layout]
    schedule: str
    group_size: int = 1


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


def plan_of(strategy: Strategy, grid: BlockGrid, ranks: int) -> tuple[Schedule, WorkProfile]:
    layout = strategy.layout(grid, ranks)
    group_size = ranks if strategy.schedule == "ulysses" else strategy.group_size
    # What an all-gather moves does not depend on which tokens a rank has, only on how many.
    moved = contiguous(grid.q_len, ranks) if strategy.schedule == "allgather" else layout
    schedule = make_schedule(
        strategy.schedule,
        [grid],
        moved,
        num_heads=SHAPE.num_heads,
        num_kv_heads=SHAPE.num_kv_heads,
        heads_group_size=group_size,
        outer_schedule="ring" if strategy.schedule == "hybrid" else "exchange",
    )
    return schedule, WorkProfile.of([grid], grouped(layout, group_size))


def measured(mask: Mask, tokens: int, ranks: int) -> dict[str, float]:
    """Our own plan: imbalance, received rows, planning CPU seconds (best of 3)."""
    seconds = []
    for _ in range(3):
        fresh = Mask(mask.mask_mod)  # a mask that nothing is known of: its grid is built as well
        begin = time.process_time()
        plan = make_plan(fresh, tokens, ranks)
        seconds.append(time.process_time() - begin)
    stats = plan.stats()
    whole = tokens * (ranks - 1) / ranks
    rows = stats.tokens_received_per_rank
    return {
        "imbalance": stats.imbalance,
        "bound": stats.imbalance_lower_bound,
        "received": max(rows) / whole,
        "sent": most_sent(plan.schedule, ranks) / whole,
        "received_mean": sum(rows) / ranks / whole,
        "received_rows": max(rows),
        "planning": min(seconds),
    }


def most_sent(schedule: Schedule, ranks: int) -> float:
    """Rows that the rank sends that sends most: a link carries as much in each direction."""
    return float(schedule.forward.moves.reversed().received(ranks).max())


def greedy_measured(mask: Mask, tokens: int, ranks: int) -> dict[str, float]:
    grid = build_block_grid(mask, tokens)
    layout = greedy_chunks(grid, ranks)
    areas = area_per_rank([grid], layout).double()
    schedule = make_schedule("exchange", [grid], layout)
    rows = schedule.forward.moves.received(ranks)
    return {
        "imbalance": float(areas.max() / areas.mean()),
        "received": float(rows.max()) / (tokens * (ranks - 1) / ranks),
    }


def unavoidable(row: Target, packs: list[list[int]]) -> float:
    """What some rank has to receive: the longest document's last row needs all of it."""
    if "documents" not in row.mask:
        return 0.0
    share = row.tokens // row.ranks
    return sum(max(0, max(pack) - share) for pack in packs) / len(packs) / (row.tokens - share)


def targets(limit: int) -> Iterator[dict[str, object]]:
    rows = [*TARGETS, *(Target(m, 1 << 19, r, None) for m in MORE for r in (8, 32, 64))]
    for row in rows:
        if row.tokens > limit:
            continue
        packs = packs_of(row.mask, row.tokens)
        chosen = [mask_named(row.mask, row.tokens, pack) for pack in packs]
        ours = [measured(mask, row.tokens, row.ranks) for mask in chosen]
        theirs = [greedy_measured(mask, row.tokens, row.ranks) for mask in chosen]
        yield {
            "mask": row.mask,
            "tokens": row.tokens,
            "ranks": row.ranks,
            "imbalance": max(x["imbalance"] for x in ours),
            "bound": max(x["bound"] for x in ours),
            "received": sum(x["received"] for x in ours) / len(ours),
            "received_mean": sum(x["received_mean"] for x in ours) / len(ours),
            "sent": sum(x["sent"] for x in ours) / len(ours),
            "received_rows": max(x["received_rows"] for x in ours),
            "target": row.received,
            "unavoidable": unavoidable(row, packs),
            "greedy_imbalance": max(x["imbalance"] for x in theirs),
            "greedy_received": sum(x["received"] for x in theirs) / len(theirs),
            "planning": max(x["planning"] for x in ours),
        }


def many_packs(count: int) -> Iterator[dict[str, object]]:
    """Layouts alone, on many packs of documents: a few packs may be unlike most others."""
    for row in TARGETS:
        if row.mask.startswith("documents"):
            drawn = [packed_document_lengths(row.tokens, seed) for seed in range(count)]
            yield of_packs(row, "as published", published_packs(row.tokens, count))
            yield of_packs(row, "uncut", drawn)


def of_packs(row: Target, kind: str, packs: list[list[int]]) -> dict[str, object]:
    """How our layouts and fixed chunks do on all packs."""
    share = row.tokens // row.ranks
    found = []
    for pack in packs:
        grid = build_block_grid(mask_named(row.mask, row.tokens, pack), row.tokens)
        pair = [balanced([grid], row.ranks), greedy_chunks(grid, row.ranks)]
        areas = [area_per_rank([grid], layout).double() for layout in pair]
        schedules = [make_schedule("exchange", [grid], layout) for layout in pair]
        rows = [float(s.forward.moves.received(row.ranks).max()) for s in schedules]
        rows += [most_sent(schedule, row.ranks) for schedule in schedules]
        evenness = (float(a.max() / a.mean()) for a in areas)
        found.append([*(r / (row.tokens - share) for r in rows), *evenness])
    ours, theirs, sent, sent_by_them, even, uneven = zip(*found, strict=True)
    count = len(packs)
    return {
        "mask": row.mask,
        "packs": kind,
        "tokens": row.tokens,
        "ranks": row.ranks,
        "received": sum(ours) / count,
        "sent": sum(sent) / count,
        "groups": [sum(ours[i : i + PACKS]) / PACKS for i in range(0, count - PACKS + 1, PACKS)],
        "unavoidable": unavoidable(row, packs),
        "imbalance": max(even),
        "greedy_received": sum(theirs) / count,
        "greedy_sent": sum(sent_by_them) / count,
        "greedy_imbalance": max(uneven),
        "worse": sum(a > b for a, b in zip(ours, theirs, strict=True)),
    }


def cells(limit: int) -> Iterator[dict[str, object]]:
    for tokens, ranks in CELLS:
        if tokens > limit:
            continue
        for name in CELL_MASKS:
            mask = mask_named(name, tokens, packed_document_lengths(tokens, seed=0))
            grid = build_block_grid(mask, tokens, heads=SHAPE.num_heads)
            whole = SHAPE.kv_bytes(SHAPE.num_kv_heads) * tokens * (ranks - 1) / ranks
            ours: dict[str, float] = {}
            chosen: dict[str, str] = {}
            planning = 0.0
            for machine in MACHINES:
                begin = time.process_time()
                plan = make_plan(mask, tokens, ranks, machine=machine, **HEADS)
                planning = max(planning, time.process_time() - begin)
                ours[machine.name] = plan.costs[""].seconds
                chosen[machine.name] = plan.considered[0][0]
                if machine.name == SHOWN:
                    ours["imbalance"] = plan.stats().imbalance
                    ours["received"] = max(plan.stats().bytes_received_per_rank) / whole
            others: dict[str, dict[str, float]] = {}
            for strategy in STRATEGIES:
                if strategy.group_size > 1 and ranks % strategy.group_size:
                    continue
                schedule, load = plan_of(strategy, grid, ranks)
                found = {m.name: price(schedule, load, m, SHAPE).seconds for m in MACHINES}
                found["received"] = float(traffic(schedule, SHAPE).forward.max()) / whole
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
    lengths = packed_document_lengths(tokens, seed=0)
    documents = mask_named("documents, causal", tokens, lengths)
    window = mask_named("window 4096", tokens, lengths)
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
            draw(found, options.out / "planning.png")


if __name__ == "__main__":
    main()
