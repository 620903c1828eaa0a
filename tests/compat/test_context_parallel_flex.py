"""FlexAttention over shards, by PyTorch's names: sharded block masks, gathered keys, score_mod."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

import flexcp
from flexcp.comm.rank_errors import RankError
from flexcp.compat.context_parallel import (
    _context_parallel_shard,
    _ContextParallel,
    _HeadTailLoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
    context_parallel_unshard,
    flex_cp_allgather,
)
from flexcp.compat.flex_attention import BlockMask, create_block_mask, flex_attention
from flexcp.testing.processes import spawn

TOLERANCE = 1e-10


def _qkvg(length):
    return [torch.randn(2, h, length, 8, dtype=torch.float64) for h in (4, 2, 2, 4)]


def _lengths(length):
    return [[length // 2, length - length // 2], [length // 3, length - length // 3]]


def _mask(length, block_size=16):
    ids = torch.stack(
        [torch.repeat_interleave(torch.arange(2), torch.tensor(n)) for n in _lengths(length)]
    )

    def mask_mod(b, h, q, kv):
        return (q >= kv) & (ids[b, q] == ids[b, kv])

    return create_block_mask(mask_mod, 2, None, length, length, device="cpu", BLOCK_SIZE=block_size)


def _alibi(score, b, h, q, kv):
    return score - 0.1 * (h + 1) * (q - kv).abs() + 0.2 * (q % 5) * b


def _balancer(name, length, ranks, mask):
    if name == "none":
        return None
    if name == "head_tail":
        return _HeadTailLoadBalancer(length, ranks, "cpu")
    if name == "documents":
        return _PerDocumentHeadTailLoadBalancer(_lengths(length), ranks, "cpu")
    return _PTRRLoadBalancer(mask, ranks)


def _one_process(tensors, score_mod, mask):
    q, k, v, g = tensors
    x = [t.clone().requires_grad_() for t in (q, k, v)]
    out = flex_attention(*x, score_mod=score_mod, block_mask=mask, enable_gqa=True)
    out.backward(g)
    return [out.detach(), *(t.grad for t in x)]


def _is_close(found, wanted):
    return all(
        a.shape == b.shape and float((a - b).abs().max()) < TOLERANCE
        for a, b in zip(found, wanted, strict=True)
    )


class _Attention(nn.Module):
    """The score function is an argument, or the module's own."""

    def __init__(self, function=flex_attention, score_mod=None):
        super().__init__()
        self.function, self.own = function, score_mod

    def forward(self, query, key, value, score_mod=None, block_mask=None):
        return self.function(
            query, key, value, score_mod or self.own, block_mask=block_mask, enable_gqa=True
        )


def _run(mesh, module, tensors, mask, balancer, *, call=None):
    """Output and gradients of all ranks."""
    named = dict(zip(("q", "k", "v", "g", "mask"), (*tensors, mask), strict=True))
    dims = {"q": 2, "k": 2, "v": -2, "g": 2, "mask": 0}
    part = _context_parallel_shard(mesh, named, dims, balancer)
    style = _ContextParallel(2, _ContextParallel.AttentionType.FLEX)
    module = parallelize_module(module, mesh, style)
    x = [part[name].requires_grad_() for name in "qkv"]
    out = call(module, x, part["mask"]) if call else module(*x, block_mask=part["mask"])
    out.backward(part["g"])
    parts = [out.detach(), *(t.grad for t in x)]
    return context_parallel_unshard(mesh, parts, [2] * 4, balancer)


@pytest.mark.parametrize("name", ["none", "head_tail", "documents", "ptrr"])
@pytest.mark.parametrize(("length", "ranks"), [(64, 2), (101, 3), (4, 3)])
def test_a_module_with_flex_attention_equals_one_process(name, length, ranks):
    tensors, mask = _qkvg(length), _mask(length)

    def rank(mesh):
        balancer = _balancer(name, length, ranks, mask)
        return _run(mesh, _Attention(), tensors, mask, balancer)

    wanted = _one_process(tensors, None, mask)
    assert all(_is_close(found, wanted) for found in spawn(rank, ranks))


