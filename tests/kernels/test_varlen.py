"""Variable-length calls: made from slabs, on an op that does what FlashAttention's is said to."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flexcp
from flexcp import FlexCPError, masks
from flexcp.kernels import varlen
from flexcp.kernels.compiled_shapes import compiled_shapes_of
from flexcp.kernels.flash import FlashKernel
from flexcp.kernels.interface import Shapes, allowed_pairs
from flexcp.kernels.registry import choose
from flexcp.kernels.shapes import shapes_of
from flexcp.kernels.varlen import CUDA_VARLEN, VarlenKernel, VarlenOps
from flexcp.kernels.varlen_calls import VarlenCall, varlen_calls
from flexcp.testing.tolerance import assert_close
from kernels.cases import MASKS


def as_flash_attention_2_takes_it(call: VarlenCall) -> tuple[int, int]:
    """A window, after what FlashAttention 2 does to it before its kernels see it."""
    left = -1 if call.left >= call.longest_k else call.left
    right = -1 if call.right >= call.longest_k else call.right
    if left < 0 and right == 0:
        return left, right
    if left < 0 <= right:
        left = call.longest_k
    if left >= 0 and right < 0:
        right = call.longest_k
    return left, right


def pairs_of(call: VarlenCall) -> Tensor:
    """Bool [rows, keys] What the op's documentation says that a call computes."""
    seen = torch.zeros(int(call.q_ends[-1]), int(call.k_ends[-1]), dtype=torch.bool)
    q_ends, k_ends = call.q_ends.tolist(), call.k_ends.tolist()
    for i in range(len(q_ends) - 1):
        (a, b), (c, d) = q_ends[i : i + 2], k_ends[i : i + 2]
        assert b - a <= call.longest_q
        assert d - c <= call.longest_k
        level = torch.arange(b - a)[:, None] + (d - c) - (b - a)
        key = torch.arange(d - c)[None]
        inside = torch.ones(b - a, d - c, dtype=torch.bool)
        left, right = as_flash_attention_2_takes_it(call)
        if left >= 0:
            inside &= key >= level - left
        if right >= 0:
            inside &= key <= level + right
        seen[a:b, c:d] = inside
    return seen


def scores_of(q: Tensor, k: Tensor, call: VarlenCall, scale: float) -> Tensor:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return scores.masked_fill(~pairs_of(call), -torch.inf)


def assert_readable(*tensors: Tensor) -> None:
    """FlashAttention reads 16 bytes at a time, and takes the elements of a row to be neighbours."""
    for x in tensors:
        assert x.stride(-1) == 1
        steps = (step * x.element_size() for step in x.stride()[:-1])
        assert all(step % 16 == 0 for step in (x.data_ptr(), *steps))


def op_forward(
    q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float
) -> tuple[Tensor, Tensor]:
    """FlashAttention's forward: 0 and an lse of +inf where a row sees no key."""
    assert_readable(q, k, v)
    scores = scores_of(q, k, call, scale)
    lse = scores.logsumexp(-1)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum("hqk,khd->qhd", (scores - lse[..., None]).exp(), v), lse


def op_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: VarlenCall,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """FlashAttention's backward; keys that no row sees are left as they were: NaN here."""
    assert_readable(g, q, k, v, out)
    assert lse.is_contiguous()
    share = q.shape[1] // k.shape[1]
    p = (scores_of(q, k, call, scale) - lse[..., None]).exp()
    dp = torch.einsum("qhd,khd->hqk", g, v.repeat_interleave(share, 1))
    ds = p * (dp - (g * out).sum(-1).t()[..., None]) * scale
    dq = torch.einsum("hqk,khd->qhd", ds, k.repeat_interleave(share, 1))
    dk, dv = torch.einsum("hqk,qhd->khd", ds, q), torch.einsum("hqk,qhd->khd", p, g)
    dk, dv = (x.unflatten(1, (-1, share)).sum(2) for x in (dk, dv))
    if call.idle_keys is not None:
        dk[call.idle_keys], dv[call.idle_keys] = torch.nan, torch.nan
    return dq, dk, dv


