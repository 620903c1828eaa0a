"""The forward kernel: one query tile per program, over the key tiles that its lists name.

Full tiles are computed without a mask and without bounds; partial ones look their bits up. An
earlier result is where the sums begin, so that rounds merge without a kernel of their own.
"""

import triton
import triton.language as tl

from flexcp.kernels.triton.tile_steps import (
    add_product,
    is_kept,
    kernel,
    key_hashes,
    product,
    read,
    read_bits,
    read_former,
    read_index,
    read_listed,
    row_hashes,
    tile_base,
    tile_offsets,
    write,
)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Instead of -inf as the largest score so far: differences to it are never NaN.
FLOOR = tl.constexpr(-3.4e38)


@triton.jit
def softmax_step(
    scores, v, highest, total, sums, score_scale, allowed, kept,
    MASKED: tl.constexpr, DROPOUT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One tile of scores joins the running maximum, the denominators and the sums of values."""
    if MASKED:
        scores = tl.where(allowed, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1) * score_scale)
    weights = tl.math.exp2(scores * score_scale - new_highest[:, None])
    rescale = tl.math.exp2(highest - new_highest)
    total = total * rescale + tl.sum(weights, 1)
    if DROPOUT:
        weights = tl.where(kept, weights, 0.0)
    sums = add_product(sums * rescale[:, None], weights.to(v.dtype), v, WIDEN)
    return new_highest, total, sums


@kernel
def forward(
    q, k, v, out, lse, q_at, kv_at, given,
    plane_of, order, full_start, full_tile, partial_start, partial_tile, partial_pattern, patterns,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int64,
    out_batch: tl.int64, out_head: tl.int64, out_row: tl.int64,
    lse_batch: tl.int64, lse_head: tl.int64,
    q_at_batch: tl.int64, kv_at_batch: tl.int64, seed: tl.int64, first_batch: tl.int64,
    first_head: tl.int64, threshold: tl.int32, factor: tl.float32,
    plane_batch: tl.int32, plane_head: tl.int32,
    heads: tl.int32, group: tl.int32, q_len: tl.int32, kv_len: tl.int32, tiles: tl.int32,
    has_former: tl.int32, sign: tl.float32, score_scale: tl.float32,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr, OUT_UNIT: tl.constexpr,
    TMA: tl.constexpr, DROPOUT: tl.constexpr, WIDEN: tl.constexpr, SCORE: tl.constexpr,
):  # fmt: skip
    """Out and lse of one query tile, merged with what is there if `has_former`.

    `sign` is that of the scale and is folded into q, so that `score_scale` (times log2 e) is
    positive and the largest score stays the largest. With DROPOUT, sums are kept without `factor`,
    by which weights that are not dropped grow. SCORE is a function on the scores or None; it scales
    them itself, by what is in `given`.
    """
    program = tl.program_id(0)
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
    k_offsets = tile_offsets(k_row, UNIT, BN, D)
    v_offsets = tile_offsets(v_row, UNIT, BN, DV)
    rows = tl.arange(0, BM)
    row_lse = lse + batch * lse_batch + head * lse_head + first + rows
    out_base = tile_base(out, batch, head, first, out_batch, out_head, out_row, OUT_UNIT)
    out_offsets = tile_offsets(out_row, OUT_UNIT, BM, DV)

    former = tl.load(row_lse, mask=rows < rows_left * has_former, other=float("-inf"))
    highest = tl.maximum(former * LOG2_E, FLOOR)
    total = tl.where(former == float("-inf"), 0.0, 1.0)
    sums = read_former(out_base, out_offsets, rows_left, has_former, VALUE_DIM).to(tl.float32)
    if DROPOUT:
        sums = sums / factor
        q_positions = tl.load(
            q_at + batch * q_at_batch + first + rows, mask=rows < rows_left, other=0
        )
        row_hash, again = row_hashes(seed, batch + first_batch, head + first_head, q_positions)
        cols = tl.arange(0, BN)
        key_positions = kv_at + batch * kv_at_batch + cols
    if SCORE is not None:
        q_index = read_index(given[0], first, rows_left, BM, True)[:, None]

    for at in tl.range(tl.load(full_start + line), tl.load(full_start + line + 1)):
        row = tl.load(full_tile + at) * BN
        k_tile = read_listed(
            k, batch, kv_head, row, k_batch, k_head, k_row, k_offsets, BN,
            HEAD_DIM, False, UNIT, TMA,
        )  # fmt: skip
        scores = product(q_tile, k_tile.T, WIDEN)
        v_tile = read_listed(
            v, batch, kv_head, row, v_batch, v_head, v_row, v_offsets, BN,
            VALUE_DIM, False, UNIT, TMA,
        )  # fmt: skip
        if SCORE is not None:
            key_index = read_index(given[1], row, BN, BN, False)[None, :]
            scores = SCORE(scores, batch, head, q_index, key_index, given)
        kept = True
        if DROPOUT:
            key_hash = key_hashes(seed, tl.load(key_positions + row))
            kept = is_kept(row_hash[:, None], again[:, None], key_hash[None, :], threshold)
        highest, total, sums = softmax_step(
            scores, v_tile, highest, total, sums, score_scale, True, kept, False, DROPOUT, WIDEN
        )

    for at in tl.range(tl.load(partial_start + line), tl.load(partial_start + line + 1)):
        row = tl.load(partial_tile + at) * BN
        allowed = read_bits(patterns, tl.load(partial_pattern + at), BM, BN)
        k_tile = read_listed(
            k, batch, kv_head, row, k_batch, k_head, k_row, k_offsets, kv_len - row,
            HEAD_DIM, True, UNIT, TMA,
        )  # fmt: skip
        scores = product(q_tile, k_tile.T, WIDEN)
        v_tile = read_listed(
            v, batch, kv_head, row, v_batch, v_head, v_row, v_offsets, kv_len - row,
            VALUE_DIM, True, UNIT, TMA,
        )  # fmt: skip
        if SCORE is not None:
            key_index = read_index(given[1], row, kv_len - row, BN, True)[None, :]
            scores = SCORE(scores, batch, head, q_index, key_index, given)
        kept = True
        if DROPOUT:
            positions = tl.load(key_positions + row, mask=cols < kv_len - row, other=0)
            key_hash = key_hashes(seed, positions)
            kept = is_kept(row_hash[:, None], again[:, None], key_hash[None, :], threshold)
        highest, total, sums = softmax_step(
            scores, v_tile, highest, total, sums, score_scale, allowed, kept, True, DROPOUT, WIDEN
        )

    if DROPOUT:
        sums = sums * factor
    seen = total > 0.0
    total = tl.where(seen, total, 1.0)
    write(out_base, out_offsets, sums / total[:, None], rows_left, VALUE_DIM)
    new_lse = tl.where(seen, (highest + tl.math.log2(total)) * LN_2, float("-inf"))
    tl.store(row_lse, new_lse, mask=rows < rows_left)
