"""The Triton kernels through the calls that users make: on one device, compiled, and over ranks."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flexcp
from flexcp import Mask, masks
from flexcp.testing import simulate
from flexcp.testing.tolerance import assert_close
from kernels.cases import loss

LENGTH = 60
MASK = masks.causal() & masks.document(lengths=[20, 17, 23])
BY_ELEMENT = masks.causal() & masks.document(lengths=[[20, 17, 23], [51, 2, 7]])
ROWS_WITHOUT_KEYS = Mask(lambda b, h, q, kv: (q >= kv + 7 * h) & (q % 11 != 4))
TRITON = {"kernel": "triton"}


def inputs(dtype: torch.dtype = torch.float32, batch: int = 1) -> list[Tensor]:
    """Q, K, V and sinks."""
    shapes = ((batch, 2, LENGTH, 16), (batch, 1, LENGTH, 16), (batch, 1, LENGTH, 16), (2,))
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, **options: object) -> list[Tensor]:
    found = flexcp.flex_attention(
        q, k, v, block_mask=MASK, enable_gqa=True, return_lse=True, sinks=sinks, **options
    )
    return list(found)


def with_gradients(
    function: Callable[..., list[Tensor]], given: list[Tensor], **options: object
) -> list[Tensor]:
    out, lse = function(*given, **options)
    return [out, lse, *torch.autograd.grad(loss(out, lse), given)]


def assert_like_the_oracle(found: list[Tensor], given: list[Tensor], dtype: torch.dtype) -> None:
    exact = [x.detach().double().requires_grad_() for x in given]
    expected = with_gradients(attend, exact, kernel_options={"kernel": "reference"})
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv", "sinks"), found, expected, strict=True):
        assert_close(a, b, dtype=dtype, what=name)


def test_flex_attention_takes_the_kernel_by_name_with_sinks_and_lse() -> None:
    given = inputs()
    found = with_gradients(attend, given, kernel_options=TRITON)
    assert_like_the_oracle(found, given, torch.float32)


def test_a_compiled_graph_runs_it_whole() -> None:
    given = inputs()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    found = with_gradients(compiled, given, kernel_options=TRITON)
    eager = with_gradients(attend, given, kernel_options=TRITON)
    assert all(torch.equal(a, b) for a, b in zip(found, eager, strict=True))


def test_autocast_and_checkpointing_are_as_with_other_kernels() -> None:
    given = inputs()

    def under_autocast(*tensors: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attend(*tensors, kernel_options=TRITON)

    def recomputed(*tensors: Tensor) -> list[Tensor]:
        return checkpoint(under_autocast, *tensors, use_reentrant=False)

    found = with_gradients(recomputed, given)
    assert found[0].dtype == torch.bfloat16
    assert_like_the_oracle(found, given, torch.bfloat16)


@pytest.mark.parametrize(
    ("ranks", "schedule", "mask"),
    [
        (2, "ulysses", MASK),
        (3, "exchange", ROWS_WITHOUT_KEYS),
        (4, "ring", masks.sliding_window(20)),
        (5, "allgather", MASK),
        (3, "exchange", BY_ELEMENT),
    ],
)
def test_ranks_merge_their_rounds_inside_the_kernel(
    ranks: int, schedule: str, mask: Mask, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = 2 if mask is BY_ELEMENT else 1
    given = inputs(batch=batch)[:3]
    exact = [x.detach().double().requires_grad_() for x in given]
    out, lse = flexcp.flex_attention(
        *exact, block_mask=mask, enable_gqa=True, return_lse=True,
        kernel_options={"kernel": "reference"},
    )  # fmt: skip
    expected = [out, lse, *torch.autograd.grad(loss(out, lse), exact)]

    def rank(mesh: object) -> list[Tensor]:
        plan = flexcp.make_plan(
            mask, LENGTH, mesh, num_heads=2, num_kv_heads=1, head_dim=16, block_size=16,
            schedule=schedule, dtype=torch.float32, batch=batch,
        )  # fmt: skip
        assert plan.layout.batch_elements == batch
        own = [x.detach().requires_grad_() for x in given]
        shards = [plan.shard(x, 2) for x in own]
        out, lse = flexcp.attention(*shards, plan, return_lse=True, kernel="triton")
        out, lse = plan.unshard(out, 2), plan.unshard(lse, 2)
        return [out, lse, *torch.autograd.grad(loss(out, lse), own)]

    monkeypatch.setattr("flexcp.kernels.flash.forward", _not_to_be_called)
    found = simulate(rank, ranks)
    for i, name in enumerate(("out", "lse")):
        assert_close(found[0][i], expected[i], dtype=torch.float32, what=name)
    for i, name in enumerate(("dq", "dk", "dv"), start=2):
        total = torch.stack([result[i] for result in found]).sum(0)
        assert_close(total, expected[i], dtype=torch.float32, what=name)


def _not_to_be_called(*args: object, **kwargs: object) -> None:
    raise AssertionError("another kernel was used")
