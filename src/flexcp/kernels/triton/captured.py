"""The kernel for gradients of what score functions read from tensors: one query tile per program.

Each number that was read has a gradient, and is an element of a tensor; many are the same one. The
kernel writes gradients and the numbers of elements to a workspace: of each pair; or, if all keys of
a query read the same element, of each query, its keys added up. `captured_sums.py` does the rest.
"""

import triton
import triton.language as tl

from flexcp.kernels.triton.backward import read_lse, score_gradients
from flexcp.kernels.triton.tile_steps import (
    is_kept,
    kernel,
    key_hashes,
    read,
    read_bits,
    read_index,
    read_listed,
    row_hashes,
    tile_base,
    tile_offsets,
)


@triton.jit
def store_pairs(
    values, elements, found, batch, head, q_index, key_index, given, inside, ELEMENT: tl.constexpr
):
    """Writes the gradient of each pair that is inside, and the number of the element it read."""
    which = ELEMENT(batch, head, q_index[:, None], key_index[None, :], given)
    tl.store(values, found, mask=inside)
    tl.store(elements, which + tl.zeros(found.shape, tl.int64), mask=inside)


@kernel
def lookup_gradients(
    q, k, v, grad_out, lse, delta, values, elements, q_at, kv_at, given,
    plane_of, order, full_start, full_tile, partial_start, partial_tile, partial_pattern, patterns,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int64,
    g_batch: tl.int64, g_head: tl.int64, g_row: tl.int64,
    lse_batch: tl.int64, lse_head: tl.int64,
    delta_batch: tl.int64, delta_head: tl.int64,
    q_at_batch: tl.int64, kv_at_batch: tl.int64, seed: tl.int64, first_batch: tl.int64,
    first_head: tl.int64, threshold: tl.int32, factor: tl.float32,
    plane_batch: tl.int32, plane_head: tl.int32,
    heads: tl.int32, group: tl.int32, q_len: tl.int32, kv_len: tl.int32, tiles: tl.int32,
    sign: tl.float32, score_scale: tl.float32,
    first_program: tl.int32, first_key: tl.int32, width: tl.int32,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr,
    TMA: tl.constexpr, DROPOUT: tl.constexpr, WIDEN: tl.constexpr,
    SCORE: tl.constexpr, PULL: tl.constexpr, ELEMENT: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    """What one query tile's pairs have read: its gradient, and which element it is.

    BY_ROW adds up each query's keys, and writes to [programs, BM]; else pairs with keys in
    [first_key, first_key + width) are written, to [programs, BM, width]. Programs count from
    `first_program`.
    """
    program = tl.program_id(0) + first_program
    batch = (program // tiles // heads).to(tl.int64)
    head = (program // tiles % heads).to(tl.int64)
    kv_head = head // group
    plane = tl.load(plane_of + batch * plane_batch + head * plane_head)
    tile = tl.load(order + plane * tiles + program % tiles)
    first = tile * BM
    rows_left = q_len - first
    line = plane * tiles + tile

    q_tile = read(
        tile_base(q, batch, head, first, q_batch, q_head, q_row, UNIT),
        tile_offsets(q_row, UNIT, BM, D), rows_left, HEAD_DIM, True,
    )  # fmt: skip
    q_tile = (q_tile.to(tl.float32) * sign).to(q_tile.dtype)
    g_tile = read(
        tile_base(grad_out, batch, head, first, g_batch, g_head, g_row, UNIT),
        tile_offsets(g_row, UNIT, BM, DV), rows_left, VALUE_DIM, True,
    )  # fmt: skip
    rows = tl.arange(0, BM)
    cols = tl.arange(0, BN)
    row_lse = read_lse(lse + batch * lse_batch + head * lse_head + first, rows_left, BM)
    row_delta = tl.load(
        delta + batch * delta_batch + head * delta_head + first + rows,
        mask=rows < rows_left, other=0.0,
    )  # fmt: skip
    k_offsets = tile_offsets(k_row, UNIT, BN, D)
    v_offsets = tile_offsets(v_row, UNIT, BN, DV)
    q_index = read_index(given[0], first, rows_left, BM, True)
    if DROPOUT:
        q_positions = tl.load(
            q_at + batch * q_at_batch + first + rows, mask=rows < rows_left, other=0
        )
        row_hash, again = row_hashes(seed, batch + first_batch, head + first_head, q_positions)
        key_positions = kv_at + batch * kv_at_batch + cols
    if BY_ROW:
        begin = tl.program_id(0).to(tl.int64) * BM
    else:
        begin = tl.program_id(0).to(tl.int64) * BM * width - first_key
    values += begin
    elements += begin
    places = rows[:, None] * width + cols[None, :]
    sums = tl.zeros([BM], tl.float32)

    for at in tl.range(tl.load(full_start + line), tl.load(full_start + line + 1)):
        row = tl.load(full_tile + at) * BN
        if BY_ROW | ((row >= first_key) & (row < first_key + width)):
            k_tile = read_listed(
                k, batch, kv_head, row, k_batch, k_head, k_row, k_offsets, BN,
                HEAD_DIM, False, UNIT, TMA,
            )  # fmt: skip
            v_tile = read_listed(
                v, batch, kv_head, row, v_batch, v_head, v_row, v_offsets, BN,
                VALUE_DIM, False, UNIT, TMA,
            )  # fmt: skip
            key_index = read_index(given[1], row, BN, BN, False)
            kept = True
            if DROPOUT:
                key_hash = key_hashes(seed, tl.load(key_positions + row))
                kept = is_kept(row_hash[:, None], again[:, None], key_hash[None, :], threshold)
            found = score_gradients(
                q_tile, g_tile, k_tile, v_tile, row_lse, row_delta, score_scale, True, kept,
                factor, batch, head, q_index, key_index, given, False, DROPOUT, WIDEN, SCORE, PULL,
            )  # fmt: skip
            if BY_ROW:
                sums += tl.sum(found, 1)
            else:
                inside = (rows < rows_left)[:, None]
                store_pairs(
                    values + row + places, elements + row + places, found, batch, head, q_index,
                    key_index, given, inside, ELEMENT,
                )  # fmt: skip

    for at in tl.range(tl.load(partial_start + line), tl.load(partial_start + line + 1)):
        row = tl.load(partial_tile + at) * BN
        if BY_ROW | ((row >= first_key) & (row < first_key + width)):
            allowed = read_bits(patterns, tl.load(partial_pattern + at), BM, BN)
            k_tile = read_listed(
                k, batch, kv_head, row, k_batch, k_head, k_row, k_offsets, kv_len - row,
                HEAD_DIM, True, UNIT, TMA,
            )  # fmt: skip
            v_tile = read_listed(
                v, batch, kv_head, row, v_batch, v_head, v_row, v_offsets, kv_len - row,
                VALUE_DIM, True, UNIT, TMA,
            )  # fmt: skip
            key_index = read_index(given[1], row, kv_len - row, BN, True)
            kept = True
            if DROPOUT:
                positions = tl.load(key_positions + row, mask=cols < kv_len - row, other=0)
                key_hash = key_hashes(seed, positions)
                kept = is_kept(row_hash[:, None], again[:, None], key_hash[None, :], threshold)
            found = score_gradients(
                q_tile, g_tile, k_tile, v_tile, row_lse, row_delta, score_scale, allowed, kept,
                factor, batch, head, q_index, key_index, given, True, DROPOUT, WIDEN, SCORE, PULL,
            )  # fmt: skip
            if BY_ROW:
                sums += tl.sum(found, 1)
            else:
                inside = allowed & (rows < rows_left)[:, None]
                store_pairs(
                    values + row + places, elements + row + places, found, batch, head, q_index,
                    key_index, given, inside, ELEMENT,
                )  # fmt: skip

    if BY_ROW:
        one = q_index[:, None]
        which = ELEMENT(batch, head, one, one, given) + tl.zeros([BM, 1], tl.int64)
        tl.store(values + rows, sums, mask=rows < rows_left)
        tl.store(elements + rows[:, None], which, mask=(rows < rows_left)[:, None])
