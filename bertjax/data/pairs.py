"""Next-sentence pairs, other ones in every epoch, drawn from sentence lengths alone.

In: the tables of a `TokenStore`. Out: for pair j of an epoch, where its two segments lie and whether the second is the
true next one. The rules are those of the original's `create_pretraining_data.py` (`create_instances_from_document`,
`truncate_seq_pair`): sentences of a document are collected until a target length; the chunk is cut at a random sentence
into A and B; half of the time, and always when the chunk is one sentence, B comes from a random place of another
document instead and the unused sentences are put back; the longer of A and B loses tokens at a random end until both
fit. In a split of a single document B is of that document too, but neither overlaps A nor begins where A ends: such a
pair would be a true next one (the original draws it all the same).

Every random number is a hash of (seed, epoch, where the chunk begins), so a pair can be computed without the ones
before it, given where it begins. `PairIndex` keeps the beginning of every 16th pair only: about one byte a pair, and
the 100 million sentences of a large corpus are indexed in seconds. The order of an epoch is a permutation computed from
(seed, epoch) as well.
"""

from typing import NamedTuple

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from bertjax.data.store import ADDRESS_BITS, TokenStore
from bertjax.formats.compiled import compiled

STRIDE = 16  # pairs between two remembered beginnings
NO_ANCHORS, NOTHING = np.empty((0, 3), np.int64), np.empty(0, np.uint8)  # for `walk`
_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # splitmix64
_MUL1 = np.uint64(0xBF58476D1CE4E5B9)
_MUL2 = np.uint64(0x94D049BB133111EB)
_TARGET = np.uint64(0x7461726765740001)  # separates the draws of target lengths from the others
_U32 = np.uint64(32)
_LOW32 = np.uint64(0xFFFFFFFF)


class Tables(NamedTuple):
    """What the compiled functions see of a `TokenStore`."""

    sentence_ends: np.ndarray  # uint32 [S]
    document_sentences: np.ndarray  # int64 [D+1]
    document_addresses: np.ndarray  # int64 [D]
    shard_pointers: np.ndarray  # uint64 [shards]; addresses in this process
    kind: np.ndarray  # empty, of the ids' dtype


class Drawing(NamedTuple):
    """How pairs are drawn. All integers, so that one compilation serves all."""

    key: np.uint64  # of (seed, epoch)
    max_tokens: int  # of a pair, without special tokens
    short_probability: np.uint64  # times 2**32
    nsp: bool


class Pair(NamedTuple):
    """Where one pair lies; addresses as in the store (shard << 40 | token)."""

    a_address: int
    a_length: int
    b_address: int
    b_length: int  # 0 without NSP
    is_random: int


def tables_of(store: TokenStore) -> Tables:
    pointers = np.array([ids.ctypes.data for ids in store.shards], np.uint64)
    return Tables(
        store.sentence_ends, store.document_sentences, store.document_addresses, pointers, np.empty(0, store.dtype)
    )


def drawing_of(store: TokenStore, seq_length: int, seed: int, epoch: int, short_seq_prob: float, nsp: bool) -> Drawing:
    """Arguments as of `PairIndex`."""
    check_length(store, seq_length, nsp)
    key = np.uint64(combine(np.uint64(seed % 2**64), np.uint64(epoch)))
    return Drawing(key, np.int64(seq_length - store.layout.count(nsp)), np.uint64(round(short_seq_prob * 2**32)), nsp)


@compiled
def mix(x):
    x = (x ^ (x >> np.uint64(30))) * _MUL1
    x = (x ^ (x >> np.uint64(27))) * _MUL2
    return x ^ (x >> np.uint64(31))


@compiled
def _below(bits, n):
    """Uniform integer in [0, n) from 64 random bits; n < 2**32."""
    return np.int64(((bits >> _U32) * np.uint64(n)) >> _U32)


@compiled
def combine(a, b):
    """Hash of two 64-bit numbers."""
    return mix(mix(np.uint64(a) + _GAMMA) + np.uint64(b))


