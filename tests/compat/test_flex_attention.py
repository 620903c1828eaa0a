"""torch's flex_attention by its own name: same errors, same results, and gradients on CPU."""

import pytest
import torch
from compat.cases import CROPS_TO_ANY_LENGTH
from kernels.cases import loss, problem
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torchs

from flexcp.compat.flex_attention import AuxRequest, flex_attention
from flexcp.kernels.reference import dense_attention, dense_mask
from flexcp.testing.tolerance import assert_close

Q = torch.randn(2, 4, 256, 16, generator=torch.Generator().manual_seed(3))
DEVICE = {"device": "cpu"}


def causal(b, h, q, kv):  # type: ignore[no-untyped-def]
    return q >= kv


def _mistakes() -> dict[str, dict[str, object]]:
    mask = create_block_mask(causal, None, None, 256, 256, **DEVICE)
    batched = create_block_mask(causal, 3, None, 256, 256, **DEVICE)
    nested = torch.nested.nested_tensor([Q[0], Q[1]])
    return {
        "embedding dims": {"key": Q[..., :8]},
        "heads without gqa": {"key": Q[:, :2], "value": Q[:, :2]},
        "heads that don't divide": {"key": Q[:, :3], "value": Q[:, :3], "enable_gqa": True},
        "three dimensions": {"query": Q[0], "key": Q[0], "value": Q[0]},
        "one dimension": {"query": Q[0, 0, 0], "key": Q[0, 0, 0], "value": Q[0, 0, 0]},
        "a mask of a smaller length": {
            "query": torch.cat([Q, Q], 2), "key": torch.cat([Q, Q], 2),
            "value": torch.cat([Q, Q], 2), "block_mask": mask,
        },
        "a mask of a larger length": {
            "query": Q[:, :, :128], "key": Q[:, :, :128], "value": Q[:, :, :128],
            "block_mask": mask,
        },
        "a sliced mask": {"query": Q[:, :, :128], "block_mask": mask[:, :, :1]},
        "devices": {"key": Q.to("meta")},
        "nested tensors": {"query": nested, "key": nested, "value": nested},
        "both lse and aux": {"return_lse": True, "return_aux": AuxRequest(lse=True)},
        "an invalid backend": {"kernel_options": {"BACKEND": "FASTEST"}},
        "two ways to name a backend": {
            "kernel_options": {"BACKEND": "TRITON", "FORCE_USE_FLEX_ATTENTION": True}
        },
        "batch sizes without a mask": {"key": Q[:1], "value": Q[:1]},
        "batch sizes of the mask": {"key": Q[:1], "value": Q[:1], "block_mask": batched},
    }  # fmt: skip


REFUSES_NESTED = hasattr(torch_flex, "_validate_no_nested_tensors")


@pytest.mark.parametrize("name", _mistakes())
def test_the_same_mistake_raises_torchs_class_and_first_words(name: str) -> None:
    if name == "nested tensors" and not REFUSES_NESTED:
        pytest.skip("nested tensors end the process in torch's flex_attention before 2.13")
    arguments = {"query": Q, "key": Q, "value": Q, **_mistakes()[name]}
    with pytest.raises(Exception) as theirs:
        torchs(**arguments)  # type: ignore[arg-type]
    with pytest.raises(theirs.type) as ours:
        flex_attention(**arguments)  # type: ignore[arg-type]
    words = 5 if "backend" not in name else 3
    assert str(ours.value).split()[:words] == str(theirs.value).split()[:words]


def test_nested_tensors_are_refused_on_every_torch() -> None:
    with pytest.raises(NotImplementedError, match="does not support NestedTensor inputs"):
        flex_attention(**_mistakes()["nested tensors"])  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"BLOCK_M": 64}, {"fwd_num_warps": 4}, {"BACKEND": "AUTO"}])
def test_tuning_options_have_no_effect_on_cpu(options: dict[str, object]) -> None:
    assert torch.equal(flex_attention(Q, Q, Q, kernel_options=options), flex_attention(Q, Q, Q))  # type: ignore[arg-type]


def test_auxiliary_outputs_are_torchs() -> None:
    mask = create_block_mask(causal, None, None, 256, 256, **DEVICE)
    out, aux = flex_attention(Q, Q, Q, block_mask=mask, return_aux=AuxRequest(True, True))
    expected = dense_attention(Q, Q, Q, allowed=torch.ones(256, 256).tril().bool())
    assert_close(out, expected.out)
    assert_close(aux.lse, expected.lse)
    assert_close(aux.max_scores, expected.max_scores)
    out, aux = flex_attention(Q, Q, Q, return_aux=AuxRequest())
    assert aux.lse is None
    assert aux.max_scores is None


