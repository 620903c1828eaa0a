"""`flexcp doctor` examines the machine, keeps what it finds, and compiles the kernels."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from launched import launched
from tools.doctor.tiny import TINY, one_thread

import flexcp as library
from flexcp.kernels import preferences
from flexcp.kernels.flash import FlashKernel
from flexcp.kernels.registry import KERNELS
from flexcp.kernels.triton.compile import KernelReport
from flexcp.plan import load_machine
from flexcp.tools.cli import main
from flexcp.tools.doctor.budget import Budget
from flexcp.tools.doctor.examine import RanksEnd
from flexcp.tools.doctor.start_ranks import LocalRanks

KEYS = {
    "kernel", "arch", "head_dim", "dtype", "config", "registers", "spills", "shared", "matrix_ops",
    "seconds",
}  # fmt: skip


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """An examination that takes a moment, with two kernels, and nothing of the user's."""
    few = {name: KERNELS[name] for name in ("flash", "scored", "flex")}
    monkeypatch.setattr("flexcp.tools.doctor.examine.KERNELS", few)
    monkeypatch.setattr("flexcp.tools.doctor.speed.KERNELS", few)
    monkeypatch.setattr(Budget, "of_device", lambda *_: TINY)
    monkeypatch.setenv("FLEXCP_DOCTOR", str(tmp_path / "preferred.json"))
    monkeypatch.chdir(tmp_path)
    with one_thread():
        yield tmp_path
    preferences.forget_preferences()


@pytest.fixture
def no_ranks(monkeypatch):
    monkeypatch.setattr(LocalRanks, "__call__", lambda *_, **__: RanksEnd())


def test_it_says_what_there_is(flexcp, tiny):
    found = json.loads(flexcp("doctor", "--only", "environment", "--json").out)
    assert found["torch"] == torch.__version__
    assert "tested: 3.7, 3.8, 3.9" in found["triton"]
    assert found["passed"] is True
    kernels = [f for f in found["findings"] if f["section"] == "kernels"]
    assert {(f["outcome"], f["said"]) for f in kernels} == {("not run", "not asked for")}
    assert "versions: flexcp" in flexcp("doctor", "--only", "environment").out
    assert "GPUs: " in (tiny / "out/doctor/report.txt").read_text()


def test_all_that_it_finds_is_kept(flexcp, tiny):
    ran = flexcp("doctor", "--ranks", 2)
    assert "all right: " in ran.out
    assert "ranks: starting 2 ranks" in ran.err
    assert "passed    plan by ring" in ran.out
    report = json.loads((tiny / "out/doctor/report.json").read_text())
    outcomes = {(f["section"], f["name"]): f["outcome"] for f in report["findings"]}
    assert outcomes["ranks", "transport"] == outcomes["kernels", "flash, float32"] == "passed"
    assert outcomes["speed", "over ranks"] == "measured"
    assert "<title>flexcp doctor</title>" in (tiny / "out/doctor/report.html").read_text()
    assert load_machine(tiny / "out/doctor/machine.json").flops == report["machine"]["flops"]
    x = torch.zeros(1, 2, 64, 16)
    why = library.kernels.explain(x, x, mask_kind="causal")
    assert "as flexcp doctor has measured with float32 and head dim 16" in why


def test_a_failed_check_is_the_answer_no(flexcp, tiny, monkeypatch):
    right = FlashKernel.backward
    monkeypatch.setattr(
        FlashKernel,
        "backward",
        lambda *a, **kw: (lambda found: replace(found, q=found.q * 1.01))(right(*a, **kw)),
    )
    out = flexcp("doctor", "--only", "kernels", code=1).out
    assert "FAILED    flash, float32: full: dq is off by 1.0e-02" in out
    assert "what to do: don't train with it" in out
    assert "2 FAILED (kernels: flash, float32, kernels: scored, float32)" in out
    assert "kernels are chosen as before: no kernel was both checked and timed" in out
    assert not (tiny / "preferred.json").exists()


def test_ctrl_c_keeps_what_is_done(flexcp, tiny, no_ranks, monkeypatch):
    def interrupt(name, *_):
        raise KeyboardInterrupt

    monkeypatch.setattr("flexcp.tools.doctor.examine.speed", interrupt)
    asked = ("doctor", "--only", "kernels", "--only", "speed", "--json")
    found = json.loads(flexcp(*asked, code=130).out)
    assert found["interrupted"] is True
    said = {(f["section"], f["name"]): f["said"] for f in found["findings"]}
    assert said["speed", "causal"] == "it was stopped"
    assert "of float64" in said["kernels", "flash, float32"]
    assert "it was stopped" in (tiny / "out/doctor/report.txt").read_text()
    assert not (tiny / "preferred.json").exists()


def test_nothing_is_preferred_where_that_is_not_wanted(flexcp, tiny, no_ranks):
    asked = ("doctor", "--only", "kernels", "--only", "speed")
    assert "--no-prefer was passed" in flexcp(*asked, "--no-prefer").out
    assert not (tiny / "preferred.json").exists()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("--only", "engine"), "expected --only environment, kernels, ranks, speed, links"),
        (("--device", "abacus"), "expected --device cpu or cuda"),
        (("--ranks", 0), "expected a value for --ranks: "),
        (("--minutes", 0), "expected a value for --minutes: "),
    ],
)
def test_what_it_cant_do_is_refused(flexcp, asked, told):
    assert told.strip() in " ".join(flexcp("doctor", *asked, code=2).err.replace("│", " ").split())


def test_ranks_of_torchrun_are_examined_together(tiny):
    asked = ["doctor", "--only", "ranks", "--only", "links", "--json"]
    first, second = launched(lambda: main(asked), 2, tiny)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert second.out == ""
    found = json.loads(first.out)
    outcomes = {f["name"]: f["outcome"] for f in found["findings"] if f["section"] == "ranks"}
    assert set(outcomes.values()) == {"passed"}
    assert found["machine"]["intra_bandwidth"] > 0
    assert (tiny / "out/doctor/report.html").exists()


def test_it_compiles_all_kernels_for_an_architecture(flexcp, monkeypatch):
    asked = ("doctor", "--compile", "sm_80", "--head-dim", 64, "--dtype", "bfloat16")
    rows = json.loads(flexcp(*asked, "--json").out)["kernels"]
    assert [row["kernel"] for row in rows] == ["forward", "prep", "dq", "dkdv"]
    assert all(set(row) == KEYS for row in rows)
    assert all(
        (row["arch"], row["head_dim"], row["dtype"]) == ("sm_80", 64, "bfloat16") for row in rows
    )
    assert all(row["registers"] > 0 and row["spills"] == 0 for row in rows)
    made = [KernelReport(**row) for row in rows]
    monkeypatch.setattr("flexcp.kernels.triton.compile.compile_reports", lambda *_: made)
    text = flexcp(*asked).out
    assert "matrix ops" in text
    assert "dkdv" in text


def test_what_it_cant_compile_is_refused(flexcp):
    assert "got 'sm_33'" in flexcp("doctor", "--compile", "sm_33", code=2).err
    refused = flexcp("doctor", "--compile", "sm_80", "--head-dim", 512, code=2).err
    assert "head dims from 1 to 256" in refused
    refused = flexcp("doctor", "--compile", "sm_80", "--dtype", "float64", code=2).err
    assert "float32, bfloat16 or float16" in refused