@compiled
def permute(index, n, key):
    """Entry `index` of a pseudo-random permutation of 0..n-1 (Feistel network, cycle walking)."""
    half = np.uint64(1)
    while (np.int64(1) << (np.int64(2) * np.int64(half))) < n:
        half += np.uint64(1)
    mask = (np.uint64(1) << half) - np.uint64(1)
    x = np.uint64(index)
    while True:
        left, right = x >> half, x & mask
        for round_ in range(4):
            scrambled = mix(key + _GAMMA * np.uint64(round_ + 1) + (right << np.uint64(8)))
            left, right = right, left ^ (scrambled & mask)
        x = (left << half) | right
        if x < np.uint64(n):
            return np.int64(x)


@compiled
def _target(drawing, document):
    """Tokens that the chunks of a document aim at; short for `short_probability` of documents."""
    state = combine(drawing.key ^ _TARGET, np.uint64(document))
    if (state & _LOW32) < drawing.short_probability:
        return 2 + _below(mix(state + _GAMMA), drawing.max_tokens - 1)
    return np.int64(drawing.max_tokens)


@compiled
def _chunk(tables, drawing, document, first, start, target):
    """The chunk that begins `start` tokens into sentence `first` (0 with NSP).

    Returns (end, a_end, is_random, next_first, next_start, state): sentences [first, a_end) are A, [a_end, end) the
    true next.
    """
    ends = tables.sentence_ends
    last = tables.document_sentences[document + 1]
    begin = np.int64(0)
    if first > tables.document_sentences[document]:
        begin = np.int64(ends[first - 1])
    state = combine(drawing.key, np.uint64(first))
    if not drawing.nsp:
        begin += start
        end = first
        while end < last and np.int64(ends[end]) - begin <= target:
            end += 1
        if end == first:  # a sentence longer than the row goes on in the next one
            return end, end, False, first, start + target, state
        return end, end, False, end, np.int64(0), state
    end = first + 1
    while end < last and np.int64(ends[end - 1]) - begin < target:
        end += 1
    size = end - first
    a_end = first + 1
    is_random = True
    if size >= 2:
        a_end = first + 1 + _below(state, size - 1)
        is_random = (mix(state + _GAMMA) >> np.uint64(63)) == np.uint64(0)
    firsts = tables.document_sentences
    if is_random and len(firsts) == 2 and a_end < last and a_end + 1 - first == last - firsts[0]:
        is_random, end = False, last  # the only document has nothing but A and its next sentence
    return end, a_end, is_random, (a_end if is_random else end), np.int64(0), state


@compiled
def _draw(tables, drawing, document, first, start, target):
    """The pair whose chunk begins at sentence `first`, truncated to fit, and (first, start) of the next chunk."""
    ends, firsts = tables.sentence_ends, tables.document_sentences
    end, a_end, is_random, next_first, next_start, state = _chunk(tables, drawing, document, first, start, target)
    a_from = start
    if first > firsts[document]:
        a_from += np.int64(ends[first - 1])
    address = tables.document_addresses[document]
    if not drawing.nsp:
        a_to = a_from + target if end == first else np.int64(ends[end - 1])
        pair = Pair(address + a_from, a_to - a_from, np.int64(0), np.int64(0), np.int64(0))
        return pair, next_first, next_start
    a_to = np.int64(ends[a_end - 1])
    state += _GAMMA + _GAMMA
    b_document = document
    if is_random:
        documents = len(firsts) - 1
        for _ in range(10):
            b_document = _below(mix(state), documents)
            state += _GAMMA
            if b_document != document:
                break
        else:
            b_document = (document + 1) % documents
        b_first, b_last = firsts[b_document], firsts[b_document + 1]
        # Of the only document, not A nor the sentence after it.
        taken = min(a_end + 1, b_last) - first if b_document == document and b_last - b_first > 1 else np.int64(0)
        b_first += _below(mix(state), b_last - b_first - taken)
        state += _GAMMA
        if taken and b_first < first:
            b_last = first
        elif taken:
            b_first += taken
        b_from = np.int64(0)
        if b_first > firsts[b_document]:
            b_from = np.int64(ends[b_first - 1])
        b_end = b_first + 1
        while b_end < b_last and np.int64(ends[b_end - 1]) - b_from < target - (a_to - a_from):
            b_end += 1
        b_to = np.int64(ends[b_end - 1])
    else:
        b_from, b_to = a_to, np.int64(ends[end - 1])
    a_from, a_to, b_from, b_to = _truncate(a_from, a_to, b_from, b_to, drawing.max_tokens, state)
    b_address = tables.document_addresses[b_document] + b_from
    pair = Pair(address + a_from, a_to - a_from, b_address, b_to - b_from, np.int64(is_random))
    return pair, next_first, next_start


