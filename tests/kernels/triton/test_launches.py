"""How much a rank launches: counted with kernels that do nothing, on simulated ranks."""

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flexcp
from flexcp import Mask, masks
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.interface import causal_shapes
from flexcp.kernels.triton.kernel import TritonKernel
from flexcp.kernels.triton.launch import Launch
from flexcp.kernels.triton.tuning import INTERPRETER
from flexcp.testing import simulate

RANKS, LENGTH = 8, 8192


class Operations(TorchDispatchMode):
    """Counts what torch is asked for in one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(),
        masks.causal() & masks.document(lengths=[LENGTH // 16] * 16),
        masks.sliding_window(LENGTH // 32),
    ],
    ids=["causal", "documents", "window"],
)
def test_a_round_is_one_launch_forward_and_two_backward(
    mask: Mask, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: dict[int, list[str]] = {}

    def note(launch: Launch, function: object) -> None:
        launched.setdefault(threading.get_ident(), []).append(launch.kernel)

    monkeypatch.setattr(Launch, "run", note)

    def rank(mesh: Any) -> tuple[int, Counter[str], Counter[str]]:
        plan = flexcp.make_plan(mask, LENGTH, mesh, num_heads=4, num_kv_heads=2, head_dim=16)
        rows = plan.positions().numel()
        own = [torch.zeros(1, h, rows, 16, requires_grad=True) for h in (4, 2, 2)]
        out = flexcp.attention(*own, plan, kernel="triton")
        forward = Counter(launched.pop(threading.get_ident()))
        torch.autograd.grad(out, own, torch.zeros_like(out))
        return plan.schedule_of().forward.rounds, forward, Counter(launched[threading.get_ident()])

    for rounds, forward, backward in simulate(rank, RANKS):
        assert forward["forward"] <= rounds
        assert forward == {"forward": forward["forward"]}
        assert backward == {"prep": 1, "dq": forward["forward"], "dkdv": forward["forward"]}


def test_a_later_round_asks_torch_for_nothing_but_its_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Launch, "run", lambda launch, function: None)
    q, k, v = (torch.zeros(1, 2, 64, 16) for _ in range(3))
    shapes, kernel = CompiledShapes(causal_shapes(64)), TritonKernel(INTERPRETER)
    former = kernel.forward(q, k, v, shapes, scale=1.0)
    delta = kernel.delta(q, q, None)
    given = (q, q, k, v, q, former.lse, shapes)
    first = kernel.backward(*given, scale=1.0, delta=delta)
    with Operations() as operations:
        kernel.forward(q, k, v, shapes, scale=1.0, former=former)
        kernel.backward(*given, scale=1.0, delta=delta, grad_q=first.q, grad_kv=(first.k, first.v))
    assert operations.counts == {}
