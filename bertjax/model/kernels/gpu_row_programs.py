"""What one GPU program of the passes over hidden vectors computes, in the Triton language.

    residual_norm_forward, _backward  ROWS hidden vectors: LayerNorm(residual + dropout(h + b))
    gelu_backward                     ROWS x COLUMNS of the gradient of h in GELU(h)
    gated_gelu_forward, _backward     the same of GELU(a) b
    turn                              queries or keys of ROWS tokens, turned by their positions
    largest, quantise, gelu_quantise, gelu_backward_quantise    ROWS x COLUMNS in 8-bit floats

Conventions as in gpu_programs; residual_norm, bias_gelu, gated_gelu, rotary and float8 say what is computed and why.
A hidden vector lies in registers in two parts, since Triton's arrays have powers of two of elements: FIRST,
the largest that fits, and REST, 0 or the smallest that holds what is left.
"""

import triton
import triton.language as tl

from bertjax.model.kernels import dropout_bits

GOLDEN = tl.constexpr(int(dropout_bits.GOLDEN))
MIX_1 = tl.constexpr(int(dropout_bits.MIX_1))
MIX_2 = tl.constexpr(int(dropout_bits.MIX_2))
MIX_3 = tl.constexpr(int(dropout_bits.MIX_3))
_SLOPE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_CUBE = tl.constexpr(0.044715)


@triton.jit
def hidden_keep(words, token, columns, THRESHOLD: tl.constexpr):
    """Which columns of one token dropout_bits.hidden_words keep; `words` are the key's two."""
    stream = token * GOLDEN + words[0]
    stream = stream ^ (stream >> 16)
    stream = stream * MIX_1
    stream = stream ^ (stream >> 15)
    stream = stream * MIX_2
    stream = stream ^ (stream >> 16)
    columns = columns.to(tl.uint32)
    x = stream + (columns >> 2) * GOLDEN
    x = x ^ (x >> 16)
    x = x * MIX_1
    x = x ^ (x >> 15) ^ words[1]
    x = x * MIX_2
    word = tl.where((columns & 2) != 0, x * MIX_3, x)
    word = tl.where((columns & 1) != 0, word << 16, word)
    return word >= THRESHOLD


