"""How fast is attention with a mask, per allowed pair, beside PyTorch's own?

flexcp, SDPA (dense, is_causal, with a bool mask) and FlexAttention (compiled and eager; neither
has a backward pass on CPU) in one run, interleaved, the best of several rounds. Throughput counts
the pairs that the mask allows; ratios are to dense SDPA at the same length and type in the same
run, and to a plain matrix product. Memory is what the process needed beyond what it had before the
call. Who is left out where, and why, stands below the table.

python benchmarks/attention.py [--out out/benchmarks] [--quick] [--lengths 4096 8192 ...]

On a busy machine, --cpu-time counts the processor's time instead, over the threads that run; with
GOMP_SPINCOUNT=0, so that waiting for another thread takes none.

The whole sweep is meant to take less than 25 minutes on two cores, --quick half a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch
from documents import packed_document_lengths
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import flexcp
from flexcp import masks
from flexcp.ops import flex_attention

HEADS, DIM = 8, 64
MASKS = ("full", "causal", "documents", "window 1024", "prefix", "block-causal")
MASKS += ("alibi", "softcap", "bias table", "buckets", "pair biases", "where", "squares", "silu")
MASKS += ("dropout", "dropout full", "dropout documents", "dropout window 1024")
MOST_FOR = {
    "SDPA bool mask": 8192,
    "FlexAttention compiled": 8192,
    "FlexAttention eager": 4096,
    "flexcp with a score_mod": 16384,
}
"""Tokens up to which they run: beyond, they take minutes, or memory for each pair."""
MOST_FOR_EVERY_KIND = 8192
"""Beyond, float32 with all key heads and bfloat16 with few stand for the four combinations."""


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
    match name.removeprefix("dropout "):
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


def make_score_mod(name: str, tokens: int) -> Callable[..., Tensor] | None:
    slopes = torch.exp2(-torch.arange(1, HEADS + 1.0))
    biases, buckets = torch.randn(HEADS, tokens), torch.randn(32, HEADS)
    pairs, ids = torch.randn(tokens, tokens), torch.arange(tokens) // 1000
    return {
        "bias table": lambda score, b, h, q, kv: score + biases[h, (q - kv).abs()],
        "buckets": lambda score, b, h, q, kv: (
            score + buckets[torch.clamp((q - kv) // 64, 0, 31), h]
        ),
        "pair biases": lambda score, b, h, q, kv: score + pairs[q, kv],
        "where": lambda score, b, h, q, kv: torch.where(ids[q] == ids[kv], score, score * 0.5),
        "squares": lambda score, b, h, q, kv: score + 0.1 * score * score,
        "silu": lambda score, b, h, q, kv: torch.nn.functional.silu(score),
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


def timed(
    call: Callable[[], Tensor],
    inputs: list[Tensor],
    gradient: Tensor | None,
    clock: Callable[[], float],
) -> tuple[float, float]:
    start = clock()
    out = call()
    middle = clock()
    if gradient is not None:
        torch.autograd.grad(out, inputs, gradient)
    return middle - start, clock() - start


def cpu_time_of_each_thread() -> float:
    return time.process_time() / torch.get_num_threads()


def matmul_seconds_per_pair(dtype: torch.dtype, clock: Callable[[], float]) -> float:
    """Of the two products of a forward pass, for one pair of one head."""
    a, b = torch.randn(1024, 1024, dtype=dtype), torch.randn(1024, 1024, dtype=dtype)
    best = float("inf")
    for _ in range(10):
        start = clock()
        a @ b
        best = min(best, clock() - start)
    return best / 1024**3 * 2 * DIM


Call = Callable[[], Tensor]


def competitors(
    name: str, q: Tensor, k: Tensor, v: Tensor, compiled: Callable[..., Tensor] | None
) -> tuple[dict[str, Call], flexcp.Mask | None, list[str]]:
    """Who runs this mask; the mask; and who is left out, and why."""
    tokens, shared = q.shape[2], k.shape[1] != q.shape[1]
    mask, score_mod = make_mask(name, tokens), make_score_mod(name, tokens)
    found: dict[str, Call] = {}
    left_out: list[str] = []

    def add(who: str, call: Call, limit: str) -> None:
        most = MOST_FOR.get(limit)
        if most is not None and tokens > most:
            left_out.append(f"{limit}: beyond {most} tokens")
        else:
            found[who] = call

    dropout = {"dropout_p": 0.1, "dropout_seed": 7} if name.startswith("dropout") else {}
    add(
        "flexcp",
        lambda: flex_attention(q, k, v, score_mod, mask, enable_gqa=True, **dropout),
        "flexcp" if score_mod is None else "flexcp with a score_mod",
    )
    if name == "full" or (tokens <= 8192 and q.dtype == torch.float32 and not shared):
        add("SDPA dense", lambda: sdpa(q, k, v, enable_gqa=True), "SDPA dense")
    if name == "causal":
        add("SDPA is_causal", lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True), "SDPA")
    if shared:
        left_out.append("SDPA bool mask and FlexAttention: with shared key heads")
        return found, mask, left_out
    if mask is not None and score_mod is None:
        allowed: list[Tensor] = []

        def with_bool_mask() -> Tensor:
            if not allowed:
                i, zero = torch.arange(tokens), torch.zeros((), dtype=torch.int64)
                allowed.append(mask.mask_mod(zero, zero, i[:, None], i))
            return sdpa(q, k, v, allowed[0], enable_gqa=True)

        add("SDPA bool mask", with_bool_mask, "SDPA bool mask")
    if compiled is None or dropout:
        return found, mask, left_out
    plain = [x.detach() for x in (q, k, v)]
    block_mask = None if mask is None else flexcp.build_block_grid(mask, tokens).to_block_mask()
    add(
        "FlexAttention compiled",
        lambda: compiled(*plain, score_mod, block_mask),
        "FlexAttention compiled",
    )
    add("FlexAttention eager", lambda: eager(*plain, score_mod, block_mask), "FlexAttention eager")
    return found, mask, left_out


def eager(*arguments: object) -> Tensor:
    from torch.nn.attention import flex_attention as module

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return module.flex_attention(*arguments)


def measure(
    name: str,
    tensors: list[Tensor],
    rounds: int,
    compiled: Callable[..., Tensor] | None,
    dense: Row | None,
    clock: Callable[[], float],
) -> tuple[list[Row], list[str]]:
    """The rows of one mask, and who is left out. The first round also plans and warms up."""
    q, k, v = tensors
    tokens, dtype = q.shape[2], q.dtype
    gradient = torch.randn_like(q)
    found, mask, left_out = competitors(name, q, k, v, compiled)
    every = HEADS * tokens * tokens
    allowed = every if mask is None else flexcp.build_block_grid(mask, tokens).area() * HEADS
    best: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    for turn in range(rounds):
        for who, call in list(found.items()):
            given = None if who.startswith("FlexAttention") else gradient
            try:
                with PeakMemory() if turn == 0 else nullcontext() as peak:
                    seconds = timed(call, tensors, given, clock)
            except Exception as error:
                left_out.append(f"{who}: {type(error).__name__}: {str(error).splitlines()[0]}")
                del found[who]
                continue
            if peak is not None:
                memory[who] = peak.megabytes
            best[who] = [min(pair) for pair in zip(best.get(who, seconds), seconds, strict=True)]
    per_pair = matmul_seconds_per_pair(dtype, clock)
    rows = []
    for who, (forward, both) in best.items():
        has_backward = not who.startswith("FlexAttention")
        pairs = every if who == "SDPA dense" else allowed
        rows.append(
            Row(name, who, tokens, str(dtype).removeprefix("torch."), k.shape[1], forward,
                both if has_backward else None, pairs, round(memory[who]),
                of_matmul=per_pair * pairs / forward)
        )  # fmt: skip
    dense = next((row for row in rows if row.who == "SDPA dense"), dense)
    assert dense is not None
    assert dense.both is not None
    for row in rows:
        row.of_dense_forward = row.pairs / row.forward / (dense.pairs / dense.forward)
        if row.both is not None:
            row.of_dense = row.pairs / row.both / (dense.pairs / dense.both)
        print(f"  {line(row)}", flush=True)
    return rows, left_out


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
    axes[0].legend(loc="upper center", ncols=4, fontsize=8)
    axes[0].set_ylim(0, 1.25)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"))
    parser.add_argument("--quick", action="store_true", help="2048 tokens, float32 alone")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--masks", nargs="+", default=list(MASKS), choices=MASKS)
    parser.add_argument("--no-flex", action="store_true", help="leave out FlexAttention")
    parser.add_argument("--rounds", type=int, help="4, 2 or 1, by length, unless given")
    parser.add_argument("--cpu-time", action="store_true", help="not the time that passed")
    options = parser.parse_args()
    clock = cpu_time_of_each_thread if options.cpu_time else time.perf_counter
    kinds = [(dtype, heads) for dtype in (torch.float32, torch.bfloat16) for heads in (HEADS, 2)]
    if options.quick:
        options.lengths, options.no_flex, kinds = [2048], True, kinds[:1]
    # What the others are compared with is measured even where it is not asked for.
    names = ["full", *(name for name in options.masks if name != "full")]
    compiled = None
    if not options.no_flex:
        from torch.nn.attention.flex_attention import flex_attention as torchs

        compiled = torch.compile(torchs, dynamic=False)
        torch._dynamo.config.recompile_limit = 1000
    rows: list[Row] = []
    left_out: dict[str, None] = {}
    if compiled is not None:
        left_out["FlexAttention's backward pass: torch has none on CPU"] = None
    for tokens in options.lengths:
        some = kinds if tokens <= MOST_FOR_EVERY_KIND else [kinds[0], *kinds[3:]]
        if len(some) < len(kinds):
            left_out[f"two of four kinds of tensors: beyond {MOST_FOR_EVERY_KIND} tokens"] = None
        for dtype, heads in some:
            tensors = [
                torch.randn(1, h, tokens, DIM, dtype=dtype, requires_grad=True)
                for h in (HEADS, heads, heads)
            ]
            dense = None
            for name in names:
                rounds = options.rounds or (4 if tokens <= 4096 else 2 if tokens <= 8192 else 1)
                more, missing = measure(name, tensors, rounds, compiled, dense, clock)
                dense = next((row for row in more if row.who == "SDPA dense"), dense)
                rows += more
                left_out.update(dict.fromkeys(missing))
    options.out.mkdir(parents=True, exist_ok=True)
    written = table(rows)
    if left_out:
        written += "\nLeft out:\n\n" + "".join(f"- {reason}\n" for reason in left_out)
    figures = {"rows": [asdict(row) for row in rows], "left_out": list(left_out)}
    (options.out / "attention.json").write_text(json.dumps(figures, indent=1))
    (options.out / "attention.md").write_text(written)
    with suppress(ImportError):
        plot(rows, options.out / "attention.png")
    print(f"\n{written}\nwritten to {options.out}/attention.json, .md and .png")


if __name__ == "__main__":
    main()
