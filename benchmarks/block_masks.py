"""How long, how much memory and how many looks does it take to find a mask's blocks?

torch's create_block_mask and flexcp in one run at lengths that torch can do, then flexcp alone up
to 16M tokens. Each measurement is a fresh process, the best of several repetitions; memory is what
the process needed beyond what it had before (read from /proc, so on Linux).

python benchmarks/block_masks.py [--out out/benchmarks] [--quick]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

BOTH = (1 << 12, 1 << 13, 1 << 14)
ALONE = (1 << 17, 1 << 20, 1 << 22, 1 << 24)
MASKS = (
    "causal",
    "window 4096",
    "documents",
    "prefix + documents",
    "shared prefix",
    "block-causal",
    "permuted lookup",
)
REPEATS = 9


def make_mask(name: str, tokens: int):
    """A plain mask_mod, the same for both libraries."""
    import torch
    from documents import packed_document_lengths

    from flexcp import masks

    if "documents" in name:
        documents = masks.document(lengths=packed_document_lengths(tokens, seed=0))
    match name:
        case "causal":
            mask = masks.causal()
        case "window 4096":
            mask = masks.sliding_window(min(4096, tokens // 4))
        case "documents":
            mask = masks.causal() & documents
        case "prefix + documents":
            mask = masks.prefix_lm(1000) & documents
        case "shared prefix":
            mask = masks.shared_prefix(tokens // 2, [tokens // 16] * 8)
        case "block-causal":
            mask = masks.block_causal(1000)
        case "permuted lookup":
            order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))

            def mask(b, h, q_idx, kv_idx):
                return order[q_idx] >= order[kv_idx]

    return getattr(mask, "mask_mod", mask)


def memory(what: str) -> int:
    """KB that Linux says of this process: VmRSS is now, VmHWM the most since it was forgotten."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{what}:")[1].split()[0])


def forget_peak() -> int:
    """Starts counting anew; returns what is in use."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def measure(library: str, name: str, tokens: int) -> dict[str, object]:
    """Runs in a process of its own: time, peak memory and effort of one case."""
    from torch.nn.attention.flex_attention import create_block_mask

    import flexcp

    def build(mask_mod, size):
        if library == "torch":
            return create_block_mask(mask_mod, None, None, size, size, device="cpu")
        return flexcp.build_block_grid(mask_mod, size)

    mask_mod = make_mask(name, tokens)
    build(make_mask("causal", 1 << 10), 1 << 10)  # what is loaded once is not the mask's cost
    before = forget_peak()
    seconds = []
    area_seconds = []
    structured = name != "permuted lookup"
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = build(mask_mod, tokens)
        seconds.append(time.perf_counter() - start)
        if sum(seconds) > 20:
            break
    built = memory("VmHWM")
    found: dict[str, object] = {
        "library": library,
        "mask": name,
        "tokens": tokens,
        "seconds": min(seconds),
        "peak_mb": (built - before) / 1024,
    }
    if library == "flexcp":
        effort = result.effort
        found |= {
            "visited": effort.visited,
            "probed": effort.probed,
            "evaluated": effort.evaluated,
            "runs": sum(len(runs) for runs in result.runs),
        }
        if structured and tokens <= 1 << 20:
            for _ in range(REPEATS):
                grid = flexcp.build_block_grid(mask_mod, tokens)
                start = time.perf_counter()
                found["area"] = grid.area()
                area_seconds.append(time.perf_counter() - start)
            found["area_seconds"] = min(area_seconds)
            found["peak_with_area_mb"] = (memory("VmHWM") - before) / 1024
    return found


def run(library: str, name: str, tokens: int) -> dict[str, object]:
    command = [sys.executable, __file__, "--one", library, name, str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["killed"]
        return {"library": library, "mask": name, "tokens": tokens, "failed": reason[0]}
    result: dict[str, object] = json.loads(done.stdout)
    return result


def as_table(results: list[dict[str, object]]) -> str:
    from flexcp.tools.report import table

    def of(library: str, name: str, tokens: int) -> dict[str, object]:
        return next(
            (
                r
                for r in results
                if (r["library"], r["mask"], r["tokens"]) == (library, name, tokens)
            ),
            {},
        )

    rows = []
    for name in dict.fromkeys(r["mask"] for r in results):
        at_8k = of("torch", name, 1 << 13).get("seconds")
        for tokens in sorted({r["tokens"] for r in results}):
            ours, theirs = of("flexcp", name, tokens), of("torch", name, tokens)
            if "seconds" not in ours:
                continue
            peer = theirs.get("seconds", at_8k)
            rows.append(
                [
                    name,
                    f"{tokens:,}",
                    f"{theirs['seconds'] * 1e3:.1f}" if "seconds" in theirs else "-",
                    f"{ours['seconds'] * 1e3:.1f}",
                    f"{ours['seconds'] / peer:.3f}" if peer else "-",
                    f"{ours['area_seconds'] * 1e3:.1f}" if "area_seconds" in ours else "-",
                    f"{theirs['peak_mb']:.0f}" if "peak_mb" in theirs else "-",
                    f"{ours['peak_mb']:.0f}",
                    f"{ours['visited']:,}",
                    f"{ours['probed']:,}",
                    f"{ours['evaluated']:,}",
                ]
            )
    header = [
        "mask",
        "tokens",
        "torch, ms",
        "flexcp, ms",
        "flexcp / torch*",
        "area, ms",
        "torch, MB",
        "flexcp, MB",
        "visited",
        "probed",
        "evaluated",
    ]
    note = "\n\n* torch at the same length where it was run, else torch at 8,192 tokens."
    return table(header, rows) + note


def plot(results: list[dict[str, object]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    names = list(dict.fromkeys(r["mask"] for r in results))
    for colour, name in zip(plt.cm.tab10.colors, names, strict=False):
        for library, style in (("torch", "--"), ("flexcp", "-")):
            mine = [
                r
                for r in results
                if (r["library"], r["mask"]) == (library, name) and "seconds" in r
            ]
            label = name if library == "flexcp" else None
            x = [r["tokens"] for r in mine]
            left.plot(x, [r["seconds"] for r in mine], style, color=colour, marker="o", label=label)
            right.plot(x, [max(r["peak_mb"], 0.5) for r in mine], style, color=colour, marker="o")
    for axes, label in ((left, "seconds"), (right, "peak memory, MB")):
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    left.legend(fontsize=8, frameon=False)
    figure.suptitle("Finding a mask's blocks: flexcp (solid) and torch (dashed)")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"))
    parser.add_argument("--quick", action="store_true", help="up to 1M tokens, four masks")
    parser.add_argument("--one", nargs=3, metavar=("LIBRARY", "MASK", "TOKENS"))
    options = parser.parse_args()
    if options.one:
        library, name, tokens = options.one
        print(json.dumps(measure(library, name, int(tokens))))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    names = MASKS[:4] if options.quick else MASKS
    cases = [
        (library, name, tokens)
        for name in names
        for tokens in (*BOTH, *(ALONE[:2] if options.quick else ALONE))
        for library in (("torch", "flexcp") if tokens in BOTH else ("flexcp",))
    ]
    results = []
    for number, case in enumerate(cases, 1):
        print(f"[{number}/{len(cases)}] {' '.join(map(str, case))}", file=sys.stderr, flush=True)
        results.append(run(*case))
        if "failed" in results[-1]:
            print(f"    failed: {results[-1]['failed']}", file=sys.stderr)
    text = as_table(results)
    print(text)
    (options.out / "block_masks.md").write_text(text + "\n")
    (options.out / "block_masks.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, options.out / "block_masks.png")


if __name__ == "__main__":
    main()
