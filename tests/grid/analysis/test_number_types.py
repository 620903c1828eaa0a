"""Types that wrap, round, overflow or are not numbers: grids follow torch in all of it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

import flexcp

I8, U8 = torch.arange(64).sub(32).to(torch.int8), torch.arange(64).mul(3).to(torch.uint8)
I16, I32 = torch.arange(64).to(torch.int16), (torch.arange(64) // 8).int()
HALF, NAN = torch.arange(64).mul(600.0).half(), torch.arange(64.0)
NAN[17] = torch.nan

MASKS = {
    "int32 against a larger number": lambda b, h, q, kv: (I32[q] + I32[kv]) < 2**31,
    "uint8 against a negative number": lambda b, h, q, kv: U8[q] + U8[kv] > -1,
    "uint8 against 256": lambda b, h, q, kv: U8[q] + U8[kv] < 256,
    "int8 against 200": lambda b, h, q, kv: I8[q] + I8[kv] < 200,
    "int8 divided by 1000": lambda b, h, q, kv: (I8[q] + I8[kv]) // 1000 == 0,
    "int16 against 40000": lambda b, h, q, kv: (q - kv).to(torch.int16) < 40000,
    "maximum of uint8": lambda b, h, q, kv: torch.maximum(U8[q], U8[kv]) >= -1,
    "logarithm of negative numbers": lambda b, h, q, kv: (
        torch.log2((q - kv).float()).clamp(0, 5).long() >= 0
    ),
    "root of negative numbers": lambda b, h, q, kv: torch.sqrt((q - kv).float()).clamp(0, 4) <= 4,
    "zero by zero": lambda b, h, q, kv: ((q - kv) / (q + kv)).clamp(-1, 1) >= -1,
    "captured NaN": lambda b, h, q, kv: (NAN[q] + NAN[kv]).clamp(0, 5) >= 0,
    "captured NaN, not equal": lambda b, h, q, kv: torch.minimum(NAN[q], NAN[kv]) != 3.0,
    "captured NaN as truth": lambda b, h, q, kv: (NAN[q] * NAN[kv]).bool(),
    "float16 overflows in a product": lambda b, h, q, kv: HALF[q] * HALF[kv] < 1e5,
    "float16 against a larger number": lambda b, h, q, kv: (q * kv * 40).half() < 80000.0,
    "float16 plus a larger number": lambda b, h, q, kv: (q - kv).half() + 70000.0 < 80000.0,
    "float16 underflows in a cast": lambda b, h, q, kv: (((q - kv).abs() + 1) * 1e-9).half() > 0,
    "float32 underflows in a cast": lambda b, h, q, kv: (
        (((q - kv).abs() + 1).double() * 1e-50).float() > 0
    ),
    "clamp by a float": lambda b, h, q, kv: torch.clamp(q * kv + 2**24, 0, 3e7) > 2**24,
    "a head as a number": lambda b, h, q, kv: (
        (torch.where(kv >= 0, I8[kv], h) * 2 > 0) & ((q // 1) >= 0)
    ),
    "a number made from an index": lambda b, h, q, kv: (
        q.new_full((), 0.1, dtype=torch.float64) * q.float() > kv
    ),
    "a fixed chunk": lambda b, h, q, kv: (q // 5 + I8[kv]) % 3 == 0,
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("block_size", [1, 8, 64])
def test_grids_follow_torchs_arithmetic(name, block_size):
    expected = create_mask(MASKS[name], 1, 2, 64, 64, device="cpu").expand(1, 2, 64, 64)
    grid = flexcp.build_block_grid(MASKS[name], 64, block_size=block_size, heads=2)
    assert grid.area() == int(expected.sum())
    if block_size == 1:
        assert torch.equal(grid.to_dense() == flexcp.BlockKind.FULL, expected)


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.float8_e4m3fn],
)
def test_ids_may_have_any_type(dtype):
    ids = (torch.arange(60) // 7).to(dtype)
    grid = flexcp.build_block_grid(lambda b, h, q, kv: ids[q] == ids[kv], 60, block_size=8)
    assert grid.area() == 8 * 7**2 + 4**2
