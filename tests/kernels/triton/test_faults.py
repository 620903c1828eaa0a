"""Faults planted in the kernels' source: each of them is noticed."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flexcp import Mask
from flexcp.kernels.triton import backward, forward, tile_steps
from flexcp.kernels.triton import kernel as launches
from flexcp.kernels.triton.tuning import Tuning, parse_tile
from kernels.triton.comparison import Sizes, assert_exact, errors

_NOISE = torch.rand(4, 45, 100, generator=torch.Generator().manual_seed(3)) > 0.5
SEES_NOTHING = (36, 37)
MASK = Mask(
    lambda b, h, q, kv: (
        ((kv <= q + 40 - 5 * h) | ((kv > 70) & _NOISE[h, q, kv]) | (kv < 64))
        & (q != SEES_NOTHING[0])
        & (q != SEES_NOTHING[1])
    )
)
"""Full, partial and ragged tiles, words of either half, rows that see nothing, a plane per head."""
SIZES = Sizes(heads=4, kv_heads=2, q_len=45, kv_len=100)


@dataclass(frozen=True)
class Fault:
    good: str
    bad: str


IN_FORWARD = {
    "an unmasked ragged value tile": Fault("v_offsets, kv_len - row,", "v_offsets, BN,"),
    "sums that are not rescaled": Fault("sums * rescale[:, None]", "sums"),
    "denominators that are not rescaled": Fault("total * rescale +", "total +"),
    "a mask that is not applied": Fault("scores = tl.where(allowed", "tl.where(allowed"),
    "a full tile left out": Fault("(full_start + line + 1)", "(full_start + line)"),
    "a partial tile left out": Fault("(partial_start + line + 1)", "(partial_start + line)"),
    "heads that read another's keys": Fault("head // group", "head % 2"),
    "one plane for all heads": Fault("head * plane_head", "0"),
    "a sign that is not folded in": Fault("tl.float32) * sign)", "tl.float32))"),
    "lse of base 2": Fault(") * LN_2", ")"),
    "rows without keys taken for others": Fault("tl.where(seen, (high", "tl.where(True, (high"),
    "an earlier lse that is forgotten": Fault("rows_left * has_former, other", "0, other"),
    "programs that compute one tile": Fault("order + plane * tiles + program % tiles", "order"),
}
IN_TILE_STEPS = {
    "a row too many written": Fault(
        "rows_left)[:, None]\n    if HEAD_DIM < COLS:\n        inside = inside",
        "rows_left + 1)[:, None]\n    if HEAD_DIM < COLS:\n        inside = inside",
    ),
    "an earlier result that is forgotten": Fault("rows_left * has_former", "rows_left * 0"),
    "reversed bits": Fault("(word >> (cols & 31))", "(word >> (31 - (cols & 31)))"),
    "the words of a row swapped": Fault("cols < 32 * i, word,", "cols >= 32 * i, word,"),
    "bits read across instead of down": Fault("words + i * ROWS", "words + i"),
}
IN_BACKWARD = {
    "delta without the gradient of lse": Fault("rows_left * has_grad_lse", "0"),
    "delta that is not subtracted": Fault("(grad_weights - delta[:, None])", "grad_weights"),
    "dq that is not scaled": Fault("former + sums * scale", "former + sums"),
    "dk that is not scaled": Fault("k_sums * scale", "k_sums"),
    "earlier gradients that are forgotten": Fault("former + sums", "sums"),
    "a dropped head of a group": Fault("tl.range(0, group)", "tl.range(0, group - 1)"),
    "one plane for a group": Fault("batch * plane_batch + head *", "batch * plane_batch + 0 *"),
    "rows past the end in dk": Fault("q_offsets, q_len - row,", "q_offsets, BM,"),
    "rows past the end in dv": Fault("g_offsets, q_len - row,", "g_offsets, BM,"),
    "a mask that is not applied": Fault("if MASKED:", "if False:"),
    "weights of rows that see nothing": Fault('lse == float("-inf"), float("inf")', "False, 0.0"),
    "bits of another tile": Fault("tl.load(partial_pattern + at)", "tl.load(partial_pattern)"),
}


def test_without_a_fault_everything_is_exact() -> None:
    assert_exact(errors(MASK, SIZES, scale=-0.3, tuning=WIDE))


WIDE = Tuning(parse_tile("32x64 w4 s1"), parse_tile("32x64 w4 s1"), parse_tile("32x32 w4 s1"))
"""Two words in a row of a tile."""


@pytest.mark.parametrize(
    ("module", "name", "fault"),
    [(forward, *item) for item in IN_FORWARD.items()]
    + [(tile_steps, *item) for item in IN_TILE_STEPS.items()]
    + [(backward, *item) for item in IN_BACKWARD.items()],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_planted_fault_is_noticed(
    module: ModuleType, name: str, fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = _with_fault(module, fault.good, fault.bad, tmp_path)
    monkeypatch.setattr(launches, "kernels", lambda: planted)
    with pytest.raises(AssertionError):
        _compare_until_it_fails(("backward",) if module is backward else ("merged", "forward"))


def _compare_until_it_fails(directions: Sequence[str]) -> None:
    for direction in directions:
        assert_exact(errors(MASK, SIZES, scale=-0.3, tuning=WIDE, directions=[direction]))


def _with_fault(
    faulty: ModuleType, good: str, bad: str, folder: Path
) -> tuple[ModuleType, ModuleType]:
    """Copies of the kernels' modules, one of them with a fault."""
    made = {}
    for module in (tile_steps, forward, backward):
        source = inspect.getsource(module)
        if module is faulty:
            assert good in source, "the fault is nowhere in the source"
            source = source.replace(good, bad)
        name = module.__name__.rpartition(".")[2]
        file = folder / f"planted_{name}.py"
        file.write_text(source.replace("flexcp.kernels.triton.", "planted_"))
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        made[name] = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = made[name]
        spec.loader.exec_module(made[name])
    for name in made:
        del sys.modules[f"planted_{name}"]
    return made["forward"], made["backward"]
