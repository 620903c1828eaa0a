"""Junk given to public functions: refused by name, or accepted because it is no junk."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flexcp
from flexcp import FlexCPError, Layout, masks

X = torch.randn(1, 2, 8, 4)
PACKED = torch.randn(8, 2, 4)
GRID = flexcp.build_block_grid(masks.causal(), 8, block_size=4)
PLAN = flexcp.make_plan(masks.causal(), 8, 2, block_size=4, num_heads=2, head_dim=4)

JUNK: list[Any] = [
    None, True, False, 0, -1, 7, 1.5, float("nan"), float("inf"), "", "nope", b"x", [], [0], [1, 2],
    [[1], [2]], (1, 2), ((1, 2), (3,)), {}, {"a": 1}, set(), object(), [None], ["a"], [1.5],
    [10**20], torch.tensor(3), torch.tensor(1.5), torch.tensor([1, 2, 3]), torch.zeros(0),
    torch.zeros(2, 3),
    torch.zeros(1, 2, 8, 4, dtype=torch.int64), torch.tensor([True, False]), 10**9, 2**63, 10**30,
    -(10**30), 1e300, complex(1, 2), int, type, range(3), torch.float32, torch.complex64,
    torch.device("cpu"), lambda *a: a, lambda b, h, q, kv: q >= kv, masks.causal(),
]  # fmt: skip

Call = tuple[Callable[..., Any], list[Any], dict[str, Any]]
CALLS: dict[str, Call] = {
    "sliding_window": (masks.sliding_window, [3, 0], {}),
    "prefix_lm": (masks.prefix_lm, [3], {}),
    "document": (masks.document, [torch.tensor([0, 0, 1])], {}),
    "document of lengths": (masks.document, [], {"lengths": [1, 2]}),
    "document of cu_seqlens": (masks.document, [], {"cu_seqlens": [0, 2]}),
    "chunked": (masks.chunked, [3], {}),
    "block_causal": (masks.block_causal, [3], {}),
    "global_tokens": (masks.global_tokens, [3], {}),
    "shared_prefix": (masks.shared_prefix, [3, [1, 2]], {}),
    "Mask": (flexcp.Mask, [lambda b, h, q, kv: q >= kv], {"name": "x"}),
    "&": (lambda other: masks.causal() & other, [masks.full()], {}),
    "build_block_grid": (
        flexcp.build_block_grid,
        [masks.causal(), 8],
        {"kv_len": 8, "block_size": 4, "batch": 1, "heads": 1},
    ),
    "grid.kind": (GRID.kind, [0, 0, 0, 0], {}),
    "grid.to_block_mask": (GRID.to_block_mask, [], {"device": "cpu"}),
    "from_block_mask": (flexcp.BlockGrid.from_block_mask, [GRID.to_block_mask()], {}),
    "flex_attention": (
        flexcp.flex_attention,
        [X, X, X],
        {
            "score_mod": None,
            "block_mask": masks.causal(),
            "scale": 1.0,
            "enable_gqa": False,
            "return_lse": False,
            "kernel_options": None,
            "return_aux": None,
            "sinks": None,
        },
    ),
    "varlen_attention": (
        flexcp.varlen_attention,
        [PACKED, PACKED, PACKED, [0, 3, 8]],
        {
            "plan": None,
            "cu_seqlens_k": None,
            "causal": False,
            "window_size": (-1, -1),
            "mask": None,
            "score_mod": None,
            "scale": 1.0,
            "sinks": None,
            "return_lse": False,
            "kernel": None,
            "dropout_p": 0.0,
            "dropout_seed": None,
        },
    ),
    "make_plan": (
        flexcp.make_plan,
        [masks.causal(), 8, 2],
        {
            "layout": "auto",
            "schedule": "auto",
            "block_size": 4,
            "num_heads": 2,
            "num_kv_heads": 2,
            "head_dim": 4,
            "dtype": torch.float32,
            "batch": 1,
            "machine": None,
            "flops_per_token": None,
            "token_slack": None,
        },
    ),
    "attention": (
        flexcp.attention,
        [X, X, X, PLAN],
        {
            "mask": None,
            "score_mod": None,
            "scale": 1.0,
            "sinks": None,
            "return_lse": False,
            "kernel": None,
        },
    ),
    "plan.shard": (PLAN.shard, [X, 2], {"rank": 0, "batch_dim": 0}),
    "plan.unshard": (PLAN.unshard, [X, 2], {}),
    "plan.positions": (PLAN.positions, [0], {}),
    "shard_batch": (
        flexcp.shard_batch,
        [{"input_ids": torch.zeros(1, 8, dtype=torch.int64)}, PLAN],
        {},
    ),
    "cross_entropy": (
        flexcp.cross_entropy,
        [torch.randn(8, 5), torch.zeros(8, dtype=torch.int64)],
        {"num_scored": 8, "ranks": None, "gradients": "summed"},
    ),
    "Layout.of_runs": (Layout.of_runs, [[[(0, 4)], [(4, 8)]]], {"seq_len": 8}),
    "explain": (
        flexcp.kernels.explain,
        [X, X],
        {"score_mod": None, "max_scores": False, "is_one_rectangle": False, "kernel": None},
    ),
    "ContextParallel": (flexcp.ContextParallel, [PLAN], {}),
    "parallelize": (flexcp.parallelize, [torch.nn.Linear(2, 2), 3, {"x": None}], {}),
    "simulate": (lambda ranks: flexcp.testing.simulate(lambda mesh: 1, ranks), [2], {}),
    "simulate a": (lambda fn: flexcp.testing.simulate(fn, 2), [int], {}),
}


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_junk_is_refused_by_name(name: str, data: st.DataObject) -> None:
    function, positional, named = CALLS[name]
    args, kwargs = list(positional), dict(named)
    places: list[Any] = [*range(len(args)), *kwargs]
    for place in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=2, unique=True)):
        junk = JUNK[data.draw(st.integers(0, len(JUNK) - 1))]
        if name == "simulate a" and callable(junk):
            return
        if isinstance(place, int):
            args[place] = junk
        else:
            kwargs[place] = junk
    with suppress(FlexCPError):
        function(*args, **kwargs)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PLAN.positions(1.5), "a rank between 0 and 1, got 1.5"),
        (lambda: PLAN.shard(X, 2, rank=0, batch_dim="a"), "batch_dim to be an integer"),
        (lambda: PLAN.shard([1], 2, rank=0), "what is sharded to be a Tensor"),
        (
            lambda: flexcp.cross_entropy(X[0, 0], torch.zeros(8).long(), float("nan")),
            "num_scored to be an integer",
        ),
        (lambda: flexcp.build_block_grid(masks.causal(), 64 << 30), "larger block_size"),
        (lambda: flexcp.make_plan(masks.causal(), 8, 10**6), "at most 16,384 ranks"),
        (lambda: flexcp.testing.simulate(print, 10**9), "at most 4,096"),
        (lambda: flexcp.attention(X, X, X, 3), "plan to be a Plan, got 3 of type int"),
        (lambda: flexcp.flex_attention(X, X, X, masks.causal()), "passed as block_mask"),
        (lambda: flexcp.flex_attention(X, X, X, scale="2"), "scale to be a finite number"),
        (lambda: flexcp.flex_attention(X, X, X, sinks=3), "sinks to be a Tensor"),
        (lambda: flexcp.shard_batch([1], PLAN), "batch to be a Mapping"),
    ],
)
def test_what_used_to_be_accepted_or_to_fail_without_a_word(
    call: Callable[[], Any], message: str
) -> None:
    with pytest.raises(FlexCPError, match=message):
        call()
