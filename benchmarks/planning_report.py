"""What benchmarks/planning.py reports, as tables and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexcp.plan import PRESETS

Rows = list[dict[str, Any]]
"""What was found out, a dict for each line."""


def print_packs(rows: Rows, count: int) -> None:
    print(
        f"{str(count) + ' packs':31}  tokens ranks  received (3 packs: from, to)  least  imbal. | "
        "greedy  imbal. | packs on which greedy receives less"
    )
    for r in rows:
        low, high = min(r["groups"]), max(r["groups"])
        print(
            f"{r['mask']:18} {r['packs']:12} {r['tokens'] >> 10:6}K {r['ranks']:4}  "
            f"{r['received']:8.3f} ({low:.3f}, {high:.3f}) {r['unavoidable']:12.3f} "
            f"{r['imbalance']:7.4f} | {r['greedy_received']:6.3f} {r['greedy_imbalance']:7.3f} | "
            f"{r['worse']}"
        )


def print_targets(rows: Rows) -> None:
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


def print_cells(rows: Rows) -> None:
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


def draw(rows: Rows, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    machine = "h100-ib"
    labels = [f"{r['mask']}\n{r['tokens'] >> 10}K/{r['ranks']}" for r in rows]
    figure, axes = plt.subplots(figsize=(max(8, 0.5 * len(rows)), 5))
    names = dict.fromkeys(name for r in rows for name in r["others"])
    for name in names:
        values = [
            r["others"].get(name, {}).get(machine, float("nan")) / r["ours"][machine] for r in rows
        ]
        axes.plot(range(len(rows)), values, "o", label=name)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_yscale("log")
    axes.set_xticks(range(len(rows)), labels, rotation=90, fontsize=7)
    axes.set_ylabel(f"predicted time relative to flexcp's plan ({machine})")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
