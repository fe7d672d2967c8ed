"""What one GPU program of the fused attention computes, in the Triton language.

    attention_forward                a block of queries of a head  ->  context, log2-sum-exp2
    attention_backward_fused, _twin  the context's gradient        ->  dq, dk, dv

Arrays are pointers to whole arrays, row-major; names in capitals are numbers known when a kernel is
compiled. attention_triton says what is computed and why, and gpu_launch how programs are run. Sums
have one fixed order and there are no atomics, so that results are bit-identical from run to run.
"""

import triton
import triton.language as tl

from bertjax.model.kernels import dropout_bits

MASKED = tl.constexpr(-1e30)  # score of a forbidden pair, finite so that a row's maximum never is -inf

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
def _masked(tile, otherwise, ids_q, ids_k, places_q, places_k, WINDOW: tl.constexpr):
    """`tile` where query and key see each other, else `otherwise`. WINDOW -1: none."""
    visible = ids_q == ids_k
    if WINDOW >= 0:
        visible = visible & (tl.abs(places_q - places_k) <= WINDOW)
    return tl.where(visible, tile, otherwise)


@triton.jit
def _rows(pointer, start, COUNT: tl.constexpr, STRIDE: tl.constexpr, HEAD: tl.constexpr):
    """Pointers to COUNT vectors of a head from token `start` on."""
    return pointer + (start + tl.arange(0, COUNT))[:, None] * STRIDE + tl.arange(0, HEAD)[None, :]


@triton.jit
def _words(seeds, HEADS: tl.constexpr):
    """The head's two words."""
    at = seeds + (tl.program_id(2) * HEADS + tl.program_id(1)) * 2
    return tl.load(at), tl.load(at + 1)


