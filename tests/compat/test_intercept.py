"""Attention is seen under any name and however early it was bound, or refused by name."""

import copy
import functools
import threading

import pytest
import torch
from compat.cases import fails, is_close
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import flexcp
from flexcp.compat.context_parallel import (
    _context_parallel_shard,
    _ContextParallel,
    _disable_context_parallel_dispatcher,
    _enable_context_parallel_dispatcher,
    _HeadTailLoadBalancer,
    context_parallel,
    context_parallel_unshard,
)
from flexcp.compat.intercept import Interception
from flexcp.testing.processes import spawn

LENGTH = 22
X = torch.randn(2, 3, LENGTH, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
BOUND = {
    "by name": scaled_dot_product_attention,
    "in a partial": functools.partial(functional.scaled_dot_product_attention),
    "from torch._C": torch._C._nn.scaled_dot_product_attention,
    "as an operator": torch.ops.aten.scaled_dot_product_attention,
}


class Attention(nn.Module):
    """Holds the function that it calls since before anything was parallelized."""

    def __init__(self, sdpa=functional.scaled_dot_product_attention):
        super().__init__()
        self.sdpa = sdpa

    def forward(self, x):
        return self.sdpa(x, x, x, is_causal=True)


MODELS = {"as an attribute": Attention(), **{n: Attention(f) for n, f in BOUND.items()}}


def one_process(run):
    x = X.clone().requires_grad_()
    out = run(x)
    out.square().sum().backward()
    return [out.detach(), x.grad]


def through_module(mesh, model):
    style = _ContextParallel(2, _ContextParallel.AttentionType.SDPA)
    module = parallelize_module(copy.deepcopy(model), mesh, style)
    balancer = _HeadTailLoadBalancer(LENGTH, mesh.size(), "cpu")
    (x,) = _context_parallel_shard(mesh, [X], [2], balancer)
    x.requires_grad_()
    out = module(x)
    out.square().sum().backward()
    return context_parallel_unshard(mesh, [out.detach(), x.grad], [2, 2], balancer)


def through_context(mesh, model, around=lambda model, x: model(x)):
    x = X.clone()
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        x.requires_grad_()
        out = around(model, x)
        out.square().sum().backward()
        return context_parallel_unshard(mesh, [out.detach(), x.grad], [2, 2])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("run", [through_module, through_context])
def test_a_function_that_was_bound_early_is_that_of_the_whole_sequence(run, ranks):
    wanted = one_process(Attention())
    for found in spawn(lambda mesh: {n: run(mesh, m) for n, m in MODELS.items()}, ranks):
        for name in MODELS:
            assert is_close(found[name], wanted), name


def test_a_function_that_was_compiled_early_is_that_of_the_whole_sequence():
    sdpa = functional.scaled_dot_product_attention
    compiled = Attention(torch.compile(sdpa, backend="aot_eager", fullgraph=True))

    def rank(mesh):
        found = through_context(mesh, compiled), through_module(mesh, compiled)
        dtensors = [DTensor.from_local(X, mesh, [Shard(2)], run_check=False) for _ in range(3)]
        _enable_context_parallel_dispatcher()
        out = compiled.sdpa(*dtensors, is_causal=True)
        assert torch.equal(out.to_local(), sdpa(*dtensors, is_causal=True).to_local())
        _disable_context_parallel_dispatcher()
        return found

    wanted = one_process(Attention())
    for found in spawn(rank, 2, timeout=200):
        assert is_close(found[0], wanted)
        assert is_close(found[1], wanted)


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 3, 8, dropout=0.0, batch_first=True)
    return layer.double().eval()


ROWS = X.transpose(1, 2).flatten(2)


def test_layers_of_torch_do_not_go_around_the_context():
    layer, later = encoder(), torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    with torch.no_grad():
        wanted = [layer(ROWS, src_mask=later), layer.self_attn(ROWS, ROWS, ROWS)[0]]

    def rank(mesh):
        x = ROWS.clone()
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]), torch.no_grad():
            square = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            outs = [
                layer(x, src_mask=square, is_causal=True),
                layer.self_attn(x, x, x, need_weights=False)[0],
            ]
            with pytest.raises(flexcp.FlexCPError, match="got need_weights=True; pass need_weigh"):
                layer.self_attn(x, x, x)
            with pytest.raises(flexcp.FlexCPError, match="got an attn_mask"):
                layer.self_attn(x, x, x, key_padding_mask=square[:1].expand(2, -1), need_weights=0)
            return context_parallel_unshard(mesh, outs, [1, 1])

    assert all(is_close(found, wanted) for found in spawn(rank, 2))


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_was_checkpointed_is_recomputed_alike_after_the_context_and_elsewhere(reentrant):
    def rank(mesh):
        x = X.clone()
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
            local = x.detach().clone().requires_grad_()
            out = checkpoint(Attention(), local, use_reentrant=reentrant)
        loss = out.square().sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return context_parallel_unshard(mesh, [out.detach(), local.grad], [2, 2])

    wanted = one_process(Attention())
    assert all(is_close(found, wanted) for found in spawn(rank, 2))


