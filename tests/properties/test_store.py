"""Damage to token stores: refused by name, or without any effect on the batches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertjax.data.batches import EvaluationBatches, PretrainingBatches
from bertjax.data.build import build_store
from bertjax.data.store import TokenStore
from bertjax.tokenization.wordpiece import WordPieceTokenizer
from tests.fakes import SPECIALS


def batches_of(path):
    """Some batches of both splits, and what else a run takes from a store."""
    train = TokenStore(path)
    heldout = train.heldout()
    tokenizer = train.load_tokenizer()
    assert len(TokenStore(path, "heldout")) == len(heldout)
    batches = [
        PretrainingBatches(train, 24, 4)[7],
        EvaluationBatches(heldout, 24, 4)[0],
        PretrainingBatches(train, 24, 2, packed=True)[2],
    ]
    tables = {str(i): batch[name] for i, batch in enumerate(batches) for name in batch}
    return {
        **tables,
        "counts": np.array([train.num_tokens, len(train), len(heldout)]),
        "fingerprint": np.array([train.manifest["content_hash"], tokenizer.fingerprint]),
    }


@pytest.fixture(scope="module")
def store(folder):
    """(directory, its files, its batches)"""
    return make_store(folder / "s")


def make_store(path):
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(40)]
    tokenizer = WordPieceTokenizer([*SPECIALS, *words], do_lower_case=True)
    documents = [
        [" ".join(rng.choice(words, rng.integers(1, 9))) for _ in range(rng.integers(2, 6))] for _ in range(12)
    ]
    build_store(None, tokenizer, path, documents=documents, heldout_fraction=0.3, shard_bytes=200)
    files = {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
    assert sum(name.endswith(".tokens") for name in files) >= 3
    return path, files, batches_of(path)


places = st.floats(0, 1, exclude_max=True)


damages = st.tuples(
    st.sampled_from(["flip", "cut", "zero", "ones", "append", "swap", "insert", "digit", "number", "remove"]),
    places,
    places,
    st.integers(0, 255),
)


def damaged(data, other, damage):
    """The bytes after (what, place and length as shares of the file, number); None: no file."""
    what, place, length, number = damage
    start = int(place * len(data))
    size = min(1 + int(length * (len(data) - start)), len(data) - start)
    before, middle, after = data[:start], data[start : start + size], data[start + size :]
    if what == "flip":
        flipped = bytes(byte ^ 1 << number % 8 for byte in data[start : start + 1])
        return before + flipped + data[start + 1 :]
    if what == "number":  # a whole entry of a table
        start -= start % 8
        return data[:start] + np.int64(number - 128).tobytes() + data[start + 8 :]
    return {
        "cut": before,
        "zero": before + bytes(size) + after,
        "swap": other,
        "remove": None,
        "ones": before + b"\xff" * size + after,
        "append": data + bytes([number]) * size,
        "insert": before + bytes([number]) + middle + after,
        "digit": before + b"%d" % (number % 10) + data[start + 1 :],
    }[what]


@given(st.data())
def test_a_damaged_store_is_refused_or_gives_the_same_batches(store, data):
    path, files, batches = store
    names = sorted(files)
    chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
    try:
        for name in chosen:
            other = files[data.draw(st.sampled_from(names))]
            changed = damaged(files[name], other, data.draw(damages))
            if changed is None:
                (path / name).unlink()
            else:
                (path / name).write_bytes(changed)
        try:
            found = batches_of(path)
        except ValueError as error:
            assert str(path) in str(error)
        else:
            for name, column in batches.items():
                assert np.array_equal(column, found[name]), name
    finally:
        for name in chosen:
            (path / name).write_bytes(files[name])
