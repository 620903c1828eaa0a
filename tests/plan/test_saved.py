"""Plans in files: what is loaded is what was saved, or an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flexcp
from flexcp import FlexCPError, load_plan, make_plan, masks, save_plan, testing


def near(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 40)


CASES = {
    "causal": (masks.causal(), 1000, 4, {}),
    "heads": (masks.document(lengths=[100, 900]), 1000, (2, 2), {"schedule": "hybrid"}),
    "ulysses": (masks.full(), 999, 4, {"schedule": "ulysses", "num_kv_heads": 2}),
    "elements": (
        masks.document(lengths=[[100, 400], [250, 250]]) & masks.causal(), 500, 3, {"batch": 2},
    ),
    "several": (
        {"a": masks.causal(), "b": masks.sliding_window(3) | masks.shared_prefix(10, [490, 500])},
        1000, 3, {"dtype": torch.float32},
    ),
    "own": (near, 300, 3, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_loaded_plan_is_the_plan(name, tmp_path):
    mask, length, ranks, options = CASES[name]
    plan = make_plan(mask, length, ranks, num_heads=8, block_size=64, **options)
    save_plan(plan, tmp_path / "plan.json")
    other = load_plan(tmp_path / "plan.json", mask=mask if name == "own" else None)
    assert other.to_json() == plan.to_json()
    assert other.fingerprint() == plan.fingerprint()
    assert other.explain() == plan.explain()
    other.check()


def test_a_loaded_plan_runs(tmp_path):
    mask = masks.causal() & masks.document(lengths=[40, 24])
    save_plan(make_plan(mask, 64, 2, block_size=8), tmp_path / "plan.json")
    q = torch.randn(1, 1, 64, 64)

    def rank(mesh):
        plan = load_plan(tmp_path / "plan.json").on(mesh)
        local = plan.shard(q, 2)
        return plan.unshard(flexcp.attention(local, local, local, plan), 2)

    expected = flexcp.flex_attention(q, q, q, block_mask=mask)
    torch.testing.assert_close(testing.simulate(rank, 2)[0], expected)


def test_functions_of_modules_are_found_by_name(tmp_path, monkeypatch):
    (tmp_path / "saved_masks_of_a_test.py").write_text(
        "def back(b, h, q_idx, kv_idx):\n    return q_idx >= kv_idx\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from saved_masks_of_a_test import back  # type: ignore[import-not-found]

    plan = make_plan(flexcp.Mask(back) & masks.chunked(10), 100, 2)
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").to_json() == plan.to_json()


def test_another_mask_is_an_error(tmp_path):
    save_plan(make_plan(masks.causal(), 100, 2), tmp_path / "plan.json")
    with pytest.raises(FlexCPError, match=r"the masks that the plan .* was made for, got others"):
        load_plan(tmp_path / "plan.json", mask=masks.full())


def test_another_mask_with_the_same_tiles_and_as_many_pairs_is_an_error(tmp_path):
    """Attention went on with it, and left out what the plan does not fetch."""
    path = tmp_path / "plan.json"
    save_plan(make_plan(lambda b, h, q, kv: q >= kv, 64, 2), path)
    load_plan(path, mask=lambda b, h, q, kv: kv <= q).check()
    with pytest.raises(FlexCPError, match=r"the masks that the plan .* was made for, got others"):
        load_plan(path, mask=lambda b, h, q, kv: q <= kv)


def test_a_function_that_nobody_finds_is_asked_for(tmp_path):
    save_plan(make_plan(lambda b, h, q, kv: q >= kv, 100, 2), tmp_path / "plan.json")
    with pytest.raises(FlexCPError, match=r"pass load_plan\(path, mask=...\)"):
        load_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not JSON"), ("[]", "no file with"), ('{"flexcp plan": 2}', "no file with"),
     ('{"flexcp plan": 1}', "has changed since")],
)  # fmt: skip
def test_other_files_are_refused(content, message, tmp_path):
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(FlexCPError, match=message):
        load_plan(tmp_path / "plan.json")


def test_a_file_that_was_changed_or_is_missing_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    save_plan(make_plan(masks.causal(), 100, 2), path)
    path.write_text(path.read_text().replace('"seq_len": 100', '"seq_len": 101'))
    with pytest.raises(FlexCPError, match="changed since it was written"):
        load_plan(path)
    for wrong in (Path("nowhere.json"), 3, None, b"x", "\0"):
        with pytest.raises(FlexCPError, match=r"expected a plan in|expected path to be"):
            load_plan(wrong)  # type: ignore[arg-type]
    with pytest.raises(FlexCPError, match="expected plan to be a Plan, got 3"):
        save_plan(3, path)  # type: ignore[arg-type]
    with pytest.raises(FlexCPError, match="a file that can be written"):
        save_plan(make_plan(masks.causal(), 10, 1), tmp_path)
