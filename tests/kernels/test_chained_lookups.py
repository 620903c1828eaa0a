"""Lookups in steps: on tiles as on single scores, values and gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flexcp.kernels.score import examine

CPU = torch.device("cpu")
TABLE = torch.randn(3, 7, 9, requires_grad=True)
IDS = torch.arange(9) % 7
CHOSEN = torch.tensor([2, 0])

IN_STEPS: dict[str, Callable[..., Tensor]] = {
    "one by one": lambda s, b, h, q, k: s + TABLE[h][q][k],
    "one, then two": lambda s, b, h, q, k: s * TABLE[h][q, k],
    "two, then one": lambda s, b, h, q, k: s * TABLE[h, q][k],
    "by a number between": lambda s, b, h, q, k: s * TABLE[h][0][k] + TABLE[1][q][k],
    "by what is computed": lambda s, b, h, q, k: s + TABLE[h % 2][IDS[q]][(q + k) % 9],
    "of what is chosen before": lambda s, b, h, q, k: s + TABLE[CHOSEN][h % 2][q, k],
}


@pytest.mark.parametrize("name", IN_STEPS)
def test_a_tile_is_looked_up_as_its_scores_are(name: str) -> None:
    function = IN_STEPS[name]
    mod = examine(function, torch.float32, CPU)
    assert mod.on_tiles
    given = torch.randn(2, 3, 4, 5), torch.arange(2), torch.arange(3).expand(2, 3)
    q, k = torch.tensor([6, 1, 0, 3]), torch.tensor([8, 2, 5, 0, 7])
    found = mod.apply(*given, q, k)
    mapped = function
    for dims in ((0, *[None] * 3, 0), (0, *[None] * 2, 0, None), (0, None, 0, None, None)):
        mapped = torch.func.vmap(mapped, in_dims=dims)
    mapped = torch.func.vmap(mapped, in_dims=(0, 0, 0, None, None))
    wanted = mapped(*given, q, k)
    assert torch.equal(found, wanted)
    weights = torch.randn_like(wanted)
    grads = [torch.autograd.grad(x, TABLE, weights)[0] for x in (found, wanted)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, k: s + TABLE[h].sum(),
        lambda s, b, h, q, k: s + TABLE[h][:, 0][q],
        lambda s, b, h, q, k: s + TABLE[h][q].max(),
    ],
)
def test_what_is_left_of_a_tensor_is_for_lookups_alone(function: Callable[..., Tensor]) -> None:
    mod = examine(function, torch.float32, CPU)
    assert not mod.on_tiles
    assert "'index', which does not act on each score alone" in str(mod.unlike)
