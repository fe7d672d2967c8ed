import itertools
import pickle
import subprocess
import sys

import numpy as np
import pytest

from bertjax.data.batches import EvaluationBatches, PretrainingBatches, prefetch
from bertjax.data.build import build_store
from bertjax.data.store import TokenStore


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


def rows(batch):
    """Each row as a tuple of its tokens."""
    return [
        tuple(ids[mask > 0].tolist())
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        if mask.any()
    ]


def test_rows_are_cls_a_sep_b_sep_and_padding(store_path):
    store = TokenStore(store_path)
    batch = PretrainingBatches(store, 64, 256, seed=1)[3]
    assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} == {
        "input_ids": ((256, 64), "int32"),
        "token_type_ids": ((256, 64), "int32"),
        "attention_mask": ((256, 64), "int32"),
        "nsp_labels": ((256, 1), "int32"),
        "nsp_weights": ((256, 1), "float32"),
    }
    text = {d: np.concatenate(doc).tobytes() for d, doc in enumerate(store.documents())}
    for ids, types, mask in zip(batch["input_ids"], batch["token_type_ids"], batch["attention_mask"], strict=True):
        n = mask.sum()
        assert (mask[:n] == 1).all() and not ids[n:].any() and not types[n:].any()
        separators = np.flatnonzero(ids == 3)
        assert ids[0] == 2 and len(separators) == 2 and separators[1] == n - 1
        assert types[:n].tolist() == [0] * (separators[0] + 1) + [1] * (n - separators[0] - 1)
        for segment in (ids[1 : separators[0]], ids[separators[0] + 1 : n - 1]):
            assert len(segment) and any(segment.astype(store.dtype).tobytes() in t for t in text.values())
    assert (batch["nsp_weights"] == 1).all()


@pytest.mark.parametrize("packed", [False, True])
def test_any_number_of_processes_makes_the_same_global_batch(store_path, packed):
    options = dict(seq_length=64, batch_size=24, seed=5, packed=packed)
    whole = PretrainingBatches(store_path, **options)
    for step in (0, 7, 1000):
        for count in (2, 3, 8):
            parts = [
                PretrainingBatches(store_path, **options, process_index=i, process_count=count)[step]
                for i in range(count)
            ]
            assert same(whole[step], {k: np.concatenate([p[k] for p in parts]) for k in parts[0]})


def test_a_batch_is_a_function_of_seed_and_step_in_another_process_too(store_path):
    expected = PretrainingBatches(store_path, 64, 8, seed=5)[1234]["input_ids"]
    code = (
        "import sys; from bertjax.data.batches import PretrainingBatches as P; "
        "print(P(sys.argv[1], 64, 8, seed=5)[1234]['input_ids'].tolist()); "
        "assert 'jax' not in sys.modules"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, store_path], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert out.stdout.strip() == str(expected.tolist()), out.stderr
    assert not np.array_equal(PretrainingBatches(store_path, 64, 8, seed=6)[1234]["input_ids"], expected)