EMULATED = VarlenOps("an emulation", "cpu", frozenset({torch.float64}), op_forward, op_backward)


def covered(shapes: Shapes, batch: int, calls: tuple[VarlenCall, ...]) -> Tensor:
    seen = torch.zeros(batch * shapes.q_len, batch * shapes.kv_len, dtype=torch.int32)
    for call in calls:
        seen[call.rows, call.keys] += pairs_of(call)
    assert int(seen.max()) <= 1, "a pair is computed twice"
    return seen.bool()


def wanted_pairs(shapes: Shapes, batch: int) -> Tensor:
    planes = [shapes.plane_of[b if shapes.batch > 1 else 0][0] for b in range(batch)]
    return torch.block_diag(*[allowed_pairs(shapes, p) for p in planes]).bool()


FEW_CALLS = {
    "full": (masks.full(), 1),
    "causal": (masks.causal(), 1),
    "window": (masks.sliding_window(17), 1),
    "two-sided window": (masks.sliding_window(9, 30), 1),
    "documents": (masks.document(lengths=[40, 1, 59, 30]), 1),
    "causal documents": (masks.document(lengths=[40, 1, 59, 30]) & masks.causal(), 1),
    "windowed documents": (masks.document(lengths=[40, 1, 59, 30]) & masks.sliding_window(12), 1),
    "documents by element": (masks.document(lengths=[[40, 90], [100, 30]]) & masks.causal(), 1),
    "prefix": (masks.prefix_lm(33), 2),
}


@pytest.mark.parametrize("name", FEW_CALLS)
def test_masks_that_models_use_need_few_calls(name: str) -> None:
    mask, most = FEW_CALLS[name]
    shapes = shapes_of(flexcp.build_block_grid(mask, 130, batch=2))
    calls = varlen_calls(shapes, 2)
    assert calls is not None
    assert len(calls) <= most
    assert torch.equal(covered(shapes, 2, calls), wanted_pairs(shapes, 2))


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    window=st.sampled_from([(None, None), (None, 0), (3, 0), (2, 5), (0, 0)]),
    picks=st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 4), st.integers(0, 3)),
)
def test_calls_compute_each_pair_of_a_rank_once(
    lengths: list[int], window: tuple[int | None, int | None], picks: tuple[int, int, int, int]
) -> None:
    """Some rows against some keys, as ranks have them."""
    total = sum(lengths)
    mask = masks.document(lengths=lengths)
    if window != (None, None):
        mask &= masks.sliding_window(total if window[0] is None else window[0], window[1] or 0)
    every, kept, every_k, kept_k = picks
    chunks = torch.arange(total) // 3
    rows = torch.arange(total)[chunks % every == kept % every]
    keys = torch.arange(total)[chunks % every_k == kept_k % every_k]
    if not rows.numel() or not keys.numel():
        return
    grid = flexcp.build_block_grid(mask, total, block_size=4)
    shapes = shapes_of(grid, q_positions=rows, kv_positions=keys)
    calls = varlen_calls(shapes, 1)
    if calls is not None:
        assert torch.equal(covered(shapes, 1, calls), wanted_pairs(shapes, 1))


