"""Any mask_mod that torch accepts is traced; what can't be is refused with its line."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

import flexcp
from flexcp.masks import trace_mask

TABLE = torch.arange(24).reshape(4, 6) % 7
LEVELS = torch.tensor([0.5, 1.5, -2.0, 0.0, 3.0, 1.0])
SCALAR = torch.tensor(2.5, dtype=torch.float64)
BEGIN, END = torch.tensor([0, 2, 4]), torch.tensor([2, 4, 6])

FUNCTIONS = {
    "chained lookups": lambda b, h, q, kv: TABLE[b][q] == TABLE[b, kv],
    "ellipsis": lambda b, h, q, kv: TABLE[..., kv].sum() > TABLE[h, ..., q],
    "constant index": lambda b, h, q, kv: TABLE[2, q] > TABLE[1][kv],
    "slice then index": lambda b, h, q, kv: TABLE[1:, :][b, q] > 2,
    "negative index": lambda b, h, q, kv: TABLE[-1, q - 6] > 2,
    "rows of a table": lambda b, h, q, kv: (TABLE[b] == q).any() & (q >= kv),
    "membership": lambda b, h, q, kv: ((q >= BEGIN) & (kv < END) & (kv >= BEGIN)).any(),
    "promotion with a captured scalar": lambda b, h, q, kv: LEVELS[q] * SCALAR > kv,
    "tensors made inside": lambda b, h, q, kv: torch.tensor([1, 0, 1, 1, 0, 1])[q] > 0,
    "in place on a local constant": lambda b, h, q, kv: torch.zeros(6).fill_(2)[q] > kv,
    "several results": lambda b, h, q, kv: torch.max(TABLE[b], dim=0).values > q + kv,
    "new_ones": lambda b, h, q, kv: b.new_ones((), dtype=torch.bool) & (q > kv),
    "full_like": lambda b, h, q, kv: q > torch.full_like(kv, 3),
    "where with scalars": lambda b, h, q, kv: torch.where(q > 2, True, kv < 1),
    "reflected": lambda b, h, q, kv: 3 - q < 2 * kv,
    "unusual operations": lambda b, h, q, kv: torch.hypot(q.double(), kv.double()) < 5,
    "logical": lambda b, h, q, kv: torch.logical_xor(q > 2, torch.logical_not(kv > 3)),
    "int32 and casts": lambda b, h, q, kv: (q.to(torch.int32) // 2).float() >= kv / 2,
    "unused everything": lambda b, h, q, kv: SCALAR > 1,
    "default arguments": lambda b, h, q, kv, offset=2: q + offset >= kv,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_graph_computes_what_the_function_does(name):
    function = FUNCTIONS[name]
    expected = create_mask(
        lambda b, h, q, kv: function(b, h, q, kv), 2, 3, 6, 6, device="cpu"
    ).expand(2, 3, 6, 6)
    i = torch.arange(6)
    b, h = torch.arange(2)[:, None, None, None], torch.arange(3)[None, :, None, None]
    found = trace_mask(function).evaluate(b, h, i[:, None], i[None, :])
    assert torch.equal(found.expand(2, 3, 6, 6), expected)
    grid = flexcp.build_block_grid(function, 6, block_size=2, batch=2, heads=3)
    assert grid.area() == int(expected.sum())


def test_the_graph_knows_which_indices_it_reads():
    assert trace_mask(lambda b, h, q, kv: TABLE[b, q] > 1).reads == {"b", "q"}
    assert trace_mask(lambda b, h, q, kv: b.new_ones((), dtype=torch.bool)).reads == set()


def test_equal_expressions_become_one_node():
    graph = trace_mask(lambda b, h, q, kv: (TABLE[b, q] > 1) | (TABLE[b, q] < 0))
    assert sum(node.name == "index" for node in graph.nodes) == 1


def test_numbers_that_python_calls_equal_stay_apart():
    graph = trace_mask(lambda b, h, q, kv: (q * 1 > kv) | (q * 1.0 > kv))
    assert sum(node.name == "mul" for node in graph.nodes) == 2


def branches(b, h, q_idx, kv_idx):
    if q_idx > 5:
        return q_idx >= kv_idx
    return kv_idx > q_idx


def changes_an_index(b, h, q_idx, kv_idx):
    distance = q_idx - kv_idx
    distance += 1
    return distance > 0


CALLS = torch.zeros((), dtype=torch.int64)


def counts_its_calls(b, h, q_idx, kv_idx):
    CALLS.add_(1)
    return q_idx >= kv_idx


TOTALS = torch.zeros(64, dtype=torch.int64)


def changes_what_it_has_read(b, h, q_idx, kv_idx):
    seen = TOTALS[q_idx] <= 0
    TOTALS.add_(1)
    return seen & (q_idx >= kv_idx)


def changes_a_view(b, h, q_idx, kv_idx):
    part = TOTALS[:32]
    part += 1
    return q_idx >= kv_idx


def changes_its_own_after_use(b, h, q_idx, kv_idx):
    table = torch.zeros(64, dtype=torch.bool)
    seen = table[q_idx]
    table.fill_(True)
    return seen | (q_idx < 0)


def adds_an_index_to_its_own(b, h, q_idx, kv_idx):
    count = torch.zeros((), dtype=torch.int64)
    count += q_idx
    return count >= kv_idx


def assigns(b, h, q_idx, kv_idx):
    table = torch.zeros(64, dtype=torch.bool)
    table[kv_idx] = True
    return table[q_idx]


def draws(b, h, q_idx, kv_idx):
    return torch.rand(()) > 0.5


REFUSED = {
    branches: (r"control flow on an index .*test_trace.py:\d+: `if q_idx > 5:`", "torch.where"),
    changes_an_index: (r"in-place operation \(add_\) .*`distance \+= 1`", "x = x \\+ 1"),
    counts_its_calls: (r"in-place operation \(add_\) .*`CALLS.add_\(1\)`", "must not change"),
    changes_what_it_has_read: (r"in-place operation \(add_\)", "must not change"),
    changes_a_view: (r"in-place operation \(add_\)", "must not change"),
    changes_its_own_after_use: (r"in-place operation \(fill_\)", "must not change"),
    adds_an_index_to_its_own: (r"in-place operation \(add_\)", "must not change"),
    assigns: (r"in-place operation \(assignment to an element\)", "must not change"),
    draws: (r"random number \(rand\) .*`return torch.rand", "draw it once outside"),
    (lambda b, h, q, kv: (q > 2) and (kv > 2)): (r"by bool\(\), .*`.* and ", "torch.where, &"),
    (lambda b, h, q, kv: q >= max(kv, 3)): ("control flow on an index", "torch.minimum"),
    (lambda b, h, q, kv: torch.tensor(q.item() > 2)): ("control flow on an index", "torch.where"),
    (lambda b, h, q, kv: torch.tensor(q.tolist()) > 2): (
        "its value was read by tolist",
        "torch.where",
    ),
    (lambda b, h, q, kv: torch.as_tensor(q.numpy()) > 2): (
        "its value was read by numpy",
        "torch.where",
    ),
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_what_cannot_be_traced_is_refused_with_its_line_and_the_way_out(function):
    problem, way_out = REFUSED[function]
    with pytest.raises(flexcp.FlexCPError, match=f"(?s){problem}.*; .*{way_out}"):
        flexcp.build_block_grid(function, 64)


WRONG = {
    "dtype": (lambda b, h, q, kv: q - kv, "returns dtype torch.bool, got torch.int64 .*score_mod"),
    "python value": (lambda b, h, q, kv: True, "returns a bool tensor, got True of type bool"),
    "shape": (lambda b, h, q, kv: TABLE[b] > 1, r"shape \(\)\) .* got shape \(6,\)"),
    "too few arguments": (lambda q, kv: q >= kv, r"four arguments .* signature \(q, kv\)"),
    "a score_mod": (lambda score, b, h, q, kv: score, "in front is a score_mod"),
    "short table": (lambda b, h, q, kv: TABLE[0, q] > 1, "cover every position .* out of bounds"),
    "few batch entries": (lambda b, h, q, kv: TABLE[b + 3, kv % 6] > 1, "cover every position"),
    "division by zero": (lambda b, h, q, kv: q // kv > 1, "ZeroDivisionError"),
    "an error of its own": (lambda b, h, q, kv: q.nonsense(), "AttributeError .*nonsense"),
}


@pytest.mark.parametrize("name", WRONG)
def test_masks_that_are_wrong_are_explained(name):
    function, message = WRONG[name]
    with pytest.raises(flexcp.FlexCPError, match=f"(?s){message}"):
        flexcp.build_block_grid(function, 64, batch=2)


def test_a_refused_mask_has_changed_nothing():
    assert not TOTALS.any()
    assert CALLS == 0


def test_a_table_that_is_too_short_is_found_even_where_the_mask_is_decided_without_it():
    short = torch.zeros(100, dtype=torch.int64)
    with pytest.raises(flexcp.FlexCPError, match="captured tensors that cover every position"):
        flexcp.build_block_grid(
            lambda b, h, q, kv: (q < kv) & (q > kv) & (short[q] == 0), 128, block_size=16
        )


def test_errors_survive_pickling_between_processes():
    error = flexcp.FlexCPError("this", "that", "do so")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == "expected this, got that; do so"
    assert again.fix == "do so"
