"""The block grids of a gallery of masks at a million tokens: a table, and a picture of each.

python examples/mask_gallery.py [--tokens 1048576] [--out out/gallery]
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from pathlib import Path

import torch

import flexcp
from flexcp import masks
from flexcp.tools.report import Picture, picture_of, table


def document_lengths(tokens: int, seed: int = 0) -> list[int]:
    """Documents as long-tailed as those of real corpora, packed into `tokens`."""
    draw = random.Random(seed)
    lengths: list[int] = []
    while tokens > 0:
        lengths.append(min(tokens, 1 + int(draw.lognormvariate(math.log(600), 1.4))))
        tokens -= lengths[-1]
    return lengths


def gallery(tokens: int) -> dict[str, flexcp.Mask]:
    ids = masks.ids_from_lengths(document_lengths(tokens))
    few = masks.ids_from_lengths([tokens // 4, tokens // 8, tokens - tokens // 4 - tokens // 8])
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))

    def dilated(b, h, q_idx, kv_idx):
        """One stretch in eight, looking back: any mask_mod will do."""
        return (q_idx >= kv_idx) & ((q_idx - kv_idx) // (tokens // 64) % 8 == 0)

    def shuffled(b, h, q_idx, kv_idx):
        return order[q_idx] >= order[kv_idx]

    return {
        "full": masks.full(),
        "causal": masks.causal(),
        "sliding window": masks.sliding_window(tokens // 16),
        "three documents": masks.causal() & masks.document(few),
        "packed documents": masks.causal() & masks.document(ids),
        "prefix LM": masks.prefix_lm(tokens // 5),
        "chunked": masks.chunked(tokens // 10) & masks.causal(),
        "block-causal": masks.block_causal(tokens // 12),
        "shared prefix": masks.shared_prefix(tokens // 4, [tokens // 4] * 3),
        "window + global": masks.global_tokens(tokens // 40)
        | masks.sliding_window(tokens // 20, tokens // 20),
        "dilated (a mask_mod)": flexcp.Mask(dilated),
        "shuffled (no structure)": flexcp.Mask(shuffled),
    }


def save_sheet(pictures: list[Picture], path: Path) -> None:
    """All pictures on one page, with their names."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = 6
    figure, axes = plt.subplots(
        -(-len(pictures) // columns), columns, figsize=(13, 4.9), layout="constrained"
    )
    for place, picture in zip(axes.flat, pictures, strict=True):
        place.imshow(picture.pixels(), interpolation="nearest")
        place.set_title(picture.title, fontsize=10)
        place.set(xticks=[], yticks=[])
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--out", type=Path, default=Path("out/gallery"))
    parser.add_argument("--sheet", type=Path, help="also draw all of them on one page (matplotlib)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    rows, pictures = [], []
    for name, mask in gallery(options.tokens).items():
        start = time.perf_counter()
        grid = flexcp.build_block_grid(mask, options.tokens)
        seconds = time.perf_counter() - start
        counts = grid.counts()
        rows.append(
            [
                name,
                f"{seconds * 1e3:.0f}",
                *(f"{counts[kind]:,}" for kind in ("full", "partial", "empty")),
                f"{sum(len(runs) for runs in grid.runs):,}",
            ]
        )
        picture = picture_of(grid, title=name)
        pictures.append(picture)
        stem = options.out / name.split(" (")[0].replace(" ", "_").replace("+", "and")
        picture.save_png(stem.with_suffix(".png"), scale=2)
        picture.save_svg(stem.with_suffix(".svg"))
        print(f"\n{name}: {grid.mask.name}")
        print(picture_of(grid, height=24, width=48).to_text(colour=colour))

    if options.sheet:
        save_sheet(pictures, options.sheet)
    print(f"\nBlock grids at {options.tokens:,} tokens, blocks of 128 x 128:\n")
    print(table(["mask", "build, ms", "full", "partial", "empty", "stored runs"], rows))
    print(
        f"\nEach picture is in {options.out}/ as PNG and SVG. For comparison, torch's "
        "create_block_mask\nlooks at every pair: a trillion of them here."
    )


if __name__ == "__main__":
    main()
