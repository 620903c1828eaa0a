"""How fast is attention with a mask, per allowed pair, beside PyTorch's own?

flexcp, SDPA (dense, is_causal, with a bool mask) and FlexAttention (compiled, forward only: it has
no backward on CPU) in one run, interleaved, the best of several repetitions. Throughput counts the
pairs that the mask allows; ratios are to dense SDPA in the same run, and to a plain matrix product.
Memory is what the process needed beyond what it had before the call.

python benchmarks/attention.py [--out out/benchmarks] [--quick] [--lengths 4096 8192 ...]
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch
from documents import packed_document_lengths
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import flexcp
from flexcp import masks
from flexcp.runtime import flex_attention

HEADS, DIM = 8, 64
MASKS = ("full", "causal", "documents", "window 1024", "prefix", "block-causal", "alibi", "softcap")
MOST_FOR_BOOL_MASK = 8192
MOST_FOR_COMPILED_FLEX = 8192


@dataclass
class Row:
    """One measurement."""

    mask: str
    who: str
    tokens: int
    dtype: str
    kv_heads: int
    forward: float
    """Seconds."""
    both: float | None
    """Seconds of forward and backward; None where there is no backward."""
    pairs: int
    memory_mb: float
    of_dense: float | None = None
    """Throughput, relative to dense SDPA."""
    of_dense_forward: float | None = None
    of_matmul: float | None = None
    """Share of a plain matrix product's speed."""


def make_mask(name: str, tokens: int) -> flexcp.Mask | None:
    match name:
        case "full":
            return None
        case "documents":
            lengths = packed_document_lengths(tokens, seed=0)
            return masks.causal() & masks.document(lengths=lengths)
        case "window 1024":
            return masks.sliding_window(1024)
        case "prefix":
            return masks.prefix_lm(1000)
        case "block-causal":
            return masks.block_causal(512)
        case _:
            return masks.causal()


def make_score_mod(name: str) -> Callable[..., Tensor] | None:
    slopes = torch.exp2(-torch.arange(1, HEADS + 1.0))
    return {
        "alibi": lambda score, b, h, q, kv: score - slopes[h] * (q - kv),
        "softcap": lambda score, b, h, q, kv: 20.0 * torch.tanh(score / 20.0),
    }.get(name)


class PeakMemory:
    """The most resident memory while it is entered, beyond what there was before, in MB."""

    def __enter__(self) -> PeakMemory:
        self._before = self.most = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _now(self) -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.most = max(self.most, self._now())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.megabytes = self.most - self._before


def timed(call: Callable[[], Tensor], inputs: list[Tensor], gradient: Tensor | None):
    start = time.perf_counter()
    out = call()
    middle = time.perf_counter()
    if gradient is not None:
        torch.autograd.grad(out, inputs, gradient)
    return middle - start, time.perf_counter() - start


def matmul_seconds_per_pair(dtype: torch.dtype) -> float:
    """Of the two products of a forward pass, for one pair of one head."""
    a, b = torch.randn(1024, 1024, dtype=dtype), torch.randn(1024, 1024, dtype=dtype)
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return best / 1024**3 * 2 * DIM


def competitors(name: str, tokens: int, q: Tensor, k: Tensor, v: Tensor, compiled: object):
    """Who runs this mask: name -> (call, has a backward pass, pairs are those of dense)."""
    mask, score_mod = make_mask(name, tokens), make_score_mod(name)
    found = {
        "flexcp": lambda: flex_attention(q, k, v, score_mod, mask, enable_gqa=True),
        "SDPA dense": lambda: sdpa(q, k, v, enable_gqa=True),
    }
    if name == "causal":
        found["SDPA is_causal"] = lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True)
    if mask is not None and score_mod is None and tokens <= MOST_FOR_BOOL_MASK:
        i = torch.arange(tokens)
        zero = torch.zeros((), dtype=torch.int64)
        allowed = mask.mask_mod(zero, zero, i[:, None], i)
        found["SDPA bool mask"] = lambda: sdpa(q, k, v, allowed, enable_gqa=True)
    if compiled is not None and tokens <= MOST_FOR_COMPILED_FLEX:
        block_mask = None
        if mask is not None:
            block_mask = flexcp.build_block_grid(mask, tokens).to_block_mask()
        plain = [x.detach() for x in (q, k, v)]
        found["FlexAttention compiled"] = lambda: compiled(
            *plain, score_mod, block_mask, enable_gqa=True
        )
    return found, mask