def test_an_epoch_has_every_pair_once_and_batches_cross_its_end(store_path):
    batches = PretrainingBatches(store_path, 64, 7, seed=1)
    one_by_one = PretrainingBatches(store_path, 64, 1, seed=1)
    pairs = batches.corpora[0].rows_per_epoch
    assert pairs % 7
    stream = [r for step in range(2 * pairs // 7) for r in rows(batches[step])]
    assert stream == [rows(one_by_one[i])[0] for i in range(len(stream))]
    index = batches.corpora[0].epoch(0).index
    everything = index.describe(np.arange(pairs))
    assert sorted(map(len, stream[:pairs])) == sorted(everything[:, 1] + everything[:, 3] + 3)
    assert len(set(stream[:pairs])) == pairs
    assert stream[:pairs] != stream[pairs : 2 * pairs]
    assert batches.epochs(pairs) == pytest.approx(7)


def test_resume_with_other_readers_gives_the_remaining_batches_once(store_path):
    def run(first, last, processes):
        batches = [
            PretrainingBatches(store_path, 32, 8, seed=2, process_index=i, process_count=processes)
            for i in range(processes)
        ]
        readers = [itertools.islice(prefetch(part, first), last - first) for part in batches]
        return [r for parts in zip(*readers, strict=True) for part in parts for r in rows(part)]

    whole = run(0, 20, 1)
    assert run(0, 5, 2) + run(5, 20, 1) == whole
    assert run(0, 5, 2) + run(5, 20, 4) == whole


def test_prefetch_is_ordered_and_endless(store_path):
    batches = PretrainingBatches(store_path, 32, 8, seed=2)
    ahead = prefetch(batches, 10**6, buffer=8)
    for step in range(10**6, 10**6 + 20):
        assert same(next(ahead), batches[step])


def test_batches_travel_to_other_processes(store_path):
    batches = PretrainingBatches(store_path, 32, 8, seed=2, packed=True, process_index=1, process_count=2)
    assert same(pickle.loads(pickle.dumps(batches))[3], batches[3])


def test_evaluation_has_each_pair_once_for_any_batch_and_processes(store_path):
    expected = None
    for batch_size, processes in ((1, 1), (16, 1), (15, 3), (16, 8)):
        parts = [
            EvaluationBatches(store_path, 64, batch_size, process_index=i, process_count=processes)
            for i in range(processes)
        ]
        assert len({len(p) for p in parts}) == 1
        got = [r for number in range(len(parts[0])) for p in parts for r in rows(p[number])]
        weights = sum(b["nsp_weights"].sum() for p in parts for b in p)
        assert weights == len(got) == parts[0].num_pairs
        assert expected is None or got == expected
        expected = got
    *_, last = EvaluationBatches(store_path, 64, 16)
    empty = last["nsp_weights"][:, 0] == 0
    assert empty.any() and not last["attention_mask"][empty].any()


def test_evaluation_reads_held_out_documents_only(store_path):
    train = {i for d in TokenStore(store_path).documents() for s in d for i in s.tolist()}
    held = {i for b in EvaluationBatches(store_path, 64, 8) for r in rows(b) for i in r}
    own = {i for d in TokenStore(store_path, "heldout").documents() for s in d for i in s.tolist()}
    assert held <= own | {2, 3} and own - train


def test_evaluation_can_be_cut_to_evenly_spread_pairs(store_path):
    whole = [r for b in EvaluationBatches(store_path, 64, 8) for r in rows(b)]
    some = [r for b in EvaluationBatches(store_path, 64, 8, max_rows=17) for r in rows(b)]
    assert len(some) == 17 and len(whole) > 48 and set(some) <= set(whole)
    assert some[-1] not in whole[:17]
    assert some == [r for b in EvaluationBatches(store_path, 64, 5, max_rows=17) for r in rows(b)]


def test_a_mixture_has_its_proportions_and_each_corpus_in_full(tmp_path, make_tokenizer, documents):
    for name, seed in (("a", 1), ("b", 2)):
        build_store(
            None,
            make_tokenizer(vocab_size=60_000),
            tmp_path / name,
            documents=documents(20, seed=seed),
            heldout_fraction=0,
        )
    of_a = {i for d in TokenStore(tmp_path / "a").documents() for s in d for i in s.tolist()}
    mixture = PretrainingBatches([tmp_path / "a", tmp_path / "b"], 32, 100, seed=1, weights=[0.25, 0.75])
    from_a = []
    for step in range(100):
        for row in rows(mixture[step]):
            words = set(row[1:]) - {2, 3}
            from_a.append(len(words & of_a) > len(words) / 2)
    assert sum(from_a) == 2500  # exactly, over 10,000 rows
    assert 0.1 < np.mean(from_a[:500]) < 0.4  # and mixed well
    with pytest.raises(ValueError, match="one positive number for each of the 2"):
        PretrainingBatches([tmp_path / "a", tmp_path / "b"], 32, 4, weights=[1.0, -1.0])


def test_a_mixture_of_different_tokenizers_is_refused(tmp_path, make_tokenizer, documents):
    for size in (1000, 1001):
        build_store(None, make_tokenizer(vocab_size=size), tmp_path / str(size), documents=documents(5))
    with pytest.raises(ValueError, match="different tokenizers"):
        PretrainingBatches([tmp_path / "1000", tmp_path / "1001"], 32, 4)


def test_without_nsp_rows_have_one_segment_and_no_weight(store_path):
    batch = PretrainingBatches(store_path, 64, 32, nsp=False)[0]
    assert not batch["nsp_weights"].any() and not batch["token_type_ids"].any()
    assert ((batch["input_ids"] == 3).sum(1) == 1).all()


def test_one_short_sentence_gives_one_padded_example(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("just five words of text\n")
    build_store(tmp_path / "a.txt", tokenizer, tmp_path / "s")
    batches = PretrainingBatches(tmp_path / "s", 512, 1)
    assert batches.corpora[0].rows_per_epoch == 1
    assert batches[0]["attention_mask"].sum() == 13  # [CLS] five [SEP] five [SEP]


def test_bad_lengths_and_batches_are_refused_at_once(store_path):
    with pytest.raises(ValueError, match="seq_length 4 .config.phases, .* at least 5, for the 3 special tokens"):
        PretrainingBatches(store_path, 4, 8)
    with pytest.raises(ValueError, match="batch_size 10 does not divide over 4 processes"):
        PretrainingBatches("/nowhere", 128, 10, process_count=4)
    with pytest.raises(ValueError, match="no token store here.*build_corpus"):
        PretrainingBatches("/nowhere", 128, 8)


def test_an_empty_split_is_refused(tmp_path, tokenizer, documents):
    build_store(None, tokenizer, tmp_path / "s", documents=documents(5), heldout_fraction=0)
    with pytest.raises(ValueError, match="0 examples in the split 'heldout'"):
        EvaluationBatches(tmp_path / "s", 64, 8)
