"""Masks that are made by, or inside of, a compiled function."""

from collections.abc import Callable, Iterator

import pytest
import torch
from compat.cases import CROPS_TO_ANY_LENGTH
from kernels.cases import loss
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask

from flexcp import FlexCPError, masks
from flexcp import flex_attention as flexcp_attention
from flexcp.compat.flex_attention import BlockMask, create_block_mask, flex_attention
from flexcp.kernels.reference import dense_attention
from flexcp.ops.positions import keep_positions
from flexcp.testing.tolerance import assert_close


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _documents(length: int, step: int):  # type: ignore[no-untyped-def]
    ids = torch.arange(length) // step
    return lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv)


def _tensors(length: int) -> list[Tensor]:
    return [torch.randn(2, 2, length, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def test_create_block_mask_compiles_into_one_graph_and_gives_the_same_mask() -> None:
    compiled = torch.compile(create_block_mask, backend="aot_eager", fullgraph=True)
    mask = _documents(90, 40)
    arguments = (mask, 2, None, 90, 90, "cpu", 32)
    found, wanted = compiled(*arguments), create_block_mask(*arguments)
    assert (found.shape, found.BLOCK_SIZE) == (wanted.shape, wanted.BLOCK_SIZE)
    assert torch.equal(found.to_dense(), wanted.to_dense())
    q, k, v = _tensors(90)
    assert torch.equal(
        flex_attention(q, k, v, block_mask=found), flex_attention(q, k, v, block_mask=wanted)
    )


def test_masks_made_inside_a_model_of_tensors_of_the_graph_run_in_one_graph() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (ids[q] == ids[kv]) & (q >= kv)

        mask = create_block_mask(mask_mod, None, None, q.shape[2], q.shape[2], device="cpu")
        return flex_attention(q * 1.5, k, v, block_mask=mask)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for step in (40, 17):
        q, k, v = _tensors(90)
        ids = torch.arange(90) // step
        allowed = ((ids[:, None] == ids) & torch.ones(90, 90, dtype=torch.bool).tril())[None, None]
        wanted = dense_attention(q * 1.5, k, v, allowed=allowed).out
        found = compiled(q, k, v, ids)
        grads = [torch.autograd.grad(loss(x), (q, k, v)) for x in (found, wanted)]
        assert_close(found, wanted)
        for actual, expected in zip(*grads, strict=True):
            assert_close(actual, expected)
    assert counter.frame_count == 1


def _causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def _blocks(length: int, step: int, **options: bool) -> BlockMask:
    return create_block_mask(_documents(length, step), 2, 2, length, length, "cpu", 32, **options)


def _from_lists(mask: BlockMask) -> BlockMask:
    return BlockMask.from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices,
        BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=_causal, seq_lengths=mask.seq_lengths,
    )  # fmt: skip


def _of_one_head(mask: BlockMask) -> BlockMask:
    found = mask[:, 1]
    found.mask_mod = mask.mask_mod
    return found


MADE_INSIDE: dict[str, Callable[[BlockMask], BlockMask]] = {
    "from lists": _from_lists,
    "by a slice": _of_one_head,
    "cropped": lambda mask: mask._adjust(90, 90),
    "moved": lambda mask: mask.to("cpu"),
}


@pytest.mark.parametrize("score_mod", [None, lambda score, b, h, q, kv: score + 0.1 * (q - kv)])
@pytest.mark.parametrize("made", MADE_INSIDE)
def test_a_block_mask_made_of_another_in_the_graph_is_what_it_is_outside(  # type: ignore[no-untyped-def]
    made: str, score_mod
) -> None:
    if made == "cropped" and not CROPS_TO_ANY_LENGTH:
        pytest.skip("torch crops to whole blocks before 2.13")
    make = MADE_INSIDE[made]
    length = 128 if made == "cropped" else 90

    def model(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        return flex_attention(q, k, v, score_mod, make(mask))  # type: ignore[return-value]

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for step in (40, 17):
        tensors, mask = _tensors(90), _blocks(length, step)
        found, wanted = compiled(*tensors, mask), model(*tensors, mask)
        assert_close(found, wanted)
        grads = [torch.autograd.grad(loss(x), tensors) for x in (found, wanted)]
        for actual, expected in zip(*grads, strict=True):
            assert_close(actual, expected)


def test_decoding_slices_its_mask_in_one_graph_for_every_position() -> None:
    mask = create_block_mask(_causal, None, None, 128, 128, "cpu", 32)
    _, k, v = _tensors(128)
    q = torch.randn(2, 2, 1, 8, dtype=torch.float64)

    def decode(q: Tensor, position: Tensor) -> Tensor:
        row = mask[:, :, position // 32]
        row.mask_mod = lambda b, h, q, kv: mask.mask_mod(b, h, q + position[0], kv)
        row.seq_lengths = (1, 128)
        return flex_attention(q, k, v, block_mask=row)  # type: ignore[return-value]

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(decode, backend=counter, fullgraph=True)
    for at in (0, 31, 32, 100):
        found = compiled(q, torch.tensor([at]))
        assert_close(found, dense_attention(q, k[:, :, : at + 1], v[:, :, : at + 1]).out)
    assert counter.frame_count == 1


def test_a_mask_mod_assigned_in_the_graph_counts_in_this_call() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        mask.mask_mod = _causal
        return flex_attention(q, k, v, block_mask=mask)  # type: ignore[return-value]

    tensors, mask = _tensors(90), _blocks(90, 90, separate_full_blocks=False)
    mask.mask_mod = lambda b, h, q, kv: q >= 0
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(*tensors, mask)
    assert mask.mask_mod is _causal
    assert_close(found, flex_attention(*tensors, block_mask=mask))


@pytest.mark.parametrize("by_element", [False, True])
def test_a_mask_made_in_the_graph_has_the_positions_of_the_one_it_is_made_of(
    by_element: bool,
) -> None:
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 90, 90, "cpu", 32)
    at = torch.arange(90)
    if by_element:
        at = torch.stack([at, at + 7])
    keep_positions(mask, at * 2, at * 3)

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flexcp_attention(  # type: ignore[return-value]
            q, k, v, lambda score, b, h, q, kv: score + 0.1 * (q - kv), mask.to("cpu"),
            dropout_p=0.5, dropout_seed=5,
        )  # fmt: skip

    tensors = _tensors(90)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(compiled(*tensors), model(*tensors))


def _every(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= 0


def _remade(mask: BlockMask) -> BlockMask:
    return type(mask).from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices,
        mask.BLOCK_SIZE, _every, seq_lengths=mask.seq_lengths,
    )  # fmt: skip


def _assigned(mask: BlockMask) -> BlockMask:
    mask.mask_mod = _every
    return mask


def _emptied(mask: BlockMask) -> BlockMask:
    mask.kv_num_blocks = torch.zeros_like(mask.kv_num_blocks)
    return mask


@pytest.mark.parametrize("change", [_remade, _assigned, _emptied])
def test_lists_of_a_mask_of_the_graph_count_once_they_do_not_follow_from_its_mask_mod(
    change: Callable[[BlockMask], BlockMask],
) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = create_block_mask(lambda b, h, q, kv: kv < 40, None, None, 90, 90, "cpu", 32)
        return flex_attention(q, k, v, block_mask=change(mask))  # type: ignore[return-value]

    tensors = _tensors(90)
    assert_close(
        torch.compile(model, backend="aot_eager", fullgraph=True)(*tensors), model(*tensors)
    )


@pytest.mark.parametrize(
    "sizes", [(None, None, 128, 128), (None, None, 64, 64), (3, None, 90, 90), (None, 5, 90, 90)]
)
def test_a_mask_of_the_graph_for_other_tensors_is_refused(sizes: tuple[int | None, ...]) -> None:
    mask = torch_create_block_mask(_causal, *sizes, device="cpu", BLOCK_SIZE=32)  # type: ignore[arg-type]

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flexcp_attention(q, k, v, block_mask=mask.to("cpu"))  # type: ignore[return-value]

    with pytest.raises(FlexCPError, match="block_mask"):
        torch.compile(model, backend="aot_eager")(*_tensors(90))


@pytest.mark.parametrize("derived", [False, True])
def test_make_fx_refuses_a_mask_of_tensors_that_it_records(derived: bool) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        mask = masks.document(ids) if derived else lambda b, h, q, kv: ids[q] == ids[kv]
        return flexcp_attention(q, k, v, block_mask=mask)  # type: ignore[return-value]

    with pytest.raises(FlexCPError, match="captures no tensor which make_fx records"):
        make_fx(model)(*_tensors(90), torch.arange(90) // 20)
