"""What does `attach` cost a Transformers model, and what does it save?

A small Llama takes training steps (forward and backward) of 8K tokens: as it is, with Transformers'
own sdpa, and attached, on one rank and on two gloo ranks. Under a causal mask attention is the same
work on one rank, so the difference is the cost of attaching; on packed documents, sdpa computes
what the mask forbids. Every step of the packed case has other documents, so that planning is part
of it. Times are those of the processor, with one thread per rank; competitors take turns, and the
best of several steps counts.

python benchmarks/models.py [--out out/benchmarks] [--tokens 8192] [--steps 3]
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch
from documents import packed_document_lengths
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from flexcp.integrations import transformers as hf
from flexcp.testing import simulate, spawn

CONFIG = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1 << 20,
}


@dataclass
class Row:
    """One measurement."""

    mask: str
    who: str
    tokens: int
    ranks: int
    step: float
    """Seconds of the processor for forward and backward, of the slowest rank; the best step."""
    shard: float
    """Of these, seconds in cp.shard: masks, plan, and picking tokens."""
    of_sdpa: float | None = None
    """Relative to Transformers' sdpa in one process."""


def make_batch(mask: str, tokens: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, CONFIG["vocab_size"], (1, tokens), generator=generator)
    batch = {"input_ids": ids, "labels": ids}
    if mask == "documents":
        lengths = packed_document_lengths(tokens, seed=step)
        batch["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    return batch


def one_step(model: torch.nn.Module, batch: dict, cp: hf.Attached | None) -> tuple[float, float]:
    model.zero_grad()
    start = time.process_time()
    local = {**batch, "use_cache": False} if cp is None else cp.shard(batch)
    middle = time.process_time()
    model(**local).loss.backward()
    return time.process_time() - start, middle - start


def measure(mask: str, tokens: int, steps: int) -> list[Row]:
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**CONFIG))

    def alone(mesh: object) -> list[Row]:
        attached = copy.deepcopy(plain)
        competitors = {"sdpa": (plain, None), "attached": (attached, hf.attach(attached, mesh))}
        best: dict[str, tuple[float, float]] = {}
        for step in range(steps + 1):  # the first one warms up
            batch = make_batch(mask, tokens, step)
            for who, (model, cp) in competitors.items():
                took = one_step(model, batch, cp)
                if step:
                    best[who] = min(best.get(who, took), took)
        return [Row(mask, who, tokens, 1, *took) for who, took in best.items()]

    def with_another(mesh: object) -> tuple[float, float]:
        model = copy.deepcopy(plain)
        cp = hf.attach(model, mesh)
        took = [one_step(model, make_batch(mask, tokens, step), cp) for step in range(steps + 1)]
        return min(took[1:])

    rows = simulate(alone, 1)[0]
    rows.append(Row(mask, "attached", tokens, 2, *max(spawn(with_another, 2, timeout=300))))
    for row in rows:
        row.of_sdpa = row.step / rows[0].step
    return rows


def table(rows: list[Row]) -> str:
    lines = [
        "| mask | tokens | who | ranks | step, s | of it shard, ms | of sdpa |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.mask} | {r.tokens} | {r.who} | {r.ranks} | {r.step:.2f} | {r.shard * 1e3:.0f} "
        f"| {r.of_sdpa:.3f} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for mask in ("causal", "documents"):
        rows += measure(mask, options.tokens, options.steps)
    print(table(rows))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "models.md").write_text(table(rows) + "\n")
        (options.out / "models.json").write_text(json.dumps([asdict(r) for r in rows], indent=1))


if __name__ == "__main__":
    main()
