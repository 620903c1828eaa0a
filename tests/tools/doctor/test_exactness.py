"""Kernels are held against float64 and against themselves; each planted fault is found by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernels.test_varlen import op_backward, op_forward
from tools.doctor.tiny import CPU, TINY, soon

from flexcp.kernels import registry
from flexcp.kernels.flash import FlashKernel
from flexcp.kernels.varlen import VarlenOps
from flexcp.tools.doctor.budget import Deadline, TimeIsUpError, at_most
from flexcp.tools.doctor.exactness import Oracle, exactness


def examined(kernel, deadline=None, dtype=torch.float32):
    return exactness(kernel, dtype, Oracle.of(TINY, CPU), deadline or soon())


@pytest.mark.parametrize("kernel", ["flash", "scored", "reference"])
def test_kernels_that_are_right_pass(kernel):
    finding = examined(kernel)
    assert finding.outcome == "passed"
    assert "the same bits in 3 repeats" in finding.said
    assert len(finding.rows) == 9
    assert {row["outcome"] for row in finding.rows} <= {"passed", "not run"}
    assert ("ALiBi (it needs a kernel that takes a score_mod, and got" in finding.said) == (
        kernel == "flash"
    )


def test_the_variable_length_op_is_checked_without_what_it_has_not(monkeypatch):
    """It has no gradient of lse, and adds up gradients in no order."""

    def shaken(*given):
        return tuple(x * (1 + 1e-9 * torch.randn(())) for x in op_backward(*given))

    dtypes = frozenset({torch.float32})
    shaking = VarlenOps("an emulation", "cpu", dtypes, op_forward, shaken)
    monkeypatch.setattr(registry, "CUDA_VARLEN", shaking)
    finding = examined("varlen")
    assert finding.outcome == "passed"
    passed = {row["case"] for row in finding.rows if row["outcome"] == "passed"}
    assert passed == {"full", "causal", "documents", "window"}

    def wrong(*given):
        dq, dk, dv = op_backward(*given)
        return dq, dk * 1.01, dv

    monkeypatch.setattr(registry, "CUDA_VARLEN", replace(shaking, backward=wrong))
    assert "dk is off by 1.0e-02" in examined("varlen").said


def test_bfloat16_has_the_budget_of_its_type():
    assert examined("flash", dtype=torch.bfloat16).outcome == "passed"


def planted(monkeypatch, method, fault):
    right = getattr(FlashKernel, method)
    monkeypatch.setattr(FlashKernel, method, lambda *a, **kw: fault(right(*a, **kw)))


def test_a_kernel_that_is_wrong_by_a_hundredth_is_named(monkeypatch):
    planted(monkeypatch, "forward", lambda found: replace(found, out=found.out * 1.01))
    finding = examined("flash")
    assert finding.outcome == "failed"
    assert finding.name == "flash, float32"
    assert "causal: " in finding.said
    assert "is off by" in finding.said
    assert "name another kernel than 'flash'" in finding.fix
    assert examined("reference").outcome == "passed"


def test_a_wrong_gradient_is_named(monkeypatch):
    planted(monkeypatch, "backward", lambda found: replace(found, k=found.k * 1.01))
    assert "dk is off by 1.0e-02" in examined("flash").said


def test_a_kernel_that_gives_other_bits_every_time_is_named(monkeypatch):
    def fault(found):
        return replace(found, v=found.v + 1e-7 * torch.randn(()))

    planted(monkeypatch, "backward", fault)
    finding = examined("flash")
    assert finding.outcome == "failed"
    assert "full: dv differs between two calls with the same tensors" in finding.said


def test_a_kernel_that_gives_nan_or_raises_fails(monkeypatch):
    planted(monkeypatch, "forward", lambda found: replace(found, lse=found.lse * torch.nan))
    assert "lse is off by inf" in examined("flash").said

    def broken(found):
        raise RuntimeError("an illegal memory access was encountered\nand more")

    planted(monkeypatch, "forward", broken)
    assert "it raised RuntimeError: an illegal memory access" in examined("flash").said


def test_a_kernel_that_this_device_cant_run_says_why():
    finding = examined("flex")
    assert finding.outcome == "not run"
    assert finding.said == "it needs CUDA tensors for the kernel 'flex', and got tensors on cpu"


def test_what_the_time_was_too_short_for_says_so():
    finding = examined("flash", Deadline.within(0))
    assert finding.outcome == "not run"
    assert finding.said == "the time was up"


def test_what_runs_too_long_is_ended():
    def run():
        with at_most(0.05):
            while True:
                pass

    with pytest.raises(TimeIsUpError):
        run()
