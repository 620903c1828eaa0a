"""The figures of docs/concepts.md, drawn from plans of flexcp itself.

python scripts/figures.py [--out docs/images]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgb
from torch import Tensor

import flexcp
from flexcp import Mask, Plan, masks

TOKENS, BLOCK, RANKS = 1024, 32, 4
COLOURS = ["#2f6fb7", "#e0802c", "#3a9a5b", "#b5467f"]
PACKED = [380, 150, 300, 60, 134]


def dense(mask: Mask, tokens: int) -> Tensor:
    """bool [S, S] for a small picture."""
    rows = torch.arange(tokens)
    zero = torch.tensor(0)
    return mask.mask_mod(zero, zero, rows[:, None], rows[None, :]).expand(tokens, tokens)


def owners(plan: Plan) -> Tensor:
    """int64 [S] the rank that owns each token."""
    owner = torch.empty(plan.seq_len, dtype=torch.int64)
    for rank in range(plan.ranks.size):
        owner[plan.positions(rank)] = rank
    return owner


def by_rank(allowed: Tensor, owner: Tensor) -> Tensor:
    """float [S, S, 3] allowed pairs in the colour of the rank that computes them."""
    colours = torch.tensor([to_rgb(c) for c in COLOURS])[owner]
    picture = colours[:, None, :].expand(*allowed.shape, 3)
    return torch.where(allowed[..., None], picture, torch.tensor(0.965))


def bare(axes: Axes, title: str) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(title, fontsize=10)
    for side in axes.spines.values():
        side.set_color("#b8bec8")


def plan_of(mask: Mask, layout: str, schedule: str = "exchange") -> Plan:
    return flexcp.make_plan(
        mask, TOKENS, RANKS, layout=layout, schedule=schedule, block_size=BLOCK, num_heads=8
    )


def stages(out: Path) -> None:
    mask = masks.causal() & masks.document(lengths=PACKED)
    allowed = dense(mask, TOKENS)
    grid = flexcp.build_block_grid(mask, TOKENS, block_size=BLOCK)
    plan = plan_of(mask, "balanced")
    figure, (first, second, third) = pyplot.subplots(1, 3, figsize=(10, 3.6))
    first.imshow(allowed, cmap=ListedColormap(["#f6f7f9", "#24476f"]), interpolation="nearest")
    bare(first, "mask: what may attend")
    second.imshow(
        grid.to_dense()[0, 0],
        cmap=ListedColormap(["#f6f7f9", "#8db6e2", "#24476f"]),
        interpolation="nearest",
    )
    bare(second, "grid: empty, partial, full tiles")
    third.imshow(by_rank(allowed, owners(plan)), interpolation="nearest")
    bare(third, "plan: which rank computes what")
    first.set_ylabel("queries", fontsize=9)
    first.set_xlabel("keys", fontsize=9)
    save(figure, out / "stages.png")


def balance(out: Path) -> None:
    mask = masks.causal()
    allowed = dense(mask, TOKENS)
    figure, axes = pyplot.subplots(
        2, 3, figsize=(10, 4.6), gridspec_kw={"height_ratios": [3.2, 1.3]}
    )
    for (top, bottom), layout in zip(axes.T, ("contiguous", "striped", "balanced"), strict=True):
        plan = plan_of(mask, layout)
        stats = plan.stats()
        area = torch.tensor(stats.area_per_rank, dtype=torch.float64)
        top.imshow(by_rank(allowed, owners(plan)), interpolation="nearest")
        bare(top, layout)
        bottom.bar(range(RANKS), area / area.mean(), color=COLOURS, width=0.7)
        bottom.axhline(1, color="#5b6472", linewidth=0.8, linestyle="--")
        bottom.set_ylim(0, 1.9)
        bottom.set_yticks([0, 1])
        bottom.set_xticks(range(RANKS), [f"rank {r}" for r in range(RANKS)], fontsize=8)
        bottom.set_xlabel(f"slowest rank: {stats.imbalance:.2f} × the mean", fontsize=8.5)
        bottom.spines[["top", "right"]].set_visible(False)
    axes[1, 0].set_ylabel("work / mean", fontsize=9)
    save(figure, out / "balance.png")


def traffic(out: Path) -> None:
    kinds = {
        "causal": masks.causal(),
        "packed documents": masks.causal() & masks.document(lengths=PACKED),
        "window of 100": masks.causal() & masks.sliding_window(100),
    }
    figure, axes = pyplot.subplots(1, 4, figsize=(10, 3.0))
    ring = plan_of(masks.causal(), "balanced", "ring")
    plans = {"any mask, ring": ring}
    plans |= {f"{name}, exchange": plan_of(mask, "balanced") for name, mask in kinds.items()}
    for axis, (title, plan) in zip(axes, plans.items(), strict=True):
        rows = sent(plan)
        axis.imshow(rows, cmap="Blues", vmin=0, vmax=TOKENS * 3 / RANKS, interpolation="nearest")
        for a in range(RANKS):
            for b in range(RANKS):
                if rows[a, b]:
                    dark = rows[a, b] > TOKENS * 1.7 / RANKS
                    axis.text(
                        b, a, int(rows[a, b]), ha="center", va="center", fontsize=8,
                        color="white" if dark else "#1c2733",
                    )  # fmt: skip
        bare(axis, title)
        axis.set_xlabel(f"to rank; {int(rows.sum())} rows in all", fontsize=8.5)
    axes[0].set_ylabel("from rank", fontsize=9)
    save(figure, out / "traffic.png")


def sent(plan: Plan) -> Tensor:
    """int64 [P, P] rows of K and V that each rank sends to each other in forward."""
    moves = plan.schedule_of().forward.moves
    rows = torch.zeros(RANKS, RANKS, dtype=torch.int64)
    rows.index_put_((moves.source, moves.target), moves.stop - moves.start, accumulate=True)
    return rows


def save(figure: pyplot.Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    stages(out)
    balance(out)
    traffic(out)


if __name__ == "__main__":
    main()
