"""Score chains: done in place, they give what the function gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexcp.kernels.score import ScoreFunction, examine

_SLOPES = torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64)
_TABLE = torch.linspace(-2, 2, 64, dtype=torch.float64)
CPU = torch.device("cpu")

STEPS: dict[str, ScoreFunction] = {
    "times": lambda s, b, h, q, k: s * 3,
    "over": lambda s, b, h, q, k: s / 1.7,
    "minus": lambda s, b, h, q, k: -s,
    "taken from": lambda s, b, h, q, k: 1.5 - s,
    "taken from a bias": lambda s, b, h, q, k: _TABLE.to(s.dtype)[q - k + 32] - s,
    "plus": lambda s, b, h, q, k: s + 0.75,
    "alibi": lambda s, b, h, q, k: s - _SLOPES.to(s.dtype)[h] * (q - k),
    "alibi, the other way": lambda s, b, h, q, k: s + -((k - q) * _SLOPES.to(s.dtype)[h] * 2),
    "with alpha": lambda s, b, h, q, k: torch.sub(s, q - k, alpha=2),
    "of a bias with alpha": lambda s, b, h, q, k: torch.add((q - k).to(s.dtype), s, alpha=-2),
    "table": lambda s, b, h, q, k: s + _TABLE.to(s.dtype)[q - k + 32],
    "gate": lambda s, b, h, q, k: s * _SLOPES.to(s.dtype)[h],
    "tanh": lambda s, b, h, q, k: torch.tanh(s),
    "sine": lambda s, b, h, q, k: torch.sin(s),
    "rounded quotient": lambda s, b, h, q, k: torch.div(s, 0.5, rounding_mode="floor") + s.detach(),
    "where": lambda s, b, h, q, k: torch.where(q >= k, s, -torch.inf),
}


def _indices() -> list[Tensor]:
    b, h = torch.arange(2).view(2, 1, 1, 1), torch.arange(3).view(1, 3, 1, 1)
    return [b, h, torch.arange(20, 25)[:, None], torch.arange(7, 14)]


@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=4), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_any_chain_of_steps_is_done_as_the_function_does_it(names: list[str], seed: int) -> None:
    def function(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        for name in names:
            s = STEPS[name](s, b, h, q, k)
        return s

    chain = examine(function, torch.float64, CPU).chain
    if "rounded quotient" in names:
        assert chain is None
        return
    assert chain is not None
    prepared = chain.prepared(torch.float64, 1.5)
    scores = torch.randn(2, 3, 5, 7, dtype=torch.float64, generator=torch.manual_seed(seed))
    expected = function(scores, *_indices()) * 1.5
    for consecutive in (False, True):
        tile = scores * prepared.factor
        found = prepared.run(tile, *_indices(), consecutive=consecutive)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_the_tangent_in_float32_is_off_by_a_few_times_the_last_digit_of_1() -> None:
    chain = examine(STEPS["tanh"], torch.float32, CPU).chain
    assert chain is not None
    prepared = chain.prepared(torch.float32)
    ends = torch.tensor([-torch.inf, -1e30, -90.0, -1e-8, 0.0, 1e-8, 90.0, 1e30, torch.inf])
    x = torch.cat([torch.linspace(-20, 20, 4000), torch.linspace(-0.01, 0.01, 991), ends])
    tile = x.view(1, 1, -1, 1) * prepared.factor
    found = prepared.run(tile, *(torch.zeros(1, dtype=torch.int64) for _ in range(4)))
    assert float((found.double().view(-1) - x.double().tanh()).abs().max()) < 3e-7


@pytest.mark.parametrize("name", ["squared", "a score for its place alone", "in place"])
def test_what_is_no_chain_is_left_to_the_function(name: str) -> None:
    def in_place(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s.add_(1.0)

    function: ScoreFunction = {
        "squared": lambda s, b, h, q, k: s * s,
        "a score for its place alone": lambda s, b, h, q, k: (q - k).to(s.dtype),
        "in place": in_place,
    }[name]
    assert examine(function, torch.float32, CPU).chain is None


_BIASES = torch.randn(3, 400, dtype=torch.float64)
_BY_DISTANCE = {
    "the distance": lambda s, b, h, q, kv: s + (q - kv),
    "ALiBi": lambda s, b, h, q, kv: s - _BIASES[h, 7] * (kv - q).abs(),
    "a table": lambda s, b, h, q, kv: s + _BIASES[h, q - kv + 200],
    "buckets": lambda s, b, h, q, kv: s + _BIASES[0, ((q - kv) // 16).clamp(0, 31)],
    "a factor": lambda s, b, h, q, kv: s * torch.exp(-0.01 * (q - kv) * (b + 1)),
    "partly": lambda s, b, h, q, kv: (
        s + torch.where(q % 3 == kv % 3, _BIASES[h, q - kv + 200], 0.5)
    ),
}


@pytest.mark.parametrize("name", _BY_DISTANCE)
def test_what_depends_on_the_distance_is_computed_once_for_each(name):
    function = _BY_DISTANCE[name]
    chain = examine(function, torch.float64, torch.device("cpu")).chain
    assert chain.relative
    prepared = chain.prepared(torch.float64)
    tile = torch.randn(2, 3, 5, 11, dtype=torch.float64)
    b, h = torch.arange(2).view(2, 1, 1, 1), torch.arange(3).view(1, 3, 1, 1)
    q, kv = torch.arange(40, 45)[:, None], torch.arange(17, 28)
    wanted = function(tile, b, h, q, kv)
    found = prepared.run(tile * prepared.factor, b, h, q, kv, consecutive=True)
    torch.testing.assert_close(found, wanted)
