"""What a corpus must be to be trained on. The tokenizer here makes one token of each word."""

import numpy as np
import pytest

from bertjax.data import laws
from bertjax.data.build import build_store
from bertjax.data.pairs import PairIndex
from bertjax.data.store import TokenStore
from tests.data.pairs import covered


def mixed(rng, documents=30, long=300, short=8):
    """Documents in which lines of `long` and of `short` words alternate."""
    return [
        [" ".join(f"w{rng.integers(1 << 40)}" for _ in range(long if i % 2 else short)) for i in range(20)]
        for _ in range(documents)
    ]


def test_lines_longer_than_a_row_are_refused_with_the_files_and_the_ways_out(tmp_path, tokenizer, documents, text_file):
    bad = text_file(tmp_path / "bad.txt", mixed(np.random.default_rng(0)))
    text_file(tmp_path / "good.txt", documents(10, sentences=(5, 9), words=(8, 12)))
    arguments = (f"{tmp_path}/*.txt", tokenizer, tmp_path / "s")
    with pytest.raises(
        ValueError,
        match=r"no pair of 128 tokens in 40 epochs.*only the middle.*"
        rf"{bad} \(100%\).*--split_lines=62.*raise --max_unseen_share",
    ) as error:
        build_store(*arguments)
    assert "\n" not in str(error.value) and not (tmp_path / "s/manifest.json").exists()
    kept = build_store(*arguments, overwrite=True, max_unseen_share=1, max_random_share=1)
    assert kept["seen_in_epoch"] < 0.6 and kept["seen_ever"] < 0.7
    split = build_store(*arguments, overwrite=True, split_lines=62)
    assert split["seen_ever"] > 0.99 and split["longest_line"] == 60
    assert split["repaired"] == {"long_lines_split": 300}
    assert split["tokens"] == kept["tokens"]


def test_the_share_ever_seen_is_what_the_pairs_of_as_many_epochs_hold(tmp_path, tokenizer):
    build_store(
        None,
        tokenizer,
        tmp_path / "s",
        documents=mixed(np.random.default_rng(1), 8),
        max_unseen_share=1,
        max_random_share=1,
        heldout_fraction=0,
    )
    store = TokenStore(tmp_path / "s")
    pairs = [PairIndex(store, 128, 0, epoch) for epoch in range(laws.EPOCHS)]
    pairs = [index.describe(np.arange(len(index))) for index in pairs]
    numbers = laws.measure(store, 128)
    assert numbers["seen_in_epoch"] == pytest.approx(covered(pairs[0]) / store.num_tokens, abs=1e-6)
    assert numbers["seen_ever"] == pytest.approx(covered(np.concatenate(pairs)) / store.num_tokens, abs=1e-6)
    assert numbers["random_share"] == pytest.approx(np.concatenate(pairs)[:, 4].mean(), abs=1e-6)
    assert numbers["longest_line"] == 300
    assert laws.measure(store, 128, nsp=False)["seen_in_epoch"] == 1.0
    assert laws.measure(store, 512)["seen_ever"] == 1.0


def test_a_sample_stands_for_a_large_corpus(tmp_path, tokenizer, documents, monkeypatch):
    build_store(None, tokenizer, tmp_path / "s", documents=documents(400), heldout_fraction=0)
    whole = laws.measure(TokenStore(tmp_path / "s"), 64)
    monkeypatch.setattr(laws, "SAMPLE", 60_000)
    sample = laws.measure(TokenStore(tmp_path / "s"), 64)
    assert TokenStore(tmp_path / "s").num_tokens > 100_000
    assert sample["random_share"] != whole["random_share"]
    for name in ("seen_in_epoch", "seen_ever", "random_share"):
        assert sample[name] == pytest.approx(whole[name], abs=0.02)


@pytest.mark.parametrize(("count", "held"), [(4, 2), (40, 2), (1000, 10)])
def test_two_texts_are_held_out_where_there_are_four(tmp_path, tokenizer, count, held):
    docs = [[f"w{d} w{i} a b c" for i in range(4)] for d in range(count)]
    splits = build_store(None, tokenizer, tmp_path / "s", documents=docs)["splits"]
    if count < 1000:
        assert splits["heldout"]["documents"] == held
    else:  # binomial, standard deviation 3.1
        assert abs(splits["heldout"]["documents"] - held) < 13
    assert splits["train"]["documents"] == count - splits["heldout"]["documents"]


def test_copies_of_a_held_out_text_are_held_out_too(tmp_path, tokenizer):
    docs = [[f"w{d % 5} w{i} a b c" for i in range(4)] for d in range(50)]
    splits = build_store(None, tokenizer, tmp_path / "s", documents=docs)["splits"]
    assert splits["heldout"]["documents"] == 20 and splits["train"]["documents"] == 30