@pytest.mark.parametrize("name", ["none", "head_tail", "documents"])
@pytest.mark.parametrize("where", ["fourth", "keyword", "inside", "inside flexcp's own"])
def test_score_mod_sees_global_positions(name, where):
    length, ranks = 50, 3
    tensors, mask = _qkvg(length), _mask(length)

    def rank(mesh):
        balancer = _balancer(name, length, ranks, mask)
        module, call = {
            "fourth": (_Attention(), lambda module, x, part: module(*x, _alibi, part)),
            "keyword": (
                _Attention(),
                lambda module, x, part: module(*x, score_mod=_alibi, block_mask=part),
            ),
            "inside": (_Attention(score_mod=_alibi), None),
            "inside flexcp's own": (_Attention(flexcp.flex_attention, _alibi), None),
        }[where]
        return _run(mesh, module, tensors, mask, balancer, call=call)

    wanted = _one_process(tensors, _alibi, mask)
    assert all(_is_close(found, wanted) for found in spawn(rank, ranks))


def test_a_rank_without_tokens_takes_part():
    tensors, mask = _qkvg(5), _mask(5, block_size=2)

    def rank(mesh):
        own = len(_context_parallel_shard(mesh, [torch.arange(5)], [0])[0])
        return own, _run(mesh, _Attention(score_mod=_alibi), tensors, mask, None)

    wanted = _one_process(tensors, _alibi, mask)
    results = spawn(rank, 4)
    assert [own for own, _ in results] == [2, 2, 1, 0]
    assert all(_is_close(found, wanted) for _, found in results)


def test_score_mod_sees_global_positions_without_a_block_mask():
    tensors = _qkvg(21)

    def rank(mesh):
        balancer = _HeadTailLoadBalancer(21, 2, "cpu")
        q, k, v = _context_parallel_shard(mesh, tensors[:3], [2] * 3, balancer)
        style = _ContextParallel(2, _ContextParallel.AttentionType.FLEX)
        module = parallelize_module(_Attention(), mesh, style)
        out = module(query=q, key=k, value=v, score_mod=_alibi)
        return context_parallel_unshard(mesh, [out], [2], balancer)

    wanted = flex_attention(*tensors[:3], score_mod=_alibi, enable_gqa=True)
    assert all(_is_close(found, [wanted]) for found in spawn(rank, 2))


def test_a_score_mod_is_left_alone_where_a_sequence_was_sharded_by_other_means():
    tensors = _qkvg(20)

    def rank(mesh):
        first = 10 * mesh.get_local_rank()
        style = _ContextParallel(2, _ContextParallel.AttentionType.FLEX)
        module = parallelize_module(_Attention(), mesh, style)

        def own_positions(score, b, h, q, kv):
            return _alibi(score, b, h, q + first, kv)

        local = [x[:, :, first : first + 10].clone() for x in tensors[:3]]
        given, _ = style.flex_input_fn(module, (*local, own_positions), {}, mesh)
        assert given[3] is own_positions
        return module(*local, score_mod=own_positions)

    wanted = flex_attention(*tensors[:3], score_mod=_alibi, enable_gqa=True)
    assert _is_close([torch.cat(spawn(rank, 2), dim=2)], [wanted])


@pytest.mark.usefixtures("loaded_compiler")
def test_a_sharded_block_mask_works_with_torchs_own_flex_attention():
    length = 64
    tensors, mask = [t.float() for t in _qkvg(length)], _mask(length)

    def rank(mesh):
        balancer = _HeadTailLoadBalancer(length, 2, "cpu")
        q, k, v, part = _context_parallel_shard(mesh, (*tensors[:3], mask), (2, 2, 2, 2), balancer)
        module = _Attention(torch_flex_attention)
        style = _ContextParallel(2, _ContextParallel.AttentionType.FLEX)
        out = parallelize_module(module, mesh, style)(q, k, v, score_mod=_alibi, block_mask=part)
        return context_parallel_unshard(mesh, [out], [2], balancer)[0]

    wanted = flex_attention(*tensors[:3], score_mod=_alibi, block_mask=mask, enable_gqa=True)
    for found in spawn(rank, 2):
        torch.testing.assert_close(found, wanted)