def test_other_threads_see_the_context_by_the_functions_own_name():
    def on_a_thread(_, x):
        outs = []
        thread = threading.Thread(
            target=lambda: outs.append(
                functional.scaled_dot_product_attention(x, x, x, is_causal=True)
            )
        )
        thread.start()
        thread.join()
        return outs[0]

    wanted = one_process(Attention())
    for found in spawn(lambda mesh: through_context(mesh, None, on_a_thread), 2):
        assert is_close(found, wanted)


def test_the_dispatcher_sees_functions_that_were_bound_early_and_may_end_within_other_modes():
    def rank(mesh):
        balancer = _HeadTailLoadBalancer(LENGTH, 2, "cpu")
        (part,) = _context_parallel_shard(mesh, [X], [2], balancer)
        x = DTensor.from_local(part, mesh, [Shard(2)], run_check=False)
        with context_parallel(mesh):
            _enable_context_parallel_dispatcher()
        outs = [f(x, x, x, is_causal=True).to_local() for f in BOUND.values()]
        with torch.device("cpu"):
            _disable_context_parallel_dispatcher()
        assert torch.overrides._get_current_function_mode_stack() == []
        return context_parallel_unshard(mesh, outs, [2] * len(outs), balancer)

    wanted = Attention()(X)
    assert all(is_close(found, [wanted] * len(BOUND)) for found in spawn(rank, 2))


def test_nothing_stays_changed_after_a_context_has_raised():
    def rank(mesh):
        original = functional.scaled_dot_product_attention
        with pytest.raises(KeyError), context_parallel(mesh):
            raise KeyError
        style = _ContextParallel(2, _ContextParallel.AttentionType.SDPA)
        module = parallelize_module(Attention(lambda *_, **__: {}["nothing"]), mesh, style)
        with pytest.raises(KeyError, match="nothing"):
            module(X)
        assert functional.scaled_dot_product_attention is original
        assert torch.overrides._get_current_function_mode_stack() == []

    spawn(rank, 1)


def test_a_module_that_calls_no_attention_is_refused_by_name():
    def rank(mesh):
        style = _ContextParallel(2, _ContextParallel.AttentionType.SDPA)
        parallelize_module(nn.Linear(4, 4).double(), mesh, style)(X)

    error = fails(rank, 1)
    assert isinstance(error, flexcp.FlexCPError)
    assert "expected a module that calls F.scaled_dot_product_attention, got Linear" in str(error)


def test_a_style_that_matched_no_module_is_an_error_when_tensors_are_sharded():
    def rank(mesh):
        style = _ContextParallel(2, _ContextParallel.AttentionType.SDPA)
        model = parallelize_module(nn.Sequential(Attention()), mesh, {"attn": style})
        for _ in range(2):
            with pytest.raises(flexcp.FlexCPError, match=r"got _ContextParallel\(2, .*no module"):
                _context_parallel_shard(mesh, [X], [2])
        flexcp.parallelize(
            model, mesh, {"0": _ContextParallel(2, _ContextParallel.AttentionType.SDPA)}
        )
        return model(*_context_parallel_shard(mesh, [X], [2]))

    assert is_close([torch.cat(spawn(rank, 2), 2)], [Attention()(X)])


def test_a_style_that_is_still_to_be_applied_does_not_disturb_whole_tensors():
    def rank(mesh):
        style = _ContextParallel(2, _ContextParallel.AttentionType.SDPA)
        whole = Attention()(X)
        parallelize_module(Attention(), mesh, style)
        return whole, *_context_parallel_shard(mesh, [X], [2])

    assert is_close(spawn(rank, 1)[0], [Attention()(X), X])


class Answering(Interception):
    """Doubles the query, in place of torch's flex_attention."""

    trains_flex_op_on_cpu = True
    calls = 0

    def flex_op(self, query, *_):
        self.calls += 1
        return query * 2, query[..., 0], query[..., 0]


FLEX = {
    "as it is": flex_attention,
    "compiled": torch.compile(flex_attention, backend="eager"),
    "in a partial": functools.partial(flex_attention),
}


@pytest.mark.parametrize("name", FLEX)
def test_torchs_flex_attention_is_answered_and_trained_under_any_name(name):
    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    with Answering() as mode:
        for _ in range(2):
            out = FLEX[name](x, x, x)
    out.sum().backward()
    assert mode.calls == 2
    assert torch.equal(out, 2 * x)
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(x, x, x)


def test_torchs_flex_attention_runs_as_it_is_if_nobody_answers():
    x = torch.randn(1, 2, 8, 4)
    with Interception():
        within = flex_attention(x, x, x, scale=0.5)
    assert torch.equal(flex_attention(x, x, x, scale=0.5), within)


def falls_back(x):
    """Ends in an error, so that dynamo gives it up, and runs what it calls one by one."""
    assert [x.requires_grad, x.dim(), x.numel(), x.is_nested] == [True, 2, 12, False]
    raise KeyError("at the end")


def test_a_compiled_function_that_falls_back_mixes_up_no_functions():
    """Dynamo must not compile a mode by itself: it would not guard on which function it sees."""
    with Interception(), pytest.raises(KeyError, match="at the end"):
        torch.compile(falls_back, backend="eager")(torch.randn(3, 4, requires_grad=True))