@pytest.mark.parametrize("count", [2, 5, 12])
def test_single_sentences_are_refused_in_small_corpora_too(tmp_path, tokenizer, count):
    docs = [[f"this is sentence {i}"] for i in range(count + 2)]
    with pytest.raises(ValueError, match="100% of the next-sentence pairs.*without NSP"):
        build_store(None, tokenizer, tmp_path / "s", documents=docs)


def test_mostly_copies_are_refused_and_named(tmp_path, tokenizer, documents, text_file):
    docs = documents(10, sentences=(5, 9))
    text_file(tmp_path / "once.txt", docs)
    copies = text_file(tmp_path / "twice.txt", docs * 200)
    with pytest.raises(ValueError, match=rf"100% of the tokens.*{copies} \(100%\).*--deduplicate"):
        build_store(f"{tmp_path}/*.txt", tokenizer, tmp_path / "s", heldout_fraction=0)
    manifest = build_store(f"{tmp_path}/*.txt", tokenizer, tmp_path / "s", deduplicate=True, overwrite=True)
    assert manifest["duplicate_share"] == 0 and manifest["documents"] == 10


def test_copies_are_refused_also_where_they_are_held_out(tmp_path, tokenizer, documents):
    docs = documents(60, sentences=(5, 9))
    build_store(None, tokenizer, tmp_path / "s", documents=docs)
    held = TokenStore(tmp_path / "s", "heldout").document(0)
    copied = next(doc for doc in docs if sum(len(line.split()) for line in doc) == sum(map(len, held)))
    with pytest.raises(ValueError, match=r"9\d% of the tokens are in documents whose text occurs more than once"):
        build_store(None, tokenizer, tmp_path / "t", documents=[*docs, *[copied] * 2000])


def test_unknown_words_are_refused_with_the_file(tmp_path, make_tokenizer):
    (tmp_path / "a.txt").write_text("the cat sat\n" * 20 + "\ncat sat\nthe cat\n")
    (tmp_path / "b.txt").write_text("le chat est assis\n" * 20)
    with pytest.raises(ValueError, match=rf"unknown.*most of them in {tmp_path}/b\.txt \(100%\)"):
        build_store(f"{tmp_path}/*.txt", make_tokenizer(words=["the", "cat", "sat"]), tmp_path / "s")


def test_a_line_of_a_whole_book_is_refused_with_its_first_words(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("a b c\nd e\n\n" + "call me word " * 40_000 + "\nd e\n")
    with pytest.raises(ValueError, match=r"longest line has 120,000 tokens \(.*a\.txt: 'call me"):
        build_store(tmp_path / "a.txt", tokenizer, tmp_path / "s", max_unseen_share=1, heldout_fraction=0)


def test_rows_that_were_masked_before_are_measured_too():
    rng = np.random.default_rng(0)
    ids = np.concatenate([np.full((200, 1), 2), rng.integers(5, 100, (200, 31))], 1)
    batch = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "mlm_positions": np.full((200, 1), 3),
        "mlm_labels": ids[:, 3:4].copy(),
        "mlm_weights": np.ones((200, 1)),
        "nsp_weights": np.ones((200, 1)),
        "nsp_labels": rng.integers(0, 2, (200, 1)),
    }
    batch["input_ids"][:, 3] = 4  # [MASK]
    numbers = laws.measure_rows([batch], 1, (0, 1, 2, 3, 4))
    assert numbers["unknown_rate"] == numbers["duplicate_share"] == 0
    assert not list(laws.row_problems(numbers, nsp=True))
    for change, words in (
        ({"nsp_labels": np.zeros((200, 1), int)}, "0% of the next-sentence"),
        ({"input_ids": np.where(ids % 2, ids, 1)}, "tokens are unknown"),
        ({"input_ids": ids[:1].repeat(200, 0)}, "equal to an earlier"),
    ):
        numbers = laws.measure_rows([batch | change], 1, (0, 1, 2, 3, 4))
        assert any(words in problem for problem in laws.row_problems(numbers, nsp=True)), change


def test_rows_for_a_trial_are_not_held_against_the_text(tmp_path, tokenizer, documents):
    build_store(None, tokenizer, tmp_path / "s", documents=documents(30, words=(10, 30)))
    store = TokenStore(tmp_path / "s")
    numbers = laws.measure(store, 16)
    assert 0.2 < 1 - numbers["seen_ever"] < 0.5 and numbers["random_share"] > 0.9
    assert not list(laws.problems(numbers, store.manifest))
    assert [name for name, _ in laws.problems(numbers | {"seq_length": 64}, store.manifest)] == [
        "max_unseen_share",
        "max_random_share",
    ]
