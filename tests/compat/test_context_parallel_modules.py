"""Sharding and unsharding by PyTorch's names, and modules whose attention is made parallel."""

import pytest
import torch
from compat.cases import fails, is_close, one_process, qkvg
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

from flexcp.compat.context_parallel import (
    _context_parallel_shard,
    _ContextParallel,
    _cp_options,
    _disable_context_parallel_dispatcher,
    _enable_context_parallel_dispatcher,
    _HeadTailLoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    context_parallel,
    context_parallel_unshard,
)
from flexcp.testing.processes import spawn


def test_unshard_restores_order_at_any_length_and_dimension():
    lengths = [[5, 0, 8], [13]]
    x, y = torch.randn(13), torch.randn(3, 2, 13)
    z = torch.randn(2, 13, 3)

    def rank(mesh):
        def there_and_back(tensors, dims, balancer):
            parts = _context_parallel_shard(mesh, tensors, dims, balancer)
            return context_parallel_unshard(mesh, parts, dims, balancer)

        head_tail = _HeadTailLoadBalancer(13, 3, "cpu")
        documents = _PerDocumentHeadTailLoadBalancer(lengths, 3, "cpu")
        return [
            *there_and_back([x, y], [0, -1], None),
            *there_and_back([x, y], [-1, 2], head_tail),
            *there_and_back([z], [1], documents),
        ]

    for found in spawn(rank, 3):
        assert all(torch.equal(a, b) for a, b in zip(found, [x, y, x, y, z], strict=True))


def test_unshard_has_a_gradient():
    weight = torch.randn(7, dtype=torch.float64)
    x = torch.randn(7, dtype=torch.float64)

    def rank(mesh):
        full = x.clone().requires_grad_()
        balancer = _HeadTailLoadBalancer(7, 2, "cpu")
        (part,) = _context_parallel_shard(mesh, [full], [0], balancer)
        (whole,) = context_parallel_unshard(mesh, [part * 2], [0], balancer)
        (whole * weight).sum().backward()
        return full.grad

    total = sum(spawn(rank, 2))
    assert torch.allclose(total, 2 * weight)


def test_sharding_leaves_no_switch_behind():
    tensors = qkvg(8)
    wanted = one_process(*tensors, True)[0]

    def rank(mesh):
        _context_parallel_shard(mesh, [torch.arange(8)], [0], None)
        untouched = _cp_options.enable_load_balance
        x, where = [t.clone() for t in tensors[:3]], torch.arange(8)
        with context_parallel(mesh, buffers=[*x, where], buffer_seq_dims=[2, 2, 2, 0]):
            _context_parallel_shard(mesh, [torch.arange(8)], [0], None)
            out = functional.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True)
            found = context_parallel_unshard(mesh, [out], [2])
            balanced = where.tolist()
        return untouched, balanced, found

    for untouched, balanced, found in spawn(rank, 2):
        assert untouched
        assert balanced in ([0, 1, 6, 7], [2, 3, 4, 5])
        assert is_close(found, [wanted])


def test_unshard_with_the_wrong_shard_is_an_error():
    def rank(mesh):
        context_parallel_unshard(mesh, [torch.zeros(5)], [0], _HeadTailLoadBalancer(8, 2, "cpu"))

    assert "4 rows along dim 0" in str(fails(rank))

    def uneven(mesh):
        context_parallel_unshard(mesh, [torch.zeros(3 + 4 * mesh.get_rank())], [0])

    assert "[5, 5] tokens by rank, got [3, 7]" in str(fails(uneven))


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.fails = False

    def forward(self, query, key, value, is_causal=False):
        if self.fails:
            raise KeyError("in the module")
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, enable_gqa=True
        )


@pytest.mark.parametrize("balanced", [True, False])
def test_a_module_with_sdpa_is_parallelized(balanced):
    tensors = qkvg(15)

    def rank(mesh):
        original = functional.scaled_dot_product_attention
        balancer = _HeadTailLoadBalancer(15, 3, "cpu") if balanced else None
        parts = _context_parallel_shard(mesh, tensors, [2] * 4, balancer)
        style = _ContextParallel(2, _ContextParallel.AttentionType.SDPA)
        module = parallelize_module(_Attention(), mesh, style)
        x = [t.requires_grad_() for t in parts[:3]]
        out = module(*x, is_causal=True)
        out.backward(parts[3])
        module.fails = True
        with pytest.raises(KeyError):
            module(*x)
        assert functional.scaled_dot_product_attention is original
        parts = [out.detach(), *(t.grad for t in x)]
        return context_parallel_unshard(mesh, parts, [2] * 4, balancer)

    wanted = one_process(*tensors, True)
    assert all(is_close(found, wanted) for found in spawn(rank, 3))


