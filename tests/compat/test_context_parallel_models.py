"""Models under `context_parallel`: layers, checkpointing, compilation, autocast, and faults."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.experimental import _context_parallel as theirs
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from flexcp import FlexCPError
from flexcp.comm.rank_errors import RankError
from flexcp.compat import context_parallel as ours
from flexcp.compat.flex_attention import create_block_mask
from flexcp.testing.processes import spawn
from flexcp.testing.world import simulate

TOLERANCE = 1e-10


class _Block(nn.Module):
    def __init__(self, rotation):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.rotation = rotation

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k = q * self.rotation, k * self.rotation
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(out.transpose(1, 2).flatten(2))


def _model(length, layers):
    """Layers that share a buffer of values by position."""
    rotation = torch.randn(length, 8, dtype=torch.float64)
    return nn.Sequential(*(_Block(rotation) for _ in range(layers))).double(), rotation


def _run(model, x, how):
    if how == "checkpoint":
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        return x
    if how == "compile":
        return torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    return model(x)


@pytest.mark.usefixtures("loaded_compiler")
@pytest.mark.parametrize("how", ["plainly", "checkpoint", "compile"])
@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_gradients_of_a_model_add_up_to_those_of_one_process(how, method):
    length = 26
    layers = 1 if how == "compile" else 2  # which takes longest
    (model, rotation), x = _model(length, layers), torch.randn(2, length, 32, dtype=torch.float64)
    model(x).square().sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    def rank(mesh):
        ours.set_rotate_method(method)
        local = x.clone()
        buffers = [local, rotation]
        with ours.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 0]):
            _run(model, local, how).square().sum().backward()
        return [p.grad for p in model.parameters()]

    for *parts, want in zip(*spawn(rank, 2), wanted, strict=True):
        assert float((sum(parts) - want).abs().max()) < TOLERANCE


def test_autocast_lowers_the_type_as_it_does_for_torch():
    def rank(mesh):
        x = torch.randn(1, 2, 8, 4)
        with (
            ours.context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]),
            torch.autocast("cpu", torch.bfloat16),
        ):
            return functional.scaled_dot_product_attention(x, x.bfloat16(), x).dtype

    assert spawn(rank, 2) == [torch.bfloat16] * 2


def test_a_buffer_that_requires_a_gradient_has_one_of_its_rows():
    x = torch.randn(1, 2, 9, 4, dtype=torch.float64)

    def rank(mesh):
        buffer = x.clone().requires_grad_()
        with ours.context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[2]):
            out = functional.scaled_dot_product_attention(*[buffer] * 3, is_causal=True)
            out.sum().backward()
            (grad,) = ours.context_parallel_unshard(mesh, [buffer.grad], [2])
        return grad, buffer.shape[2]

    whole = x.clone().requires_grad_()
    functional.scaled_dot_product_attention(whole, whole, whole, is_causal=True).sum().backward()
    for grad, length in spawn(rank, 2):
        assert length == 9
        assert float((grad - whole.grad).abs().max()) < TOLERANCE


def test_sdpa_is_exact_under_a_layout_for_each_batch_element():
    x = torch.randn(2, 2, 16, 4, dtype=torch.float64)

    class Attention(nn.Module):
        def forward(self, q, k, v):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def rank(mesh):
        balancer = ours._PerDocumentHeadTailLoadBalancer([[5, 11], [16]], 3, "cpu")
        (part,) = ours._context_parallel_shard(mesh, [x], [2], balancer)
        style = ours._ContextParallel(2, ours._ContextParallel.AttentionType.SDPA)
        out = parallelize_module(Attention(), mesh, style)(part, part, part)
        return ours.context_parallel_unshard(mesh, [out], [2])[0]

    wanted = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    for found in spawn(rank, 3):
        assert float((found - wanted).abs().max()) < TOLERANCE


def test_shards_are_pytorchs_where_pytorch_has_them():
    even, uneven = torch.randn(2, 96, 3), torch.randn(11, 2)
    mask = create_block_mask(
        lambda b, h, q, kv: q >= kv, None, None, 96, 96, device="cpu", BLOCK_SIZE=8
    )

    def rank(mesh):
        same = []
        for name, arguments in (
            ("_HeadTailLoadBalancer", (96, mesh.size(), "cpu")),
            ("_PTRRLoadBalancer", (mask, mesh.size())),
        ):
            found, wanted = (
                module._context_parallel_shard(mesh, [even], [1], getattr(module, name)(*arguments))
                for module in (ours, theirs)
            )
            same.append(torch.equal(found[0], wanted[0]))
        found, wanted = (
            module._context_parallel_shard(mesh, {"x": uneven}, {"x": 0}, None)
            for module in (ours, theirs)
        )
        same.append(torch.equal(found["x"], wanted["x"]))
        theirs._cp_options.enable_load_balance = True
        buffers = []
        for module in (ours, theirs):
            buffer = even.clone()
            with module.context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
                buffers.append(buffer.clone())
        return [*same, torch.equal(*buffers)]

    assert spawn(rank, 3) == [[True] * 4] * 3


def _errors(rank):
    """The errors of all ranks."""
    with pytest.raises(RankError) as caught:
        spawn(rank, 2, timeout=20)
    return [str(error) for error in caught.value.failures.values()]


def test_ranks_that_disagree_about_the_mask_all_raise():
    def rank(mesh):
        x = torch.randn(1, 1, 4, 4)
        with ours.context_parallel(mesh):
            functional.scaled_dot_product_attention(x, x, x, is_causal=mesh.get_rank() == 0)

    messages = _errors(rank)
    assert len(messages) == 2
    assert all("all ranks to make the same call of attention" in message for message in messages)


def test_ranks_whose_backward_passes_differ_all_raise():
    def rank(mesh):
        ours.set_rotate_method("alltoall")
        x = torch.randn(1, 1, 4, 4, requires_grad=True)
        with ours.context_parallel(mesh):
            outs = [functional.scaled_dot_product_attention(x, x, x) for _ in range(2)]
        outs[mesh.get_rank()].sum().backward()

    messages = _errors(rank)
    assert len(messages) == 2
    assert all("backward pass of the same attention, got the calls [0, 1]" in m for m in messages)


@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_a_rank_that_raises_before_backward_makes_the_other_raise(method):
    def rank(mesh):
        ours.set_rotate_method(method)
        x = torch.randn(1, 1, 4, 4, requires_grad=True)
        with ours.context_parallel(mesh):
            out = functional.scaled_dot_product_attention(x, x, x)
        if mesh.get_rank() == 1:
            raise KeyError("between forward and backward")
        out.sum().backward()

    waiting, raised = _errors(rank)
    assert "no answer on rank 0" in waiting
    assert "between forward and backward" in raised


def test_a_rank_that_does_not_gather_is_named_in_the_error():
    def rank(mesh):
        if mesh.get_rank() == 1:
            raise KeyError("before gathering")
        x = torch.zeros(1, 1, 2, 2)
        ours.flex_cp_allgather(x, x, 2, mesh.get_group().group_name)

    waiting, _ = _errors(rank)
    assert "rank 1 to take part in flex_cp_allgather, got no answer on rank 0" in waiting


def test_simulated_ranks_are_refused_with_the_way_out():
    with pytest.raises(RankError) as caught:
        simulate(lambda mesh: ours.context_parallel_unshard(mesh, [torch.zeros(1)], [0]), 2)
    assert isinstance(caught.value.__cause__, FlexCPError)
    assert "flexcp.make_plan" in str(caught.value.__cause__)
