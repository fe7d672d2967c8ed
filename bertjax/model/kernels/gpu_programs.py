"""What one GPU program of the fused attention computes, in the Triton language.

    attention_forward   a block of queries of a head  ->  context, log2-sum-exp2
    attention_backward  the context's gradient        ->  dq, dk, dv

Arrays are pointers to whole arrays, row-major; names in capitals are numbers known when a kernel is
compiled. attention_triton says what is computed and why, and gpu_launch how programs are run. Sums
have one fixed order and there are no atomics, so that results are bit-identical from run to run.

A sum has one loop. With two, one for tiles that need no comparison and one for the others, ptxas
runs the products of both one after the other (its warning C7515), which took up to 20 % more time.
Ids are read where they are compared: read ahead, they cost 8 % of the time of rows that need no comparison.
"""

import triton
import triton.language as tl

from bertjax.model.kernels import dropout_bits

MASKED = tl.constexpr(-1e30)  # score of a forbidden pair, finite so that a row's maximum never is -inf
LOWEST = tl.constexpr(-1e20)  # a row's maximum before it has met a key, far above MASKED: exp2 of the difference is 0

GOLDEN = tl.constexpr(int(dropout_bits.GOLDEN))
ROW_STRIDE = tl.constexpr(int(dropout_bits.ROW_STRIDE))
MIX_1 = tl.constexpr(int(dropout_bits.MIX_1))
MIX_2 = tl.constexpr(int(dropout_bits.MIX_2))
MIX_3 = tl.constexpr(int(dropout_bits.MIX_3))


@triton.jit
def _split(start, SIZE: tl.constexpr):
    """Positions from `start` without bit 3, and that bit, which so does not depend on `start`."""
    index = tl.arange(0, SIZE).to(tl.uint32)
    return ((index >> 4) << 3 | (index & 7)) + tl.cast(start >> 1, tl.uint32), (index & 8) != 0


