"""What benchmarks/planning.py reports, as tables and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexcp.plan import PRESETS

MACHINES = [m for m in PRESETS if m.name in ("cpu-gloo", "h100-nvlink", "h100-ib", "pcie")]
SHOWN = "h100-ib"
"""The machine whose plans are drawn, and of which imbalance and received bytes are told."""
Rows = list[dict[str, Any]]
"""What was found out, a dict for each line."""


def print_packs(rows: Rows, count: int) -> None:
    print(
        f"{str(count) + ' packs':31}  tokens ranks  received (3 packs: from, to)  least   sent  "
        "imbal. | greedy   sent  imbal. | packs on which greedy receives less"
    )
    for r in rows:
        low, high = min(r["groups"]), max(r["groups"])
        print(
            f"{r['mask']:18} {r['packs']:12} {r['tokens'] >> 10:6}K {r['ranks']:4}  "
            f"{r['received']:8.3f} ({low:.3f}, {high:.3f}) {r['unavoidable']:12.3f} "
            f"{r['sent']:6.3f} {r['imbalance']:7.4f} | {r['greedy_received']:6.3f} "
            f"{r['greedy_sent']:6.3f} {r['greedy_imbalance']:7.3f} | {r['worse']}"
        )


def print_targets(rows: Rows) -> None:
    print(
        f"{'mask':24} {'tokens':>7} {'ranks':>5} {'imbal.':>7} {'bound':>6} {'recv':>6} "
        f"{'sent':>6} {'mean':>6} {'least':>6} {'target':>6} | {'greedy':>7} {'recv':>6} | "
        f"{'plan s':>6}"
    )
    for r in rows:
        target = "" if r["target"] is None else f"{r['target']:.3f}"
        print(
            f"{r['mask']:24} {r['tokens'] >> 10:6}K {r['ranks']:5} {r['imbalance']:7.4f} "
            f"{r['bound']:6.3f} {r['received']:6.3f} {r['sent']:6.3f} {r['received_mean']:6.3f} "
            f"{r['unavoidable']:6.3f} {target:>6} | "
            f"{r['greedy_imbalance']:7.3f} {r['greedy_received']:6.3f} | {r['planning']:6.2f}"
        )


def print_cells(rows: Rows) -> None:
    """Predicted times; "received" are bytes, Q and outputs included, of those of an all-gather."""
    print(
        f"\n{'mask':22} {'tokens':>6} {'ranks':>5} {'machine':12} {'flexcp ms':>10}  "
        "others relative to flexcp (below 1 would be better)"
    )
    for r in rows:
        for machine in MACHINES:
            ours = r["ours"][machine.name]
            ratios = ", ".join(f"{n} {o[machine.name] / ours:.3f}" for n, o in r["others"].items())
            best = min(o[machine.name] / ours for o in r["others"].values())
            mark = "" if best >= 1 - 1e-9 else "  <-- not the best"
            print(
                f"{r['mask']:22} {r['tokens'] >> 10:5}K {r['ranks']:5} {machine.name:12} "
                f"{ours * 1e3:10.3f}  {ratios}{mark}"
            )
        print(f"{'':22} {SHOWN}: {r['chosen'][SHOWN]}; planning {r['planning']:.2f} s at most")
        for what in ("imbalance", "received"):
            each = ", ".join(f"{n} {o[what]:.3f}" for n, o in r["others"].items())
            print(f"{'':22} {what}: flexcp {r['ours'][what]:.3f}, {each}")


def draw(rows: Rows, path: Path) -> None:
    """A panel for every mask: predicted time of other strategies, flexcp's plan = 1."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    masks = list(dict.fromkeys(r["mask"] for r in rows))
    cells = list(dict.fromkeys((r["tokens"], r["ranks"]) for r in rows))
    names = list(dict.fromkeys(name for r in rows for name in r["others"]))
    columns = 4
    figure, grid = plt.subplots(-(-(len(masks) + 1) // columns), columns, figsize=(14, 6.4))
    panels = list(grid.flat)
    for panel, mask in zip(panels, masks, strict=False):
        own = {(r["tokens"], r["ranks"]): r for r in rows if r["mask"] == mask}
        for name, marker in zip(names, "osD^vP*X<>", strict=False):
            values = [
                own[c]["others"].get(name, {}).get(SHOWN, float("nan")) / own[c]["ours"][SHOWN]
                for c in cells
            ]
            panel.plot(range(len(cells)), values, marker=marker, linewidth=0.8, label=name)
        panel.axhline(1, color="black", linewidth=1)
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.set_title(mask, fontsize=10)
        labels = [f"{tokens >> 10}K\n{ranks}" for tokens, ranks in cells]
        panel.set_xticks(range(len(cells)), labels, fontsize=8)
    handles, found = panels[0].get_legend_handles_labels()
    for panel in panels[len(masks) :]:
        panel.axis("off")
    panels[len(masks)].legend(handles, found, loc="center", fontsize=9, frameon=False)
    figure.suptitle(f"Predicted time on {SHOWN} by tokens and ranks, flexcp's plan = 1")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
