"""Score functions in the Triton kernels: as the oracle, on one device and over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flexcp
from flexcp import FlexCPError, masks
from flexcp.kernels import choose, explain
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.dropout import Dropout
from flexcp.kernels.flash import FlashKernel
from flexcp.kernels.interface import BitTile, Plane, Shapes, Slab, full_shapes
from flexcp.kernels.score import examine
from flexcp.kernels.triton import backward, captured_sums, forward, scoring
from flexcp.kernels.triton import kernel as launches
from flexcp.kernels.triton.emit import emitted
from flexcp.kernels.triton.kernel import TritonKernel
from flexcp.testing import simulate
from flexcp.testing.tolerance import assert_close
from kernels.cases import MASKS
from kernels.triton.comparison import APART, SMALL, Sizes, assert_exact, errors
from kernels.triton.test_faults import _with_fault

SIZES = Sizes(batch=1, heads=2, kv_heads=1, q_len=40, kv_len=45)
LONGEST = 45


def learned(*shape: int) -> Tensor:
    values = torch.linspace(-1, 1, torch.Size(shape).numel())
    return (values * 7).sin().view(shape).requires_grad_()


def softcapped_alibi() -> Callable[..., Tensor]:
    slopes, cap = learned(2), torch.tensor(3.0, requires_grad=True)
    return lambda s, b, h, q, k: cap * torch.tanh((s - 0.1 * slopes[h] * (q - k)) / cap)


def relative_in_documents() -> Callable[..., Tensor]:
    table, ids = learned(2, 2 * LONGEST), torch.arange(LONGEST) // 20

    def function(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(ids[q] == ids[k], s + table[h, q - k + LONGEST], -torch.inf)

    return function


def by_query_and_key() -> Callable[..., Tensor]:
    pairs, keys = learned(LONGEST, LONGEST), learned(LONGEST)
    return lambda s, b, h, q, k: s * (1 + pairs[q, k]) + keys[k] * keys[q]


@pytest.mark.parametrize(
    ("make", "mask", "tuning", "dropout"),
    [
        (softcapped_alibi, "noise", SMALL, None),
        (softcapped_alibi, "causal", APART, Dropout(0.3, 5)),
        (relative_in_documents, "causal", SMALL, None),
        (by_query_and_key, "full", SMALL, Dropout(0.2, 1)),
    ],
)
def test_results_and_all_gradients_are_the_oracles(
    make: Callable[[], Any], mask: str, tuning: Any, dropout: Dropout | None
) -> None:
    found = errors(
        MASKS[mask](), SIZES, tuning=tuning, dropout=dropout, score_mod=make(), scale=-0.3
    )
    assert any(name.startswith("captured") for name in found)
    assert_exact(found)


def test_half_precision_is_scored_in_single() -> None:
    directions = ("forward", "backward")
    found = errors(
        MASKS["causal"](), SIZES, dtype=torch.bfloat16, score_mod=softcapped_alibi(),
        directions=directions,
    )  # fmt: skip
    assert_exact(found)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_positions_are_global_and_masked_pairs_may_be_anything() -> None:
    at_q, at_k = torch.tensor([7, 900, 3, 44] * 5), torch.arange(20).flip(0) * 50
    later = Plane((), (BitTile(0, 20, 0, 20, at_q[:, None] > at_k),))
    shapes = Shapes(20, 20, ((0,),), (later,), at_q, at_k)
    q, v = torch.zeros(1, 1, 20, 16), torch.eye(20).expand(1, 1, 20, 20)

    def distance(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.log((q - k).to(s.dtype))  # NaN or -inf where q <= k

    mod = examine(distance, torch.float32, q.device)
    out = TritonKernel(SMALL).forward(q, q, v, CompiledShapes(shapes), scale=1.0, score_mod=mod).out
    weights = (at_q[:, None] - at_k).clamp(min=0).double()
    assert_close(out[0, 0], weights / weights.sum(1, keepdim=True).clamp(min=1))


FAULTS = {
    "a derivative that is dropped": (scoring, "g * (", "g + 0 * ("),
    "a tanh for its own derivative": (scoring, "(1.0 - x", "(0.9 - x"),
    "another head's number": (scoring, "h = (h + given[3])", "h = (h * 0 + given[3])"),
    "a scale that is left out": (scoring, "s = s * given[4]", "s = s * 1.0"),
    "queries taken for keys": (forward, "q_index, key_index, given)", "key_index, q_index, given)"),
    "keys taken for queries in dk": (backward, "q_index[None, :], key", "key_index[:, None], key"),
    "a gradient that is not pulled back": (backward, "0.0, found)", "0.0, grad_scores)"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_planted_fault_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    module, good, bad = FAULTS[name]
    if module is scoring:
        whole = scoring.functions_of

        def planted(source: str) -> Any:
            assert good in source
            return whole(source.replace(good, bad))

        monkeypatch.setattr(scoring, "functions_of", planted)
    else:
        modules = _with_fault(module, good, bad, tmp_path)
        monkeypatch.setattr(launches, "kernels", lambda: modules)
    directions = ["forward"] if module is forward else ["backward"]
    with pytest.raises(AssertionError):
        assert_exact(
            errors(
                MASKS["causal"](), Sizes(heads=2, q_len=20, kv_len=20), scale=-0.3,
                score_mod=softcapped_alibi(), directions=directions,
            )
        )  # fmt: skip


POSITIONS = torch.arange(LONGEST) % 13
PAIRS, BY_HEAD, BY_ALL = learned(45, 45), learned(2, 45, 46), learned(45, 2, 2, 45)
RELATIVE, BUCKETS, KEYS = learned(90, 2), learned(2, 9), learned(2, 45)
GRID = learned(2, 17, 17)
READS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "of each pair, for all heads": ("pair", lambda s, b, h, q, k: s + PAIRS[q, k]),
    "of each pair and head": ("pair", lambda s, b, h, q, k: s + BY_HEAD[h][q, k + 1]),
    "of each pair and batch element": ("pair", lambda s, b, h, q, k: s * BY_HEAD[b, q, k]),
    "of each pair, head and element": ("pair", lambda s, b, h, q, k: s + BY_ALL[q, h, b, k]),
    "by distance": ("table", lambda s, b, h, q, k: s + RELATIVE[q - k, h]),
    "by bounded distance": ("table", lambda s, b, h, q, k: s + BUCKETS[h, (q - k).clamp(-4, 4)]),
    "by distance in documents": (
        "table", lambda s, b, h, q, k: s + BUCKETS[h, (POSITIONS[q] - POSITIONS[k]) % 9]),
    "by distance in a picture": (
        "table", lambda s, b, h, q, k: s + GRID[h, q // 6 - k // 6, q % 6 - k % 6]),
    "by a hash": ("table", lambda s, b, h, q, k: s + BUCKETS[1 - h, (q * 7 + k * k) % 9]),
    "of keys": ("table", lambda s, b, h, q, k: s + KEYS[b, k]),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_gradients_of_what_is_read_by_query_and_key_are_the_oracles(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, function = READS[name]
    mod = examine(function, torch.float32, torch.device("cpu"))
    found = emitted(mod)
    assert not isinstance(found, str)
    assert [lookup.kind for lookup in found.lookups] == [kind]
    monkeypatch.setattr(captured_sums, "add_in_order", None)  # nothing is sorted
    sizes = Sizes(batch=2, heads=2, kv_heads=1, q_len=40, kv_len=45)
    assert_exact(
        errors(MASKS["causal"](), sizes, score_mod=function, directions=["backward"], tuning=APART)
    )


def test_a_pair_of_positions_that_is_there_twice_and_a_large_table_are_added_up_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at = torch.tensor([7, 9, 3, 44] * 5)
    shapes = Shapes(20, 20, ((0,),), (Plane((Slab(0, 20, 0, 20, 0, 0),), ()),), at, at)
    compiled = CompiledShapes(shapes)
    mod = examine(READS["of each pair, for all heads"][1], torch.float32, torch.device("cpu"))
    q, k, v, g = (torch.randn(1, 2, 20, 16) for _ in range(4))
    results = []
    kernels = (FlashKernel(None), 0), (TritonKernel(SMALL), 1 << 26), (TritonKernel(SMALL), 45 * 44)
    for kernel, most in kernels:
        monkeypatch.setattr(captured_sums, "MOST_SUMS", most)
        options = {"scale": 0.3, "score_mod": mod}
        found = kernel.forward(q, k, v, compiled, **options)
        given = (g, q, k, v, found.out, found.lse, compiled)
        results.append(kernel.backward(*given, **options).captured[0])
    for found in results[1:]:
        assert_close(found, results[0].double(), dtype=torch.float32)


def test_gradients_of_what_is_captured_have_the_same_bits_in_parts_of_any_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mod = examine(relative_in_documents(), torch.float32, torch.device("cpu"))
    q, k, v, g = (torch.randn(1, 2, 40, 16) for _ in range(4))
    compiled = CompiledShapes(full_shapes(40, 40))
    kernel, options = TritonKernel(SMALL), {"scale": 0.3, "score_mod": mod}
    found = kernel.forward(q, k, v, compiled, **options)
    given = (g, q, k, v, found.out, found.lse, compiled)
    first, again = (kernel.backward(*given, **options).captured[0] for _ in range(2))
    assert torch.equal(first, again)
    monkeypatch.setattr(captured_sums, "MOST_SUMS", 4 * 180)
    assert_close(kernel.backward(*given, **options).captured[0], first.double())


@pytest.mark.parametrize("schedule", ["exchange", "ulysses"])
def test_ranks_see_global_positions_heads_and_batch_elements(schedule: str) -> None:
    q, k, v = (torch.randn(2, 2, 40, 16) for _ in range(3))
    mask = masks.document(lengths=[[12, 28], [25, 15]])
    slopes, table = learned(2), learned(2, 80)

    def function(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * (1 + b) - slopes[h] * (q - k) * 0.1 + table[b, q - k + 40]

    exact = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = flexcp.flex_attention(
        *exact, score_mod=function, block_mask=mask, kernel_options={"kernel": "reference"}
    )
    gradients = torch.autograd.grad(wanted.square().sum(), [*exact, slopes, table])

    def rank(mesh: object) -> list[Tensor]:
        plan = flexcp.make_plan(
            mask, 40, mesh, num_heads=2, head_dim=16, block_size=8, schedule=schedule, batch=2
        )
        own = [plan.shard(x, 2).requires_grad_() for x in (q, k, v)]
        out = flexcp.attention(*own, plan, kernel="triton", score_mod=function)
        *found, d_slopes, d_table = torch.autograd.grad(out.square().sum(), [*own, slopes, table])
        return [*(plan.unshard(x, 2) for x in (out, *found)), d_slopes, d_table]

    results = simulate(rank, 2)
    for found in results:
        for x, y in zip(found[:4], [wanted, *gradients[:3]], strict=True):
            assert_close(x, y, dtype=torch.float32)
    for i in (4, 5):  # each rank has the share of its own queries
        assert_close(sum(found[i] for found in results), gradients[i - 1], dtype=torch.float32)


def test_flex_attention_takes_a_score_function_by_name_and_names_what_it_does_not_know() -> None:
    x = torch.randn(1, 2, 20, 16)
    mod, options = softcapped_alibi(), {"kernel_options": {"kernel": "triton"}}
    found = flexcp.flex_attention(x, x, x, score_mod=mod, **options)
    assert_close(found, flexcp.flex_attention(x, x, x, score_mod=mod).double(), dtype=torch.float32)
    with pytest.raises(FlexCPError, match=r"the operation 'i0'.*ask for 'scored'"):
        flexcp.flex_attention(x, x, x, score_mod=unknown, **options)


def unknown(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.special.i0(s)


def test_a_gpu_gets_triton_for_what_is_known_and_says_where_the_rest_goes() -> None:
    def softcap(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return 20 * torch.tanh(s / 20)

    with FakeTensorMode():
        x = torch.empty(1, 4, 64, 64, dtype=torch.bfloat16, device="cuda")
        for is_one_rectangle in (False, True):
            choice = choose(x, x, score_mod=softcap, is_one_rectangle=is_one_rectangle)
            assert (choice.kernel, choice.varlen) == ("triton", None)
        assert "a score_mod written out in Triton" in explain(x, x, score_mod=softcap)
        assert choose(x, x, score_mod=softcap, partial=True, dropout=True).kernel == "triton"
        assert "the operation 'i0'" in explain(x, x, score_mod=unknown)
        assert choose(x, x, score_mod=unknown).kernel == "flex"
        over_ranks = choose(x, x, score_mod=unknown, partial=True)
        assert over_ranks.kernel == "scored"
        assert "the operation 'i0'" in over_ranks.reasons[0]
        assert "returns no partial results" in over_ranks.reasons[1]
