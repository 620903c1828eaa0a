"""Packed sequences: each as if it were alone, on one device, in a graph and over ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import flexcp
from flexcp import FlexCPError, Mask, masks
from flexcp.compat.varlen import AuxRequest, varlen_attn, varlen_attn_out
from flexcp.kernels.reference import dense_attention
from flexcp.testing import simulate
from flexcp.testing.tolerance import assert_close

WINDOWS = [(-1, -1), (-1, 0), (3, 0), (2, 4), (-1, 2)]


def ends_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def packed(tokens: int, keys: int, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    torch.manual_seed(tokens + keys)
    shapes = [(tokens, heads, 8), (keys, kv_heads, 8), (keys, kv_heads, 8)]
    return [torch.randn(s, requires_grad=True) for s in shapes]


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, window: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Returns out and lse of every sequence by itself, by the oracle in float64."""
    outs, lses = [], []
    for i in range(q_ends.numel() - 1):
        rows, keys = (slice(int(e[i]), int(e[i + 1])) for e in (q_ends, k_ends))
        parts = [x.double().transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
        n, m = parts[0].shape[2], parts[1].shape[2]
        level = torch.arange(n)[:, None] + m - n
        key = torch.arange(m)[None]
        left, right = (10**6 if w == -1 else w for w in window)
        allowed = ((level - key <= left) & (key - level <= right))[None, None]
        found = dense_attention(*parts, allowed=allowed)
        outs.append(found.out[0].transpose(0, 1))
        lses.append(found.lse[0])
    return torch.cat(outs), torch.cat(lses, dim=1)


def check(found: object, wanted: tuple[Tensor, Tensor], inputs: list[Tensor]) -> None:
    out, lse = found  # type: ignore[misc]
    assert_close(out, wanted[0], what="out")
    assert_close(lse, wanted[1], what="lse")
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    grads = torch.autograd.grad((out * weights).sum(), inputs)
    for x, y in zip(grads, torch.autograd.grad((wanted[0] * weights).sum(), inputs), strict=True):
        assert_close(x, y, what="gradient")


@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5),
    window=st.sampled_from(WINDOWS),
)
def test_every_sequence_attends_as_if_it_were_alone(
    lengths: list[tuple[int, int]], window: tuple[int, int]
) -> None:
    q_ends, k_ends = (ends_of([pair[i] for pair in lengths]) for i in (0, 1))
    inputs = packed(int(q_ends[-1]), int(k_ends[-1]))
    found = flexcp.varlen_attention(
        *inputs, q_ends, cu_seqlens_k=k_ends, window_size=window, return_lse=True
    )
    check(found, one_by_one(*inputs, q_ends, k_ends, window), inputs)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_over_ranks_it_is_what_one_process_computes(ranks: int, window: tuple[int, int]) -> None:
    ends = ends_of([5, 0, 40, 17, 1])
    inputs = packed(63, 63)
    mask = masks.document(cu_seqlens=ends)
    if window != (-1, -1):
        left, right = (63 if w == -1 else w for w in window)
        mask &= masks.causal() if window == (-1, 0) else masks.sliding_window(left, right)

    def rank(mesh: object) -> Tensor:
        plan = flexcp.make_plan(mask, 63, mesh, num_heads=4, num_kv_heads=2, head_dim=8)  # type: ignore[arg-type]
        local = [plan.shard(x, 0) for x in inputs]
        out = flexcp.varlen_attention(*local, ends, plan, window_size=window)
        return plan.unshard(out, 0)  # type: ignore[arg-type]

    wanted = one_by_one(*inputs, ends, ends, window)[0]
    with torch.no_grad():
        for out in simulate(rank, ranks):
            assert_close(out, wanted, what="out")


def test_gradients_over_ranks_are_those_of_one_process() -> None:
    ends = ends_of([30, 3, 20])
    inputs = [x.detach() for x in packed(53, 53)]
    wanted = one_by_one(*[x.requires_grad_() for x in inputs], ends, ends, (-1, 0))[0]
    expected = torch.autograd.grad(wanted.square().sum(), inputs)

    def rank(mesh: object) -> list[Tensor]:
        mask = masks.causal() & masks.document(cu_seqlens=ends)
        plan = flexcp.make_plan(mask, 53, mesh, num_heads=4, num_kv_heads=2, head_dim=8)  # type: ignore[arg-type]
        local = [plan.shard(x.detach(), 0).requires_grad_() for x in inputs]
        out = varlen_attn(
            *local, ends, ends.clone(), 30, 30, window_size=(-1, 0), enable_gqa=True, plan=plan
        )
        out.square().sum().backward()  # type: ignore[union-attr]
        return [plan.unshard(x.grad, 0) for x in local]  # type: ignore[arg-type]

    for found in simulate(rank, 2):
        for x, y in zip(found, expected, strict=True):
            assert_close(x, y, what="gradient")