@compiled
def _truncate(a_from, a_to, b_from, b_to, most, state):
    """Takes tokens from random ends of the longer segment until both have at most `most`, without branches: no
    processor can predict which end it is.
    """
    bits = np.uint64(0)
    for removed in range(a_to - a_from + b_to - b_from - most):
        if removed & 63 == 0:
            bits = mix(state)
            state += _GAMMA
        back = np.int64(bits & np.uint64(1))
        bits >>= np.uint64(1)
        of_a = np.int64(a_to - a_from > b_to - b_from)
        a_from += of_a & (back ^ 1)
        a_to -= of_a & back
        b_from += (of_a ^ 1) & (back ^ 1)
        b_to -= (of_a ^ 1) & back
    return a_from, a_to, b_from, b_to


@compiled
def walk(tables, drawing, anchors, lengths, seen):
    """(pairs, random pairs) of the epoch, in the order of the corpus.

    Fills what is not empty: anchors [N/STRIDE+1, 3]; lengths [N]; seen[i] = 1 for each token i in a pair, addresses
    being places in `seen`.
    """
    count, random = np.int64(0), np.int64(0)
    firsts = tables.document_sentences
    for document in range(len(firsts) - 1):
        target = _target(drawing, document)
        first, start = firsts[document], np.int64(0)
        while first < firsts[document + 1]:
            if count % STRIDE == 0 and len(anchors):
                anchors[count // STRIDE, 0] = document
                anchors[count // STRIDE, 1] = first
                anchors[count // STRIDE, 2] = start
            if len(lengths) or len(seen):
                pair, first, start = _draw(tables, drawing, document, first, start, target)
                if len(lengths):
                    lengths[count] = pair.a_length + pair.b_length
                if len(seen):
                    seen[pair.a_address : pair.a_address + pair.a_length] = 1
                    seen[pair.b_address : pair.b_address + pair.b_length] = 1
                random += pair.is_random
            else:
                _, _, is_random, first, start, _ = _chunk(tables, drawing, document, first, start, target)
                random += np.int64(is_random)
            count += 1
    return count, random


@compiled
def longest_sentence(tables):
    longest = np.int64(0)
    firsts = tables.document_sentences
    for document in range(len(firsts) - 1):
        begin = np.int64(0)
        for sentence in range(firsts[document], firsts[document + 1]):
            end = np.int64(tables.sentence_ends[sentence])
            longest = max(longest, end - begin)
            begin = end
    return longest


@compiled
def locate(tables, drawing, anchors, number):
    """Pair `number` of the epoch, in the order of the corpus."""
    anchor = anchors[number // STRIDE]
    document, first, start = anchor[0], anchor[1], anchor[2]
    firsts = tables.document_sentences
    target = _target(drawing, document)
    for _ in range(number % STRIDE):
        _, _, _, first, start, _ = _chunk(tables, drawing, document, first, start, target)
        if first == firsts[document + 1]:
            document += 1
            target = _target(drawing, document)
    return _draw(tables, drawing, document, first, start, target)[0]


@compiled
def _describe(tables, drawing, anchors, numbers, out):
    for row in range(len(numbers)):
        pair = locate(tables, drawing, anchors, numbers[row])
        out[row, 0], out[row, 1] = pair.a_address, pair.a_length
        out[row, 2], out[row, 3] = pair.b_address, pair.b_length
        out[row, 4] = pair.is_random


@intrinsic
def _pointer(typingctx, address, kind):
    """The address in this process as a typed pointer."""
    pointer = types.CPointer(kind.dtype)

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(types.uint64, kind), codegen


@compiled
def copy_ids(tables, address, length, out, position):
    """Copy `length` ids from the store to out[position:]."""
    shard = address >> ADDRESS_BITS
    offset = address & ((np.int64(1) << ADDRESS_BITS) - 1)
    ids = numba.carray(_pointer(tables.shard_pointers[shard], tables.kind), (offset + length,))
    for i in range(length):
        out[position + i] = ids[offset + i]


class PairIndex:
    """The pairs of one epoch.

    Args:
      store: one split.
      seq_length: row length with special tokens; at least 5 (3 without NSP).
      seed, epoch: another epoch draws other pairs, in another order.
      short_seq_prob: share of documents whose pairs aim at a random shorter length.
      nsp: False gives single segments of contiguous sentences of one document instead of pairs.
    """

    def __init__(
        self,
        store: TokenStore,
        seq_length: int,
        seed: int,
        epoch: int = 0,
        short_seq_prob: float = 0.1,
        nsp: bool = True,
    ):
        self.drawing = drawing_of(store, seq_length, seed, epoch, short_seq_prob, nsp)
        store.require_documents()
        self.store, self.seq_length = store, seq_length
        self.tables = tables_of(store)  # valid while the store is there, which holds the memory maps
        bound = store.num_sentences  # a pair takes at least one; untouched memory costs nothing
        if not nsp:  # but a long sentence fills several rows
            bound, _ = walk(self.tables, self.drawing, NO_ANCHORS, NOTHING, NOTHING)
        anchors = np.empty((bound // STRIDE + 1, 3), np.int64)
        self.num_pairs, self.num_random = map(int, walk(self.tables, self.drawing, anchors, NOTHING, NOTHING))
        self.anchors = anchors[: (self.num_pairs - 1) // STRIDE + 1].copy()

    @property
    def random_share(self) -> float:
        return self.num_random / self.num_pairs

    def __len__(self) -> int:
        return self.num_pairs

    def describe(self, numbers: np.ndarray) -> np.ndarray:
        """int64 [n, 5]: the fields of `Pair` for each number (in the order of the corpus)."""
        out = np.empty((len(numbers), 5), np.int64)
        numbers = np.asarray(numbers, np.int64)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < self.num_pairs:
            raise IndexError(f"pairs 0..{self.num_pairs - 1} exist")
        _describe(self.tables, self.drawing, self.anchors, numbers, out)
        return out

    def lengths(self) -> np.ndarray:
        """Tokens of each pair, special tokens included, uint16 or uint32 [num_pairs]."""
        out = np.empty(self.num_pairs, np.uint16 if self.seq_length < 1 << 16 else np.uint32)
        walk(self.tables, self.drawing, NO_ANCHORS, out, NOTHING)
        out += out.dtype.type(self.seq_length - self.drawing.max_tokens)
        return out


def check_length(store: TokenStore, seq_length: int, nsp: bool) -> None:
    """ValueError where a row cannot hold a pair."""
    special = store.layout.count(nsp)
    if seq_length < (shortest := special + 1 + nsp):
        texts = "two texts and a token of each" if nsp else "a text and a token of it"
        raise ValueError(
            f"seq_length {seq_length} (config.phases, config.eval.seq_length or --seq_length): must be at least "
            f"{shortest}, for the {special} special tokens that the tokenizer puts around {texts}"
        )
