"""Documents here count: token k of document d has the id 5 + 10,000 d + k: ids show the place."""

import math

import numpy as np
import pytest

from bertjax.data.build import build_store
from bertjax.data.pairs import PairIndex, permute
from bertjax.data.store import ADDRESS_BITS, TokenStore
from bertjax.tokenization import Layout
from tests.data.pairs import covered
from tests.fakes import FakeTokenizer

PER_DOCUMENT = 10_000


class Counter(FakeTokenizer):
    """Reads numbers as ids."""

    pad_id, unk_id, cls_id, sep_id, mask_id = range(5)
    vocab_size = 100_000_000
    fingerprint = "counter"

    def encode_batch(self, texts):
        return [[5 + int(word) for word in text.split()] for text in texts]

    def save(self, directory):
        directory.mkdir(parents=True)


def counting_store(path, sentence_lengths, **settings):
    """A store of documents with these sentence lengths."""
    documents = []
    for d, lengths in enumerate(sentence_lengths):
        ends = np.cumsum(lengths)
        documents.append(
            [
                " ".join(map(str, range(PER_DOCUMENT * d + e - n, PER_DOCUMENT * d + e)))
                for n, e in zip(lengths, ends, strict=True)
            ]
        )
    build_store(None, Counter(), path, documents=documents, heldout_fraction=0, max_random_share=1.0, **settings)
    return TokenStore(path)


@pytest.fixture(scope="module")
def lengths():
    rng = np.random.default_rng(0)
    return [rng.integers(1, 40, rng.integers(1, 60)) for _ in range(400)]


@pytest.fixture(scope="module")
def store(tmp_path_factory, lengths):
    return counting_store(tmp_path_factory.mktemp("pairs") / "s", lengths, shard_bytes=300_000)


def places(store, addresses):
    """(document, token in it) of addresses."""
    ids = (
        np.array([store.shards[a >> ADDRESS_BITS][a & ((1 << ADDRESS_BITS) - 1)] for a in addresses.tolist()], np.int64)
        - 5
    )
    return ids // PER_DOCUMENT, ids % PER_DOCUMENT


def all_pairs(index):
    return index.describe(np.arange(len(index)))


def within(share, count, probability, sigmas=4):
    """The share of successes in `count` draws lies in the binomial's tolerance."""
    return abs(share - probability) < sigmas * math.sqrt(probability * (1 - probability) / count)


@pytest.mark.parametrize("seq_length", [16, 64, 128, 512])
def test_pairs_fit_and_neither_segment_is_empty(store, seq_length):
    pairs = all_pairs(PairIndex(store, seq_length, seed=1))
    assert (pairs[:, [1, 3]] >= 1).all()
    assert (pairs[:, 1] + pairs[:, 3] <= seq_length - 3).all()


def test_next_segments_follow_and_random_ones_are_of_another_document(store, lengths):
    # At 4,000 nothing is truncated, so that the segments show where the sentences were cut.
    pairs = all_pairs(PairIndex(store, 4000, seed=1, short_seq_prob=0.5))
    a_document, a_start = places(store, pairs[:, 0])
    b_document, b_start = places(store, pairs[:, 2])
    random = pairs[:, 4] == 1
    assert (a_document[~random] == b_document[~random]).all()
    assert (a_start + pairs[:, 1])[~random].tolist() == b_start[~random].tolist()
    assert (a_document[random] != b_document[random]).all()
    starts = [{0, *np.cumsum(n).tolist()} for n in lengths]
    for document, first, length in [
        *zip(a_document, a_start, pairs[:, 1], strict=True),
        *zip(b_document, b_start, pairs[:, 3], strict=True),
    ]:
        assert {int(first), int(first + length)} <= starts[document]


def test_chunks_of_several_sentences_are_random_half_of_the_time(tmp_path):
    # 24 sentences of 10 tokens fill rows of 63 with 6 sentences: only a last sentence that is left
    # alone cannot have a next one, and it is recognised by its place.
    store = counting_store(tmp_path / "s", [[10] * 24] * 600)
    pairs = all_pairs(PairIndex(store, 63, seed=3, short_seq_prob=0.0))
    _, start = places(store, pairs[:, 0])
    alone = start >= 230
    assert (pairs[alone, 4] == 1).all()
    free = pairs[~alone]
    assert len(free) > 3000
    assert within((free[:, 4] == 1).mean(), len(free), 0.5)
    # A has 1 to 5 of a chunk's 6 sentences, each equally often.
    whole = free[(start[~alone] <= 180) & (free[:, 4] == 0)]
    for sentences in range(1, 6):
        assert within((whole[:, 1] == 10 * sentences).mean(), len(whole), 0.2)


def test_a_tenth_of_the_documents_aim_at_shorter_pairs(tmp_path):
    store = counting_store(tmp_path / "s", [[1] * 110] * 4000)
    pairs = all_pairs(PairIndex(store, 103, seed=5))
    document, start = places(store, pairs[:, 0])
    first = start == 0  # the first pair of a document is as long as its target, unless random
    is_next = first & (pairs[:, 4] == 0)
    total = (pairs[:, 1] + pairs[:, 3])[is_next]
    # The target is uniform on 2..100, in one case of 99 the full length after all.
    assert within((total < 100).mean(), len(total), 0.1 * 98 / 99)
    short = total[total < 100]
    assert 2 <= short.min() < 6 and 96 < short.max()
    assert abs(short.mean() - 50.5) < 4 * 28.3 / math.sqrt(len(short))


