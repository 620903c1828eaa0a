"""The doctor's file: read where it was made, put aside with a sentence everywhere else."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

import flexcp
from flexcp import FlexCPError, masks, testing
from flexcp.kernels import preferences
from flexcp.kernels.mask_kinds import KINDS
from flexcp.kernels.preferences import KernelOrder, preferences_for, write_preferences
from flexcp.kernels.registry import Choice, _as_measured, choose, explain

CPU = torch.device("cpu")
SLOW_FLASH = ("scored", "flash")


def order(kind="causal", kernels=SLOW_FLASH, dtype="float32", head_dim=16):
    return KernelOrder(kind, dtype, head_dim, tuple(kernels), tuple(float(n) for n in range(2)))


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv(preferences.VARIABLE, str(tmp_path / "deep" / "doctor.json"))
    yield tmp_path / "deep" / "doctor.json"
    preferences.forget_preferences()


def x():
    return torch.randn(1, 4, 40, 16)


def by_rules():
    """The kernel where nothing was measured."""
    return choose(x(), x()).kernel


def test_the_registry_takes_what_was_measured_as_the_fastest(path):
    assert choose(x(), x(), mask_kind=lambda: "causal").kernel == by_rules()
    write_preferences(path, CPU, [order()])
    assert choose(x(), x(), mask_kind=lambda: "causal").kernel == "scored"
    assert choose(x(), x(), mask_kind=lambda: "window").kernel == by_rules()
    assert choose(x(), x(), dropout=True, mask_kind=lambda: "causal").kernel == by_rules()
    assert by_rules() in ("native", "flash")
    assert choose(x().double(), x().double(), mask_kind=lambda: "causal").kernel == "flash"


def test_explain_says_that_a_measurement_decided(path):
    write_preferences(path, CPU, [order()])
    text = explain(x(), x(), mask_kind="causal")
    assert text.startswith("scored")
    assert "as flexcp doctor has measured with float32 and head dim 16" in text
    assert "by name" not in text
    assert "doctor" not in explain(x(), x(), mask_kind="window")
    with pytest.raises(FlexCPError, match="'documents'"):
        explain(x(), x(), mask_kind="docs")


def test_a_fastest_kernel_that_cant_leaves_it_to_the_next(path):
    write_preferences(path, CPU, [order(kernels=("flex", "scored")), order("score function")])
    assert choose(x(), x(), mask_kind=lambda: "causal").kernel == "scored"
    chosen = choose(x(), x(), score_mod=True, mask_kind=lambda: "causal")
    assert chosen.kernel == "scored"
    assert chosen.reasons[0].startswith("score function: ")


def test_a_kernel_asked_for_by_name_is_what_one_gets(path):
    write_preferences(path, CPU, [order()])
    assert choose(x(), x(), kernel="flash", mask_kind=lambda: "causal").kernel == "flash"


def test_the_nearest_head_dim_counts(path):
    small, large = order(head_dim=32), order(head_dim=128, kernels=("flash", "scored"))
    write_preferences(path, CPU, [small, large])
    known = preferences_for(CPU)
    assert known.order("causal", torch.float32, 64) == small
    assert known.order("causal", torch.float32, 96) == large


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda d: "", "it is damaged"),
        (lambda d: json.dumps(d)[:-20], "it is damaged"),
        (lambda d: json.dumps([d]), "it is damaged"),
        (lambda d: json.dumps(d).replace('"scored"', '"slower"', 1), "it is damaged"),
        (lambda d: json.dumps({**d, "format": 99}), "it has format 99"),
        (lambda d: sealed(d, versions={"torch": "1.0"}), "was made with flexcp None, and this is"),
        (
            lambda d: sealed(d, versions={**d["versions"], "torch": "2.0"}),
            "it was made with torch 2.0",
        ),
        (
            lambda d: sealed(d, devices={"cpu": {"name": "an abacus", "orders": []}}),
            "it was measured on an abacus, and this is",
        ),
        (lambda d: sealed(d, devices={"cpu": {"name": 1}}), "it was measured on 1"),
        (lambda d: sealed(d, devices=[]), "it is damaged"),
    ],
)
def test_a_file_that_cant_be_believed_is_put_aside_with_a_sentence(path, damage, sentence):
    write_preferences(path, CPU, [order()])
    path.write_text(damage(json.loads(path.read_text())))
    preferences.forget_preferences()
    with pytest.warns(UserWarning, match="run `flexcp doctor` to measure anew") as warned:
        chosen = choose(x(), x(), mask_kind=lambda: "causal")
    assert chosen.kernel == by_rules()
    assert sentence in str(warned[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert sentence in explain(x(), x(), mask_kind="causal")
        assert sentence in explain(x(), x())


def sealed(content, **changes):
    content = {**content, **changes}
    content.pop("checksum")
    return json.dumps({**content, "checksum": preferences._checksum(content)})


def test_what_a_file_says_of_other_devices_stays_and_says_nothing_here(path):
    write_preferences(path, torch.device("cuda"), [order()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert preferences_for(CPU).orders == ()
    write_preferences(path, CPU, [order()])
    assert set(json.loads(path.read_text())["devices"]) == {"cpu", "cuda"}
    assert [*path.parent.iterdir()] == [path]


def test_the_file_is_in_the_users_cache_unless_a_variable_says_otherwise(monkeypatch, tmp_path):
    monkeypatch.setenv(preferences.VARIABLE, "")
    assert preferences.preferences_path() is None
    monkeypatch.delenv(preferences.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert preferences.preferences_path() == tmp_path / "flexcp" / "doctor.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert preferences.preferences_path() == tmp_path / "home" / ".cache" / "flexcp" / "doctor.json"


MASKS = {
    "full": masks.full(),
    "causal": masks.causal(),
    "documents": masks.causal() & masks.document(lengths=[100, 60, 96]),
    "window": masks.sliding_window(40),
    "arbitrary": flexcp.Mask(lambda b, h, q, kv: (q * kv) % 7 < 3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_a_mask_is_read_off_its_slabs(kind):
    grid = flexcp.build_block_grid(MASKS[kind], 256)
    assert flexcp.kernels.compiled_shapes_of(grid).kind == kind


def test_calls_on_one_device_and_over_a_plan_take_the_measured_kernel(path, monkeypatch):
    write_preferences(path, CPU, [order(kind) for kind in KINDS])
    q, k, v = (torch.randn(1, 2, 64, 16) for _ in range(3))
    mask = masks.causal()
    expected = flexcp.flex_attention(q, k, v, block_mask=mask, kernel_options={"kernel": "scored"})
    assert torch.equal(flexcp.flex_attention(q, k, v, block_mask=mask), expected)

    def rank(mesh):
        plan = flexcp.make_plan(mask, 64, mesh, num_heads=2, head_dim=16, dtype=torch.float32)
        local = [plan.shard(t, 2) for t in (q, k, v)]
        own = flexcp.attention(*local, plan)
        return torch.equal(own, flexcp.attention(*local, plan, kernel="scored"))

    assert testing.simulate(rank, 2) == [True, True]


def test_the_variable_length_op_is_preferred_with_a_kernel_for_what_it_cant_express():
    ops, tuned = object(), Choice("triton", None, ("it was asked for by name", "Triton"))
    known = {
        "varlen": Choice("varlen", None, (), varlen=ops),
        "flex": Choice("flex", None, ()),
        "triton": tuned,
    }
    found = _as_measured(order(kernels=("varlen", "flex", "triton")), known.__getitem__)
    assert (found.kernel, found.varlen) == ("triton", ops)
    assert found.reasons[0].startswith("causal: the first that can, of varlen, flex, triton")
    assert found.reasons[1:] == ("Triton",)
    first = _as_measured(order(kernels=("flex", "varlen", "triton")), known.__getitem__)
    assert (first.kernel, first.varlen) == ("flex", None)
    assert _as_measured(order(kernels=("varlen",)), known.__getitem__) is None
