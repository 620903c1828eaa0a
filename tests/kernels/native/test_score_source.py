"""Score functions written in C++: every step beside autograd in float64, on one tile.

Compiling takes half a second, so one function is another one for each head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.interface import full_shapes
from flexcp.kernels.native import build
from flexcp.kernels.native.scores import TILE, CompiledScore, ScoreFields, compiled_score
from flexcp.kernels.score import ScoreMod, examine
from flexcp.testing.tolerance import assert_close
from kernels.score_cases import ARITHMETIC, HEADS, LONGEST, LOOKUPS

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")
CPU = torch.device("cpu")
NATIVE = {"kernel": "native"}
Function = Callable[..., Tensor]


def by_head(functions: Sequence[Function]) -> Function:
    """A function that does to the scores of each head what one of some functions does."""

    def chosen(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        found = s
        for i, function in enumerate(functions):
            found = torch.where(h == i, function(s, b, h % HEADS, q, k).to(s.dtype), found)
        return found

    return chosen


class ScoreTile(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("given", "whole", "real")),
        *((name, ctypes.c_int64) for name in ("batch", "head")),
        *((name, ctypes.c_void_p) for name in ("q_at", "kv_at")),
        ("consecutive", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("first", "last")),
        ("rows", ctypes.c_int64),
    )


def on_a_tile(
    mod: ScoreMod, head: int, s: Tensor, g: Tensor, q_at: Tensor, kv_at: Tensor
) -> tuple[Tensor, Tensor]:
    """The scores of a tile, changed, and their gradients."""
    mod = replace(mod, captured=())
    code = compiled_score(mod, ())
    assert isinstance(code, CompiledScore), code
    shapes = replace(full_shapes(len(q_at), len(kv_at)), q_positions=q_at, kv_positions=kv_at)
    compiled = CompiledShapes(shapes)
    arguments = ScoreFields.of(mod, compiled, ())
    given = arguments.fields
    even = compiled.tiled_positions("q", TILE).consecutive[0]
    even = even & compiled.tiled_positions("kv", TILE).consecutive[0]
    first, last = ((ctypes.c_int * TILE)(*[x] * TILE) for x in (0, TILE))
    tile = ScoreTile(
        given["score_given"], given["score_whole"], given["score_real"], 1, head, given["q_at"],
        given["kv_at"], int(even), ctypes.addressof(first), ctypes.addressof(last), len(q_at),
    )  # fmt: skip
    value, slope = (torch.zeros(TILE * TILE + 64) for _ in range(2))
    value, slope = (
        x[-x.data_ptr() % 64 // 4 :][: TILE * TILE].view(TILE, TILE) for x in (value, slope)
    )
    value[: len(q_at), : len(kv_at)], slope[: len(q_at), : len(kv_at)] = s, g
    raw = aligned_tile().copy_(value)
    pointers = (ctypes.c_void_p,) * 3
    call = ctypes.CFUNCTYPE(None, *pointers)(code.pull_back)
    call(ctypes.addressof(tile), raw.data_ptr(), slope.data_ptr())
    ctypes.CFUNCTYPE(None, *pointers[:2])(code.score)(ctypes.addressof(tile), value.data_ptr())
    del arguments  # which the call reads
    return value[: len(q_at), : len(kv_at)], slope[: len(q_at), : len(kv_at)]


def aligned_tile() -> Tensor:
    memory = torch.zeros(TILE * TILE + 16)
    return memory[-memory.data_ptr() % 64 // 4 :][: TILE * TILE].view(TILE, TILE)


PLACES = {
    "in order": (torch.arange(TILE), torch.arange(20, 20 + TILE - 7)),
    "anywhere": tuple(torch.randint(0, LONGEST, (2, TILE), generator=torch.Generator())),
}
APART = ("a divisor that is not known", "in place")
NAMES = [name for name in (*ARITHMETIC, *LOOKUPS) if name not in APART]
PARTS = [NAMES[:10], NAMES[10:20], NAMES[20:30], NAMES[30:], ["in place"]]
EVERY = {**ARITHMETIC, **{name: function for name, (function, _) in LOOKUPS.items()}}


@pytest.mark.parametrize("names", PARTS, ids=" ".join)
def test_every_step_is_the_one_of_torch(names: list[str]) -> None:
    mod = examine(by_head([EVERY[name] for name in names]), torch.float32, CPU)
    s, g = torch.randn(TILE, TILE) * 2, torch.randn(TILE, TILE)
    for q_at, kv_at in PLACES.values():
        for head, name in enumerate(names):
            own = s[: len(q_at), : len(kv_at)], g[: len(q_at), : len(kv_at)]
            value, slope = on_a_tile(replace(mod, first_batch=1), head, *own, q_at, kv_at)
            exact = own[0].double().requires_grad_()
            given = (torch.tensor(x).view(1, 1) for x in (2, head))
            wanted = mod.function(exact, *given, q_at[:, None], kv_at).expand(exact.shape)
            (right,) = torch.autograd.grad(wanted, exact, own[1].double())
            assert_close(value, wanted, dtype=torch.float32, what=name)
            assert_close(slope, right, dtype=torch.float32, what=f"slope of {name}", factor=2)


SPECIAL = [
    0.0,
    -0.0,
    1e-38,
    1e-30,
    3e-5,
    0.3,
    0.6,
    0.93,
    1.0,
    3.9,
    7.9,
    8.1,
    44.4,
    87.0,
    88.7,
    103.0,
]
SPECIAL += [127.9, 128.0, 149.0, 4e3, 1e4, 1e7, 3e9, 1e20, 3e38, torch.inf, torch.nan]
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    name: getattr(torch, name)
    for name in (
        "tanh", "erf", "exp", "exp2", "log", "log1p", "log2", "sin", "cos", "sigmoid", "floor",
        "ceil", "trunc", "sqrt", "rsqrt", "sign", "abs",
    )
}  # fmt: skip


def test_functions_are_right_from_end_to_end() -> None:
    """Also where they overflow or vanish, and of what is not a number."""
    functions = [lambda s, b, h, q, k, of=of: of(s) for of in UNARY.values()]
    mod = examine(by_head(functions), torch.float32, CPU)
    values = torch.tensor([*SPECIAL, *(-x for x in SPECIAL)])
    s = torch.cat([values, torch.linspace(-20, 20, TILE * TILE - len(values))]).view(TILE, TILE)
    for head, (name, of) in enumerate(UNARY.items()):
        found, _ = on_a_tile(mod, head, s, s, *(torch.arange(TILE),) * 2)
        exact = of(s.double())
        wanted = exact.float()
        normal = wanted.isfinite() & (wanted.abs() > 1.2e-38)
        off = ((found - exact) / exact).abs()[normal]
        assert float(off.max()) < 1e-6, (name, s[normal][off.argmax()])
        assert torch.equal(found.isnan(), wanted.isnan()), name
        infinite = wanted.isinf()
        assert torch.equal(found[infinite], wanted[infinite]), name
        small = wanted.abs() <= 1.2e-38
        assert float(found[small].abs().max() if small.any() else 0) <= 1.3e-38, name