def test_truncation_takes_from_either_end_of_the_longer_segment(tmp_path):
    # Chunks are two sentences of 60 tokens; 97 fit, so that A and B lose 11 or 12 tokens each.
    store = counting_store(tmp_path / "s", [[60, 60]] * 3000)
    pairs = all_pairs(PairIndex(store, 100, seed=7, short_seq_prob=0.0))
    pairs = pairs[pairs[:, 4] == 0]
    _, a_start = places(store, pairs[:, 0])
    assert set(pairs[:, 1]) | set(pairs[:, 3]) == {48, 49}
    assert (pairs[:, 1] + pairs[:, 3] == 97).all()
    lost = 60 - pairs[:, 1]
    assert within(a_start.sum() / lost.sum(), lost.sum(), 0.5)


def test_every_token_is_used_where_nothing_is_truncated(store):
    index = PairIndex(store, 4000, seed=1, short_seq_prob=0.5)
    assert covered(all_pairs(index)) == store.num_tokens
    # What truncation cuts off one epoch, another has.
    pairs = [all_pairs(PairIndex(store, 128, seed=1, epoch=e)) for e in range(10)]
    assert covered(pairs[0]) < covered(np.concatenate(pairs))
    assert covered(np.concatenate(pairs)) > 0.98 * store.num_tokens


def test_unused_sentences_of_random_pairs_are_put_back(store):
    pairs = all_pairs(PairIndex(store, 4000, seed=2, short_seq_prob=0.5))
    document, start = places(store, pairs[:, 0])
    ends = start + pairs[:, 1]
    following = np.flatnonzero((pairs[:-1, 4] == 1) & (document[:-1] == document[1:]))
    assert len(following) > 50
    assert (start[following + 1] == ends[following]).all()


def test_another_epoch_or_seed_draws_other_pairs_the_same_ones_again_the_same(store):
    same = [all_pairs(PairIndex(store, 128, seed=1, epoch=2)) for _ in range(2)]
    assert np.array_equal(*same)
    for other in (PairIndex(store, 128, 1, 3), PairIndex(store, 128, 2, 2)):
        other = all_pairs(other)
        assert not np.array_equal(other[:100], same[0][:100])


def test_pairs_do_not_depend_on_how_they_are_asked_for(store):
    index = PairIndex(store, 128, seed=1)
    whole = all_pairs(index)
    some = np.random.default_rng(0).integers(0, len(index), 500)
    assert np.array_equal(index.describe(some), whole[some])
    assert np.array_equal(index.lengths(), whole[:, 1] + whole[:, 3] + 3)


def test_without_nsp_a_row_is_contiguous_text_of_one_document(store, lengths):
    index = PairIndex(store, 34, seed=1, nsp=False, short_seq_prob=0.0)
    pairs = all_pairs(index)
    assert (pairs[:, 3] == 0).all() and (pairs[:, 1] <= 32).all() and (pairs[:, 1] > 0).all()
    assert covered(pairs) == store.num_tokens == pairs[:, 1].sum()
    # Longer sentences than a row go on in the next one.
    assert max(map(max, lengths)) > 32


def test_one_sentence_is_its_own_random_next(tmp_path):
    store = counting_store(tmp_path / "s", [[5]])
    pairs = all_pairs(PairIndex(store, 512, seed=0))
    assert pairs[:, [1, 3, 4]].tolist() == [[5, 5, 1]]


@pytest.mark.parametrize("documents", [[[5, 4]], [[3, 9, 4]], [[7] * 30], [[7, 2, 30] * 20], [[4, 6], [8, 3, 5]]])
def test_a_random_segment_is_never_the_next_one_nor_overlaps_the_first(tmp_path, documents):
    store = counting_store(tmp_path / "s", documents)
    pairs = np.concatenate(
        [all_pairs(PairIndex(store, length, 1, epoch)) for length in (16, 64, 4000) for epoch in range(1000)]
    )
    (a_document, a), (b_document, b) = places(store, pairs[:, 0]), places(store, pairs[:, 2])
    a_end, b_end, random = a + pairs[:, 1], b + pairs[:, 3], pairs[:, 4] == 1
    assert (a_document == b_document)[~random].all()
    if len(documents) > 1:
        assert (a_document != b_document)[random].all()
    else:
        starts = np.cumsum([0, *documents[0]])  # truncation moves the ends: where sentences begin does not move
        after_a, of_b = np.searchsorted(starts, a_end), np.searchsorted(starts, b, side="right") - 1
        assert ((b_end <= a) | (of_b > after_a))[random].all()
        assert random.any() == (len(documents[0]) > 2)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 64, 1000, 4097])
def test_permutation_has_every_number_once(n):
    key = np.uint64(12345)
    order = [permute(i, n, key) for i in range(n)]
    assert sorted(order) == list(range(n))
    if n >= 1000:
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 4 / math.sqrt(n)
        assert order != [permute(i, n, np.uint64(12346)) for i in range(n)]


def test_shortest_row_that_holds_a_pair(store, monkeypatch):
    assert all_pairs(PairIndex(store, 5, seed=0, short_seq_prob=1.0))[:, [1, 3]].max() == 1
    with pytest.raises(ValueError, match="seq_length 4 .config.phases, .* at least 5, for the 3 special tokens"):
        PairIndex(store, 4, seed=0, short_seq_prob=1.0)
    monkeypatch.setattr(TokenStore, "layout", Layout((0,), (2, 2), (2,), 0))
    with pytest.raises(ValueError, match="must be at least 6, for the 4 special tokens"):
        PairIndex(store, 5, seed=0)
