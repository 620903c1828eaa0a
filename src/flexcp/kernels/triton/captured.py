"""The kernel for gradients of what score functions read from tensors, query tile by query tile.

Each number that was read has a gradient, and is an element of a tensor; many are the same one. How
they are added up follows from how the tensor is looked up (`Lookup.kind`):

- "row": all keys of a query read the same, and are added up; one number of each query is left;
- "pair": no two pairs of a head read the same, and gradients are added where they belong;
- "table": equal elements of a tile are added up in registers, then to a table of the program's own;
- "sorted": gradients and the numbers of elements are written, for `captured_sums.py` to sort.

Nothing is added by atomics: what is written to has one program, which goes in a fixed order.
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
def slanted(tile, nothing, WIDTH: tl.constexpr):
    """[BM, WIDTH] A tile whose diagonals are columns, and `nothing` where there is none."""
    ROWS: tl.constexpr = tile.shape[0]
    COLS: tl.constexpr = tile.shape[1]
    at = tl.arange(0, WIDTH)[None, :] + tl.arange(0, ROWS)[:, None] - (ROWS - 1)
    inside = (at >= 0) & (at < COLS)
    found = tl.gather(tile, tl.minimum(tl.maximum(at, 0), COLS - 1), 1)
    return tl.where(inside, found, nothing)


@triton.jit
def add_to_table(table, found, which, SLANTED: tl.constexpr, WIDTH: tl.constexpr):
    """Adds each pair's gradient to the element of the table that it names, unless it is below 0.

    Each turn takes one element of every column, all rows that name it, and with it the columns that
    chose the same: one turn if diagonals (SLANTED) or columns read the same, as they mostly do.
    """
    if SLANTED:
        found = slanted(found, 0.0, WIDTH)
        which = slanted(which, -1, WIDTH)
    while tl.max(tl.max(which, 1), 0) >= 0:
        chosen = tl.max(which, 0)
        taken = which == chosen[None, :]
        sums = tl.sum(tl.where(taken, found, 0.0), 0)
        which = tl.where(taken, -1, which)
        alike = chosen[:, None] == chosen[None, :]
        total = tl.sum(tl.where(alike, sums[None, :], 0.0), 1)
        former = tl.load(table + chosen, mask=chosen >= 0, other=0.0)
        tl.debug_barrier()  # columns that chose the same write the same sum, once all have read
        tl.store(table + chosen, former + total, mask=chosen >= 0)
        tl.debug_barrier()


@triton.jit
def take_tile(
    found, inside, sums, values, elements, row, places, batch, head, q_index, key_index, given,
    KIND: tl.constexpr, ELEMENT: tl.constexpr, SLANTED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Adds up or writes down the gradients of a tile's pairs, those that are inside."""
    if KIND == "row":
        sums += tl.sum(found, 1)
    else:
        which = ELEMENT(batch, head, q_index[:, None], key_index[None, :], given)
        if KIND == "table":
            which = tl.where(inside, which + tl.zeros(found.shape, tl.int32), -1)
            add_to_table(values, found, which, SLANTED, WIDTH)
        else:
            which = which + tl.zeros(found.shape, tl.int64)
            if KIND == "pair":
                former = tl.load(values + which, mask=inside, other=0.0)
                tl.store(values + which, former + found, mask=inside)
            else:
                tl.store(values + row + places, found, mask=inside)
                tl.store(elements + row + places, which, mask=inside)
    return sums


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
    first_tile: tl.int32, lanes: tl.int32, apart: tl.int32, step: tl.int32, span: tl.int32,
    first_key: tl.int32, width: tl.int32, key_parts: tl.int32, size: tl.int32,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr,
    TMA: tl.constexpr, DROPOUT: tl.constexpr, WIDEN: tl.constexpr,
    SCORE: tl.constexpr, PULL: tl.constexpr, ELEMENT: tl.constexpr, OWNER: tl.constexpr,
    KIND: tl.constexpr, SLANTED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What the pairs of some query tiles have read: its gradient, and which element it is.

    Which tiles a program takes is said by `Walk` in `captured_sums.py`, where also what is written
    is: "row" writes to [programs, BM], "table" to [programs, size] and the table's number to
    [programs], "pair" to the gradient itself, "sorted" to [programs, BM, width]. The last two see
    keys in [first_key, first_key + width) alone; `key_parts` programs share their tiles.
    """
    program = tl.program_id(0) // key_parts
    first_key += tl.program_id(0) % key_parts * width
    rows = tl.arange(0, BM)
    cols = tl.arange(0, BN)
    k_offsets = tile_offsets(k_row, UNIT, BN, D)
    v_offsets = tile_offsets(v_row, UNIT, BN, DV)
    places = rows[:, None] * width + cols[None, :]
    if KIND == "row":
        values += program.to(tl.int64) * BM
        elements += program.to(tl.int64) * BM
    elif KIND == "table":
        values += program.to(tl.int64) * size
    elif KIND == "sorted":
        begin = program.to(tl.int64) * BM * width - first_key
        values += begin
        elements += begin

    begin_tile = first_tile + program // lanes * apart
    for numbered in tl.range(begin_tile + program % lanes, begin_tile + span, step):
        batch = (numbered // tiles // heads).to(tl.int64)
        head = (numbered // tiles % heads).to(tl.int64)
        kv_head = head // group
        plane = tl.load(plane_of + batch * plane_batch + head * plane_head)
        tile = numbered % tiles
        if KIND != "pair":  # where all heads of a program have to have the same one
            tile = tl.load(order + plane * tiles + tile)
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
        row_lse = read_lse(lse + batch * lse_batch + head * lse_head + first, rows_left, BM)
        row_delta = tl.load(
            delta + batch * delta_batch + head * delta_head + first + rows,
            mask=rows < rows_left, other=0.0,
        )  # fmt: skip
        q_index = read_index(given[0], first, rows_left, BM, True)
        if DROPOUT:
            q_positions = tl.load(
                q_at + batch * q_at_batch + first + rows, mask=rows < rows_left, other=0
            )
            row_hash, again = row_hashes(seed, batch + first_batch, head + first_head, q_positions)
            key_positions = kv_at + batch * kv_at_batch + cols
        sums = tl.zeros([BM], tl.float32)

        for at in tl.range(tl.load(full_start + line), tl.load(full_start + line + 1)):
            row = tl.load(full_tile + at) * BN
            is_seen = True
            if KIND == "pair" or KIND == "sorted":
                is_seen = (row >= first_key) & (row - first_key < width)
            if is_seen:
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
                    factor, batch, head, q_index, key_index, given, False, DROPOUT, WIDEN,
                    SCORE, PULL,
                )  # fmt: skip
                inside = (rows < rows_left)[:, None]
                sums = take_tile(
                    found, inside, sums, values, elements, row, places, batch, head, q_index,
                    key_index, given, KIND, ELEMENT, SLANTED, WIDTH,
                )  # fmt: skip

        for at in tl.range(tl.load(partial_start + line), tl.load(partial_start + line + 1)):
            row = tl.load(partial_tile + at) * BN
            is_seen = True
            if KIND == "pair" or KIND == "sorted":
                is_seen = (row >= first_key) & (row - first_key < width)
            if is_seen:
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
                    factor, batch, head, q_index, key_index, given, True, DROPOUT, WIDEN,
                    SCORE, PULL,
                )  # fmt: skip
                inside = allowed & (rows < rows_left)[:, None]
                sums = take_tile(
                    found, inside, sums, values, elements, row, places, batch, head, q_index,
                    key_index, given, KIND, ELEMENT, SLANTED, WIDTH,
                )  # fmt: skip

        if KIND == "row":
            one = q_index[:, None]
            which = ELEMENT(batch, head, one, one, given) + tl.zeros([BM, 1], tl.int64)
            tl.store(values + rows, sums, mask=rows < rows_left)
            tl.store(elements + rows[:, None], which, mask=(rows < rows_left)[:, None])
        elif KIND == "table":
            tl.store(elements + program, OWNER(batch, head, q_index, q_index, given))
        elif KIND == "pair":
            tl.debug_barrier()  # the next head may have other threads for a pair