@triton.jit
def _read(pointer, START: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """A part of a vector, 0 beyond its end."""
    columns = START + tl.arange(0, SIZE)
    if START + SIZE > WIDTH:
        x = tl.load(pointer + columns, mask=columns < WIDTH, other=0.0)
    else:
        x = tl.load(pointer + columns)
    return x


@triton.jit
def _load(pointer, START: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """The same in float32."""
    return _read(pointer, START, SIZE, WIDTH).to(tl.float32)


@triton.jit
def _store(pointer, x, START: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    columns = START + tl.arange(0, SIZE)
    x = x.to(pointer.dtype.element_ty)
    if START + SIZE > WIDTH:
        tl.store(pointer + columns, x, mask=columns < WIDTH)
    else:
        tl.store(pointer + columns, x)


@triton.jit
def _within(x, START: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    if START + SIZE > WIDTH:
        x = tl.where(START + tl.arange(0, SIZE) < WIDTH, x, 0.0)
    return x


@triton.jit
def _sum(h, before, residual, z, words, token, START: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
         THRESHOLD: tl.constexpr, FACTOR: tl.constexpr):  # fmt: skip
    """A part of z = residual + dropout(h + before), stored, float32."""
    x = _load(h, START, SIZE, WIDTH) + before
    if THRESHOLD > 0:
        x = tl.where(hidden_keep(words, token, START + tl.arange(0, SIZE), THRESHOLD), x * FACTOR, 0.0)
    # Rounded before the statistics are taken, so that backward sees the same numbers.
    x = (x + _load(residual, START, SIZE, WIDTH)).to(z.dtype.element_ty)
    _store(z, x, START, SIZE, WIDTH)
    return _within(x.to(tl.float32), START, SIZE, WIDTH)


@triton.jit
def residual_norm_forward(
    words, tokens, h, before, residual, scale, bias, y, z,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr,
    THRESHOLD: tl.constexpr, FACTOR: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    """FACTOR: 1 / keep probability."""
    before_0, scale_0, bias_0 = (
        _load(before, 0, FIRST, WIDTH),
        _load(scale, 0, FIRST, WIDTH),
        _load(bias, 0, FIRST, WIDTH),
    )
    if REST > 0:
        before_1, scale_1 = _load(before, FIRST, REST, WIDTH), _load(scale, FIRST, REST, WIDTH)
        bias_1 = _load(bias, FIRST, REST, WIDTH)
    key = tl.load(words), tl.load(words + 1)
    start = tl.program_id(0) * ROWS
    for i in range(0, ROWS):
        row = start + i
        at = tl.cast(row, tl.int64) * WIDTH
        token = tl.load(tokens + row)
        x_0 = _sum(h + at, before_0, residual + at, z + at, key, token, 0, FIRST, WIDTH, THRESHOLD, FACTOR)
        total = tl.sum(x_0, 0)
        if REST > 0:
            x_1 = _sum(h + at, before_1, residual + at, z + at, key, token, FIRST, REST, WIDTH, THRESHOLD, FACTOR)
            total = total + tl.sum(x_1, 0)
        mean = total * (1.0 / WIDTH)
        x_0 = x_0 - mean
        squares = tl.sum(x_0 * x_0, 0)
        if REST > 0:
            x_1 = _within(x_1 - mean, FIRST, REST, WIDTH)
            squares = squares + tl.sum(x_1 * x_1, 0)
        reciprocal = tl.rsqrt(squares * (1.0 / WIDTH) + EPSILON)
        _store(y + at, x_0 * reciprocal * scale_0 + bias_0, 0, FIRST, WIDTH)
        if REST > 0:
            _store(y + at, x_1 * reciprocal * scale_1 + bias_1, FIRST, REST, WIDTH)


@triton.jit
def _read_three(z, dz, dy, row, START: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    at = tl.cast(row, tl.int64) * WIDTH
    return _read(z + at, START, SIZE, WIDTH), _read(dz + at, START, SIZE, WIDTH), _read(dy + at, START, SIZE, WIDTH)


@triton.jit
def _gradients(dx, x, mean, slope, reciprocal, own_dz, dh, dr, words, token, START: tl.constexpr, SIZE: tl.constexpr,
               WIDTH: tl.constexpr, THRESHOLD: tl.constexpr, FACTOR: tl.constexpr, BEFORE: tl.constexpr):  # fmt: skip
    """A part of the gradients of the residual and of h, stored; that of h is returned, float32.

    Without dropout they are the same, and that of h is not stored.
    """
    dx = (dx - mean - x * slope) * reciprocal
    if BEFORE:
        dx += own_dz
    _store(dr, dx, START, SIZE, WIDTH)
    if THRESHOLD > 0:
        dx = tl.where(hidden_keep(words, token, START + tl.arange(0, SIZE), THRESHOLD), dx * FACTOR, 0.0)
        _store(dh, dx, START, SIZE, WIDTH)
    return dx


@triton.jit
def residual_norm_backward(
    words, tokens, z, dz, dy, scale, dh, dr, sums,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr,
    THRESHOLD: tl.constexpr, FACTOR: tl.constexpr, EPSILON: tl.constexpr,
    BEFORE: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """sums [programs, 3, WIDTH]: what these rows add to the gradients of scale, bias and `before`.

    BEFORE: dz and dy are the gradients of z and of y; else both are of y. BIASED: False where there is neither
    bias nor `before`, and sums [programs, 1, WIDTH]. The next row is read while this one is worked on.
    """
    scale_0 = _load(scale, 0, FIRST, WIDTH)
    dscale_0 = tl.full((FIRST,), 0.0, tl.float32)
    dbias_0 = tl.full((FIRST,), 0.0, tl.float32)
    dbefore_0 = tl.full((FIRST,), 0.0, tl.float32)
    key = tl.load(words), tl.load(words + 1)
    start = tl.program_id(0) * ROWS
    z_0, dz_0, dy_0 = _read_three(z, dz, dy, start, 0, FIRST, WIDTH)
    if REST > 0:
        scale_1 = _load(scale, FIRST, REST, WIDTH)
        dscale_1 = tl.full((REST,), 0.0, tl.float32)
        dbias_1 = tl.full((REST,), 0.0, tl.float32)
        dbefore_1 = tl.full((REST,), 0.0, tl.float32)
        z_1, dz_1, dy_1 = _read_three(z, dz, dy, start, FIRST, REST, WIDTH)
    for i in range(0, ROWS):
        row = start + i
        following = start + tl.minimum(i + 1, ROWS - 1)
        at = tl.cast(row, tl.int64) * WIDTH
        token = tl.load(tokens + row)
        x_0, own_0, g_0 = z_0.to(tl.float32), dz_0.to(tl.float32), dy_0.to(tl.float32)
        z_0, dz_0, dy_0 = _read_three(z, dz, dy, following, 0, FIRST, WIDTH)
        total = tl.sum(x_0, 0)
        if REST > 0:
            x_1, own_1, g_1 = z_1.to(tl.float32), dz_1.to(tl.float32), dy_1.to(tl.float32)
            z_1, dz_1, dy_1 = _read_three(z, dz, dy, following, FIRST, REST, WIDTH)
            total = total + tl.sum(x_1, 0)
        mean = total * (1.0 / WIDTH)
        x_0 = x_0 - mean
        squares = tl.sum(x_0 * x_0, 0)
        if REST > 0:
            x_1 = _within(x_1 - mean, FIRST, REST, WIDTH)
            squares = squares + tl.sum(x_1 * x_1, 0)
        reciprocal = tl.rsqrt(squares * (1.0 / WIDTH) + EPSILON)
        x_0 = x_0 * reciprocal
        if not BEFORE:
            g_0 += own_0
        dx_0 = g_0 * scale_0
        total = tl.sum(dx_0, 0)
        slope = tl.sum(dx_0 * x_0, 0)
        if REST > 0:
            x_1 = x_1 * reciprocal
            if not BEFORE:
                g_1 += own_1
            dx_1 = g_1 * scale_1
            total = total + tl.sum(dx_1, 0)
            slope = slope + tl.sum(dx_1 * x_1, 0)
        mean, slope = total * (1.0 / WIDTH), slope * (1.0 / WIDTH)
        dx_0 = _gradients(
            dx_0, x_0, mean, slope, reciprocal, own_0, dh + at, dr + at, key, token, 0, FIRST,
            WIDTH, THRESHOLD, FACTOR, BEFORE,
        )  # fmt: skip
        dscale_0 += g_0 * x_0
        if BIASED:
            dbias_0 += g_0
            dbefore_0 += dx_0
        if REST > 0:
            dx_1 = _gradients(
                dx_1, x_1, mean, slope, reciprocal, own_1, dh + at, dr + at, key, token, FIRST, REST,
                WIDTH, THRESHOLD, FACTOR, BEFORE,
            )  # fmt: skip
            dscale_1 += g_1 * x_1
            if BIASED:
                dbias_1 += g_1
                dbefore_1 += dx_1
    PARTS: tl.constexpr = 3 if BIASED else 1
    sums += tl.program_id(0).to(tl.int64) * (PARTS * WIDTH)
    _store(sums, dscale_0, 0, FIRST, WIDTH)
    if REST > 0:
        _store(sums, dscale_1, FIRST, REST, WIDTH)
    if BIASED:
        _store(sums + WIDTH, dbias_0, 0, FIRST, WIDTH)
        _store(sums + 2 * WIDTH, dbefore_0, 0, FIRST, WIDTH)
        if REST > 0:
            _store(sums + WIDTH, dbias_1, FIRST, REST, WIDTH)
            _store(sums + 2 * WIDTH, dbefore_1, FIRST, REST, WIDTH)


@triton.jit
def _gelu(x, TANH: tl.constexpr):
    """GELU and its slope, float32: by tanh, as x times a sigmoid, or exact."""
    if TANH:
        square = x * x
        s = 1.0 / (1.0 + tl.exp(x * -_SLOPE * (square * _CUBE + 1.0)))
        return x * s, s + x * s * (1.0 - s) * ((square * (3.0 * _CUBE) + 1.0) * _SLOPE)
    below = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
    return x * below, below + x * tl.exp(-0.5 * x * x) * 0.3989422804014327


@triton.jit
def gelu_backward(u, g, du, sums, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """du = g * d GELU / du of the tanh form; sums [programs of rows, WIDTH], what these rows of du add up to."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.program_id(0) * ROWS
    total = tl.full((COLUMNS,), 0.0, tl.float32)
    for i in range(0, ROWS):
        at = tl.cast(start + i, tl.int64) * WIDTH + columns
        x = tl.load(u + at).to(tl.float32)
        _, slope = _gelu(x, True)
        dx = tl.load(g + at).to(tl.float32) * slope
        tl.store(du + at, dx.to(du.dtype.element_ty))
        total += dx
    tl.store(sums + tl.program_id(0).to(tl.int64) * WIDTH + columns, total)


@triton.jit
def gated_gelu_forward(u, y, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TANH: tl.constexpr):
    """y [rows, WIDTH] = GELU(a) b, where a row of u is a and b."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = rows[:, None] * (2 * WIDTH) + columns[None, :]
    value, _ = _gelu(tl.load(u + at).to(tl.float32), TANH)
    b = tl.load(u + at + WIDTH).to(tl.float32)
    tl.store(y + rows[:, None] * WIDTH + columns[None, :], (value * b).to(y.dtype.element_ty))


@triton.jit
def gated_gelu_backward(u, g, du, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TANH: tl.constexpr):
    """du, of the gradient g of y."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = rows[:, None] * (2 * WIDTH) + columns[None, :]
    value, slope = _gelu(tl.load(u + at).to(tl.float32), TANH)
    b = tl.load(u + at + WIDTH).to(tl.float32)
    dy = tl.load(g + rows[:, None] * WIDTH + columns[None, :]).to(tl.float32)
    tl.store(du + at, (dy * b * slope).to(du.dtype.element_ty))
    tl.store(du + at + WIDTH, (dy * value).to(du.dtype.element_ty))


@triton.jit
def turn(
    x, cos, sin, PERIOD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Queries or keys of x [rows, 3, HEADS, 2 HALF] turned, in place.

    Row i turns by row i % PERIOD of cos and sin [PERIOD, 2 HALF].
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, HALF)
    angles = (rows % PERIOD)[:, None] * (2 * HALF) + columns[None, :]
    c, s = tl.load(cos + angles), tl.load(sin + angles)
    at = (rows * (6 * HEADS * HALF) + tl.program_id(1) * (2 * HEADS * HALF))[:, None] + columns[None, :]
    for _ in tl.static_range(0, HEADS):
        first, second = tl.load(x + at).to(tl.float32), tl.load(x + at + HALF).to(tl.float32)
        tl.store(x + at, (first * c - second * s).to(x.dtype.element_ty))
        tl.store(x + at + HALF, (second * c + first * s).to(x.dtype.element_ty))
        at += 2 * HALF


@triton.jit
def largest(x, most, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """most [programs]: the largest magnitude, or NaN: as integers its bits come last."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    values = tl.load(x + rows[:, None] * WIDTH + columns[None, :]).to(tl.float32)
    bits = tl.max(tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0)
    tl.store(most + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), bits.to(tl.float32, bitcast=True))


@triton.jit
def _store_8_bits(values, straight, turned, rows, columns, COUNT: tl.constexpr, WIDTH: tl.constexpr,
                  FINE: tl.constexpr):  # fmt: skip
    """The bits of values as e4m3 if FINE, else as e5m2, into straight [COUNT, WIDTH] and turned [WIDTH, COUNT]."""
    if FINE:
        bits = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = values.to(tl.float8e5).to(tl.uint8, bitcast=True)
    tl.store(straight + rows[:, None] * WIDTH + columns[None, :], bits)
    tl.store(turned + columns[:, None] * COUNT + rows[None, :], tl.trans(bits))


@triton.jit
def quantise(
    x, scale, straight, turned, COUNT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    FINE: tl.constexpr,
):  # fmt: skip
    """x [COUNT, WIDTH] times scale in 8 bits."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    values = tl.load(x + rows[:, None] * WIDTH + columns[None, :]).to(tl.float32) * tl.load(scale)
    _store_8_bits(values, straight, turned, rows, columns, COUNT, WIDTH, FINE)


@triton.jit
def gelu_quantise(
    h, bias, scale, straight, turned, COUNT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    """GELU(h + bias) times scale in 8 bits."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(h + rows[:, None] * WIDTH + columns[None, :]).to(tl.float32) + tl.load(bias + columns)[None, :]
    value, _ = _gelu(x, TANH)
    _store_8_bits(value * tl.load(scale), straight, turned, rows, columns, COUNT, WIDTH, True)


@triton.jit
def gelu_backward_quantise(
    h, bias, g, scale, straight, turned, sums, COUNT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    """The gradient of h, times scale in 8 bits; sums [programs of rows, WIDTH], what these rows of it add up to."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    at = rows[:, None] * WIDTH + columns[None, :]
    _, slope = _gelu(tl.load(h + at).to(tl.float32) + tl.load(bias + columns)[None, :], TANH)
    dx = tl.load(g + at).to(tl.float32) * slope
    tl.store(sums + tl.program_id(0).to(tl.int64) * WIDTH + columns, tl.sum(dx, 0))
    _store_8_bits(dx * tl.load(scale), straight, turned, rows, columns, COUNT, WIDTH, False)
