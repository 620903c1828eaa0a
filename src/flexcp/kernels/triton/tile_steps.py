"""Steps that the Triton kernels share: where a tile is, how it is read, which of its pairs attend.

Everything here is Triton's language, not Python: it is compiled for a GPU, or run by Triton's
interpreter. Legend: BM queries and BN keys of a tile; D and DV, head dims padded to powers of two.

Addresses are a 64-bit scalar for the tile and 32-bit offsets inside of it. Strides come in units of
`UNIT` elements: 16 bytes where all tensors are aligned to that, so that the compiler knows it.
"""

import inspect

import triton
import triton.language as tl


def kernel(function):
    """A Triton kernel that is compiled once for all lengths, counts, strides and addresses."""
    parameters = inspect.signature(function).parameters.values()
    data = [p.name for p in parameters if p.annotation is not tl.constexpr]
    return triton.jit(function, do_not_specialize=data)


@triton.jit
def tile_base(tensor, batch, head, row, batch_stride, head_stride, row_stride, UNIT: tl.constexpr):
    """The address of the first element of a row of a batch element and head."""
    units = batch * batch_stride + head * head_stride + row * row_stride
    base = tensor + units * UNIT
    if UNIT > 1:
        base = tl.multiple_of(base, 16)
    return base


@triton.jit
def tile_offsets(row_stride, UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Where the elements of a tile are, from its base."""
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    return rows[:, None] * (row_stride.to(tl.int32) * UNIT) + cols[None, :]


@triton.jit
def read(base, offsets, rows_left, HEAD_DIM: tl.constexpr, BOUNDED: tl.constexpr):
    """A tile: zeros beyond the head dim, and if BOUNDED beyond the last row."""
    ROWS: tl.constexpr = offsets.shape[0]
    COLS: tl.constexpr = offsets.shape[1]
    if BOUNDED:
        inside = (tl.arange(0, ROWS) < rows_left)[:, None]
        if HEAD_DIM < COLS:
            inside = inside & (tl.arange(0, COLS) < HEAD_DIM)[None, :]
        return tl.load(base + offsets, mask=inside, other=0.0)
    if HEAD_DIM < COLS:
        inside = (tl.arange(0, COLS) < HEAD_DIM)[None, :]
        return tl.load(base + offsets, mask=inside, other=0.0)
    return tl.load(base + offsets)


@triton.jit
def read_listed(
    tensor, batch, head, row, batch_stride, head_stride, row_stride, offsets, rows_left,
    HEAD_DIM: tl.constexpr, BOUNDED: tl.constexpr, UNIT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A tile that a list names, by its address; or with TMA through the tensor's descriptor.

    A descriptor knows the tensor's bounds, and reads zeros beyond them.
    """
    ROWS: tl.constexpr = offsets.shape[0]
    COLS: tl.constexpr = offsets.shape[1]
    if TMA:
        tile = tensor.load([batch.to(tl.int32), head.to(tl.int32), row, 0]).reshape(ROWS, COLS)
    else:
        base = tile_base(tensor, batch, head, row, batch_stride, head_stride, row_stride, UNIT)
        tile = read(base, offsets, rows_left, HEAD_DIM, BOUNDED)
    return tile


@triton.jit
def write(base, offsets, value, rows_left, HEAD_DIM: tl.constexpr):
    """Stores a tile, without what is beyond the last row or the head dim."""
    ROWS: tl.constexpr = offsets.shape[0]
    COLS: tl.constexpr = offsets.shape[1]
    inside = (tl.arange(0, ROWS) < rows_left)[:, None]
    if HEAD_DIM < COLS:
        inside = inside & (tl.arange(0, COLS) < HEAD_DIM)[None, :]
    tl.store(base + offsets, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def read_former(base, offsets, rows_left, has_former, HEAD_DIM: tl.constexpr):
    """What an earlier call left in a tile of the output; zeros if there was none."""
    ROWS: tl.constexpr = offsets.shape[0]
    COLS: tl.constexpr = offsets.shape[1]
    inside = (tl.arange(0, ROWS) < rows_left * has_former)[:, None]
    inside = inside & (tl.arange(0, COLS) < HEAD_DIM)[None, :]
    return tl.load(base + offsets, mask=inside, other=0.0)


@triton.jit
def read_index(positions, first, rows_left, ROWS: tl.constexpr, BOUNDED: tl.constexpr):
    """[ROWS] The global positions of some rows in 32 bits; 0 beyond the last if BOUNDED."""
    rows = tl.arange(0, ROWS)
    if BOUNDED:
        return tl.load(positions + first + rows, mask=rows < rows_left, other=0).to(tl.int32)
    return tl.load(positions + first + rows).to(tl.int32)


@triton.jit
def read_bits(patterns, pattern, ROWS: tl.constexpr, COLS: tl.constexpr):
    """[ROWS, COLS] Which pairs of a tile attend: a 32-bit word of each row per 32 columns."""
    WORDS: tl.constexpr = (COLS + 31) // 32
    words = patterns + pattern.to(tl.int64) * (ROWS * WORDS) + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)[None, :]
    word = tl.load(words)[:, None]
    for i in tl.static_range(1, WORDS):
        word = tl.where(cols < 32 * i, word, tl.load(words + i * ROWS)[:, None])
    return ((word >> (cols & 31)) & 1) != 0


@triton.jit
def product(a, b, WIDEN: tl.constexpr):
    """The matrix product in float32, never by tf32.

    Triton's interpreter multiplies half-precision operands wrongly, so they are widened for it.
    """
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def add_product(total, a, b, WIDEN: tl.constexpr):
    """`total` plus the matrix product."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total, input_precision="ieee")


# Which weights are dropped: the numbers of `kernels/dropout.py`, in 32 bits.
OF_ROW = tl.constexpr(0x1E3779B9)
OF_ROW_AGAIN = tl.constexpr(0x7F4A7C15)
OF_KEY = tl.constexpr(0x42B2AE35)


@triton.jit
def mixed(x):
    """A 32-bit number that depends on all bits of another, one to one."""
    x = x ^ (x >> 16)
    x = tl.mul(x, 0x7FEB352D, sanitize_overflow=False)
    x = x ^ (x >> 15)
    x = tl.mul(x, 0x846CA68B, sanitize_overflow=False)
    return x ^ (x >> 16)


@triton.jit
def seeded(seed, WHICH: tl.constexpr):
    """The state of a hash after the seed."""
    low = seed.to(tl.uint32)
    return mixed(mixed(low ^ WHICH) ^ (seed >> 32).to(tl.uint32))


@triton.jit
def row_hashes(seed, batch, head, positions):
    """Both hashes of some queries, by their global positions."""
    b, h, q = batch.to(tl.uint32), head.to(tl.uint32), positions.to(tl.uint32)
    row = mixed(mixed(mixed(seeded(seed, OF_ROW) ^ b) ^ h) ^ q) | 1
    again = mixed(mixed(mixed(seeded(seed, OF_ROW_AGAIN) ^ b) ^ h) ^ q) | 1
    return row.to(tl.int32, bitcast=True), again.to(tl.int32, bitcast=True)


@triton.jit
def key_hashes(seed, positions):
    """The hash of some keys, by their global positions."""
    key = mixed(seeded(seed, OF_KEY) ^ positions.to(tl.uint32)) | 1
    return key.to(tl.int32, bitcast=True)


@triton.jit
def is_kept(row, again, key, threshold):
    """Whether weights are kept: hashes of rows and keys, to be broadcast against each other."""
    x = tl.mul(row, key, sanitize_overflow=False)
    x = tl.mul(x, (x << 1) | 1, sanitize_overflow=False)
    return tl.mul(x, again, sanitize_overflow=False) >= threshold
