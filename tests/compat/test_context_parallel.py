"""`context_parallel` on real processes: attention of one process, and nothing left behind."""

import pytest
import torch
from compat.cases import fails, is_close, one_process, qkvg
from torch.nn import functional

import flexcp
from flexcp.compat.context_parallel import (
    _cp_options,
    _HeadTailLoadBalancer,
    _RotateMethod,
    context_parallel,
    context_parallel_unshard,
    set_rotate_method,
)
from flexcp.testing.processes import spawn


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("method", ["allgather", "alltoall"])
@pytest.mark.parametrize(("length", "ranks"), [(16, 2), (13, 2), (100, 3), (4, 3)])
def test_attention_and_gradients_equal_one_process(length, ranks, method, is_causal):
    tensors = qkvg(length)

    def rank(mesh):
        set_rotate_method(method)
        buffers = [t.clone() for t in tensors]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, -2, 2, 2]):
            x = [t.detach().clone().requires_grad_() for t in buffers[:3]]
            out = functional.scaled_dot_product_attention(*x, is_causal=is_causal, enable_gqa=True)
            out.backward(buffers[3])
        parts = [out.detach(), *(t.grad for t in x)]
        return context_parallel_unshard(mesh, parts, [2, 2, -2, 2])

    wanted = one_process(*tensors, is_causal)
    assert all(is_close(found, wanted) for found in spawn(rank, ranks))


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
    tensors = qkvg(10)
    wanted = one_process(*tensors, True)[0]

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
        assert is_close(found, [wanted, wanted])
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
    assert all(is_close(found, wanted) for found in spawn(rank, 2))


def test_load_balancing_can_be_switched_off():
    tensors = qkvg(14)
    wanted = one_process(*tensors, True)[0]

    def rank(mesh):
        _cp_options.enable_load_balance = False
        x, where = [t.clone() for t in tensors[:3]], torch.arange(14)
        with context_parallel(mesh, buffers=[*x, where], buffer_seq_dims=[2, 2, 2, 0]):
            out = functional.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True)
            rows = where.tolist()
        return rows, context_parallel_unshard(mesh, [out], [2])

    for number, (rows, found) in enumerate(spawn(rank, 2)):
        assert rows == list(range(7 * number, 7 * number + 7))
        assert is_close(found, [wanted])


def test_a_context_without_buffers_takes_the_default_order():
    tensors = qkvg(12)
    wanted = one_process(*tensors, True)[0]

    def rank(mesh):
        order = _HeadTailLoadBalancer(12, 2, "cpu")
        x = [t[:, :, order._generate_indices()[0]].chunk(2, 2)[mesh.get_rank()] for t in tensors]
        with context_parallel(mesh):
            out = functional.scaled_dot_product_attention(*x[:3], is_causal=True, enable_gqa=True)
        return context_parallel_unshard(mesh, [out], [2], order)

    assert all(is_close(found, [wanted]) for found in spawn(rank, 2))


def test_dropout_is_that_of_one_process():
    q, v = torch.zeros(1, 2, 10, 4), torch.eye(10).expand(1, 2, 10, 10)
    torch.manual_seed(4)
    wanted = flexcp.flex_attention(q, q, v, block_mask=flexcp.masks.causal(), dropout_p=0.4)

    def rank(mesh):
        torch.manual_seed(4)
        own_q, own_v = q.clone(), v.clone()
        with context_parallel(mesh, buffers=[own_q, own_v], buffer_seq_dims=[2, 2]):
            out = functional.scaled_dot_product_attention(
                own_q, own_q, own_v, dropout_p=0.4, is_causal=True
            )
        return context_parallel_unshard(mesh, [out], [2])

    assert all(is_close(found, [wanted]) for found in spawn(rank, 2))


def test_what_attention_cannot_honour_is_an_error_that_names_it():
    q, k, v, _ = qkvg(8, kv_heads=4)

    def rank(mesh):
        messages = []
        with context_parallel(mesh):
            for bad in (
                {"attn_mask": torch.ones(8, 8, dtype=torch.bool)},
                {"dropout_p": 1.0},
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
    assert "flexcp.make_plan" in mask
    assert "dropout_p to be a number of at least 0 and below 1" in dropout
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

    assert "mesh of one dimension, got one of shape (2, 1)" in str(fails(rank, (2, 1)))


def test_using_a_buffer_after_it_was_restored_in_a_gradient_is_an_error():
    def rank(mesh):
        x = torch.randn(1, 1, 8, 4)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
            x.requires_grad_()
            loss = (x * x).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    spawn(rank, 2)


@pytest.mark.parametrize("method", ["allgather", "alltoall"])
@pytest.mark.parametrize("gradient", ["strided", "expanded"])
def test_strides_of_inputs_and_gradients_do_not_matter(method, gradient):
    tensors = [t.transpose(1, 2).contiguous() for t in qkvg(13)]

    def backward(out, g):
        if gradient == "expanded":
            out.sum().backward()
        else:
            out.backward(g.transpose(1, 2))

    def attend(q, k, v, g):
        x = [t.clone().requires_grad_() for t in (q, k, v)]
        views = [t.transpose(1, 2) for t in x]
        assert not any(view.is_contiguous() for view in views)
        out = functional.scaled_dot_product_attention(*views, is_causal=True, enable_gqa=True)
        backward(out, g)
        return [out.detach().transpose(1, 2), *(t.grad for t in x)]

    def rank(mesh):
        set_rotate_method(method)
        buffers = [t.clone() for t in tensors]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * 4):
            found = attend(*buffers)
        return context_parallel_unshard(mesh, found, [1] * 4)

    wanted = attend(*tensors)
    assert all(is_close(found, wanted) for found in spawn(rank, 3))
