"""Score functions: those of torch's own tests, with gradients of all that they capture."""

from collections.abc import Callable

import pytest
import torch
from kernels.cases import problem
from torch import Tensor

from flexcp import FlexCPError, masks
from flexcp.kernels.reference import dense_attention
from flexcp.kernels.score import examine
from flexcp.ops import flex_attention
from ops.test_flex_attention import check

LENGTH, HEADS = 150, 4


def _tensor(*shape: int) -> Tensor:
    values = torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64)
    return (values * 7).sin().view(shape).requires_grad_()


class Captured:
    """Tensors that score functions capture; new ones for each test."""

    def __init__(self) -> None:
        self.by_batch, self.by_head = _tensor(2), _tensor(HEADS)
        self.by_position, self.other = _tensor(LENGTH), _tensor(LENGTH)
        self.relative, self.pairs = _tensor(2 * LENGTH), _tensor(LENGTH, LENGTH)
        self.head_and_position = _tensor(HEADS, LENGTH)
        self.gate = torch.nn.Linear(1, 1).double()
        self.offsets = torch.arange(LENGTH) // 50 * 50


MODS: dict[str, Callable[[Captured], tuple[Callable[..., Tensor], list[Tensor]]]] = {
    "identity": lambda c: (lambda s, b, h, q, k: s, []),
    "scaled": lambda c: (lambda s, b, h, q, k: s * 2, []),
    "squared": lambda c: (lambda s, b, h, q, k: s * s, []),
    "causal": lambda c: (lambda s, b, h, q, k: torch.where(q >= k, s, -torch.inf), []),
    "inverse causal": lambda c: (lambda s, b, h, q, k: torch.where(q <= k, s, -torch.inf), []),
    "relative bias": lambda c: (lambda s, b, h, q, k: s + (q - k), []),
    "relative causal": lambda c: (
        lambda s, b, h, q, k: torch.where(q >= k, s + (q - k), -torch.inf), []),
    "alibi": lambda c: (lambda s, b, h, q, k: s + (k - q) * torch.exp2(-(h + 1) * 2.0), []),
    "learned alibi": lambda c: (lambda s, b, h, q, k: s - c.by_head[h] * (q - k), [c.by_head]),
    "softcap": lambda c: (lambda s, b, h, q, k: 3 * torch.tanh(s / 3), []),
    "trigonometric": lambda c: (lambda s, b, h, q, k: torch.sin(s).cos() + torch.tan(b * s), []),
    "silu": lambda c: (lambda s, b, h, q, k: torch.nn.functional.silu(s), []),
    "composed": lambda c: (
        lambda s, b, h, q, k: torch.tanh(s + c.by_head[h]) * 2 - (q - k).abs() / 9, [c.by_head]),
    "captured by batch": lambda c: (lambda s, b, h, q, k: s + c.by_batch[b], [c.by_batch]),
    "captured by head": lambda c: (lambda s, b, h, q, k: s * c.by_head[h], [c.by_head]),
    "captured by query": lambda c: (lambda s, b, h, q, k: s + c.by_position[q], [c.by_position]),
    "captured by key": lambda c: (lambda s, b, h, q, k: s + c.by_position[k], [c.by_position]),
    "by all": lambda c: (
        lambda s, b, h, q, k: s + c.by_batch[b] + c.by_head[h] + c.by_position[q] + c.other[k],
        [c.by_batch, c.by_head, c.by_position, c.other]),
    "learned relative": lambda c: (lambda s, b, h, q, k: s + c.relative[q - k + LENGTH],
        [c.relative]),
    "learned pairs": lambda c: (lambda s, b, h, q, k: s + c.pairs[q, k], [c.pairs]),
    "per head": lambda c: (lambda s, b, h, q, k: s + c.head_and_position[h, k],
        [c.head_and_position]),
    "gated": lambda c: (lambda s, b, h, q, k: s + c.pairs[q, k] * torch.sigmoid(c.by_head[h]),
        [c.pairs, c.by_head]),
    "indirect": lambda c: (lambda s, b, h, q, k: s + c.by_position[c.offsets[q]],
        [c.by_position]),
    "one tensor indexed twice": lambda c: (
        lambda s, b, h, q, k: s + c.by_position[q] * c.by_position[k], [c.by_position]),
    "derived inside": lambda c: (lambda s, b, h, q, k: s + (c.by_position * 2)[q],
        [c.by_position]),
    "chained lookup": lambda c: (lambda s, b, h, q, k: s + c.pairs[q][k], [c.pairs]),
    "a whole row": lambda c: (lambda s, b, h, q, k: s + c.pairs[q].mean(), [c.pairs]),
    "a module": lambda c: (lambda s, b, h, q, k: c.gate(s.view(1)).squeeze(),
        list(c.gate.parameters())),
    "natten": lambda c: (
        lambda s, b, h, q, k: torch.where(
            ((q // 10 - k // 10).abs() <= 2) & ((q % 10 - k % 10).abs() <= 2), s, -torch.inf), []),
    "nested offsets": lambda c: (
        lambda s, b, h, q, k: torch.where(
            c.offsets[q] == c.offsets[k], s + (q - c.offsets[q]) * 0.1, -torch.inf), []),
    "nothing of the score": lambda c: (lambda s, b, h, q, k: (q - k).to(s.dtype) / 9, []),
    "only a captured value": lambda c: (lambda s, b, h, q, k: c.by_position[3], [c.by_position]),
}  # fmt: skip


@pytest.mark.parametrize("name", MODS)
def test_outputs_and_gradients_are_the_oracles(name: str) -> None:
    score_mod, captured = MODS[name](Captured())
    p = problem(q_len=LENGTH)
    p.captured = captured
    check(p, masks.sliding_window(60), score_mod)


@pytest.mark.parametrize("name", ["learned alibi", "softcap", "causal", "by all"])
def test_score_mods_work_without_a_mask_and_with_sinks(name: str) -> None:
    score_mod, captured = MODS[name](Captured())
    p = problem(q_len=LENGTH, sinks=True)
    p.captured = captured
    check(p, None, score_mod)


def test_elementwise_functions_run_on_whole_tiles() -> None:
    device = torch.device("cpu")
    for name in ("alibi", "softcap", "learned pairs", "natten", "indirect"):
        assert examine(MODS[name](Captured())[0], torch.float64, device).on_tiles, name
    for name in ("a whole row", "a module"):
        assert not examine(MODS[name](Captured())[0], torch.float64, device).on_tiles, name


def _call(score_mod: object) -> None:
    q = torch.zeros(1, 2, 8, 4)
    flex_attention(q, q, q, score_mod)  # type: ignore[arg-type]


def test_a_score_mod_that_returns_whole_numbers_is_refused() -> None:
    with pytest.raises(FlexCPError, match=r"return dtype torch.float32.*got torch.int64"):
        _call(lambda s, b, h, q, k: s.long())


@pytest.mark.parametrize("mode", ["eager", "compiled", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_scores_of_another_floating_type_are_converted(mode: str, dtype: torch.dtype) -> None:
    slopes = torch.tensor([0.25, -0.5], dtype=dtype, requires_grad=True)
    q, k, v = (torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3))

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s.to(dtype) + slopes[h] * ((i - j) % 4)

    attend = torch.compile(flex_attention, backend="aot_eager")
    options = {"kernel": "reference"} if mode == "reference" else None
    run = attend if mode == "compiled" else flex_attention
    out = run(q, k, v, score_mod, kernel_options=options)
    assert isinstance(out, Tensor)
    assert out.dtype == torch.float32
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, slopes)]

    def wide_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + wide[3][h] * ((i - j) % 4)

    wanted = dense_attention(*wide[:3], score_mod=wide_mod).out
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    weight = torch.randn(out.shape)
    of_both = ((out, (q, k, v, slopes)), (wanted, wide))
    gradients = (torch.autograd.grad(x, y, weight.to(x.dtype)) for x, y in of_both)
    for found, right in ((out, wanted), *zip(*gradients, strict=True)):
        assert (found.double() - right).norm() <= 30 * eps * max(1.0, float(right.detach().norm()))


def test_a_score_mod_that_returns_several_scores_is_refused() -> None:
    table = torch.zeros(8, 5)
    with pytest.raises(FlexCPError, match=r"one score \(shape \(\)\).*got shape \(5,\)"):
        _call(lambda s, b, h, q, k: s + table[q])


def test_a_score_mod_that_returns_no_tensor_is_refused() -> None:
    with pytest.raises(FlexCPError, match="score_mod to return a tensor, got None"):
        _call(lambda s, b, h, q, k: None)


def test_a_score_mod_that_draws_random_numbers_is_refused() -> None:
    with pytest.raises(FlexCPError, match="a random number"):
        _call(lambda s, b, h, q, k: s + torch.rand(()))


def test_a_score_mod_that_is_no_function_is_refused() -> None:
    with pytest.raises(FlexCPError, match="score_mod to be a function"):
        _call(3)


def test_scores_changed_in_place_are_changed_only_in_the_copy() -> None:
    p = problem(q_len=70)

    def add(score, b, h, q, kv):  # type: ignore[no-untyped-def]
        score = score * 1
        score += 1
        return score

    check(p, masks.causal(), add)
