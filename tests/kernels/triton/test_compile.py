"""What compilers make of the kernels: no spills, matrix instructions, short loops, no tf32.

Kernels are compiled in a process of their own, where Triton's interpreter is off; Triton keeps what
it has compiled, so that only a change to the kernels is compiled again. The float32 kernels take
minutes to compile, and are left to `flexcp doctor`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from typing import Any

import pytest

from flexcp import FlexCPError
from flexcp.kernels.triton.compile import SHARED_LIMIT, _require_known

COMPILE = """
import json, re, sys, torch
from dataclasses import asdict
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

rows = []
for arch, name, dim, dtype, tile in json.loads(sys.argv[1]):
    tuning = tuning_for(arch, dim, dim, getattr(torch, dtype), tile and f"{name}={tile}")[0]
    made = machine_code(arch, name, dim, getattr(torch, dtype), tuning)
    rows.append({**asdict(made.report), "loops": loops(made.text),
                 "tf32": "tf32" in made.intermediate.lower() + made.text.lower()})
print(json.dumps(rows))
"""


def compiled(*wanted: tuple[str, str, int, str, str]) -> list[dict[str, Any]]:
    """Reports of some kernels: architecture, kernel, head dim, type, and a tile or ""."""
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(wanted)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    rows: list[dict[str, Any]] = json.loads(run.stdout)
    return rows


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_nothing_spills_and_all_fits_at_head_dims_64_and_128(arch: str) -> None:
    kernels = product([arch], ("forward", "prep", "dq", "dkdv"), (64, 128), ["bfloat16"], [""])
    for row in compiled(*kernels):
        assert row["spills"] == 0, row
        assert row["shared"] <= SHARED_LIMIT[arch], row
        assert (row["matrix_ops"] > 0) == (row["kernel"] != "prep"), row


def test_amd_code_fits_and_has_matrix_instructions() -> None:
    for row in compiled(*product(["gfx942"], ("forward", "dq", "dkdv"), [128], ["float16"], [""])):
        assert row["matrix_ops"] > 0, row
        assert row["shared"] <= SHARED_LIMIT["gfx942"], row
        assert row["spills"] == 0, row


LONGEST_LOOPS = {
    ("sm_80", "128x64 w8 s3"): (501, 616),
    ("sm_90", "128x64 w8 s2"): (394, 487),
    ("sm_100", "128x128 w8 s2 tma"): (488, 647),
}
"""Instructions of the forward kernel's loops at head dim 128, over full and partial tiles."""


@pytest.mark.parametrize(("arch", "tile"), LONGEST_LOOPS)
def test_the_loops_are_short(arch: str, tile: str) -> None:
    full, partial = sorted(compiled((arch, "forward", 128, "bfloat16", tile))[0]["loops"])
    most_full, most_partial = LONGEST_LOOPS[arch, tile]
    assert full <= 1.05 * most_full
    assert partial <= 1.05 * most_partial


def test_float32_is_never_multiplied_as_tf32() -> None:
    small = "16x16 w4 s1"
    names = ("forward", "dq", "dkdv")
    rows = compiled(*product(["sm_80", "sm_90"], names, [16], ["float32"], [small]))
    assert [row["tf32"] for row in rows] == [False] * 6


def test_an_architecture_that_nobody_knows_is_refused() -> None:
    with pytest.raises(FlexCPError, match=r"an architecture among sm_80, sm_90, .*, got 'sm_33'"):
        _require_known("sm_33")
