"""`flexcp doctor` says what there is, and compiles the kernels."""

from __future__ import annotations

import json

import torch

KEYS = {
    "kernel", "arch", "head_dim", "dtype", "config", "registers", "spills", "shared", "matrix_ops",
    "seconds",
}  # fmt: skip


def test_it_says_what_there_is(flexcp):
    found = json.loads(flexcp("doctor", "--json").out)
    assert found["torch"] == torch.__version__
    assert "tested: 3.9" in found["triton"]
    assert "GPUs: " in flexcp("doctor").out


def test_it_compiles_all_kernels_for_an_architecture(flexcp):
    asked = ("doctor", "--compile", "sm_80", "--head-dim", 64, "--dtype", "bfloat16")
    rows = json.loads(flexcp(*asked, "--json").out)["kernels"]
    assert [row["kernel"] for row in rows] == ["forward", "prep", "dq", "dkdv"]
    assert all(set(row) == KEYS for row in rows)
    assert all(
        (row["arch"], row["head_dim"], row["dtype"]) == ("sm_80", 64, "bfloat16") for row in rows
    )
    assert all(row["registers"] > 0 and row["spills"] == 0 for row in rows)
    text = flexcp(*asked).out
    assert "matrix ops" in text
    assert "dkdv" in text


def test_what_it_cant_compile_is_refused(flexcp):
    assert "got 'sm_33'" in flexcp("doctor", "--compile", "sm_33", code=2).err
    refused = flexcp("doctor", "--compile", "sm_80", "--head-dim", 512, code=2).err
    assert "head dims up to 256" in refused
    refused = flexcp("doctor", "--compile", "sm_80", "--dtype", "float64", code=2).err
    assert "float32, bfloat16 or float16" in refused