def test_another_packing_runs_in_the_graph_of_the_first() -> None:
    torch.compiler.reset()
    graphs: list[object] = []

    def count(gm: torch.fx.GraphModule, example: object) -> object:
        graphs.append(example)
        return gm.forward

    @torch.compile(fullgraph=True, backend=count, dynamic=True)
    def call(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        return flexcp.varlen_attention(q, k, v, ends, causal=True, return_lse=True)  # type: ignore[return-value]

    for lengths in ([5, 20, 8], [30, 2, 1], [11, 11, 11]):
        ends = ends_of(lengths)
        inputs = packed(33, 33)
        check(call(*inputs, ends), one_by_one(*inputs, ends, ends, (-1, 0)), inputs)
    assert len(graphs) == 1


def test_the_same_weights_are_dropped_whatever_computes_them() -> None:
    ends = ends_of([30, 3, 20])
    inputs = [x.detach() for x in packed(53, 53)]
    options = {"dropout_p": 0.4, "dropout_seed": 11, "causal": True}
    four = [x.transpose(0, 1)[None] for x in inputs]
    mask = masks.document(cu_seqlens=ends) & masks.causal()
    wanted = flexcp.flex_attention(
        *four, block_mask=mask, enable_gqa=True, dropout_p=0.4, dropout_seed=11
    )[0].transpose(0, 1)  # type: ignore[index, union-attr]
    assert_close(flexcp.varlen_attention(*inputs, ends, **options), wanted)  # type: ignore[arg-type]

    def rank(mesh: object) -> Tensor:
        plan = flexcp.make_plan(mask, 53, mesh, num_heads=4, num_kv_heads=2, head_dim=8)  # type: ignore[arg-type]
        local = [plan.shard(x, 0) for x in inputs]
        return plan.unshard(flexcp.varlen_attention(*local, ends, plan, **options), 0)  # type: ignore[arg-type]

    for out in simulate(rank, 3):
        assert_close(out, wanted, what="out")


def test_lengths_changed_in_place_are_another_packing() -> None:
    ends = ends_of([10, 10])
    inputs = packed(20, 20)
    flexcp.varlen_attention(*inputs, ends)
    ends[1] = 4
    found = flexcp.varlen_attention(*inputs, ends, return_lse=True)
    check(found, one_by_one(*inputs, ends, ends, (-1, -1)), inputs)


def test_lengths_that_are_let_go_are_not_kept() -> None:
    from flexcp.ops.packed_masks import _masks

    ends, before = ends_of([6, 2]), len(_masks)
    inputs = packed(8, 8)
    varlen_attn(*inputs, ends, ends, 6, 6, enable_gqa=True)
    assert len(_masks) == before + 1
    del ends
    assert len(_masks) == before


def test_a_plan_for_another_packing_is_refused() -> None:
    plan = flexcp.make_plan(masks.document(lengths=[4, 4]), 8, 1)
    inputs = packed(8, 8, 1, 1)
    with pytest.raises(FlexCPError, match=r"make_plan\(masks.document\(cu_seqlens=cu_seqlens\)"):
        flexcp.varlen_attention(*inputs, [0, 3, 8], plan)
    with pytest.raises(FlexCPError, match=r"& masks.causal\(\)"):
        flexcp.varlen_attention(*inputs, [0, 4, 8], plan, causal=True)


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([0, 5], "end at 8"),
        ([1, 8], "start at 0"),
        ([0, 6, 4, 8], "do not fall"),
        ([0.0, 8.0], "tensor of integers"),
        ("eight", "cu_seqlens as integers"),
        ([0, 9], "end at 8"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(ends: object, message: str) -> None:
    with pytest.raises(FlexCPError, match=message):
        flexcp.varlen_attention(*packed(8, 8), ends)  # type: ignore[arg-type]


def test_tensors_with_a_batch_dimension_are_refused() -> None:
    x = torch.randn(1, 2, 8, 4)
    with pytest.raises(FlexCPError, match=r"q of shape \[tokens, heads, head dim\]"):
        flexcp.varlen_attention(x, x, x, [0, 8])
    with pytest.raises(FlexCPError, match="pair"):
        flexcp.varlen_attention(*packed(8, 8), [0, 8], window_size=3)  # type: ignore[arg-type]


def test_keys_in_pages_are_those_of_their_sequences() -> None:
    q, _, _ = packed(6, 1)
    pool = torch.randn(5, 4, 2, 8), torch.randn(5, 4, 2, 8)
    table = torch.tensor([[3, 0], [1, -1], [4, 2]], dtype=torch.int32)
    used, ends = torch.tensor([7, 3, 8], dtype=torch.int32), ends_of([1, 2, 3])
    options = {"window_size": (-1, 0), "enable_gqa": True, "seqused_k": used, "block_table": table}
    k, v = (
        torch.cat([x[t].flatten(0, 1)[:n] for t, n in (([3, 0], 7), ([1], 3), ([4, 2], 8))])
        for x in pool
    )
    wanted = one_by_one(q, k, v, ends, ends_of(used.tolist()), (-1, 0))
    with torch.no_grad():
        found = varlen_attn(q, *pool, ends, None, 3, 8, return_aux=AuxRequest(lse=True), **options)  # type: ignore[arg-type]
        assert_close(found[0], wanted[0], what="out")
        assert_close(found[1], wanted[1], what="lse")
        out = torch.empty_like(q)
        assert varlen_attn_out(out, q, *pool, ends, None, 3, 8, **options) is out  # type: ignore[arg-type]
        assert_close(out, wanted[0], what="out")
    with pytest.raises(RuntimeError, match="seqused_k is an inference-only parameter"):
        varlen_attn(q, *pool, ends, None, 3, 8, **options)  # type: ignore[arg-type]


def test_keys_beyond_those_used_and_tokens_beyond_the_last_do_not_count() -> None:
    q, k, v = (x.detach() for x in packed(9, 12))
    ends, k_ends, used = ends_of([3, 4]), ends_of([5, 5]), torch.tensor([2, 5])
    out = varlen_attn(
        q, k, v, ends, k_ends, 4, 5, seqused_k=used, enable_gqa=True, window_size=(-1, 0)
    )
    keys = torch.cat([k[:2], k[5:10]]), torch.cat([v[:2], v[5:10]])
    wanted = one_by_one(q[:7], *keys, ends, ends_of([2, 5]), (-1, 0))[0]
    assert_close(out[:7], wanted, what="out")  # type: ignore[index]
    assert not out[7:].any()  # type: ignore[index]


def test_heads_that_are_not_shared_are_refused_in_torchs_words() -> None:
    ends = ends_of([8])
    with pytest.raises(ValueError, match="Try setting enable_gqa=True"):
        varlen_attn(*packed(8, 8), ends, ends, 8, 8)


def test_torchs_own_aux_request_is_understood_and_other_things_are_refused() -> None:
    torchs = pytest.importorskip("torch.nn.attention.varlen").AuxRequest
    ends, given = ends_of([3, 5]), packed(8, 8, 2, 2)
    wanted = varlen_attn(*given, ends, ends, 5, 5, return_aux=AuxRequest(lse=True))
    found = varlen_attn(*given, ends, ends, 5, 5, return_aux=torchs(lse=True))
    assert_close(found[1], wanted[1], what="lse")
    with pytest.raises(FlexCPError, match="return_aux of type AuxRequest, got True of type bool"):
        varlen_attn(*given, ends, ends, 5, 5, return_aux=True)  # type: ignore[arg-type]


def test_a_score_mod_sees_positions_in_the_pack() -> None:
    ends = ends_of([5, 7])
    q, k, v = packed(12, 12, 2, 2)

    def near(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - 0.3 * (q_idx - kv_idx).abs() + 0.1 * kv_idx

    out = flexcp.varlen_attention(q, k, v, ends, score_mod=near)
    four = [x.transpose(0, 1)[None] for x in (q, k, v)]
    mask = Mask(masks.document(lengths=[5, 7]).mask_mod)
    wanted = flexcp.flex_attention(*four, near, mask, kernel_options={"kernel": "reference"})
    assert_close(out, wanted[0].transpose(0, 1), what="out")  # type: ignore[index, union-attr]
