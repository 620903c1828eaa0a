"""The whole CUDA path on shapes, types and devices alone: no CUDA tensor is read on the way.

torch's guard for CUDA devices is not part of its CPU builds, so one that does nothing is compiled
for these tests. The autograd engine needs a device; what it would call is called directly.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import AuxOutput

import flexcp
from flexcp import Mask, masks
from flexcp.kernels import flex
from flexcp.kernels.triton.launch import Launch
from flexcp.kernels.varlen import VarlenOps
from flexcp.ops.autograd import Attention
from flexcp.testing.tolerance import assert_close
from kernels.cases import problem

LENGTH = 1700

PATTERNS: dict[str, Mask | None] = {
    "full": None,
    "causal": masks.causal(),
    "documents": masks.causal() & masks.document(lengths=[300, 37, 1300, 63]),
    "window": masks.sliding_window(150),
    "by head": Mask(lambda b, h, q, kv: (q >= kv) & (q - kv < 100 * (h + 1))),
    "fully masked rows": Mask(lambda b, h, q, kv: q >= kv + 200),
}

_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}
"""


@pytest.fixture(scope="session")
def cuda_guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    if torch.backends.cuda.is_built():
        return
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("a CPU build of torch needs a C++ compiler here")
    torch_at = Path(torch.__file__).parent
    folder = tmp_path_factory.mktemp("guard")
    (folder / "guard.cpp").write_text(_GUARD)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-std=c++20", f"-I{torch_at}/include", "guard.cpp",
         f"-L{torch_at}/lib", "-lc10", "-o", "guard.so"],
        cwd=folder, check=True,
    )  # fmt: skip
    ctypes.CDLL(str(folder / "guard.so"))


@pytest.fixture
def shapes_only(cuda_guard: None) -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def _tensors(dtype: torch.dtype, kv_heads: int) -> list[Tensor]:
    return [
        torch.empty(2, heads, LENGTH, 64, dtype=dtype, device="cuda", requires_grad=True)
        for heads in (4, kv_heads, kv_heads)
    ]


def _alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score - 0.1 * (h + 1) * (q - kv)


def _unknown_to_triton(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return _alibi(torch.special.i0(score), b, h, q, kv)


def _assert_like(found: Tensor, x: Tensor) -> None:
    assert (found.shape, found.dtype, found.device) == (x.shape, x.dtype, x.device)


@pytest.mark.usefixtures("shapes_only")
@pytest.mark.parametrize(("name", "kv_heads"), [*zip(PATTERNS, cycle([2, 4]))])
def test_attention_runs_there_and_back(name: str, kv_heads: int) -> None:
    dtype = torch.bfloat16 if kv_heads == 2 else torch.float32
    q, k, v = _tensors(dtype, kv_heads)
    sinks = torch.empty(4, dtype=dtype, device="cuda", requires_grad=True)
    out, lse = flexcp.flex_attention(
        q, k, v, block_mask=PATTERNS[name], enable_gqa=True, return_lse=True, sinks=sinks,
        kernel_options={"kernel": "flash"},
    )  # fmt: skip
    _assert_like(out, q)
    assert (lse.shape, lse.dtype, lse.device.type) == (q.shape[:3], torch.float32, "cuda")
    grad_lse = lse.detach() if name == "window" else None
    grads = Attention.backward(out.grad_fn, out.detach(), grad_lse, None)
    for grad, x in zip(grads[1:], (q, k, v, sinks), strict=True):
        _assert_like(grad, x)


@pytest.mark.usefixtures("shapes_only")
@pytest.mark.parametrize("name", ["full", "documents", "by head"])
def test_score_functions_run_forward(name: str) -> None:
    """Differentiating them takes the autograd engine, and a CUDA build."""
    q, k, v = _tensors(torch.float16, 2)
    out = flexcp.flex_attention(
        q, k, v, _alibi, PATTERNS[name], enable_gqa=True, kernel_options={"kernel": "scored"}
    )
    _assert_like(out, q)


@pytest.mark.usefixtures("shapes_only")
@pytest.mark.parametrize("score_mod", [None, _unknown_to_triton], ids=["plain", "scored"])
@pytest.mark.parametrize("name", ["causal", "documents", "window"])
def test_torchs_flex_attention_is_handed_what_it_takes(
    name: str, score_mod: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(q, k, v, mod, block_mask, scale, gqa, _, options, return_aux):  # type: ignore[no-untyped-def]
        assert gqa
        assert not options
        lists = block_mask.as_tuple()
        assert all(x.device.type == "cuda" for x in lists if isinstance(x, Tensor))
        assert tuple(block_mask.seq_lengths) == (LENGTH, LENGTH)
        mod = mod or (lambda score, b, h, q, kv: score)
        with torch.no_grad():
            out, lse, _ = torch.ops.higher_order.flex_attention(
                q, k, v, mod, lists, scale, {}, (), ()
            )
        assert return_aux.lse
        return out, AuxOutput(lse=lse)

    monkeypatch.setattr(flex, "compiled_flex_attention", lambda: attend)
    q, k, v = (x.detach() for x in _tensors(torch.bfloat16, 2))
    out, lse = flexcp.flex_attention(
        q, k, v, score_mod, PATTERNS[name], enable_gqa=True, return_lse=True,
        kernel_options=None if score_mod else {"kernel": "flex"},
    )  # fmt: skip
    _assert_like(out, q)
    assert (lse.shape, lse.device.type) == (q.shape[:3], "cuda")


@pytest.mark.usefixtures("shapes_only")
def test_masks_and_score_functions_go_to_the_triton_kernels_unless_torchs_are_tuned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[str] = []
    monkeypatch.setattr(Launch, "run", lambda launch, function: launched.append(launch.kernel))
    monkeypatch.setattr(flex, "compiled_flex_attention", lambda: _refused)
    monkeypatch.setattr(VarlenOps, "refuses", lambda *_: "it is left out here")
    q, k, v = _tensors(torch.bfloat16, 2)
    out = flexcp.flex_attention(q, k, v, block_mask=masks.causal(), enable_gqa=True)
    _assert_like(out, q)
    Attention.backward(out.grad_fn, out.detach(), None, None)
    assert launched == ["forward", "prep", "dq", "dkdv"]
    scored = flexcp.flex_attention(q, k, v, _alibi, enable_gqa=True)
    _assert_like(scored, q)
    Attention.backward(scored.grad_fn, scored.detach(), None, None)
    assert launched == ["forward", "prep", "dq", "dkdv"] * 2
    with pytest.raises(NotImplementedError, match="torch's own kernels"):
        flexcp.flex_attention(
            q, k, v, block_mask=masks.causal(), enable_gqa=True, kernel_options={"BLOCK_M": 64}
        )


def _refused(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError("torch's own kernels")


def test_what_was_planned_without_numbers_serves_them_afterwards() -> None:
    mask = masks.sliding_window(30)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + 0.1 * (q - kv)

    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 4, 333, 8, dtype=torch.float64)
        for mod in (None, score_mod):
            assert flexcp.flex_attention(x, x, x, mod, mask).shape == x.shape
    p = problem(kv_heads=4)
    for mod in (None, score_mod):
        found = flexcp.flex_attention(p.q, p.k, p.v, mod, mask)
        assert_close(found, p.expected(mask, mod).out)
