"""Tools that count collectives see those that PyTorch's ring makes."""

import pytest
from compat.cases import qkvg
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

from flexcp.compat.context_parallel import _cp_options, context_parallel, set_rotate_method
from flexcp.testing.processes import spawn

CALLS = {
    "as usual": {},
    "not causal": {"is_causal": False},
    "uneven, not balanced, two layers": {"less": 1, "balanced": False, "layers": 2},
}


def _counts(mesh, method, *, is_causal=True, balanced=True, layers=1, less=0):
    """Collectives of forward and backward, by name."""
    tensors = qkvg(8 * mesh.size() - less)
    _cp_options.enable_load_balance = balanced
    with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 4):
        set_rotate_method(method)
        q, k, v = (t.detach().clone().requires_grad_() for t in tensors[:3])
        with CommDebugMode() as forward:
            for _ in range(layers):
                q = functional.scaled_dot_product_attention(
                    q, k, v, is_causal=is_causal, enable_gqa=True
                )
        with CommDebugMode() as backward:
            q.backward(tensors[3])
    return [
        {op.__name__: n for op, n in mode.get_comm_counts().items()} for mode in (forward, backward)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_collectives_are_those_that_pytorch_makes(ranks):
    def rank(mesh):
        return {
            (name, method): _counts(mesh, method, **call)
            for name, call in CALLS.items()
            for method in ("alltoall", "allgather")
        }

    for found in spawn(rank, ranks):
        for name, call in CALLS.items():
            layers = call.get("layers", 1)
            forward, backward = found[name, "alltoall"]
            assert forward == _some("all_to_all_single", layers * (ranks - 1)), name
            assert backward == _some("all_to_all_single", layers * (2 * ranks - 1)), name
            gathered, _ = found[name, "allgather"]
            assert gathered == _some("all_gather_into_tensor", layers * (ranks > 1)), name


def _some(collective, times):
    return {collective: times} if times else {}
