"""A score_mod sees global positions once, however a sharded block mask comes to flex_attention."""

import copy

import pytest
import torch
from compat.cases import CROPS_TO_ANY_LENGTH, is_close, qkvg
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from flexcp.compat.context_parallel import (
    _context_parallel_shard,
    _ContextParallel,
    _HeadTailLoadBalancer,
    context_parallel_unshard,
)
from flexcp.compat.flex_attention import BlockMask, create_block_mask, flex_attention
from flexcp.testing.processes import spawn

LENGTH, RANKS = 50, 3


def _mask():
    return create_block_mask(
        lambda b, h, q, kv: q >= kv, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16
    )


def _alibi(score, b, h, q, kv):
    return score - 0.1 * (h + 1) * (q - kv).abs() + 0.2 * (q % 5)


class _Attention(nn.Module):
    """The block mask is an argument, or the module's own; a score_mod may be wrapped."""

    def __init__(self, mask=None, *, wraps=False):
        super().__init__()
        self.mask, self.wraps = mask, wraps

    def forward(self, query, key, value, score_mod, block_mask=None):
        def wrapped(score, b, h, q, kv):
            return score_mod(score, b, h, q, kv) - 0.05 * (kv % 7) * (q % 3)

        mask = self.mask if block_mask is None else block_mask
        mod = wrapped if self.wraps else score_mod
        return flex_attention(query, key, value, mod, mask, enable_gqa=True)


def _sharded(mesh, tensors, call):
    """Output and gradients of all ranks."""
    balancer = _HeadTailLoadBalancer(LENGTH, mesh.size(), "cpu")
    buffers = [*tensors, _mask()]
    *parts, g, mask = _context_parallel_shard(mesh, buffers, [2] * len(buffers), balancer)
    x = [t.requires_grad_() for t in parts]
    out = call(x, mask)
    out.backward(g)
    found = [out.detach(), *(t.grad for t in x)]
    return context_parallel_unshard(mesh, found, [2] * 4, balancer)


def _parallel(module, mesh):
    return parallelize_module(
        module, mesh, _ContextParallel(2, _ContextParallel.AttentionType.FLEX)
    )


def _one_process(tensors, *, wraps=False):
    *x, g = (t.clone() for t in tensors)
    x = [t.requires_grad_() for t in x]
    out = _Attention(_mask(), wraps=wraps)(*x, _alibi)
    out.backward(g)
    return [out.detach(), *(t.grad for t in x)]


def _through_a_pytree(mask):
    leaves, context = mask._flatten()
    copies = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in leaves)
    return BlockMask._unflatten(copies, context)


MADE_ANEW = {
    "to": lambda mask: mask.to("cpu"),
    "pytree": _through_a_pytree,
    "copy": copy.copy,
    "adjust": lambda mask: mask._adjust(*mask.seq_lengths),
    "all": lambda mask: copy.copy(_through_a_pytree(mask.to("cpu"))).to("cpu"),
}


class _OwnScore(_Attention):
    def forward(self, query, key, value, block_mask):
        return super().forward(query, key, value, _alibi, block_mask)


@pytest.mark.parametrize("how", MADE_ANEW)
def test_a_block_mask_that_is_made_anew_keeps_its_positions(how):
    if how == "adjust" and not CROPS_TO_ANY_LENGTH:
        pytest.skip("torch crops to whole blocks before 2.13")
    tensors = qkvg(LENGTH)

    def rank(mesh):
        module = _parallel(_OwnScore(), mesh)
        return _sharded(mesh, tensors, lambda x, mask: module(*x, MADE_ANEW[how](mask)))

    wanted = _one_process(tensors)
    assert all(is_close(found, wanted) for found in spawn(rank, RANKS))


@pytest.mark.parametrize("wraps", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize("held", [False, True], ids=["argument", "held"])
def test_a_score_mod_that_is_an_argument_is_translated_once(held, wraps):
    tensors = qkvg(LENGTH)

    def rank(mesh):
        def call(x, mask):
            if held:
                return _parallel(_Attention(mask, wraps=wraps), mesh)(*x, score_mod=_alibi)
            return _parallel(_Attention(wraps=wraps), mesh)(*x, _alibi, mask)

        return _sharded(mesh, tensors, call)

    wanted = _one_process(tensors, wraps=wraps)
    assert all(is_close(found, wanted) for found in spawn(rank, RANKS))


@pytest.mark.usefixtures("loaded_compiler")
@pytest.mark.parametrize(
    ("held", "wraps"), [(False, False), (True, True)], ids=["argument", "held, wrapped"]
)
def test_a_score_mod_that_is_an_argument_is_translated_once_in_a_compiled_module(held, wraps):
    tensors = qkvg(LENGTH)

    def rank(mesh):
        def call(x, mask):
            module = _parallel(_Attention(mask if held else None, wraps=wraps), mesh)
            compiled = torch.compile(module, backend="aot_eager")
            return compiled(*x, _alibi) if held else compiled(*x, _alibi, mask)

        return _sharded(mesh, tensors, call)

    wanted = _one_process(tensors, wraps=wraps)
    assert all(is_close(found, wanted) for found in spawn(rank, 2))