def test_a_sharded_block_mask_keeps_its_block_size_and_allows_the_same_pairs():
    length, ranks = 75, 3
    mask = _mask(length, block_size=(8, 16))

    def rank(mesh):
        balancer = _PerDocumentHeadTailLoadBalancer(_lengths(length), ranks, "cpu")
        (part,) = _context_parallel_shard(mesh, [mask], [0], balancer)
        return part.BLOCK_SIZE, part.shape, flexcp.BlockGrid.from_block_mask(part).area()

    found = spawn(rank, ranks)
    assert [tuple(size) for size, _, _ in found] == [(8, 16)] * ranks
    assert [shape for _, shape, _ in found] == [(2, 1, 25, 75)] * ranks
    assert sum(area for _, _, area in found) == flexcp.BlockGrid.from_block_mask(mask).area()


def test_blocks_that_a_mask_lists_count_even_without_a_mask_mod():
    counts = torch.tensor([[[1, 2, 1, 2]]], dtype=torch.int32)
    columns = torch.tensor([[[[0, 1, 2, 3], [3, 1, 0, 2], [2, 0, 1, 3], [0, 3, 1, 2]]]])
    listed = BlockMask.from_kv_blocks(counts, columns.int(), BLOCK_SIZE=8)
    tensors = _qkvg(32)

    def rank(mesh):
        return _run(mesh, _Attention(), tensors, listed, _HeadTailLoadBalancer(32, 2, "cpu"))

    wanted = _one_process(tensors, None, listed)
    assert all(_is_close(found, wanted) for found in spawn(rank, 2))


def test_containers_come_back_as_they_went_in():
    def rank(mesh):
        x = torch.arange(6)
        a_list = _context_parallel_shard(mesh, [x], [0])
        a_tuple = _context_parallel_shard(mesh, (x, x[None]), (0, -1))
        a_dict = _context_parallel_shard(mesh, {"b": x[None], "a": x}, {"a": 0, "b": 1})
        shapes = {name: tuple(part.shape) for name, part in a_dict.items()}
        return type(a_list), a_list[0].tolist(), type(a_tuple), shapes

    first, second = spawn(rank, 2)
    assert first == (list, [0, 1, 2], tuple, {"b": (1, 3), "a": (3,)})
    assert second[1] == [3, 4, 5]


def test_bad_arguments_of_shard_raise_pytorchs_errors():
    def rank(mesh):
        x = torch.zeros(2, 8)
        documents = _PerDocumentHeadTailLoadBalancer([[4, 4], [8], [8]], 2, "cpu")
        messages = []
        for buffers, dims, balancer in (
            ([x], [1, 1], None),
            ({"a": x}, {"b": 1}, None),
            ([x, "text"], [1, 1], None),
            ([x, x.to("meta")], [1, 1], None),
            ([x], [1], documents),
            ([x], [1], _HeadTailLoadBalancer(6, 2, "cpu")),
            ([_mask(8)], [1], documents),
        ):
            with pytest.raises((ValueError, AssertionError)) as caught:
                _context_parallel_shard(mesh, buffers, dims, balancer)
            messages.append(f"{type(caught.value).__name__}: {caught.value}")
        return messages

    count, names, kind, device, batch, length, mask = spawn(rank, 2)[0]
    assert count == "ValueError: `seq_dims` must have the same number of elements as `buffers`."
    assert names == "ValueError: `seq_dims` must have the pytree structure as `buffers`."
    assert kind == "ValueError: Unknown buffer type: <class 'str'>"
    assert device.startswith("AssertionError: All buffers must be on the same device")
    assert batch.startswith("ValueError: Cannot rearrange buffer: load_balance_indices has shape")
    assert "expected a sequence of 6 tokens, as _HeadTailLoadBalancer was made for, got 8" in length
    assert "the BlockMask has 2" in mask


