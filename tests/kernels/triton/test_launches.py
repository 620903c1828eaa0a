"""How much a rank launches: counted with kernels that do nothing, on simulated ranks."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flexcp
from flexcp import Mask, masks
from flexcp.comm.simulated import SimulatedTransport, _SimulatedReceives
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.interface import causal_shapes
from flexcp.kernels.triton.kernel import TritonKernel
from flexcp.kernels.triton.launch import Launch
from flexcp.kernels.triton.tuning import INTERPRETER
from flexcp.testing import simulate

RANKS, LENGTH = 8, 1 << 17
MOST_LAUNCHES = {"forward": 4, "backward": 8}
"""In a round: rows are gathered, a kernel runs; in backward, gradients are cast and summed too."""
MOST_OPERATIONS = 150
"""Of a whole call, forward and backward: all that torch is asked for, copies of messages too."""
STARTS_NOTHING = {
    "permute", "slice", "view", "detach", "empty", "split_with_sizes", "unsqueeze", "transpose",
    "select", "_unsafe_view",
}  # fmt: skip
DOCUMENTS = [9000, 3000, 40000, 1000, 17, 20000, 983, 30000, 27072]
OTHERS = [60000, 11, 30000, 41061]
SMALL = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
LARGE = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
"""What a plan is made for; what runs is small."""


class Operations(TorchDispatchMode):
    """Counts what torch is asked for in one thread, and what the transport asks for apart."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.of_transport = 0
        self.in_transport = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.in_transport:
            self.of_transport += 1
        else:
            self.counts[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))

    @property
    def launches(self) -> int:
        return sum(n for name, n in self.counts.items() if name not in STARTS_NOTHING)


class Counted:
    """Operations of each rank's pass, as it runs in its thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._of: dict[int, Operations] = {}
        monkeypatch.setattr(Launch, "run", lambda launch, _: self._note(launch.kernel))
        for owner, name in ((SimulatedTransport, "exchange"), (_SimulatedReceives, "wait")):
            monkeypatch.setattr(owner, name, self._apart(getattr(owner, name)))

    def _note(self, kernel: str) -> None:
        found = self._of.get(threading.get_ident())
        if found is not None:
            found.counts[kernel] += 1

    def _apart(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def transported(*args: Any, **kwargs: Any) -> Any:
            found = self._of.get(threading.get_ident(), Operations())
            found.in_transport = True
            try:
                return function(*args, **kwargs)
            finally:
                found.in_transport = False

        return transported

    @contextmanager
    def counting(self) -> Iterator[Operations]:
        with Operations() as found:
            self._of[threading.get_ident()] = found
            yield found
        del self._of[threading.get_ident()]


@pytest.mark.parametrize(
    ("mask", "batch", "heads"),
    [
        (masks.causal(), 1, SMALL),  # little to move: all at once
        (masks.causal(), 8, SMALL),  # in many rounds
        (masks.causal() & masks.document(lengths=DOCUMENTS), 1, SMALL),
        (masks.causal() & masks.document(lengths=[DOCUMENTS, OTHERS]), 2, LARGE),
        (masks.sliding_window(LENGTH // 32), 1, SMALL),
    ],
    ids=["causal at once", "causal in rounds", "documents", "documents by element", "window"],
)
def test_a_call_over_ranks_launches_little(
    mask: Mask, batch: int, heads: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    made = flexcp.make_plan(mask, LENGTH, RANKS, batch=batch, **heads)

    def rank(mesh: Any) -> tuple[int, Operations, Operations]:
        plan = made.on(mesh)
        rows, dtype = plan.positions().shape[-1], torch.bfloat16
        own = [torch.zeros(batch, h, rows, 16, dtype=dtype).requires_grad_() for h in (2, 1, 1)]
        out = flexcp.attention(*own, plan, kernel="triton")
        torch.autograd.grad(out, own, gradient := torch.zeros_like(out))
        with counted.counting() as forward:  # the second call finds everything made
            out = flexcp.attention(*own, plan, kernel="triton")
        with counted.counting() as backward:
            torch.autograd.grad(out, own, gradient)
        return plan.schedule_of().forward.rounds, forward, backward

    for rounds, forward, backward in simulate(rank, RANKS):
        kernels = forward.counts["forward"]
        assert kernels <= rounds
        assert [backward.counts[name] for name in ("prep", "dq", "dkdv")] == [1, kernels, kernels]
        of_result = {"forward": 1, "backward": 2}  # what is returned is cast once, at the end
        for name, found in (("forward", forward), ("backward", backward)):
            assert found.launches <= MOST_LAUNCHES[name] * rounds + of_result[name], found.counts
        total = sum(sum(x.counts.values()) for x in (forward, backward))
        if heads is SMALL:  # large plans have more messages, each of which is two copies here
            total += forward.of_transport + backward.of_transport
        assert total <= MOST_OPERATIONS, (forward.counts, backward.counts)


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
