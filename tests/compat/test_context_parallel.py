"""`context_parallel` on real processes: attention of one process, and nothing left behind."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

from flexcp.comm.simulated import RankError
from flexcp.compat.context_parallel import (
    _context_parallel_shard,
    _ContextParallel,
    _cp_options,
    _disable_context_parallel_dispatcher,
    _enable_context_parallel_dispatcher,
    _HeadTailLoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _RotateMethod,
    context_parallel,
    context_parallel_unshard,
    set_rotate_method,
)
from flexcp.testing.processes import spawn

TOLERANCE = 1e-10


def _qkvg(length, batch=2, heads=4, kv_heads=2, dim=8):
    return [
        torch.randn(batch, h, length, dim, dtype=torch.float64)
        for h in (heads, kv_heads, kv_heads, heads)
    ]


def _one_process(q, k, v, g, is_causal):
    x = [t.clone().requires_grad_() for t in (q, k, v)]
    out = functional.scaled_dot_product_attention(*x, is_causal=is_causal, enable_gqa=True)
    out.backward(g)
    return [out.detach(), *(t.grad for t in x)]


def _is_close(found, wanted):
    return all(
        a.shape == b.shape and float((a - b).abs().max()) < TOLERANCE
        for a, b in zip(found, wanted, strict=True)
    )


def _fails(rank, ranks=2):
    """The error that a rank raises."""
    with pytest.raises(RankError) as caught:
        spawn(rank, ranks, timeout=20)
    return caught.value.__cause__


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("method", ["allgather", "alltoall"])
@pytest.mark.parametrize(("length", "ranks"), [(16, 2), (13, 2), (100, 3), (4, 3)])
def test_attention_and_gradients_equal_one_process(length, ranks, method, is_causal):
    tensors = _qkvg(length)

    def rank(mesh):
        set_rotate_method(method)
        buffers = [t.clone() for t in tensors]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, -2, 2, 2]):
            x = [t.detach().clone().requires_grad_() for t in buffers[:3]]
            out = functional.scaled_dot_product_attention(*x, is_causal=is_causal, enable_gqa=True)
            out.backward(buffers[3])
        parts = [out.detach(), *(t.grad for t in x)]
        return context_parallel_unshard(mesh, parts, [2, 2, -2, 2])

    wanted = _one_process(*tensors, is_causal)
    assert all(_is_close(found, wanted) for found in spawn(rank, ranks))


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_are_those_that_pytorch_makes(ranks):
    tensors = _qkvg(12 * ranks)

    def rank(mesh):
        counts = {}
        for method in ("alltoall", "allgather"):
            buffers = [t.clone() for t in tensors]
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
                set_rotate_method(method)
                x = [t.detach().clone().requires_grad_() for t in buffers[:3]]
                with CommDebugMode() as forward:
                    out = functional.scaled_dot_product_attention(
                        *x, is_causal=True, enable_gqa=True
                    )
                with CommDebugMode() as backward:
                    out.backward(buffers[3])
            counts[method] = [
                {op.__name__: n for op, n in mode.get_comm_counts().items()}
                for mode in (forward, backward)
            ]
        return counts

    for counts in spawn(rank, ranks):
        forward, backward = counts["alltoall"]
        assert forward == {"all_to_all_single": ranks - 1}
        assert backward == {"all_to_all_single": 2 * ranks - 1}
        assert counts["allgather"][0] == {"all_gather_into_tensor": 1}


def test_buffers_hold_the_ranks_rows_in_the_body_and_are_whole_after_it():
    def rank(mesh):
        original = functional.scaled_dot_product_attention
        tokens, table, dropped = torch.arange(8), torch.arange(16.0).view(2, 8), torch.arange(8)
        memory = tokens.data_ptr()
        with context_parallel(
            mesh,
            buffers=[tokens, table, dropped],
            buffer_seq_dims=[0, -1, 0],
            no_restore_buffers={dropped},
        ):
            inside = (tokens.tolist(), table.shape[1])
            patched = functional.scaled_dot_product_attention is not original
        restored = tokens.data_ptr() == memory and torch.equal(tokens, torch.arange(8))
        unpatched = functional.scaled_dot_product_attention is original
        return inside, patched, restored and unpatched, table.shape[1], dropped.tolist()

    first, second = spawn(rank, 2)
    assert first == (([0, 1, 6, 7], 4), True, True, 8, [0, 1, 6, 7])
    assert second == (([2, 3, 4, 5], 4), True, True, 8, [2, 3, 4, 5])


def test_an_exception_in_the_body_leaves_everything_as_it_was():
    def rank(mesh):
        original, x = functional.scaled_dot_product_attention, torch.arange(9.0)

        def body():
            with context_parallel(mesh, buffers=[x], buffer_seq_dims=[0]):
                set_rotate_method("alltoall")
                raise KeyError("in the body")

        with pytest.raises(KeyError):
            body()
        options = _cp_options.rotate_method is _RotateMethod.ALL_GATHER
        return functional.scaled_dot_product_attention is original and len(x) == 9 and options

    assert spawn(rank, 2) == [True, True]


def test_contexts_nest_and_keep_their_own_mesh_and_rotation():
    tensors = _qkvg(10)
    wanted = _one_process(*tensors, True)[0]

    def rank(mesh):
        columns, rows = mesh["dim_1"], mesh["dim_0"]
        found, methods = [], []

        def attend(inner):
            x = [t.clone() for t in tensors[:3]]
            with context_parallel(inner, buffers=x, buffer_seq_dims=[2] * 3):
                methods.append(_cp_options.rotate_method.name)
                out = functional.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True)
            found.append(context_parallel_unshard(inner, [out], [2])[0])

        outer = [t.clone() for t in tensors[:3]]
        with context_parallel(rows, buffers=outer, buffer_seq_dims=[2] * 3):
            set_rotate_method("alltoall")
            attend(columns)
            methods.append(_cp_options.rotate_method.name)
            out = functional.scaled_dot_product_attention(*outer, is_causal=True, enable_gqa=True)
        found.append(context_parallel_unshard(rows, [out], [2])[0])
        methods.append(_cp_options.rotate_method.name)
        return found, methods

    for found, methods in spawn(_named(rank), (2, 2)):
        assert _is_close(found, [wanted, wanted])
        assert methods == ["ALL_GATHER", "ALL_TO_ALL", "ALL_GATHER"]


def _named(rank):
    """Gives the dimensions of a mesh their names."""

    def run(mesh):
        from torch.distributed.device_mesh import DeviceMesh

        return rank(DeviceMesh("cpu", mesh.mesh, mesh_dim_names=("dim_0", "dim_1")))

    return run


def test_tensors_without_heads_and_with_more_dimensions_work():
    flat = [torch.randn(3, 11, 4, dtype=torch.float64) for _ in range(3)]
    deep = [torch.randn(2, 3, 2, 11, 4, dtype=torch.float64) for _ in range(3)]

    def rank(mesh):
        found = []
        for tensors in (flat, deep):
            x = [t.clone() for t in tensors]
            with context_parallel(mesh, buffers=x, buffer_seq_dims=[-2] * 3):
                out = functional.scaled_dot_product_attention(*x, is_causal=True, scale=0.3)
            found += context_parallel_unshard(mesh, [out], [-2])
        return found

    wanted = [
        functional.scaled_dot_product_attention(*t, is_causal=True, scale=0.3) for t in (flat, deep)
    ]
    assert all(_is_close(found, wanted) for found in spawn(rank, 2))


def test_load_balancing_can_be_switched_off():
    tensors = _qkvg(14)
    wanted = _one_process(*tensors, True)[0]

    def rank(mesh):
        _cp_options.enable_load_balance = False
        x, where = [t.clone() for t in tensors[:3]], torch.arange(14)
        with context_parallel(mesh, buffers=[*x, where], buffer_seq_dims=[2, 2, 2, 0]):
            out = functional.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True)
            rows = where.tolist()
        return rows, context_parallel_unshard(mesh, [out], [2])

    for number, (rows, found) in enumerate(spawn(rank, 2)):
        assert rows == list(range(7 * number, 7 * number + 7))
        assert _is_close(found, [wanted])


def test_a_context_without_buffers_takes_the_default_order():
    tensors = _qkvg(12)
    wanted = _one_process(*tensors, True)[0]

    def rank(mesh):
        order = _HeadTailLoadBalancer(12, 2, "cpu")
        x = [t[:, :, order._generate_indices()[0]].chunk(2, 2)[mesh.get_rank()] for t in tensors]
        with context_parallel(mesh):
            out = functional.scaled_dot_product_attention(*x[:3], is_causal=True, enable_gqa=True)
        return context_parallel_unshard(mesh, [out], [2], order)

    assert all(_is_close(found, [wanted]) for found in spawn(rank, 2))


def test_what_attention_cannot_honour_is_an_error_that_names_it():
    q, k, v, _ = _qkvg(8, kv_heads=4)

    def rank(mesh):
        messages = []
        with context_parallel(mesh):
            for bad in (
                {"attn_mask": torch.ones(8, 8, dtype=torch.bool)},
                {"dropout_p": 0.1},
                {"key": k[:, :2]},
                {"key": k[:, :, :3], "value": v[:, :, :3]},
            ):
                arguments = {"query": q, "key": k, "value": v} | bad
                with pytest.raises(ValueError) as caught:
                    functional.scaled_dot_product_attention(**arguments)
                messages.append(str(caught.value))
        return messages

    mask, dropout, heads, length = spawn(rank, 2)[0]
    assert "attn_mask=None" in mask
    assert "flexcp.attention" in mask
    assert "dropout_p=0.1" in dropout
    assert "enable_gqa=True" in heads
    assert "8 rows of query and 3 of key" in length


def test_bad_buffers_raise_pytorchs_errors_and_change_nothing():
    def rank(mesh):
        x, y = torch.arange(8.0), torch.arange(8.0)
        result = torch.ones(8, requires_grad=True) * 2
        messages = []
        for arguments in (
            {"buffers": [x, y], "buffer_seq_dims": [0]},
            {"buffers": [x], "buffer_seq_dims": [0], "no_restore_buffers": {y}},
            {"buffers": [x, x], "buffer_seq_dims": [0, 0]},
            {"buffers": [x, result], "buffer_seq_dims": [0, 0]},
            {"buffers": [x, y], "buffer_seq_dims": [0, 1]},
        ):
            with (
                pytest.raises((ValueError, IndexError)) as caught,
                context_parallel(mesh, **arguments),
            ):
                pass
            messages.append(f"{type(caught.value).__name__}: {caught.value}")
            assert len(x) == 8
        return messages

    count, subset, twice, history, dim = spawn(rank, 2)[0]
    assert count == "ValueError: `seq_dims` must have the same number of elements as `buffers`."
    assert subset == "ValueError: `no_restore_buffers` must be a subset of `buffers`."
    assert "each buffer once" in twice
    assert "_context_parallel_shard" in history
    assert dim.startswith("IndexError: Dimension out of range")


def test_a_mesh_of_two_dimensions_is_refused():
    def rank(mesh):
        with context_parallel(mesh):
            pass

    assert "mesh of one dimension, got one of shape (2, 1)" in str(_fails(rank, (2, 1)))


def test_using_a_buffer_after_it_was_restored_in_a_gradient_is_an_error():
    def rank(mesh):
        x = torch.randn(1, 1, 8, 4)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
            x.requires_grad_()
            loss = (x * x).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    spawn(rank, 2)


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
    tensors = _qkvg(8)
    wanted = _one_process(*tensors, True)[0]

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
        assert _is_close(found, [wanted])


def test_unshard_with_the_wrong_shard_is_an_error():
    def rank(mesh):
        context_parallel_unshard(mesh, [torch.zeros(5)], [0], _HeadTailLoadBalancer(8, 2, "cpu"))

    assert "4 rows along dim 0" in str(_fails(rank))

    def uneven(mesh):
        context_parallel_unshard(mesh, [torch.zeros(3 + 4 * mesh.get_rank())], [0])

    assert "[5, 5] tokens by rank, got [3, 7]" in str(_fails(uneven))


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
    tensors = _qkvg(15)

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

    wanted = _one_process(*tensors, True)
    assert all(_is_close(found, wanted) for found in spawn(rank, 3))


def test_the_dispatcher_runs_dtensors_and_can_be_switched_off():
    tensors = _qkvg(16)

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

    wanted = _one_process(*tensors, True)[0]
    assert all(_is_close(found, [wanted, wanted]) for found in spawn(rank, 2))


def test_an_unknown_attention_type_is_pytorchs_error():
    def rank(mesh):
        parallelize_module(_Attention(), mesh, _ContextParallel(2, "flash"))

    error = _fails(rank)
    assert isinstance(error, ValueError)
    assert "Unknown attention type: flash" in str(error)