def test_the_dispatcher_runs_dtensors_and_can_be_switched_off():
    tensors = qkvg(16)

    def rank(mesh):
        original = functional.scaled_dot_product_attention
        balancer = _HeadTailLoadBalancer(16, 2, "cpu")
        parts = _context_parallel_shard(mesh, tensors[:3], [2] * 3, balancer)
        _enable_context_parallel_dispatcher()
        _enable_context_parallel_dispatcher()
        x = [DTensor.from_local(t, mesh, [Shard(2)], run_check=False) for t in parts]
        out = functional.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True)
        plain = functional.scaled_dot_product_attention(
            *tensors[:3], is_causal=True, enable_gqa=True
        )
        _disable_context_parallel_dispatcher()
        assert isinstance(out, DTensor)
        assert functional.scaled_dot_product_attention is original
        return [*context_parallel_unshard(mesh, [out.to_local()], [2], balancer), plain]

    wanted = one_process(*tensors, True)[0]
    assert all(is_close(found, [wanted, wanted]) for found in spawn(rank, 2))


def test_an_unknown_attention_type_is_pytorchs_error():
    def rank(mesh):
        parallelize_module(_Attention(), mesh, _ContextParallel(2, "flash"))

    error = fails(rank)
    assert isinstance(error, ValueError)
    assert "Unknown attention type: flash" in str(error)


class _Causal(nn.Module):
    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in x.chunk(3, -1))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _with_two_layouts(mesh, attend):
    """What `attend` gives for shards of one balancer, while those of a later one are in use."""
    x = torch.arange(14 * 24, dtype=torch.float64).sin().view(1, 14, 24)
    style = _ContextParallel(2, _ContextParallel.AttentionType.SDPA)
    module = parallelize_module(_Causal(), mesh, style)
    balancer = _HeadTailLoadBalancer(14, mesh.size(), "cpu")
    (part,) = _context_parallel_shard(mesh, [x], [1], balancer)
    labels = _context_parallel_shard(mesh, [torch.arange(14)], [0], None)
    out = attend(module, part)
    del labels
    return context_parallel_unshard(mesh, [out], [1], balancer)[0], _Causal()(x)


def test_shards_themselves_say_how_they_were_sharded():
    for found, wanted in spawn(lambda mesh: _with_two_layouts(mesh, lambda f, x: f(x)), 2):
        assert is_close([found], [wanted])


def test_a_layout_that_could_be_one_of_two_is_an_error():
    error = fails(lambda mesh: _with_two_layouts(mesh, lambda f, x: f(x * 1.0)))
    assert "expected tensors of this length to be sharded in one way" in str(error)
    assert "Layout(contiguous: 14 tokens" in str(error)
    assert "Layout(_HeadTailLoadBalancer: 14 tokens" in str(error)
    assert "delete those of another batch" in str(error)


def test_tensors_of_two_layouts_in_one_call_are_an_error():
    def rank(mesh):
        x = torch.randn(1, 1, 14, 4)
        balancer = _HeadTailLoadBalancer(14, 2, "cpu")
        (q,) = _context_parallel_shard(mesh, [x], [2], balancer)
        k, v = _context_parallel_shard(mesh, [x, x], [2, 2], None)
        with context_parallel(mesh):
            functional.scaled_dot_product_attention(q, k, v)

    assert "expected tensors of this length to be sharded in one way" in str(fails(rank))


def test_shards_of_earlier_batches_that_are_gone_do_not_matter():
    tensors = qkvg(13)[:3]
    wanted = functional.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)

    def rank(mesh):
        style = _ContextParallel(2, _ContextParallel.AttentionType.SDPA)
        module = parallelize_module(_Attention(), mesh, style)
        found = []
        for lengths in ([4, 9], [6, 7], [13]):
            balancer = _PerDocumentHeadTailLoadBalancer([lengths], 2, "cpu")
            parts = _context_parallel_shard(mesh, tensors, [2] * 3, balancer)
            out = module(*(t * 1.0 for t in parts), is_causal=True)
            found += context_parallel_unshard(mesh, [out], [2])
        return found

    assert all(is_close(found, [wanted] * 3) for found in spawn(rank, 2))