def measure(name: str, tokens: int, dtype: torch.dtype, kv_heads: int, repeats: int, compiled):
    q = torch.randn(1, HEADS, tokens, DIM, dtype=dtype, requires_grad=True)
    k, v = (
        torch.randn(1, kv_heads, tokens, DIM, dtype=dtype, requires_grad=True) for _ in range(2)
    )
    gradient = torch.randn_like(q)
    found, mask = competitors(name, tokens, q, k, v, compiled)
    every = HEADS * tokens * tokens
    allowed = every if mask is None else flexcp.build_block_grid(mask, tokens).area() * HEADS
    best: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    for who, call in list(found.items()):
        with PeakMemory() as peak:  # also warms up, and plans
            try:
                timed(call, [q, k, v], None if "compiled" in who else gradient)
            except Exception as error:
                print(f"  {who} can't: {type(error).__name__}: {str(error).splitlines()[0]}")
                del found[who]
                continue
        memory[who] = peak.megabytes
    for _ in range(repeats):
        for who, call in found.items():
            forward, both = timed(call, [q, k, v], None if "compiled" in who else gradient)
            kept = best.setdefault(who, [forward, both])
            best[who] = [min(kept[0], forward), min(kept[1], both)]
    rows = []
    dense_forward, dense_both = best["SDPA dense"]
    for who, (forward, both) in best.items():
        pairs = every if who == "SDPA dense" else allowed
        has_backward = "compiled" not in who
        row = Row(name, who, tokens, str(dtype).removeprefix("torch."), kv_heads, forward,
                  both if has_backward else None, pairs, round(memory[who]))  # fmt: skip
        row.of_dense_forward = pairs / forward / (every / dense_forward)
        if has_backward:
            row.of_dense = pairs / both / (every / dense_both)
        row.of_matmul = matmul_seconds_per_pair(dtype) * pairs / forward
        rows.append(row)
        print(f"  {line(row)}", flush=True)
    return rows


def line(row: Row) -> str:
    both = "-" if row.of_dense is None else f"{row.of_dense:.2f}"
    return (
        f"{row.mask:12s} {row.tokens:6d} {row.dtype:8s} kv heads {row.kv_heads}  {row.who:22s} "
        f"forward {row.forward * 1e3:8.1f} ms, {row.of_dense_forward:.2f} of dense; "
        f"with backward {both} of dense; {row.of_matmul:.2f} of matmul; {row.memory_mb:.0f} MB"
    )


def table(rows: list[Row]) -> str:
    head = (
        "| mask | tokens | type | kv heads | who | forward ms | forward + backward ms "
        "| forward, of dense | both, of dense | of matmul | MB |\n" + "|---" * 11 + "|\n"
    )
    lines = []
    for r in rows:
        both = "" if r.both is None else f"{r.both * 1e3:.0f}"
        ratio = "" if r.of_dense is None else f"{r.of_dense:.2f}"
        lines.append(
            f"| {r.mask} | {r.tokens} | {r.dtype} | {r.kv_heads} | {r.who} | {r.forward * 1e3:.0f} "
            f"| {both} | {r.of_dense_forward:.2f} | {ratio} | {r.of_matmul:.2f} "
            f"| {r.memory_mb:.0f} |"
        )
    return head + "\n".join(lines) + "\n"


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    chosen = [r for r in rows if r.dtype == "float32" and r.kv_heads == HEADS]
    longest = max((r.tokens for r in chosen), default=0)
    chosen = [r for r in chosen if r.tokens == min(longest, 8192)]
    names = [name for name in MASKS if any(r.mask == name for r in chosen)]
    who = ["flexcp", "SDPA is_causal", "SDPA bool mask", "FlexAttention compiled"]
    figure, axes = plt.subplots(1, 2, figsize=(13, 4.2), sharey=True)
    for axis, field, title in zip(
        axes, ("of_dense_forward", "of_dense"), ("forward", "forward and backward"), strict=True
    ):
        for position, one in enumerate(who):
            at = [names.index(r.mask) + (position - 1.5) * 0.2 for r in chosen if r.who == one]
            height = [getattr(r, field) or 0 for r in chosen if r.who == one]
            axis.bar(at, height, 0.2, label=one)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(range(len(names)), names, rotation=30)
        axis.set_title(f"{title}: throughput on allowed pairs, dense SDPA = 1")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"))
    parser.add_argument("--quick", action="store_true", help="one length, float32, two repetitions")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--masks", nargs="+", default=list(MASKS), choices=MASKS)
    parser.add_argument("--no-flex", action="store_true", help="leave out compiled FlexAttention")
    options = parser.parse_args()
    lengths = [4096] if options.quick else options.lengths
    dtypes = [torch.float32] if options.quick else [torch.float32, torch.bfloat16]
    kv_heads = [HEADS] if options.quick else [HEADS, 2]
    compiled = None
    if not options.no_flex:
        from torch.nn.attention.flex_attention import flex_attention as torchs

        compiled = torch.compile(torchs, dynamic=False)
    rows: list[Row] = []
    for tokens in lengths:
        for dtype in dtypes:
            for groups in kv_heads:
                for name in options.masks:
                    repeats = 2 if options.quick or tokens > 8192 else 4
                    with torch._dynamo.config.patch(recompile_limit=1000):
                        rows += measure(name, tokens, dtype, groups, repeats, compiled)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "attention.json").write_text(json.dumps([asdict(r) for r in rows], indent=1))
    (options.out / "attention.md").write_text(table(rows))
    with suppress(ImportError):
        plot(rows, options.out / "attention.png")
    print(f"\n{table(rows)}\nwritten to {options.out}/attention.json, .md and .png")


if __name__ == "__main__":
    main()