@pytest.mark.parametrize("name", [*FEW_CALLS, "gaps", "noise"])
def test_the_kernel_gives_what_the_flash_kernel_gives(name: str) -> None:
    torch.manual_seed(0)
    if name == "gaps":  # rows and keys between sequences, and rows that see nothing at all
        mask = flexcp.Mask(
            lambda b, h, q, kv: (q // 20 == kv // 20) & (q // 20 % 2 == 1) & (q >= kv)
        )
    else:
        mask = MASKS["noise"]() if name == "noise" else FEW_CALLS[name][0]
    q = torch.randn(2, 4, 130, 16, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 130, 16, dtype=torch.float64) for _ in range(2))
    compiled = compiled_shapes_of(flexcp.build_block_grid(mask, 130, batch=2, heads=4))
    plain = FlashKernel(None)
    kernel = VarlenKernel(EMULATED, plain)
    other = torch.randn(2, 4, 130, 16, dtype=torch.float64), torch.randn(2, 4, 130).double()
    for former in (False, True):
        results = []
        for each in (kernel, plain):
            given = flexcp.kernels.interface.Partial(*(x.clone() for x in other))
            found = each.forward(q, k, v, compiled, scale=0.3, former=given if former else None)
            results.append((found.out, found.lse))
        for x, y in zip(*results, strict=True):
            assert_close(x, y, what="forward")
    out, lse = results[0]
    g = torch.randn_like(out)
    sums = []
    for each in (kernel, plain):
        into = torch.ones_like(q), (torch.empty_like(k), torch.empty_like(v))
        found = each.backward(
            g, q, k, v, out, lse, compiled, scale=0.3, grad_q=into[0], grad_kv=into[1]
        )
        sums.append((found.q, found.k, found.v))
    for x, y in zip(*sums, strict=True):
        assert_close(x, y, what="gradient")


@pytest.mark.parametrize(
    "mask",
    [masks.causal(), masks.sliding_window(30, 400), masks.sliding_window(3, 50), masks.full()],
)
@pytest.mark.parametrize("lengths", [(400, 100), (100, 400), (64, 63)])
def test_more_rows_than_keys_and_the_other_way(mask: flexcp.Mask, lengths: tuple[int, int]) -> None:
    shapes = shapes_of(flexcp.build_block_grid(mask, *lengths))
    calls = varlen_calls(shapes, 1)
    if calls is not None:
        assert torch.equal(covered(shapes, 1, calls), allowed_pairs(shapes))


@given(st.lists(st.sampled_from([1, 1, 2, 2, 3, 7, 20]), min_size=2, max_size=12))
def test_documents_of_any_lengths_are_one_call(lengths: list[int]) -> None:
    shapes = shapes_of(
        flexcp.build_block_grid(masks.causal() & masks.document(lengths=lengths), sum(lengths))
    )
    calls = varlen_calls(shapes, 1)
    assert calls is not None
    assert len(calls) == 1
    assert torch.equal(covered(shapes, 1, calls), allowed_pairs(shapes))


def test_tensors_are_given_to_the_op_as_it_reads_memory() -> None:
    causal = compiled_shapes_of(flexcp.build_block_grid(masks.causal(), 60))
    across = torch.randn(1, 2, 8, 60, dtype=torch.float64).transpose(2, 3)
    shifted = torch.randn(60 * 2 * 8 + 1, dtype=torch.float64)[1:].view(1, 2, 60, 8)
    odd = torch.randn(1, 2, 60, 9, dtype=torch.float64)[..., :8]
    given = (across, shifted, odd)
    grad_out = torch.ones((), dtype=torch.float64).expand(1, 2, 60, 8)  # of out.sum()
    found = []
    for kernel in (VarlenKernel(EMULATED, None), FlashKernel(None)):
        part = kernel.forward(*given, causal, scale=0.3)
        lse = torch.stack([part.lse, part.lse], -1)[..., 0]
        back = kernel.backward(grad_out, *given, part.out, lse, causal, scale=0.3)
        found.append((part.out, back.q, back.k, back.v))
    for x, y in zip(*found, strict=True):
        assert_close(x, y)


