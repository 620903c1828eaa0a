"""What compilers make of the kernels: no spills, matrix instructions, short loops, no tf32.

Kernels are compiled in a process of their own, where Triton's interpreter is off; Triton keeps what
it has compiled, so that only a change to the kernels is compiled again. Most float32 kernels, which
take long to compile, are left to `flexcp doctor`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from flexcp import FlexCPError
from flexcp.kernels.triton.available import triton_version
from flexcp.kernels.triton.compile import SHARED_LIMIT, _require_known

COMPILE = """
import json, re, sys, torch
from dataclasses import asdict
from flexcp.kernels.dropout import Dropout
from flexcp.kernels.triton.compile import machine_code
from flexcp.kernels.triton.tuning import tuning_for

def loops(text):
    '''Instructions of each loop with matrix instructions: from its label to the branch back.'''
    labels, found, code = {}, [], []
    for line in text.splitlines():
        label = re.match(r"\\s*(\\.L_x_\\d+):", line)
        if label:
            labels[label[1]] = len(code)
        elif re.match(r"\\s*/\\*[0-9a-f]+\\*/", line):
            code.append(line)
            back = re.search(r" BRA.*`\\((\\.L_x_\\d+)\\)", line)
            if back and back[1] in labels:
                body = code[labels[back[1]]:]
                outlined = any(re.search(r"\\*/\\s+EXIT", x) for x in body)  # waits, behind the end
                if any("MMA" in x for x in body) and not outlined:
                    found.append(len(body))
    return found

slopes, table = (torch.zeros(shape, requires_grad=True) for shape in ((8,), (8, 8191)))

def softcapped_alibi(s, b, h, q, k):
    return 20 * torch.tanh((s - slopes[h] * (q - k)) / 20)

def biased(s, b, h, q, k):
    return softcapped_alibi(s, b, h, q, k) + table[h, q - k]

rows = []
for arch, name, dim, kind, tile in json.loads(sys.argv[1]):
    dtype, dropout = getattr(torch, kind.split()[0]), Dropout(0.1, 3) if "dropout" in kind else None
    mod = {"scored": softcapped_alibi, "biased": biased}.get(kind.split()[-1])
    needs = {"dropout": dropout is not None, "scored": mod is not None}
    tuning = tuning_for(arch, dim, dim, dtype, tile and f"{name}={tile}", **needs)[0]
    made = machine_code(arch, name, dim, dtype, tuning, dropout=dropout, score_mod=mod)
    rows.append({**asdict(made.report), "loops": loops(made.text),
                 "tf32": "tf32" in made.intermediate.lower() + made.text.lower()})
print(json.dumps(rows))
"""


NVIDIA = ("sm_80", "sm_90", "sm_100")
LONGEST_LOOPS = {
    ("sm_80", "128x64 w8 s3"): (501, 616),
    ("sm_90", "128x64 w8 s2"): (394, 487),
    ("sm_100", "128x128 w8 s2 tma"): (488, 647),
}
"""Instructions of the forward kernel's loops at head dim 128, over full and partial tiles."""
LONGER, SPILLED = (1.05, 0) if (triton_version() or "").startswith("3.9") else (1.16, 8)
"""The tiles were chosen with Triton 3.9: of older ones, loops are up to 15 % longer, and one kernel
spills 8 bytes."""

Wanted = tuple[str, str, int, str, str]
"""Architecture, kernel, head dim, type (and what is done to scores or weights), a tile or ""."""
KERNELS = ("forward", "dq", "dkdv")
AT_64_AND_128 = [*product(NVIDIA, ("prep", *KERNELS), (64, 128), ["bfloat16"], [""])]
AT_256 = [
    *product(["sm_100"], ("forward", "dq", "dk", "dv"), [256], ["bfloat16"], [""]),
    *product(["sm_86"], KERNELS, [256], ["bfloat16"], [""]),
]
SINGLE = [("sm_80", "dkdv", 64, "float32", ""), ("sm_100", "dkdv", 64, "float32", "")]
DROPPING = [
    *product(["sm_80"], KERNELS, [128], ["bfloat16 dropout"], [""]),
    *product(["sm_90", "sm_100"], ["dkdv"], [128], ["bfloat16 dropout"], [""]),
]
SCORED = [
    *product(["sm_80"], KERNELS, [128], ["bfloat16 scored"], [""]),
    *product(["sm_90"], ("forward", "dkdv"), [64], ["bfloat16 scored"], [""]),
    ("sm_80", "captured 0", 64, "bfloat16 biased", ""),
    ("sm_90", "captured 1", 64, "bfloat16 biased", ""),
]
"""By softcap and ALiBi; and the gradients of slopes and of a table of relative biases."""
ON_AMD = [*product(["gfx942"], KERNELS, [128], ["float16"], [""])]
TIGHT = [*DROPPING, *SCORED, *ON_AMD]
LOOPS = [(arch, "forward", 128, "bfloat16", tile) for arch, tile in LONGEST_LOOPS]
IN_FLOAT32 = [*product(["sm_80", "sm_90"], KERNELS, [16], ["float32"], ["16x16 w4 s1"])]


@pytest.fixture(scope="module")
def reports() -> Mapping[Wanted, dict[str, Any]]:
    """Every kernel that a test here asks for: one process compiles them all, each once."""
    wanted = list(dict.fromkeys([*AT_64_AND_128, *AT_256, *SINGLE, *TIGHT, *LOOPS, *IN_FLOAT32]))
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(wanted)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return dict(zip(wanted, json.loads(run.stdout), strict=True))


@pytest.mark.parametrize("arch", NVIDIA)
def test_nothing_spills_and_all_fits_at_head_dims_64_and_128(
    arch: str, reports: Mapping[Wanted, dict[str, Any]]
) -> None:
    for row in (reports[kernel] for kernel in AT_64_AND_128 if kernel[0] == arch):
        assert row["spills"] <= SPILLED, row
        assert row["shared"] <= SHARED_LIMIT[arch], row
        assert (row["matrix_ops"] > 0) == (row["kernel"] != "prep"), row


@pytest.mark.parametrize("wanted", [*AT_256, *SINGLE, *TIGHT])
def test_nothing_spills_and_all_fits_where_it_is_tight(
    wanted: Wanted, reports: Mapping[Wanted, dict[str, Any]]
) -> None:
    row = reports[wanted]
    assert (row["matrix_ops"] > 0) == (row["dtype"] != "float32"), row  # which have none
    assert row["shared"] <= SHARED_LIMIT[wanted[0]], row
    assert row["spills"] == 0, row


@pytest.mark.parametrize("wanted", LOOPS)
def test_the_loops_are_short(wanted: Wanted, reports: Mapping[Wanted, dict[str, Any]]) -> None:
    full, partial = sorted(reports[wanted]["loops"])
    most_full, most_partial = LONGEST_LOOPS[wanted[0], wanted[4]]
    assert full <= LONGER * most_full
    assert partial <= LONGER * most_partial


def test_float32_is_never_multiplied_as_tf32(reports: Mapping[Wanted, dict[str, Any]]) -> None:
    assert [reports[kernel]["tf32"] for kernel in IN_FLOAT32] == [False] * 6


def test_an_architecture_that_nobody_knows_is_refused() -> None:
    with pytest.raises(FlexCPError, match=r"an architecture among sm_80, sm_90, .*, got 'sm_33'"):
        _require_known("sm_33")