def test_a_module_without_tensors_is_an_assertion_as_in_pytorch():
    def rank(mesh):
        style = _ContextParallel(2, _ContextParallel.AttentionType.FLEX)
        parallelize_module(_Attention(), mesh, style)(torch.zeros(1, 1, 2, 2), None, None)

    with pytest.raises(RankError) as caught:
        spawn(rank, 2, timeout=20)
    assert "key must be a tensor, got NoneType" in str(caught.value.__cause__)


@pytest.mark.parametrize("sizes", [(4, 4), (5, 3), (6, 0)])
def test_gathered_keys_and_their_gradients_are_complete(sizes):
    k, v = torch.randn(2, 3, sum(sizes), 4), torch.randn(2, sum(sizes), 3, 5).transpose(1, 2)
    weight = [torch.randn(2, *t.shape) for t in (k, v)]

    def rank(mesh):
        number = mesh.get_rank()
        own = [t.split(sizes, 2)[number].clone().requires_grad_() for t in (k, v)]
        gathered = flex_cp_allgather(*own, 2, mesh.get_group().group_name)
        sum((t * w[number]).sum() for t, w in zip(gathered, weight, strict=True)).backward()
        return [t.detach() for t in gathered], [t.grad for t in own]

    for number, (gathered, grads) in enumerate(spawn(rank, 2)):
        assert torch.equal(gathered[0], k)
        assert torch.equal(gathered[1], v)
        for grad, w in zip(grads, weight, strict=True):
            torch.testing.assert_close(grad, w.sum(0).split(sizes, 2)[number])


def test_gathering_passes_torchs_checks_of_custom_ops():
    def rank(mesh):
        k, v = (torch.randn(1, 2, 4, 3, requires_grad=True) for _ in range(2))
        name = mesh.get_group().group_name
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(flex_cp_allgather, (k, v, 2, name), test_utils=checks)
        with FakeTensorMode() as mode:
            fake = flex_cp_allgather(*(mode.from_tensor(t) for t in (k, v)), 2, name)
        return [tuple(t.shape) for t in fake]

    assert spawn(rank, 2) == [[(1, 2, 8, 3)] * 2] * 2


@pytest.mark.parametrize("gradient", ["strided", "expanded"])
def test_strides_of_inputs_and_gradients_do_not_matter(gradient):
    length = 37
    tensors, mask = [t.transpose(1, 2).contiguous() for t in _qkvg(length)], _mask(length)

    def attend(q, k, v, g, attention):
        x = [t.clone().requires_grad_() for t in (q, k, v)]
        views = [t.transpose(1, 2) for t in x]
        assert not any(view.is_contiguous() for view in views)
        out = attention(*views)
        if gradient == "expanded":
            out.sum().backward()
        else:
            out.backward(g.transpose(1, 2))
        return [out.detach().transpose(1, 2), *(t.grad for t in x)]

    def rank(mesh):
        balancer = _HeadTailLoadBalancer(length, 3, "cpu")
        *parts, part = _context_parallel_shard(mesh, [*tensors, mask], [1] * 5, balancer)
        style = _ContextParallel(2, _ContextParallel.AttentionType.FLEX)
        module = parallelize_module(_Attention(score_mod=_alibi), mesh, style)
        found = attend(*parts, lambda q, k, v: module(q, k, v, block_mask=part))
        return context_parallel_unshard(mesh, found, [1] * 4, balancer)

    whole = _Attention(score_mod=_alibi)
    wanted = attend(*tensors, lambda q, k, v: whole(q, k, v, block_mask=mask))
    assert all(_is_close(found, wanted) for found in spawn(rank, 3))