@triton.jit
def attention_keep(
    seeds, start_q, start_k,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, THRESHOLD: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """dropout_bits.tile_keep_mask; `seeds` are the head's two words."""
    i, i_bit = _split(start_q, QUERIES)
    j, j_bit = _split(start_k, KEYS)
    if TURNED:
        i, i_bit, j, j_bit = i[None, :], i_bit[None, :], j[:, None], j_bit[:, None]
    else:
        i, i_bit, j, j_bit = i[:, None], i_bit[:, None], j[None, :], j_bit[None, :]
    x = i * ROW_STRIDE + j * GOLDEN + seeds[0]
    x = x ^ (x >> 16)
    x = x * MIX_1
    x = x ^ (x >> 15) ^ seeds[1]
    x = x * MIX_2
    word = tl.where(i_bit, x * MIX_3, x)
    word = tl.where(j_bit, word << 16, word)
    return word >= THRESHOLD


@triton.jit
def _masked(tile, otherwise, ids_q, ids_k, at_q, at_k, WINDOW: tl.constexpr):
    """`tile` where query and key see each other, else `otherwise`. WINDOW -1: none."""
    visible = ids_q == ids_k
    if WINDOW >= 0:
        visible = visible & (tl.abs(at_q - at_k) <= WINDOW)
    return tl.where(visible, tile, otherwise)


@triton.jit
def _rows(pointer, start, COUNT: tl.constexpr, STRIDE: tl.constexpr, HEAD: tl.constexpr):
    """Pointers to COUNT vectors of a head from token `start` on."""
    return pointer + (start + tl.arange(0, COUNT))[:, None] * STRIDE + tl.arange(0, HEAD)[None, :]


@triton.jit
def _store_turned_back(pointer, x, cos, sin, start, COUNT: tl.constexpr, STRIDE: tl.constexpr, HEAD: tl.constexpr):
    """x [COUNT, HEAD], turned back by its tokens' angles, to the vectors of a head from token `start` on."""
    HALF: tl.constexpr = HEAD // 2
    first, second = tl.split(tl.permute(tl.reshape(x, (COUNT, 2, HALF)), (0, 2, 1)))
    c, s = tl.load(_rows(cos, start, COUNT, HEAD, HALF)), tl.load(_rows(sin, start, COUNT, HEAD, HALF))
    kind = pointer.dtype.element_ty
    tl.store(_rows(pointer, start, COUNT, STRIDE, HALF), (first * c + second * s).to(kind))
    tl.store(_rows(pointer + HALF, start, COUNT, STRIDE, HALF), (second * c - first * s).to(kind))


@triton.jit
def _words(seeds, HEADS: tl.constexpr):
    """The head's two words."""
    at = seeds + (tl.program_id(2) * HEADS + tl.program_id(1)) * 2
    return tl.load(at), tl.load(at + 1)


@triton.jit
def _range(bounds, blocks):
    """One line of attention_triton.tile_bounds."""
    at = bounds + (tl.program_id(2) * blocks + tl.program_id(0)) * 4
    first, whole, mixed, last = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    tl.assume(first < last)  # a path around the loop would set its sums, and ptxas then runs its products one by one
    return first, whole, mixed, last


@triton.jit
def attention_forward(
    seeds, bounds, q, k, v, ids, o, lse,
    LENGTH: tl.constexpr, HEADS: tl.constexpr, HEAD: tl.constexpr, JOINED: tl.constexpr,
    SCALE: tl.constexpr, KEEP: tl.constexpr, THRESHOLD: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """JOINED: q, k and v are one array [B,T,3,A,D]. SCALE: of the scores, times log2(e). BOUNDED: only
    tiles between the bounds are visited; a loop over all of them, of known length, is the faster."""
    WIDTH: tl.constexpr = HEADS * HEAD
    STRIDE: tl.constexpr = 3 * WIDTH if JOINED else WIDTH
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    start_q = tl.program_id(0) * BLOCK_Q
    at = row * (LENGTH * STRIDE) + head * HEAD
    q, k, v = q + at, k + at, v + at
    if JOINED:
        k, v = k + WIDTH, v + 2 * WIDTH
    ids += row * LENGTH
    words = _words(seeds, HEADS)
    at_q = start_q + tl.arange(0, BLOCK_Q)
    query, ids_q = tl.load(_rows(q, start_q, BLOCK_Q, STRIDE, HEAD)), tl.load(ids + at_q)
    first, whole, mixed, last = _range(bounds, LENGTH // BLOCK_Q)
    acc = tl.full((BLOCK_Q, HEAD), 0.0, tl.float32)
    top = tl.full((BLOCK_Q,), LOWEST, tl.float32)
    total = tl.full((BLOCK_Q,), 0.0, tl.float32)
    for i in range(first if BOUNDED else 0, last if BOUNDED else LENGTH // BLOCK_K):
        start_k = i * BLOCK_K
        scores = tl.dot(query, tl.trans(tl.load(_rows(k, start_k, BLOCK_K, STRIDE, HEAD))))
        if (i < whole) | (i >= mixed):
            at_k = start_k + tl.arange(0, BLOCK_K)
            ids_k = tl.load(ids + at_k)
            scores = _masked(scores, MASKED, ids_q[:, None], ids_k[None, :], at_q[:, None], at_k[None, :], WINDOW)
        higher = tl.maximum(top, tl.max(scores, 1) * SCALE)
        shrink = tl.exp2(top - higher)
        p = tl.exp2(scores * SCALE - higher[:, None])
        top, total = higher, total * shrink + tl.sum(p, 1)
        if THRESHOLD > 0:
            p = tl.where(attention_keep(words, start_q, start_k, BLOCK_Q, BLOCK_K, THRESHOLD, False), p, 0.0)
        value = tl.load(_rows(v, start_k, BLOCK_K, STRIDE, HEAD))
        acc = acc * shrink[:, None] + tl.dot(p.to(value.dtype), value)
    acc = acc * (1.0 / (total * KEEP))[:, None]
    o += row * (LENGTH * WIDTH) + head * HEAD
    tl.store(_rows(o, start_q, BLOCK_Q, WIDTH, HEAD), acc.to(o.dtype.element_ty))
    tl.store(lse + (row * HEADS + head) * LENGTH + at_q, top + tl.log2(total))


@triton.jit
def attention_backward(
    seeds, bounds, q, k, v, ids, do, lse, delta, cos, sin, dq, dk, dv,
    LENGTH: tl.constexpr, HEADS: tl.constexpr, HEAD: tl.constexpr, JOINED: tl.constexpr,
    SCALE: tl.constexpr, FACTOR: tl.constexpr, KEEP: tl.constexpr, THRESHOLD: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, OVER: tl.constexpr, OF_KEYS: tl.constexpr, OF_QUERIES: tl.constexpr, TURNED: tl.constexpr,
    PERIOD: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens of one head: dk and dv of these keys and dq of these queries, each over OVER tokens a time.

    Every program goes over all queries, so delta comes ready made: working it out here cost more
    than the pass over o and its gradient that makes it. FACTOR: what dq and dk still lack. JOINED:
    dq alone is written, [B,T,3,A,D]. TURNED: queries and keys came turned, their gradients go back
    unturned; cos and sin [PERIOD, T, D], of row i those of i % PERIOD.
    """
    WIDTH: tl.constexpr = HEADS * HEAD
    STRIDE: tl.constexpr = 3 * WIDTH if JOINED else WIDTH
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    mine = tl.program_id(0) * BLOCK
    at = row * (LENGTH * STRIDE) + head * HEAD
    if JOINED:
        k, v, dk, dv = k + WIDTH, v + 2 * WIDTH, dq + WIDTH, dq + 2 * WIDTH
    q, k, v, dq, dk, dv = q + at, k + at, v + at, dq + at, dk + at, dv + at
    do += row * (LENGTH * WIDTH) + head * HEAD
    lse += (row * HEADS + head) * LENGTH
    delta += (row * HEADS + head) * LENGTH
    ids += row * LENGTH
    cos += (row % PERIOD) * (LENGTH * HEAD)
    sin += (row % PERIOD) * (LENGTH * HEAD)
    words = _words(seeds, HEADS)
    own = mine + tl.arange(0, BLOCK)
    own_ids = tl.load(ids + own)
    first, whole, mixed, last = _range(bounds, LENGTH // BLOCK)

    if OF_KEYS:  # tiles are [keys, queries]
        key, value = tl.load(_rows(k, mine, BLOCK, STRIDE, HEAD)), tl.load(_rows(v, mine, BLOCK, STRIDE, HEAD))
        dkey = tl.full((BLOCK, HEAD), 0.0, tl.float32)
        dvalue = tl.full((BLOCK, HEAD), 0.0, tl.float32)
        for i in range(first, last):
            start = i * OVER
            other = start + tl.arange(0, OVER)
            query = tl.load(_rows(q, start, OVER, STRIDE, HEAD))
            dcontext = tl.load(_rows(do, start, OVER, WIDTH, HEAD))
            p = tl.exp2(tl.dot(key, tl.trans(query)) * SCALE - tl.load(lse + other)[None, :])
            if (i < whole) | (i >= mixed):
                other_ids = tl.load(ids + other)
                p = _masked(p, 0.0, other_ids[None, :], own_ids[:, None], other[None, :], own[:, None], WINDOW)
            dropped = p
            if THRESHOLD > 0:
                keep = attention_keep(words, start, mine, OVER, BLOCK, THRESHOLD, True)
                dropped = tl.where(keep, p, 0.0)
            dvalue = tl.dot(dropped.to(query.dtype), dcontext, dvalue)
            dp = tl.dot(value, tl.trans(dcontext))
            if THRESHOLD > 0:
                dp = tl.where(keep, dp, 0.0)
            ds = p * (dp - tl.load(delta + other)[None, :])
            dkey = tl.dot(ds.to(query.dtype), query, dkey)
        if TURNED:
            _store_turned_back(dk, dkey * FACTOR, cos, sin, mine, BLOCK, STRIDE, HEAD)
        else:
            tl.store(_rows(dk, mine, BLOCK, STRIDE, HEAD), (dkey * FACTOR).to(dk.dtype.element_ty))
        tl.store(_rows(dv, mine, BLOCK, STRIDE, HEAD), (dvalue * (1.0 / KEEP)).to(dv.dtype.element_ty))

    if OF_QUERIES:  # tiles are [queries, keys]
        query, dcontext = tl.load(_rows(q, mine, BLOCK, STRIDE, HEAD)), tl.load(_rows(do, mine, BLOCK, WIDTH, HEAD))
        own_lse, own_delta = tl.load(lse + own), tl.load(delta + own)
        dquery = tl.full((BLOCK, HEAD), 0.0, tl.float32)
        for i in range(first, last):
            start = i * OVER
            keys = tl.load(_rows(k, start, OVER, STRIDE, HEAD))
            values = tl.load(_rows(v, start, OVER, STRIDE, HEAD))
            p = tl.exp2(tl.dot(query, tl.trans(keys)) * SCALE - own_lse[:, None])
            dp = tl.dot(dcontext, tl.trans(values))  # before the branch: exp2 runs beside it
            if (i < whole) | (i >= mixed):
                other = start + tl.arange(0, OVER)
                other_ids = tl.load(ids + other)
                p = _masked(p, 0.0, own_ids[:, None], other_ids[None, :], own[:, None], other[None, :], WINDOW)
            if THRESHOLD > 0:
                dp = tl.where(attention_keep(words, mine, start, BLOCK, OVER, THRESHOLD, False), dp, 0.0)
            ds = p * (dp - own_delta[:, None])
            dquery = tl.dot(ds.to(keys.dtype), keys, dquery)
        if TURNED:
            _store_turned_back(dq, dquery * FACTOR, cos, sin, mine, BLOCK, STRIDE, HEAD)
        else:
            tl.store(_rows(dq, mine, BLOCK, STRIDE, HEAD), (dquery * FACTOR).to(dq.dtype.element_ty))
