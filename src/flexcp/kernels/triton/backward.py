"""The backward kernels: prep (delta), dq by query tile, and dk and dv by key tile.

Scores are computed again from the *global* lse. Every tile of a gradient is written by one program,
in the order of its lists: no atomics, and the same bits in every run.
"""

import triton
import triton.language as tl

from flexcp.kernels.triton.forward import LOG2_E
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


@kernel
def prep(
    grad_out, out, grad_lse, delta,
    g_batch: tl.int64, g_head: tl.int64, g_row: tl.int64,
    out_batch: tl.int64, out_head: tl.int64, out_row: tl.int64,
    lse_batch: tl.int64, lse_head: tl.int64,
    delta_batch: tl.int64, delta_head: tl.int64,
    heads: tl.int32, q_len: tl.int32, tiles: tl.int32, has_grad_lse: tl.int32,
    VALUE_DIM: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, UNIT: tl.constexpr,
    OUT_UNIT: tl.constexpr,
):  # fmt: skip
    """Delta = sum(grad_out * out) - grad_lse of each row."""
    program = tl.program_id(0)
    batch = (program // tiles // heads).to(tl.int64)
    head = (program // tiles % heads).to(tl.int64)
    first = program % tiles * BM
    rows_left = q_len - first
    g = read(
        tile_base(grad_out, batch, head, first, g_batch, g_head, g_row, UNIT),
        tile_offsets(g_row, UNIT, BM, DV), rows_left, VALUE_DIM, True,
    )  # fmt: skip
    o = read(
        tile_base(out, batch, head, first, out_batch, out_head, out_row, OUT_UNIT),
        tile_offsets(out_row, OUT_UNIT, BM, DV), rows_left, VALUE_DIM, True,
    )  # fmt: skip
    found = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    rows = tl.arange(0, BM)
    inside = rows < rows_left
    from_lse = grad_lse + batch * lse_batch + head * lse_head + first + rows
    found -= tl.load(from_lse, mask=rows < rows_left * has_grad_lse, other=0.0)
    tl.store(delta + batch * delta_batch + head * delta_head + first + rows, found, mask=inside)


@triton.jit
def read_lse(base, rows_left, BM: tl.constexpr):
    """Lse in units of log2; +inf for rows that see nothing, so that their weights are 0."""
    rows = tl.arange(0, BM)
    lse = tl.load(base + rows, mask=rows < rows_left, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)


@triton.jit
def score_gradients(
    q, g, k, v, lse, delta, score_scale, allowed, kept, factor,
    batch, head, q_index, key_index, given,
    MASKED: tl.constexpr, DROPOUT: tl.constexpr, WIDEN: tl.constexpr, SCORE: tl.constexpr,
    PULL_BACK: tl.constexpr,
):  # fmt: skip
    """[BM, BN] The gradients of a tile's scores; with SCORE, of what PULL_BACK says of them."""
    products = product(q, k.T, WIDEN)
    scores = products
    if SCORE is not None:
        scores = SCORE(products, batch, head, q_index[:, None], key_index[None, :], given)
    if MASKED:
        scores = tl.where(allowed, scores, float("-inf"))
    weights = tl.math.exp2(scores * score_scale - lse[:, None])
    grad_weights = product(g, v.T, WIDEN)
    if DROPOUT:
        grad_weights = tl.where(kept, grad_weights * factor, 0.0)
    grad_scores = weights * (grad_weights - delta[:, None])
    if SCORE is not None:
        found = PULL_BACK(
            grad_scores, products, batch, head, q_index[:, None], key_index[None, :], given
        )
        grad_scores = tl.where(scores == float("-inf"), 0.0, found)
    return grad_scores


@triton.jit
def dq_step(
    q, g, k, v, lse, delta, sums, score_scale, allowed, kept, factor,
    batch, head, q_index, key_index, given,
    MASKED: tl.constexpr, DROPOUT: tl.constexpr, WIDEN: tl.constexpr, SCORE: tl.constexpr,
    PULL_BACK: tl.constexpr,
):  # fmt: skip
    """Adds what one key tile gives to the gradient of the queries."""
    grad_scores = score_gradients(
        q, g, k, v, lse, delta, score_scale, allowed, kept, factor,
        batch, head, q_index, key_index, given, MASKED, DROPOUT, WIDEN, SCORE, PULL_BACK,
    )  # fmt: skip
    return add_product(sums, grad_scores.to(k.dtype), k, WIDEN)


@kernel
def dq(
    q, k, v, grad_out, lse, delta, grad_q, q_at, kv_at, given,
    plane_of, order, full_start, full_tile, partial_start, partial_tile, partial_pattern, patterns,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int64,
    g_batch: tl.int64, g_head: tl.int64, g_row: tl.int64,
    lse_batch: tl.int64, lse_head: tl.int64,
    delta_batch: tl.int64, delta_head: tl.int64,
    dq_batch: tl.int64, dq_head: tl.int64, dq_row: tl.int64,
    q_at_batch: tl.int64, kv_at_batch: tl.int64, seed: tl.int64, first_batch: tl.int64,
    first_head: tl.int64, threshold: tl.int32, factor: tl.float32,
    plane_batch: tl.int32, plane_head: tl.int32,
    heads: tl.int32, group: tl.int32, q_len: tl.int32, kv_len: tl.int32, tiles: tl.int32,
    has_former: tl.int32, sign: tl.float32, score_scale: tl.float32, scale: tl.float32,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr, OUT_UNIT: tl.constexpr,
    TMA: tl.constexpr, DROPOUT: tl.constexpr, WIDEN: tl.constexpr, SCORE: tl.constexpr,
    PULL_BACK: tl.constexpr,
):  # fmt: skip
    """The gradient of one query tile, added to what is there if `has_former`."""
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
    g_tile = read(
        tile_base(grad_out, batch, head, first, g_batch, g_head, g_row, UNIT),
        tile_offsets(g_row, UNIT, BM, DV), rows_left, VALUE_DIM, True,
    )  # fmt: skip
    rows = tl.arange(0, BM)
    row_lse = read_lse(lse + batch * lse_batch + head * lse_head + first, rows_left, BM)
    row_delta = tl.load(
        delta + batch * delta_batch + head * delta_head + first + rows,
        mask=rows < rows_left, other=0.0,
    )  # fmt: skip
    k_offsets = tile_offsets(k_row, UNIT, BN, D)
    v_offsets = tile_offsets(v_row, UNIT, BN, DV)
    sums = tl.zeros([BM, D], tl.float32)
    if DROPOUT:
        q_positions = tl.load(
            q_at + batch * q_at_batch + first + rows, mask=rows < rows_left, other=0
        )
        row_hash, again = row_hashes(seed, batch + first_batch, head + first_head, q_positions)
        cols = tl.arange(0, BN)
        key_positions = kv_at + batch * kv_at_batch + cols
    q_index = rows
    if SCORE is not None:
        q_index = read_index(given[0], first, rows_left, BM, True)

    for at in tl.range(tl.load(full_start + line), tl.load(full_start + line + 1)):
        row = tl.load(full_tile + at) * BN
        k_tile = read_listed(
            k, batch, kv_head, row, k_batch, k_head, k_row, k_offsets, BN,
            HEAD_DIM, False, UNIT, TMA,
        )  # fmt: skip
        v_tile = read_listed(
            v, batch, kv_head, row, v_batch, v_head, v_row, v_offsets, BN,
            VALUE_DIM, False, UNIT, TMA,
        )  # fmt: skip
        key_index = row
        if SCORE is not None:
            key_index = read_index(given[1], row, BN, BN, False)
        kept = True
        if DROPOUT:
            key_hash = key_hashes(seed, tl.load(key_positions + row))
            kept = is_kept(row_hash[:, None], again[:, None], key_hash[None, :], threshold)
        sums = dq_step(
            q_tile, g_tile, k_tile, v_tile, row_lse, row_delta, sums, score_scale, True, kept,
            factor, batch, head, q_index, key_index, given, False, DROPOUT, WIDEN, SCORE, PULL_BACK,
        )  # fmt: skip

    for at in tl.range(tl.load(partial_start + line), tl.load(partial_start + line + 1)):
        row = tl.load(partial_tile + at) * BN
        allowed = read_bits(patterns, tl.load(partial_pattern + at), BM, BN)
        k_tile = read_listed(
            k, batch, kv_head, row, k_batch, k_head, k_row, k_offsets, kv_len - row,
            HEAD_DIM, True, UNIT, TMA,
        )  # fmt: skip
        v_tile = read_listed(
            v, batch, kv_head, row, v_batch, v_head, v_row, v_offsets, kv_len - row,
            VALUE_DIM, True, UNIT, TMA,
        )  # fmt: skip
        key_index = row
        if SCORE is not None:
            key_index = read_index(given[1], row, kv_len - row, BN, True)
        kept = True
        if DROPOUT:
            positions = tl.load(key_positions + row, mask=cols < kv_len - row, other=0)
            key_hash = key_hashes(seed, positions)
            kept = is_kept(row_hash[:, None], again[:, None], key_hash[None, :], threshold)
        sums = dq_step(
            q_tile, g_tile, k_tile, v_tile, row_lse, row_delta, sums, score_scale, allowed, kept,
            factor, batch, head, q_index, key_index, given, True, DROPOUT, WIDEN, SCORE, PULL_BACK,
        )  # fmt: skip

    base = tile_base(grad_q, batch, head, first, dq_batch, dq_head, dq_row, OUT_UNIT)
    offsets = tile_offsets(dq_row, OUT_UNIT, BM, D)
    former = read_former(base, offsets, rows_left, has_former, HEAD_DIM).to(tl.float32)
    write(base, offsets, former + sums * scale, rows_left, HEAD_DIM)


@triton.jit
def dkdv_step(
    q, g, k, v, lse, delta, k_sums, v_sums, score_scale, allowed, kept, factor,
    batch, head, q_index, key_index, given,
    MASKED: tl.constexpr, DK: tl.constexpr, DV_WANTED: tl.constexpr, DROPOUT: tl.constexpr,
    WIDEN: tl.constexpr, SCORE: tl.constexpr, PULL_BACK: tl.constexpr,
):  # fmt: skip
    """Adds what one query tile gives to the gradients of the keys and values."""
    products = product(k, q.T, WIDEN)
    scores = products
    if SCORE is not None:
        scores = SCORE(products, batch, head, q_index[None, :], key_index[:, None], given)
    if MASKED:
        scores = tl.where(allowed, scores, float("-inf"))
    weights = tl.math.exp2(scores * score_scale - lse[None, :])
    if DV_WANTED:
        weights_kept = weights
        if DROPOUT:
            weights_kept = tl.where(kept, weights * factor, 0.0)
        v_sums = add_product(v_sums, weights_kept.to(g.dtype), g, WIDEN)
    if DK:
        grad_weights = product(v, g.T, WIDEN)
        if DROPOUT:
            grad_weights = tl.where(kept, grad_weights * factor, 0.0)
        grad_scores = weights * (grad_weights - delta[None, :])
        if SCORE is not None:
            found = PULL_BACK(
                grad_scores, products, batch, head, q_index[None, :], key_index[:, None], given
            )
            grad_scores = tl.where(scores == float("-inf"), 0.0, found)
        k_sums = add_product(k_sums, grad_scores.to(q.dtype), q, WIDEN)
    return k_sums, v_sums


@kernel
def dkdv(
    q, k, v, grad_out, lse, delta, grad_k, grad_v, q_at, kv_at, given,
    plane_of, order, full_start, full_tile, partial_start, partial_tile, partial_pattern, patterns,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int64,
    g_batch: tl.int64, g_head: tl.int64, g_row: tl.int64,
    lse_batch: tl.int64, lse_head: tl.int64,
    delta_batch: tl.int64, delta_head: tl.int64,
    dk_batch: tl.int64, dk_head: tl.int64, dk_row: tl.int64,
    dv_batch: tl.int64, dv_head: tl.int64, dv_row: tl.int64,
    q_at_batch: tl.int64, kv_at_batch: tl.int64, seed: tl.int64, first_batch: tl.int64,
    first_head: tl.int64, threshold: tl.int32, factor: tl.float32,
    plane_batch: tl.int32, plane_head: tl.int32,
    kv_heads: tl.int32, group: tl.int32, q_len: tl.int32, kv_len: tl.int32, tiles: tl.int32,
    sign: tl.float32, score_scale: tl.float32, scale: tl.float32,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr, OUT_UNIT: tl.constexpr,
    DK: tl.constexpr, DV_WANTED: tl.constexpr, TMA: tl.constexpr, DROPOUT: tl.constexpr,
    WIDEN: tl.constexpr, SCORE: tl.constexpr, PULL_BACK: tl.constexpr,
):  # fmt: skip
    """The gradients of one key tile, over the query tiles of all heads that share it.

    The lists and the bits are transposed: by key tile, and a word per 32 queries. A ragged query
    tile is always partial here, so that rows past the end add nothing.
    """
    program = tl.program_id(0)
    batch = (program // tiles // kv_heads).to(tl.int64)
    kv_head = (program // tiles % kv_heads).to(tl.int64)
    # The heads of a group may differ in their planes; the first one's order serves all.
    plane = tl.load(plane_of + batch * plane_batch + kv_head * group * plane_head)
    tile = tl.load(order + plane * tiles + program % tiles)
    first = tile * BN
    rows_left = kv_len - first

    k_tile = read(
        tile_base(k, batch, kv_head, first, k_batch, k_head, k_row, UNIT),
        tile_offsets(k_row, UNIT, BN, D), rows_left, HEAD_DIM, True,
    )  # fmt: skip
    k_tile = (k_tile.to(tl.float32) * sign).to(k_tile.dtype)
    v_tile = read(
        tile_base(v, batch, kv_head, first, v_batch, v_head, v_row, UNIT),
        tile_offsets(v_row, UNIT, BN, DV), rows_left, VALUE_DIM, True,
    )  # fmt: skip
    q_offsets = tile_offsets(q_row, UNIT, BM, D)
    g_offsets = tile_offsets(g_row, UNIT, BM, DV)
    rows = tl.arange(0, BM)
    k_sums = tl.zeros([BN, D], tl.float32)
    v_sums = tl.zeros([BN, DV], tl.float32)
    if DROPOUT:
        keys = tl.arange(0, BN)
        key_positions = tl.load(
            kv_at + batch * kv_at_batch + first + keys, mask=keys < rows_left, other=0
        )
        key_hash = key_hashes(seed, key_positions)
        q_positions = q_at + batch * q_at_batch + rows
    key_index = rows
    if SCORE is not None:
        key_index = read_index(given[1], first, rows_left, BN, True)

    for member in tl.range(0, group):
        head = kv_head * group + member
        plane = tl.load(plane_of + batch * plane_batch + head * plane_head)
        line = plane * tiles + tile
        head_lse = lse + batch * lse_batch + head * lse_head
        head_delta = delta + batch * delta_batch + head * delta_head

        for at in tl.range(tl.load(full_start + line), tl.load(full_start + line + 1)):
            row = tl.load(full_tile + at) * BM
            q_tile = read_listed(
                q, batch, head, row, q_batch, q_head, q_row, q_offsets, BM,
                HEAD_DIM, False, UNIT, TMA,
            )  # fmt: skip
            g_tile = read_listed(
                grad_out, batch, head, row, g_batch, g_head, g_row, g_offsets, BM,
                VALUE_DIM, False, UNIT, TMA,
            )  # fmt: skip
            row_lse = read_lse(head_lse + row, BM, BM)
            row_delta = tl.load(head_delta + row + rows)
            q_index = row
            if SCORE is not None:
                q_index = read_index(given[0], row, BM, BM, False)
            kept = True
            if DROPOUT:
                positions = tl.load(q_positions + row)
                row_hash, again = row_hashes(
                    seed, batch + first_batch, head + first_head, positions
                )
                kept = is_kept(row_hash[None, :], again[None, :], key_hash[:, None], threshold)
            k_sums, v_sums = dkdv_step(
                q_tile, g_tile, k_tile, v_tile, row_lse, row_delta, k_sums, v_sums, score_scale,
                True, kept, factor, batch, head, q_index, key_index, given, False, DK, DV_WANTED,
                DROPOUT, WIDEN, SCORE, PULL_BACK,
            )  # fmt: skip

        for at in tl.range(tl.load(partial_start + line), tl.load(partial_start + line + 1)):
            row = tl.load(partial_tile + at) * BM
            allowed = read_bits(patterns, tl.load(partial_pattern + at), BN, BM)
            q_tile = read_listed(
                q, batch, head, row, q_batch, q_head, q_row, q_offsets, q_len - row,
                HEAD_DIM, True, UNIT, TMA,
            )  # fmt: skip
            g_tile = read_listed(
                grad_out, batch, head, row, g_batch, g_head, g_row, g_offsets, q_len - row,
                VALUE_DIM, True, UNIT, TMA,
            )  # fmt: skip
            row_lse = read_lse(head_lse + row, q_len - row, BM)
            row_delta = tl.load(head_delta + row + rows, mask=rows < q_len - row, other=0.0)
            q_index = row
            if SCORE is not None:
                q_index = read_index(given[0], row, q_len - row, BM, True)
            kept = True
            if DROPOUT:
                positions = tl.load(q_positions + row, mask=rows < q_len - row, other=0)
                row_hash, again = row_hashes(
                    seed, batch + first_batch, head + first_head, positions
                )
                kept = is_kept(row_hash[None, :], again[None, :], key_hash[:, None], threshold)
            k_sums, v_sums = dkdv_step(
                q_tile, g_tile, k_tile, v_tile, row_lse, row_delta, k_sums, v_sums, score_scale,
                allowed, kept, factor, batch, head, q_index, key_index, given, True, DK, DV_WANTED,
                DROPOUT, WIDEN, SCORE, PULL_BACK,
            )  # fmt: skip

    if DK:
        write(
            tile_base(grad_k, batch, kv_head, first, dk_batch, dk_head, dk_row, OUT_UNIT),
            tile_offsets(dk_row, OUT_UNIT, BN, D), k_sums * scale, rows_left, HEAD_DIM,
        )  # fmt: skip
    if DV_WANTED:
        write(
            tile_base(grad_v, batch, kv_head, first, dv_batch, dv_head, dv_row, OUT_UNIT),
            tile_offsets(dv_row, OUT_UNIT, BN, DV), v_sums, rows_left, VALUE_DIM,
        )  # fmt: skip