def test_return_lse_warns_that_it_is_deprecated() -> None:
    with pytest.warns(FutureWarning, match="return_aux"):
        _, lse = flex_attention(Q, Q, Q, return_lse=True)
    assert lse.shape == Q.shape[:3]


def _check(mask: BlockMask, allowed: torch.Tensor, **shape: int) -> None:
    p = problem(**shape)
    out = flex_attention(p.q, p.k, p.v, block_mask=mask, enable_gqa=True)
    expected = dense_attention(p.q, p.k, p.v, allowed=allowed)
    assert_close(out, expected.out)
    for found, wanted in zip(
        torch.autograd.grad(loss(out), p.inputs),
        torch.autograd.grad(loss(expected.out), p.inputs),
        strict=True,
    ):
        assert_close(found, wanted)


def test_a_length_that_is_no_multiple_of_the_block_size_works() -> None:
    mask = create_block_mask(causal, None, None, 1023, 1023, **DEVICE)
    _check(mask, torch.ones(1023, 1023).tril().bool(), q_len=1023, batch=1, heads=2, kv_heads=1)


def test_block_lists_narrower_than_their_mask_mod_count() -> None:
    """As in compiled torch: what is not listed is not computed, whatever mask_mod says."""
    counts = torch.tensor([[[1, 1, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 1, 2], [1, 0, 2], [0, 2, 1]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=64, mask_mod=causal)
    listed = torch.zeros(3, 3, dtype=torch.bool)
    listed[[0, 1, 2, 2], [0, 1, 0, 2]] = True
    every = listed.repeat_interleave(64, 0).repeat_interleave(64, 1)
    _check(mask, every & torch.ones(192, 192).tril().bool(), q_len=192)


def test_full_blocks_are_full_whatever_mask_mod_says() -> None:
    one, zero = (torch.full((1, 1, 2), n, dtype=torch.int32) for n in (1, 0))
    first = torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(zero, first, one, first, BLOCK_SIZE=64, mask_mod=causal)
    allowed = torch.zeros(128, 128, dtype=torch.bool)
    allowed[:, :64] = True
    _check(mask, allowed, q_len=128)


@pytest.mark.skipif(not CROPS_TO_ANY_LENGTH, reason="torch crops to whole blocks before 2.13")
def test_an_adjusted_mask_is_the_corner_of_the_larger_one() -> None:
    mask = create_block_mask(causal, None, None, 512, 512, **DEVICE)._adjust(300, 200)
    _check(mask, torch.ones(300, 200).tril().bool(), q_len=300, kv_len=200)


def test_a_slice_of_rows_with_an_offset_mask_is_decoding() -> None:
    offset = torch.tensor(256)

    def shifted(b, h, q, kv):  # type: ignore[no-untyped-def]
        return q + offset >= kv

    mask = create_block_mask(causal, None, None, 512, 512, **DEVICE)[:, :, 2:3]
    mask.mask_mod = shifted
    mask.seq_lengths = (128, 512)
    rows, keys = torch.arange(256, 384)[:, None], torch.arange(512)
    _check(mask, rows >= keys, q_len=128, kv_len=512)


def test_a_single_query_decodes_against_a_cache() -> None:
    position = torch.tensor(77)

    def upto(b, h, q, kv):  # type: ignore[no-untyped-def]
        return kv <= q + position

    mask = create_block_mask(upto, None, None, 1, 200, **DEVICE)
    _check(mask, (torch.arange(200) <= 77)[None], q_len=1, kv_len=200)


def test_a_paged_mask_translates_physical_positions() -> None:
    logical = torch.randperm(200)

    def paged(b, h, q, kv):  # type: ignore[no-untyped-def]
        return q >= logical[kv]

    mask = create_block_mask(paged, None, None, 200, 200, **DEVICE)
    _check(mask, torch.arange(200)[:, None] >= logical, q_len=200)


def test_keys_of_batch_size_one_meet_a_batched_mask() -> None:
    def by_batch(b, h, q, kv):  # type: ignore[no-untyped-def]
        return q >= kv + 20 * b

    mask = create_block_mask(by_batch, 3, None, 150, 150, **DEVICE)
    p = problem(batch=3, q_len=150)
    out = flex_attention(p.q, p.k[:1], p.v[:1], block_mask=mask, enable_gqa=True)
    i = torch.arange(150)
    allowed = dense_mask(by_batch, i, i, batch=3, heads=4)
    expected = dense_attention(p.q, p.k[:1].expand(3, -1, -1, -1), p.v[:1].expand(3, -1, -1, -1),
                               allowed=allowed)  # fmt: skip
    assert_close(out, expected.out)


def test_torchs_mask_for_everything_is_no_mask() -> None:
    from torch.nn.attention.flex_attention import _create_empty_block_mask

    empty = _create_empty_block_mask(Q, Q)
    assert_close(flex_attention(Q, Q, Q, block_mask=empty), flex_attention(Q, Q, Q))


def test_the_output_is_laid_out_in_memory_as_the_query() -> None:
    transposed = Q.transpose(1, 2).contiguous().transpose(1, 2)
    turned = Q.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    one = Q[:, :, :1].transpose(1, 2).contiguous().transpose(1, 2)
    for query in (transposed, turned, one, Q):
        out, lse = flex_attention(query, Q, Q, return_aux=AuxRequest(lse=True))
        assert torch.equal(out, flex_attention(query.contiguous(), Q, Q))
        assert lse.lse is not None
        strides = query.stride()[:3], out.stride()[:3]
        assert len({tuple(sorted(range(3), key=x.__getitem__)) for x in strides}) == 1
        assert out.stride(3) == 1


def test_a_whole_graph_takes_a_mask_for_everything_and_returns_lse() -> None:
    """And a score_mod, from a query that lies in memory in another order."""
    from torch.nn.attention.flex_attention import _create_empty_block_mask

    def bias(score, b, h, q, kv):  # type: ignore[no-untyped-def]
        return score + 0.1 * (kv - q)

    torch._dynamo.reset()
    query = Q.transpose(1, 2).contiguous().transpose(1, 2)
    empty = _create_empty_block_mask(Q, Q)
    compiled = torch.compile(flex_attention, backend="eager", fullgraph=True)
    out, lse = compiled(query, Q, Q, bias, empty, return_lse=True)
    expected = dense_attention(
        Q, Q, Q, allowed=torch.ones(256, 256, dtype=torch.bool), score_mod=bias
    )
    assert_close(out, expected.out)
    assert_close(lse, expected.lse)
    assert out.stride() == query.stride()


def test_results_are_those_of_torchs_eager_function() -> None:
    mask = create_block_mask(causal, 2, 4, 256, 256, **DEVICE)

    def bias(score, b, h, q, kv):  # type: ignore[no-untyped-def]
        return score + 0.1 * (h + 1) * (kv - q)

    expected = dense_attention(Q, Q, Q, allowed=torch.ones(256, 256).tril().bool(), score_mod=bias)
    assert_close(flex_attention(Q, Q, Q, bias, mask), expected.out)


def test_a_block_mask_that_is_changed_after_a_call_is_planned_again() -> None:
    mask = create_block_mask(causal, None, None, 128, 128, **DEVICE)
    _check(mask, torch.ones(128, 128).tril().bool(), q_len=128)
    mask.mask_mod = lambda b, h, q, kv: q == kv
    _check(mask, torch.eye(128).bool(), q_len=128)
    mask.kv_num_blocks.zero_()
    if mask.full_kv_num_blocks is not None:
        mask.full_kv_num_blocks.zero_()
    _check(mask, torch.zeros(128, 128).bool(), q_len=128)


@pytest.mark.parametrize("compiled", [False, True])
def test_keys_and_values_of_eight_bits_are_read_in_the_querys_type(compiled: bool) -> None:
    low = Q.to(torch.float8_e4m3fn)
    attend = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    found = (attend if compiled else flex_attention)(Q, low, low)
    assert_close(found, torchs(Q, low, low))


@pytest.mark.parametrize("score_mod", [None, lambda score, b, h, q, kv: score - q // (1 + kv)])
@pytest.mark.parametrize("masked", [False, True])
def test_what_make_fx_records_runs_on_other_tensors(score_mod, masked: bool) -> None:  # type: ignore[no-untyped-def]
    mask = create_block_mask(causal, None, None, 200, 200, **DEVICE) if masked else None

    def forward_and_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list:  # type: ignore[type-arg]
        out = flex_attention(q, k, v, score_mod, mask)
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]

    small, large = (
        [factor * torch.randn(1, 2, 200, 8, dtype=torch.float64) for _ in range(3)]
        for factor in (0.1, 10.0)
    )
    for x in (*small, *large):
        x.requires_grad_()
    recorded = make_fx(forward_and_backward)(*small)
    with torch.no_grad():  # gradients are part of what was recorded
        found = recorded(*large)
    for actual, wanted in zip(found, forward_and_backward(*large), strict=True):
        assert_close(actual, wanted)
