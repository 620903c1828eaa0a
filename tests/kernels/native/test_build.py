"""Compiling the C++ kernel: once, for the processor, and not trusted before it was right."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flexcp
from flexcp import masks
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.dropout import Dropout
from flexcp.kernels.interface import Partial
from flexcp.kernels.native import build, library
from flexcp.kernels.native.build import BuildError, built
from flexcp.kernels.native.kernel import NativeKernel
from flexcp.kernels.native.library import Library, load
from flexcp.kernels.registry import choose, explain
from flexcp.kernels.shapes import shapes_of
from flexcp.testing.tolerance import assert_close
from kernels.cases import MASKS

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")


@pytest.fixture
def nothing_loaded() -> Iterator[None]:
    library.library.cache_clear()
    yield
    library.library.cache_clear()


def x(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(1, 4, 200, 16, dtype=dtype)


@needs_compiler
@pytest.mark.parametrize("width", [4, 8, 16])
def test_vectors_of_every_width_give_the_same_result(width: int) -> None:
    """Wider ones than the processor's are emulated: so what runs elsewhere is tried here."""
    kernel = NativeKernel(load(built(extra=(f"-DFLEXCP_WIDTH={width}",))))
    own = library.library()
    assert isinstance(own, Library)
    second = CompiledShapes(
        shapes_of(flexcp.build_block_grid(masks.document(lengths=[40, 293]), 333))
    )
    for name in ("documents", "noise", "window", "by head"):
        mask = MASKS[name]()
        compiled = CompiledShapes(shapes_of(flexcp.build_block_grid(mask, 333, batch=1, heads=4)))
        q, k, v = torch.randn(1, 4, 333, 20), torch.randn(1, 2, 333, 20), torch.randn(1, 2, 333, 9)
        poisoned = v.clone()
        poisoned[:, :, 5] = torch.inf  # of the next round's first document
        dropout = Dropout(0.2, 7) if name == "documents" else None
        runs = []
        for tried in (kernel, NativeKernel(own)):
            found = tried.forward(q, k, v, compiled, scale=0.3, dropout=dropout)
            back = tried.backward(
                found.out.cos(), q, k, v, found.out, found.lse, compiled, scale=0.3, dropout=dropout
            )
            former = Partial(found.out.clone(), found.lse.clone())
            more = tried.forward(q, k, poisoned, second, scale=0.3, former=former)
            runs.append((found.out, found.lse, back.q, back.k, back.v, more.out, more.lse))
        for actual, wanted in zip(*runs, strict=True):
            assert_close(actual, wanted)
        assert runs[0][5][:, :, :40].isinf().any()
        assert runs[0][5][:, :, 40:].isfinite().all()


@needs_compiler
def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = built()
    assert first.is_relative_to(tmp_path / "flexcp")
    monkeypatch.setattr(build, "_compile", None)
    assert built() == first
    assert built(extra=()) == first


@needs_compiler
@pytest.mark.parametrize("home", ["a file", None], ids=["unwritable", "none"])
def test_without_a_cache_a_process_has_its_own(
    home: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").write_text("")
    folder = None if home is None else tmp_path / home / "flexcp"
    monkeypatch.setattr(build, "cache_folder", lambda: folder)
    made = []

    def pretend(command: str, extra: tuple[str, ...], score: str | None, to: Path) -> None:
        made.append(to)
        to.write_bytes(b"")

    monkeypatch.setattr(build, "_compile", pretend)
    path = built(extra=(f"-DHOME={home is None}",))
    assert path == made[0]
    assert not path.is_relative_to(tmp_path)
    path.unlink()


@pytest.mark.usefixtures("nothing_loaded")
def test_without_a_compiler_fused_ops_compute_and_it_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert choose(x(), x()).kernel == "flash"
    assert "not in C++: no C++ compiler was found (g++, c++)" in explain(x(), x())
    with pytest.raises(flexcp.FlexCPError, match=r"no C\+\+ compiler was found"):
        flexcp.flex_attention(x(), x(), x(), kernel_options={"kernel": "native"})
    q = x()
    found = flexcp.flex_attention(q, q, q, block_mask=masks.causal())
    right = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert_close(found, right)


@needs_compiler
def test_what_a_compiler_says_is_passed_on() -> None:
    with pytest.raises(BuildError, match=r"failed: .*error.*not there"):
        built(extra=("-include", "not there"))


@needs_compiler
def test_what_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_TOLERANCE", 0.0)
    with pytest.raises(BuildError, match=r"wrong by .* on this processor"):
        load(built())


@needs_compiler
@pytest.mark.usefixtures("nothing_loaded")
def test_a_damaged_file_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = build._key(build.compiler(), (), None)
    pretended = tmp_path / "flexcp" / "native" / f"attention-{key}.so"
    pretended.parent.mkdir(parents=True)
    pretended.write_bytes(b"damaged")
    assert isinstance(library.library(), Library)


@needs_compiler
@pytest.mark.usefixtures("nothing_loaded")
def test_the_first_call_may_be_checkpointed_or_transformed() -> None:
    """What is computed to check the kernel is nobody else's to save, count or differentiate."""
    q = x().requires_grad_()
    saved: list[torch.Size] = []

    def note(t: torch.Tensor) -> torch.Tensor:
        saved.append(t.shape)
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        flexcp.flex_attention(q, q, q)
    assert set(saved) <= {q.shape, q.shape[:3]}
    library.library.cache_clear()
    given = x()
    found = torch.func.grad(lambda k: flexcp.flex_attention(given, k, given).sum())(given)
    assert found.shape == given.shape


def test_a_file_that_is_no_library_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "damaged.so").write_bytes(b"damaged")
    with pytest.raises(BuildError, match="can't be loaded"):
        load(tmp_path / "damaged.so")


@needs_compiler
@pytest.mark.usefixtures("nothing_loaded")
def test_the_first_call_may_be_inside_of_a_graph() -> None:
    """Where there is no autograd, and tensors without numbers while it is traced."""
    q, k, v = (x().requires_grad_() for _ in range(3))
    compiled = torch.compile(flexcp.flex_attention, backend="aot_eager", fullgraph=True)
    out = compiled(q, k, v, block_mask=masks.causal())
    found = torch.autograd.grad(out.sum(), (q, k, v))
    assert isinstance(library.library(), Library)
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    for actual, wanted in zip(found, torch.autograd.grad(right.sum(), (q, k, v)), strict=True):
        assert_close(actual, wanted)


@needs_compiler
def test_it_is_chosen_for_what_it_is_faster_for() -> None:
    assert choose(x(), x()).kernel == "native"
    assert choose(x(), x(), dropout=True).kernel == "native"
    assert choose(x(), x(), max_scores=True).kernel == "native"
    assert choose(x(torch.float64), x(torch.float64)).kernel == "flash"
    assert "needs 32 queries" in explain(x()[:, :, :31], x())
    assert choose(x(), x(), score_mod=True).kernel == "scored"