@triton.jit
def _range(bounds, blocks):
    """One line of attention_triton.tile_bounds."""
    at = bounds + (tl.program_id(2) * blocks + tl.program_id(0)) * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def _forward_tile(
    acc, running_max, running_sum, q, k, v, ids, ids_q, seeds, start_q, start_k, compare,
    STRIDE: tl.constexpr, HEAD: tl.constexpr, SCALE: tl.constexpr, THRESHOLD: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    scores = tl.dot(q, tl.trans(tl.load(_rows(k, start_k, BLOCK_K, STRIDE, HEAD)))) * SCALE
    places_k = start_k + tl.arange(0, BLOCK_K)
    ids_k = tl.load(ids + places_k)
    if compare:
        places_q = start_q + tl.arange(0, BLOCK_Q)
        scores = _masked(scores, MASKED, ids_q[:, None], ids_k[None, :], places_q[:, None], places_k[None, :], WINDOW)
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    shrink = tl.exp2(running_max - new_max)
    p = tl.exp2(scores - new_max[:, None])
    running_sum = running_sum * shrink + tl.sum(p, 1)
    if THRESHOLD > 0:
        p = tl.where(attention_keep(seeds, start_q, start_k, BLOCK_Q, BLOCK_K, THRESHOLD, False), p, 0.0)
    value = tl.load(_rows(v, start_k, BLOCK_K, STRIDE, HEAD))
    acc = acc * shrink[:, None] + tl.dot(p.to(value.dtype), value)
    return acc, new_max, running_sum


@triton.jit
def attention_forward(
    seeds, bounds, q, k, v, ids, o, lse,
    LENGTH: tl.constexpr, HEADS: tl.constexpr, HEAD: tl.constexpr, JOINED: tl.constexpr,
    SCALE: tl.constexpr, KEEP: tl.constexpr, THRESHOLD: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """JOINED: q, k and v are one array [B,T,3,A,D]. SCALE: of the scores, times log2(e). BOUNDED: only
    tiles between the bounds are visited, in two loops, of which the one without comparison is the faster."""
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
    query = tl.load(_rows(q, start_q, BLOCK_Q, STRIDE, HEAD))
    ids_q = tl.load(ids + start_q + tl.arange(0, BLOCK_Q))
    first, whole, mixed, last = _range(bounds, LENGTH // BLOCK_Q)
    acc = tl.full((BLOCK_Q, HEAD), 0.0, tl.float32)
    top = tl.full((BLOCK_Q,), 2 * MASKED, tl.float32)
    total = tl.full((BLOCK_Q,), 0.0, tl.float32)
    if BOUNDED:
        for i in range(whole, mixed):
            acc, top, total = _forward_tile(
                acc, top, total, query, k, v, ids, ids_q, words, start_q, i * BLOCK_K, False,
                STRIDE, HEAD, SCALE, THRESHOLD, WINDOW, BLOCK_Q, BLOCK_K)  # fmt: skip
        before = whole - first
        for i in range(0, before + last - mixed):
            index = first + i + tl.where(i < before, 0, mixed - whole)
            acc, top, total = _forward_tile(
                acc, top, total, query, k, v, ids, ids_q, words, start_q, index * BLOCK_K, True,
                STRIDE, HEAD, SCALE, THRESHOLD, WINDOW, BLOCK_Q, BLOCK_K)  # fmt: skip
    else:
        for i in range(0, LENGTH // BLOCK_K):
            acc, top, total = _forward_tile(
                acc, top, total, query, k, v, ids, ids_q, words, start_q, i * BLOCK_K, (i < whole) | (i >= mixed),
                STRIDE, HEAD, SCALE, THRESHOLD, WINDOW, BLOCK_Q, BLOCK_K)  # fmt: skip
    acc = acc * (1.0 / (total * KEEP))[:, None]
    o += row * (LENGTH * WIDTH) + head * HEAD
    tl.store(_rows(o, start_q, BLOCK_Q, WIDTH, HEAD), acc.to(o.dtype.element_ty))
    tl.store(lse + (row * HEADS + head) * LENGTH + start_q + tl.arange(0, BLOCK_Q), top + tl.log2(total))


@triton.jit
def _gradient_tile(
    q, do, lse, delta, ids_q, k, v, ids_k, seeds, start_q, start_k, compare,
    SCALE: tl.constexpr, THRESHOLD: tl.constexpr, WINDOW: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """(dropped probabilities, score gradients) of a tile, [queries, keys] or, TURNED, [keys, queries].

    The score gradient lacks the factor scale / keep probability, which the caller applies to the sum
    of all tiles.
    """
    places_q, places_k = start_q + tl.arange(0, QUERIES), start_k + tl.arange(0, KEYS)
    if TURNED:
        scores, dp = tl.dot(k, tl.trans(q)), tl.dot(v, tl.trans(do))
        lse, delta, ids_q, ids_k = lse[None, :], delta[None, :], ids_q[None, :], ids_k[:, None]
        places_q, places_k = places_q[None, :], places_k[:, None]
    else:
        scores, dp = tl.dot(q, tl.trans(k)), tl.dot(do, tl.trans(v))
        lse, delta, ids_q, ids_k = lse[:, None], delta[:, None], ids_q[:, None], ids_k[None, :]
        places_q, places_k = places_q[:, None], places_k[None, :]
    p = tl.exp2(scores * SCALE - lse)
    if compare:
        p = _masked(p, 0.0, ids_q, ids_k, places_q, places_k, WINDOW)
    dropped = p
    if THRESHOLD > 0:
        keep = attention_keep(seeds, start_q, start_k, QUERIES, KEYS, THRESHOLD, TURNED)
        dropped, dp = tl.where(keep, p, 0.0), tl.where(keep, dp, 0.0)
    ds = p * (dp - delta)
    return dropped.to(q.dtype), ds.to(q.dtype)


@triton.jit
def _over_queries(
    dkey, dvalue, q, do, lse, delta, ids, key, value, ids_k, seeds, start_q, start_k, compare,
    STRIDE: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr, SCALE: tl.constexpr, THRESHOLD: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr, OVER: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK keys with what OVER queries add."""
    at = start_q + tl.arange(0, OVER)
    query = tl.load(_rows(q, start_q, OVER, STRIDE, HEAD))
    dcontext = tl.load(_rows(do, start_q, OVER, WIDTH, HEAD))
    dropped, ds = _gradient_tile(
        query, dcontext, tl.load(lse + at), tl.load(delta + at), tl.load(ids + at), key, value, ids_k,
        seeds, start_q, start_k, compare, SCALE, THRESHOLD, WINDOW, OVER, BLOCK, True)  # fmt: skip
    dvalue = dvalue + tl.dot(dropped, dcontext)
    dkey = dkey + tl.dot(ds, query)
    return dkey, dvalue


@triton.jit
def _over_keys(
    dquery, query, dcontext, lse_q, delta_q, ids_q, k, v, ids, seeds, start_q, start_k, compare,
    STRIDE: tl.constexpr, HEAD: tl.constexpr, SCALE: tl.constexpr, THRESHOLD: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, OVER: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK queries with what OVER keys add."""
    key = tl.load(_rows(k, start_k, OVER, STRIDE, HEAD))
    value = tl.load(_rows(v, start_k, OVER, STRIDE, HEAD))
    ids_k = tl.load(ids + start_k + tl.arange(0, OVER))
    _, ds = _gradient_tile(
        query, dcontext, lse_q, delta_q, ids_q, key, value, ids_k,
        seeds, start_q, start_k, compare, SCALE, THRESHOLD, WINDOW, BLOCK, OVER, False)  # fmt: skip
    return dquery + tl.dot(ds, key)


@triton.jit
def attention_backward_twin(
    seeds, bounds, q, k, v, ids, do, lse, delta, dq, dk, dv,
    LENGTH: tl.constexpr, HEADS: tl.constexpr, HEAD: tl.constexpr, JOINED: tl.constexpr,
    SCALE: tl.constexpr, FACTOR: tl.constexpr, KEEP: tl.constexpr, THRESHOLD: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, OVER: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens of one head: dk and dv of these keys, then dq of these queries, each over OVER tokens a time.

    Every program goes over all queries, so delta comes ready made: working it out here cost more
    than the pass over o and its gradient that makes it. FACTOR: what dq and dk still lack. JOINED:
    dq alone is written, [B,T,3,A,D].
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
    words = _words(seeds, HEADS)
    own = mine + tl.arange(0, BLOCK)
    my_ids = tl.load(ids + own)
    first, whole, mixed, last = _range(bounds, LENGTH // BLOCK)
    before = whole - first

    key, value = tl.load(_rows(k, mine, BLOCK, STRIDE, HEAD)), tl.load(_rows(v, mine, BLOCK, STRIDE, HEAD))
    dkey = tl.full((BLOCK, HEAD), 0.0, tl.float32)
    dvalue = tl.full((BLOCK, HEAD), 0.0, tl.float32)
    for i in range(whole, mixed):
        dkey, dvalue = _over_queries(
            dkey, dvalue, q, do, lse, delta, ids, key, value, my_ids, words, i * OVER, mine, False,
            STRIDE, WIDTH, HEAD, SCALE, THRESHOLD, WINDOW, BLOCK, OVER)  # fmt: skip
    for i in range(0, before + last - mixed):
        index = first + i + tl.where(i < before, 0, mixed - whole)
        dkey, dvalue = _over_queries(
            dkey, dvalue, q, do, lse, delta, ids, key, value, my_ids, words, index * OVER, mine, True,
            STRIDE, WIDTH, HEAD, SCALE, THRESHOLD, WINDOW, BLOCK, OVER)  # fmt: skip
    tl.store(_rows(dk, mine, BLOCK, STRIDE, HEAD), (dkey * FACTOR).to(dk.dtype.element_ty))
    tl.store(_rows(dv, mine, BLOCK, STRIDE, HEAD), (dvalue * (1.0 / KEEP)).to(dv.dtype.element_ty))

    query, dcontext = tl.load(_rows(q, mine, BLOCK, STRIDE, HEAD)), tl.load(_rows(do, mine, BLOCK, WIDTH, HEAD))
    my_lse, my_delta = tl.load(lse + own), tl.load(delta + own)
    dquery = tl.full((BLOCK, HEAD), 0.0, tl.float32)
    for i in range(whole, mixed):
        dquery = _over_keys(
            dquery, query, dcontext, my_lse, my_delta, my_ids, k, v, ids, words, mine, i * OVER, False,
            STRIDE, HEAD, SCALE, THRESHOLD, WINDOW, BLOCK, OVER)  # fmt: skip
    for i in range(0, before + last - mixed):
        index = first + i + tl.where(i < before, 0, mixed - whole)
        dquery = _over_keys(
            dquery, query, dcontext, my_lse, my_delta, my_ids, k, v, ids, words, mine, index * OVER, True,
            STRIDE, HEAD, SCALE, THRESHOLD, WINDOW, BLOCK, OVER)  # fmt: skip
    tl.store(_rows(dq, mine, BLOCK, STRIDE, HEAD), (dquery * FACTOR).to(dq.dtype.element_ty))


@triton.jit
def attention_backward_fused(
    seeds, q, k, v, ids, o, do, lse, dq, dk, dv,
    LENGTH: tl.constexpr, HEADS: tl.constexpr, HEAD: tl.constexpr, JOINED: tl.constexpr,
    SCALE: tl.constexpr, FACTOR: tl.constexpr, KEEP: tl.constexpr, THRESHOLD: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """All gradients of one head, whose keys are one block: over all blocks of queries."""
    WIDTH: tl.constexpr = HEADS * HEAD
    STRIDE: tl.constexpr = 3 * WIDTH if JOINED else WIDTH
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = row * (LENGTH * STRIDE) + head * HEAD
    if JOINED:
        k, v, dk, dv = k + WIDTH, v + 2 * WIDTH, dq + WIDTH, dq + 2 * WIDTH
    q, k, v, dq, dk, dv = q + at, k + at, v + at, dq + at, dk + at, dv + at
    at = row * (LENGTH * WIDTH) + head * HEAD
    o, do = o + at, do + at
    lse += (row * HEADS + head) * LENGTH
    ids += row * LENGTH
    words = _words(seeds, HEADS)
    key, value = tl.load(_rows(k, 0, LENGTH, STRIDE, HEAD)), tl.load(_rows(v, 0, LENGTH, STRIDE, HEAD))
    ids_k = tl.load(ids + tl.arange(0, LENGTH))
    dkey = tl.full((LENGTH, HEAD), 0.0, tl.float32)
    dvalue = tl.full((LENGTH, HEAD), 0.0, tl.float32)
    for i in range(0, LENGTH // BLOCK_Q):
        start_q = i * BLOCK_Q
        at_q = start_q + tl.arange(0, BLOCK_Q)
        query = tl.load(_rows(q, start_q, BLOCK_Q, STRIDE, HEAD))
        dcontext = tl.load(_rows(do, start_q, BLOCK_Q, WIDTH, HEAD))
        context = tl.load(_rows(o, start_q, BLOCK_Q, WIDTH, HEAD))
        delta = tl.sum(context.to(tl.float32) * dcontext.to(tl.float32), 1) * KEEP
        dropped, ds = _gradient_tile(
            query, dcontext, tl.load(lse + at_q), delta, tl.load(ids + at_q), key, value, ids_k,
            words, start_q, 0, True, SCALE, THRESHOLD, WINDOW, BLOCK_Q, LENGTH, True)  # fmt: skip
        dvalue = dvalue + tl.dot(dropped, dcontext)
        dkey = dkey + tl.dot(ds, query)
        dquery = tl.dot(tl.trans(ds), key) * FACTOR
        tl.store(_rows(dq, start_q, BLOCK_Q, STRIDE, HEAD), dquery.to(dq.dtype.element_ty))
    tl.store(_rows(dk, 0, LENGTH, STRIDE, HEAD), (dkey * FACTOR).to(dk.dtype.element_ty))
    tl.store(_rows(dv, 0, LENGTH, STRIDE, HEAD), (dvalue * (1.0 / KEEP)).to(dv.dtype.element_ty))
