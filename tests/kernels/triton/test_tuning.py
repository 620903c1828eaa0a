"""Which tiles are used, and what is refused: types, head dims, versions, devices."""

from itertools import product

import pytest
import torch

from flexcp import FlexCPError
from flexcp.kernels import choose, explain, refusals, registry
from flexcp.kernels.triton import available
from flexcp.kernels.triton.tuning import ARCHITECTURES, TABLE, parse_tile, tuning_for


def x(dim: int = 64, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(1, 4, 8, dim, dtype=dtype)


def test_every_architecture_has_tiles_for_every_type_and_head_dim() -> None:
    assert set(TABLE) == set(product(ARCHITECTURES, ("half", "single"), (64, 128, 256)))
    for arch in ARCHITECTURES:
        for dim in (16, 80, 200, 256):
            tuning_for(arch, dim, 64, torch.bfloat16)


def test_an_unknown_architecture_gets_the_nearest_and_is_told() -> None:
    for arch, nearest in (("sm_86", "sm_80"), ("sm_103", "sm_100"), ("gfx950", "gfx942")):
        found, why = tuning_for(arch, 64, 64, torch.bfloat16)
        assert found.arch == nearest
        assert why[0] == f"tiles of {nearest}, the nearest to {arch} that was tuned"


def test_gpus_with_less_shared_memory_get_smaller_tiles_where_others_would_not_fit() -> None:
    assert str(tuning_for("sm_89", 256, 64, torch.bfloat16)[0].forward) == "64x32 w8 s2"
    for dim, dtype in ((64, torch.float32), (128, torch.float16), (256, torch.float32)):
        assert tuning_for("sm_89", dim, dim, dtype)[0] == tuning_for("sm_80", dim, dim, dtype)[0]


def test_a_kernel_by_name_says_its_tiles() -> None:
    text = explain(x(), x(), kernel="triton: forward=32x16 w2 s1")
    assert "it was asked for by name" in text
    assert "tiles of interpreter" in text
    assert "forward=32x16 w2 s1, dq=64x64 w4 s1" in text


@pytest.mark.parametrize("text", ["128x64", "100x64 w4 s2", "8x64 w4 s2", "64x64 w3 s2", "fast"])
def test_a_tile_that_cant_be_is_refused(text: str) -> None:
    with pytest.raises(FlexCPError, match="a tile such as '128x64 w8 s3'"):
        parse_tile(text)


def test_tiles_of_a_kernel_that_does_not_exist_are_refused() -> None:
    with pytest.raises(FlexCPError, match=r"tiles for 'forward', .*, got 'backwards=64x64 w4 s2'"):
        choose(x(), x(), kernel="triton: backwards=64x64 w4 s2")


def test_what_the_kernels_cant_compute_is_refused_by_name() -> None:
    for tensor, message in (
        (
            x(dtype=torch.float64),
            "bfloat16 or float16 for the kernel 'triton', got torch.float64",
        ),
        (x(dim=257), "head dims from 1 to 256 for the kernel 'triton', got 257 and 257"),
    ):
        with pytest.raises(FlexCPError, match=message):
            choose(tensor, tensor, kernel="triton")
    with pytest.raises(FlexCPError, match="takes score_mod, got kernel 'triton'"):
        choose(x(), x(), kernel="triton", score_mod=True)
    with pytest.raises(FlexCPError, match="takes max_scores, got kernel 'triton'"):
        choose(x(), x(), kernel="triton", max_scores=True)


def test_without_triton_asking_for_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "triton_version", lambda: None)
    with pytest.raises(FlexCPError, match=r"pip install 'triton~=3\.9\.0'"):
        choose(x(), x(), kernel="triton")


def test_an_untested_version_is_refused_unless_every_tile_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (available, registry):
        monkeypatch.setattr(module, "triton_version", lambda: "3.4.2")
    with pytest.raises(FlexCPError, match=r"3\.7 to 3\.9, .* got Triton 3\.4\.2; pip install"):
        choose(x(), x(), kernel="triton")
    tiles = "triton: forward=64x32 w4 s2, dq=64x32 w4 s2, dkdv=32x32 w4 s2"
    assert "Triton 3.4.2" in str(choose(x(), x(), kernel=tiles))


@pytest.mark.parametrize("version", [None, "3.4.2"])
def test_where_triton_cant_be_used_a_gpu_gets_the_other_kernels_and_the_reason(
    version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for module in (registry, refusals):
        monkeypatch.setattr(module, "triton_version", lambda: version)
    with FakeTensorMode():
        q = torch.empty(1, 4, 64, 64, dtype=torch.bfloat16, device="cuda")
        assert choose(q, q).kernel == "flex"
        choice = choose(q, q, partial=True)
        assert choice.kernel == "flash"
        assert "not the Triton kernels" in str(choice)


def test_cpu_tensors_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "interprets", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(FlexCPError, match=r"got tensors on cpu; .* set TRITON_INTERPRET=1 before"):
        choose(x(), x(), kernel="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(FlexCPError, match="Triton was imported before it was set"):
        choose(x(), x(), kernel="triton")


def test_ranks_need_a_kernel_that_returns_partial_results() -> None:
    for kernel in ("flex", "reference"):
        with pytest.raises(FlexCPError, match="a kernel that returns partial results"):
            choose(x(), x(), partial=True, kernel=kernel)


def test_values_of_half_the_head_dim_get_tiles_that_do_not_spill_on_sm_90() -> None:
    narrow, wide = (tuning_for("sm_90", 192, dim, torch.bfloat16)[0] for dim in (128, 192))
    assert str(narrow.forward) == "128x32 w8 s2 tma"
    assert str(wide.forward) == "128x64 w8 s2 tma"
    assert narrow.dq == wide.dq
