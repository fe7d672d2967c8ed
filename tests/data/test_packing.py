import numpy as np

from bertjax.data.batches import PretrainingBatches
from bertjax.data.build import build_store
from bertjax.data.pairs import PairIndex
from bertjax.data.rows import PackedEpoch, pack
from bertjax.data.store import TokenStore


def unpacked(batch):
    """(tokens, types, label) of each pair of a packed batch, checked against the row's layout."""
    pairs = []
    for row in range(len(batch["input_ids"])):
        mask = batch["attention_mask"][row]
        held = int(mask.max())
        assert batch["nsp_weights"][row].tolist() == [1.0] * held + [0.0] * (batch["nsp_weights"].shape[1] - held)
        position = 0
        for slot in range(1, held + 1):
            where = np.flatnonzero(mask == slot)
            assert where.tolist() == list(range(position, position + len(where)))
            assert batch["cls_positions"][row, slot - 1] == position
            assert batch["input_ids"][row, position] == 2
            assert batch["position_ids"][row, where].tolist() == list(range(len(where)))
            pairs.append(
                (
                    tuple(batch["input_ids"][row, where].tolist()),
                    tuple(batch["token_type_ids"][row, where].tolist()),
                    int(batch["nsp_labels"][row, slot - 1]),
                )
            )
            position += len(where)
        assert not mask[position:].any() and not batch["input_ids"][row, position:].any()
    return pairs


def test_a_packed_epoch_has_the_pairs_of_the_padded_one_each_once(store_path):
    packed = PretrainingBatches(store_path, 64, 1, seed=4, packed=True)
    padded = PretrainingBatches(store_path, 64, 1, seed=4)
    got = [p for i in range(packed.corpora[0].rows_per_epoch) for p in unpacked(packed[i])]
    expected = []
    for i in range(padded.corpora[0].rows_per_epoch):
        batch = padded[i]
        n = int(batch["attention_mask"].sum())
        expected.append(
            (
                tuple(batch["input_ids"][0, :n].tolist()),
                tuple(batch["token_type_ids"][0, :n].tolist()),
                int(batch["nsp_labels"][0, 0]),
            )
        )
    assert sorted(got) == sorted(expected)
    assert packed.corpora[0].rows_per_epoch < padded.corpora[0].rows_per_epoch


def test_rows_do_not_depend_on_the_windows_asked_for_before(store_path, monkeypatch):
    monkeypatch.setattr("bertjax.data.rows.WINDOW", 50)
    options = dict(seq_length=64, batch_size=16, seed=4, packed=True)
    batches = PretrainingBatches(store_path, **options)
    forward = [batches[i]["input_ids"] for i in range(80)]
    assert batches.corpora[0].rows_per_epoch < 80 * 16
    for step in (79, 3, 31, 0):
        fresh = PretrainingBatches(store_path, **options)
        assert np.array_equal(fresh[step]["input_ids"], forward[step])


def test_best_fit_respects_capacity_and_number():
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 129, 3000)
    for most in (1, 2, 4, 16):
        rows, row_of = pack(lengths, 128, most)
        assert np.bincount(row_of).max() <= most and len(set(row_of.tolist())) == rows
        assert np.bincount(row_of, weights=lengths).max() <= 128
    assert pack(lengths, 128, 1)[0] == 3000
    assert lengths.sum() / (rows * 128) > 0.98
    assert pack(np.array([128, 64, 64, 100, 28]), 128, 4)[0] == 3


def test_fill_is_above_98_percent_at_512_on_short_documents(tmp_path, tokenizer, documents):
    docs = documents(500, sentences=(2, 60), words=(5, 30))
    build_store(None, tokenizer, tmp_path / "s", documents=docs)
    epoch = PackedEpoch(PairIndex(TokenStore(tmp_path / "s"), 512, seed=0), 512, 16)
    assert epoch.share_filled > 0.98
    pairs, firsts = epoch.pairs_of(np.arange(len(epoch)))
    assert sorted(pairs) == list(range(len(epoch.index))) and firsts[-1] == len(pairs)


def test_single_segments_pack_too(store_path):
    batch = PretrainingBatches(store_path, 64, 16, packed=True, nsp=False)[0]
    assert batch["attention_mask"].max() > 1 and not batch["nsp_weights"].any()
    assert (batch["attention_mask"] > 0).mean() > 0.85
