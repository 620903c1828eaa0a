"""What `make demo` shows: a plan, a training run on two ranks, and that it equals one process.

python examples/demo.py [--steps 24] [--tokens 4096] [--out out/demo]
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from flexcp.tools.train import PackedDocuments, TrainConfig, load_corpus

EXAMPLES = Path(__file__).parent


def chapter(text: str) -> None:
    print(f"\n━━ {text}", flush=True)


def flexcp(*args: str) -> None:
    """Runs a command as the reader would, and ends the demo if it fails."""
    print(f"\n$ flexcp {shlex.join(args)}\n", flush=True)
    code = subprocess.run([sys.executable, "-m", "flexcp.tools.cli", *args], check=False).returncode
    if code:
        sys.exit(code)


def write_lengths(config: TrainConfig, path: Path) -> int:
    """The lengths of the documents that the first step packs into its sequence."""
    corpus = load_corpus(config.data, config.seed, longest=config.document_tokens)
    batch = PackedDocuments(corpus.train, config.seed).batch(0, 1, config.tokens)
    path.write_text("".join(f"{length}\n" for length in batch.lengths[0]))
    return len(batch.lengths[0])


def draw_masks(folder: Path, tokens: str) -> None:
    """A gallery of masks; of what it prints, the table."""
    script = str(EXAMPLES / "mask_gallery.py")
    command = [sys.executable, script, "--out", str(folder), "--tokens", tokens]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    print(shown[shown.index("Block grids at") :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--gallery-tokens", default=str(1 << 20))
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    options = parser.parse_args()
    start, out, tokens = time.perf_counter(), options.out, str(options.tokens)
    out.mkdir(parents=True, exist_ok=True)

    config = TrainConfig(tokens=options.tokens, document_tokens=options.tokens // 3 + 1)
    lengths = out / "lengths.csv"
    count = write_lengths(config, lengths)
    chapter(f"1. A plan: {count} documents packed into {tokens} tokens, shared by 2 ranks")
    flexcp(
        "plan", f"causal & document({lengths})", "--ranks", "2", "--heads", "4", "--kv-heads", "2",
        "--head-dim", "32", "--dtype", "float32", "--machine", "cpu-gloo", "--check",
        "--html", str(out / "report.html"), "--svg", str(out / "plan.svg"),
    )  # fmt: skip

    chapter("2. Training on 2 processes; every step is repeated in one process and compared")
    flexcp(
        "train", "--ranks", "2", "--steps", str(options.steps), "--tokens", tokens,
        "--document-tokens", str(config.document_tokens), "--compare", "--restart",
        "--eval-every", str(max(options.steps // 2, 1)), "--out", str(out / "train"),
    )  # fmt: skip

    chapter("3. Masks at a million tokens: which tiles of the attention matrix are there at all\n")
    draw_masks(out / "masks", options.gallery_tokens)

    command = os.path.relpath(Path(sys.executable).with_name("flexcp"))
    print(f"""
━━ What you have seen, in {time.perf_counter() - start:.0f} seconds

  1. flexcp read a mask, decided who owns which tokens and what moves when, and proved that the
     schedule is that attention. Open {out / "report.html"} for the plan, tile by tile.
  2. Two processes trained a transformer, each on its half of every sequence. Losses and all
     gradients were those of one process, step by step. The curve is {out / "train/loss.svg"}.
  3. Any mask will do: pictures of twelve are in {out / "masks"}.

━━ Three commands to try next

  {command} train --data docs --out out/docs --tokens 4096    # your own text; Ctrl-C, and again
  {command} plan "causal & sliding_window(4096)" --tokens 1M --ranks 64 --html out/plan.html
  {command} show "causal & document({lengths})" --ranks 2     # who computes which tiles
""")


if __name__ == "__main__":
    main()