def test_flash_attention_4_leaves_large_head_dims_to_other_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(varlen, "current_flash_attention_impl", lambda: "FA4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with FakeTensorMode():
        for dim, taken in ((128, True), (256, False)):
            x = torch.empty(1, 8, 500, dim, dtype=torch.bfloat16, device="cuda")
            assert (CUDA_VARLEN.refuses(x, x) is None) == taken
        assert "FlashAttention 4 here" in str(CUDA_VARLEN.refuses(x, x))


def test_scales_of_another_sign_and_single_rows_go_to_the_other_kernel() -> None:
    class Counting(FlashKernel):
        calls = 0

        def forward(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            Counting.calls += 1
            return super().forward(*args, **kwargs)

    x = torch.randn(1, 1, 60, 8, dtype=torch.float64)
    causal = compiled_shapes_of(flexcp.build_block_grid(masks.causal(), 60))
    kernel = VarlenKernel(EMULATED, Counting(None))
    kernel.forward(x, x, x, causal, scale=0.5)
    assert Counting.calls == 0
    for scale in (-0.5, 0.0):
        kernel.forward(x, x, x, causal, scale=scale)
    one = compiled_shapes_of(flexcp.build_block_grid(masks.full(), 1, 60))
    kernel.forward(x[:, :, :1], x, x, one, scale=0.5)
    assert Counting.calls == 3


def test_what_it_can_not_express_goes_to_the_other_kernel_or_is_an_error() -> None:
    x = torch.randn(1, 1, 60, 8, dtype=torch.float64)
    noise = compiled_shapes_of(flexcp.build_block_grid(MASKS["noise"](), 60))
    causal = compiled_shapes_of(flexcp.build_block_grid(masks.causal(), 60))
    alone = VarlenKernel(EMULATED, None)
    with pytest.raises(FlexCPError, match="leave the kernel out"):
        alone.forward(x, x, x, noise, scale=1.0)
    found = alone.forward(x, x, x, causal, scale=1.0)
    with pytest.raises(FlexCPError, match="a gradient of lse"):
        alone.backward(
            x, x, x, x, found.out, found.lse, causal, scale=1.0, grad_lse=torch.ones(1, 1, 60)
        )


def test_wrong_windows_are_caught_by_the_emulation() -> None:
    """The tests above compare what a call computes: a call that is off by one differs."""
    shapes = shapes_of(flexcp.build_block_grid(masks.sliding_window(17), 130))
    (call,) = varlen_calls(shapes, 1) or ()
    for wrong in ({"left": call.left + 1}, {"right": 1}):
        other = dataclasses.replace(call, **wrong)
        assert not torch.equal(pairs_of(other), wanted_pairs(shapes, 1)[: other.q_ends[-1]])


@pytest.mark.parametrize("mask", [masks.causal(), masks.sliding_window(99), masks.full()])
def test_the_cuda_op_takes_and_returns_what_the_contract_says(mask: flexcp.Mask) -> None:
    (call,) = varlen_calls(shapes_of(flexcp.build_block_grid(mask, 500)), 2) or ()
    with FakeTensorMode():
        ends = torch.empty(3, dtype=torch.int32, device="cuda")
        call = dataclasses.replace(call, q_ends=ends, k_ends=ends)
        q = torch.empty(1000, 8, 64, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(1000, 2, 64, dtype=torch.bfloat16, device="cuda")
        out, lse = CUDA_VARLEN.forward(q, k, k, call, 0.1)
        assert (out.shape, out.dtype, out.device.type) == (q.shape, q.dtype, "cuda")
        assert (lse.shape, lse.dtype) == ((8, 1000), torch.float32)
        grads = CUDA_VARLEN.backward(out, q, k, k, out, lse, call, 0.1)
        for x, grad in zip((q, k, k), grads, strict=True):
            assert (grad.shape, grad.dtype) == (x.shape, x.dtype)


def test_the_registry_prefers_it_and_says_so() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(1, 8, 500, 64, dtype=torch.bfloat16, device="cuda")
        choice = choose(x, x, partial=True)
        assert isinstance(choice.runs, VarlenKernel)
        assert choice.runs.otherwise is not None
        assert "variable-length op" in str(choice)
        named = choose(x, x, kernel="varlen")
        assert isinstance(named.runs, VarlenKernel)
        assert named.runs.otherwise is None
        for other in ("triton", "flash"):
            assert not isinstance(choose(x, x, kernel=other).runs, VarlenKernel)
        single = x.float()
        assert not isinstance(choose(single, single, partial=True).runs, VarlenKernel)
        with pytest.raises(FlexCPError, match=r"does not take torch\.float32"):
            choose(single, single, kernel="varlen")
    y = torch.zeros(1, 1, 4, 8)
    with pytest.raises(FlexCPError, match="runs on cuda, not on cpu"):
        choose(y, y, kernel="varlen")
