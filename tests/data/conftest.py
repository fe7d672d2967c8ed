"""A tokenizer small enough to see through, and stores built with it."""

import hashlib
import json
import pathlib

import numpy as np
import pytest

from tests.fakes import FakeTokenizer


class WordTokenizer(FakeTokenizer):
    """Words separated by spaces; ids 5.. in the order of the vocabulary; others are unknown.

    Without a vocabulary a word's id is a hash, so that nothing is unknown.
    """

    pad_id, unk_id, cls_id, sep_id, mask_id = range(5)

    def __init__(self, words=None, vocab_size=1000):
        self.words = words
        self.vocab_size = 5 + len(words) if words else vocab_size

    @property
    def fingerprint(self):
        return hashlib.sha256(json.dumps([self.words, self.vocab_size]).encode()).hexdigest()

    def encode(self, text):
        return [self._id(word) for word in text.replace("\u200b", " ").split()]

    def _id(self, word):
        if self.words is None:
            digest = hashlib.md5(word.encode()).digest()
            return 5 + int.from_bytes(digest[:8], "little") % (self.vocab_size - 5)
        return 5 + self.words.index(word) if word in self.words else self.unk_id

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def save(self, directory):
        pathlib.Path(directory).mkdir(parents=True)
        pathlib.Path(directory, "vocab.txt").write_text("\n".join(self.words or []))


def make_documents(count, seed=0, sentences=(1, 30), words=(1, 40)):
    """Documents of random words; every sentence is different."""
    rng = np.random.default_rng(seed)
    return [
        [
            " ".join(f"w{rng.integers(1 << 40)}" for _ in range(rng.integers(*words)))
            for _ in range(rng.integers(*sentences))
        ]
        for _ in range(count)
    ]


def write_text(path, documents):
    """Documents in the original's form."""
    path.write_text("\n\n".join("\n".join(doc) for doc in documents) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tokenizer():
    return WordTokenizer()


@pytest.fixture(scope="session")
def make_tokenizer():
    return WordTokenizer


@pytest.fixture(scope="session")
def documents():
    return make_documents


@pytest.fixture(scope="session")
def text_file():
    return write_text


@pytest.fixture(scope="session")
def store_path(tmp_path_factory):
    """A store of 200 documents, ids of 50,000 words, some held out."""
    from bertjax.data.build import build_store

    path = tmp_path_factory.mktemp("store") / "store"
    build_store(
        None,
        WordTokenizer(vocab_size=50_000),
        path,
        documents=make_documents(200),
        heldout_fraction=0.1,
        shard_bytes=50_000,
    )
    return path
