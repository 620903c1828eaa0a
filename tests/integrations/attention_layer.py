"""An attention layer under ContextParallel, by ranks and by one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa_by_name

import flexcp
from flexcp import FlexCPError, masks, testing
from flexcp.comm.rank_errors import RankError
from flexcp.compat.flex_attention import flex_attention as compat_flex_attention
from flexcp.testing.tolerance import assert_close

LENGTH = 37
DOCUMENTS = [11, 3, 23]
PACKED = masks.causal() & masks.document(lengths=DOCUMENTS)
compiled_by_the_user = torch.compile(torch_flex_attention, backend="aot_eager")


class Attention(nn.Module):
    """An attention layer whose attention function is the caller's choice."""

    def __init__(self, attend, heads=4, kv_heads=2):
        super().__init__()
        self.heads, self.kv_heads, self.attend = heads, kv_heads, attend
        self.qkv = nn.Linear(8, (heads + 2 * kv_heads) * 4)
        self.out = nn.Linear(heads * 4, 8)

    def forward(self, x):
        heads = self.qkv(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


def bias(score, b, h, q_idx, kv_idx):
    return score - 0.05 * (h + 1) * (q_idx - kv_idx)


def plan_for(mesh, mask=PACKED, length=LENGTH, **options):
    return flexcp.make_plan(
        mask, length, mesh, block_size=8, num_heads=4, num_kv_heads=2, head_dim=4,
        dtype=torch.float64, **options,
    )  # fmt: skip


def layer(attend, seed=0):
    torch.manual_seed(seed)
    return Attention(attend).double()


X = torch.randn(2, LENGTH, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def whole(mask=PACKED, **options):
    """Output and gradients of one process."""
    module = layer(
        lambda q, k, v: flexcp.flex_attention(q, k, v, block_mask=mask, enable_gqa=True, **options)
    )
    x = X.clone().requires_grad_()
    out = module(x)
    out.square().sum().backward()
    return out.detach(), x.grad, [p.grad for p in module.parameters()]


def sharded(mesh, attend, plan=None, run=lambda module, x: module(x)):
    """The same by this rank, put together."""
    plan = plan_for(mesh) if plan is None else plan
    module = parallelize_module(layer(attend), mesh, flexcp.ContextParallel(plan))
    x = plan.shard(X, 1).requires_grad_()
    out = run(module, x)
    out.square().sum().backward()
    grads = [p.grad for p in module.parameters()]
    return plan.unshard(out.detach(), 1), plan.unshard(x.grad, 1), grads


def assert_same(results, expected):
    for out, x_grad, _ in results:
        assert_close(out, expected[0], what="out")
        assert_close(x_grad, expected[1], what="dx")
    for *parts, want in zip(*(grads for _, _, grads in results), expected[2], strict=True):
        assert_close(sum(parts), want, what="a parameter's gradient")


ATTENTIONS = {
    "sdpa": lambda q, k, v: functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    ),
    "sdpa by name": lambda q, k, v: sdpa_by_name(q, k, v, None, 0.0, True, enable_gqa=True),
    "torch flex": lambda q, k, v: torch_flex_attention(q, k, v, enable_gqa=True),
    "compiled torch flex": lambda q, k, v: compiled_by_the_user(q, k, v, enable_gqa=True),
    "flexcp flex": lambda q, k, v: flexcp.flex_attention(q, k, v, enable_gqa=True),
    "compat flex": lambda q, k, v: compat_flex_attention(q, k, v, enable_gqa=True),
}


def message_of(rank, ranks=2):
    """What the FlexCPError of a simulated rank says."""
    with pytest.raises(RankError) as caught:
        testing.simulate(rank, ranks)
    assert isinstance(caught.value.__cause__, FlexCPError)
    return str(caught.value.__cause__)
