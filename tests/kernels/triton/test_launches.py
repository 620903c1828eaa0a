"""How much a rank launches: counted with kernels that do nothing, on simulated ranks."""

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flexcp
from flexcp import Mask, masks
from flexcp.kernels.triton.launch import Launch
from flexcp.testing import simulate

RANKS, LENGTH = 8, 8192
NO_LAUNCH = {
    "slice", "narrow", "view", "split", "split_with_sizes", "select", "expand", "transpose",
    "permute", "alias", "unsqueeze", "as_strided", "empty", "new_empty", "empty_like", "empty_strided",
}  # fmt: skip
"""Views, and memory: nothing runs on a device."""
OF_THE_SIMULATION = {"detach", "clone"}
"""Messages between ranks of one process are copies."""


PER_PASS = 6
"""Casts of the results, and room where gradients are added up: once, however many rounds."""


class Operations(TorchDispatchMode):
    """Counts what torch is asked for in one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))

    @property
    def launches(self) -> int:
        others = NO_LAUNCH | OF_THE_SIMULATION
        return sum(n for name, n in self.counts.items() if name not in others)


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(),
        masks.causal() & masks.document(lengths=[LENGTH // 16] * 16),
        masks.sliding_window(LENGTH // 32),
    ],
    ids=["causal", "documents", "window"],
)
def test_a_round_takes_few_launches(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: dict[int, list[str]] = {}

    def note(launch: Launch, function: object) -> None:
        launched.setdefault(threading.get_ident(), []).append(launch.kernel)

    monkeypatch.setattr(Launch, "run", note)

    def rank(mesh: Any) -> tuple[int, int, int, Counter[str], Counter[str]]:
        plan = flexcp.make_plan(mask, LENGTH, mesh, num_heads=4, num_kv_heads=2, head_dim=16)
        rows = plan.positions().numel()
        own = [torch.zeros(1, h, rows, 16, requires_grad=True) for h in (4, 2, 2)]
        for _ in range(2):  # the first call makes the lists
            launched.pop(threading.get_ident(), None)
            with Operations() as forward:
                out = flexcp.attention(*own, plan, kernel="triton")
            kernels_forward = Counter(launched.pop(threading.get_ident()))
            grad = torch.zeros_like(out)
            with Operations() as backward:
                torch.autograd.grad(out, own, grad)
            kernels_backward = Counter(launched.pop(threading.get_ident()))
        rounds = plan.schedule_of().forward.rounds
        return rounds, forward.launches, backward.launches, kernels_forward, kernels_backward

    for rounds, forward, backward, kernels, gradients in simulate(rank, RANKS):
        assert kernels == {"forward": kernels["forward"]}
        assert kernels["forward"] <= rounds
        computed = gradients["dq"]
        assert gradients == {"prep": 1, "dq": computed, "dkdv": computed}
        assert computed <= rounds
        assert forward + kernels.total() <= 4 * rounds + PER_PASS
        assert backward + gradients.total() <= 8 * rounds + PER_PASS
