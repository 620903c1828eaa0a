"""Small masks, tensors, plans and kinds of arguments that calls of public functions share."""

from __future__ import annotations

from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch

import flexcp
from flexcp import Machine, masks, testing
from flexcp.plan import save_machine
from tests.junk.values import (
    absent,
    either,
    flag,
    function,
    integers,
    listed,
    number,
    one_of,
    shaped,
    whole,
)

CAUSAL = masks.causal()
X = torch.randn(1, 2, 8, 4)
HALF = torch.randn(1, 2, 4, 4)
PACKED = torch.randn(8, 2, 4)
IDS = torch.zeros(1, 8, dtype=torch.int64)
GRID = flexcp.build_block_grid(CAUSAL, 8, block_size=4)
BLOCK_MASK = GRID.to_block_mask()
PLAN = flexcp.make_plan(CAUSAL, 8, 2, block_size=4, num_heads=2, head_dim=4)
ON_RANK = testing.simulate(PLAN.on, 2)[0]
LAYOUT = PLAN.layout
MACHINE = Machine.preset("h100")
LAYOUTS = ("auto", "contiguous", "head_tail", "striped", "per_document", "ptrr", "balanced")
SCHEDULES = ("auto", "exchange", "hierarchical", "ring", "allgather", "ulysses", "hybrid")

Q = (X, shaped(1, 2, 8, 4))


def rows(x: Any) -> bool:
    """Whether something is a query of the heads and head dim of `X`."""
    is_one = isinstance(x, torch.Tensor) and not x.is_nested and x.dim() == 4
    return is_one and x.dtype == X.dtype and x.shape[1::2] == X.shape[1::2]


TOKENS = whole(0, 2**40)
RANKS = whole(1, 16_384)
SCALE = (1.0, either(absent, number(-1e30, 1e30)))
DROPOUT = {
    "dropout_p": (0.0, number(0, 1 - 1e-9)),
    "dropout_seed": (None, either(absent, whole(None, 2**64 - 1), integers(0, 1))),
}
OPTIONS = {
    "score_mod": (None, either(absent, function)),
    "scale": SCALE,
    "sinks": (None, either(absent, shaped(2))),
    "return_lse": (False, flag),
    "kernel": (None, absent),
    **DROPOUT,
}
DOCUMENTS = either(absent, integers(1, 2), listed(whole(0)), listed(listed(whole(0))))
DIM = whole(-9, 9)
PAIR = one_of((1, 2))
SAVED = TemporaryDirectory()
PLAN_FILE = f"{SAVED.name}/plan.json"
MACHINE_FILE = f"{SAVED.name}/machine.json"
flexcp.save_plan(PLAN, PLAN_FILE)
save_machine(MACHINE, MACHINE_FILE)


def on_ranks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a function of a plan on simulated ranks, every one with the same arguments."""

    def run(**arguments: Any) -> Any:
        return testing.simulate(lambda mesh: function(PLAN.on(mesh), **arguments), PLAN.ranks.size)

    return run


class Tiny(torch.nn.Module):
    """Attention over embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(32, 4)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = (self.embed(tokens) + positions[..., None] * 0.01)[:, None]
        x = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return x[:, 0] @ self.embed.weight.T
