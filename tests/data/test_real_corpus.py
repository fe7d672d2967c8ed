"""Wikipedia text end to end, and the pairs against those of the original program."""

import tarfile

import numpy as np
import pytest

from bertjax.data.build import build_store
from bertjax.data.inspection import pair_statistics
from bertjax.data.pairs import PairIndex
from bertjax.data.store import TokenStore
from tests.data.pairs import covered

pytestmark = pytest.mark.real_data

# create_pretraining_data.py of google-research/bert (its last commit, Python 3.11) on the four
# files below, split into sentences by bertjax.data.sentences, uncased vocabulary, short_seq_prob 0
# (with 0.1 the few short documents drown everything else): mean over 20 runs and its standard
# error of the number of instances, the share of random next, the mean lengths of A and B, and the
# share of the corpus's tokens in some instance of a run.
ORIGINAL = {
    128: {
        "pairs": (8239.4, 6.5),
        "random": (0.5037, 0.0010),
        "a": (60.269, 0.056),
        "b": (64.188, 0.057),
        "coverage": (0.9011, 0.0002),
    },
    512: {
        "pairs": (2314.2, 3.1),
        "random": (0.5022, 0.0016),
        "a": (238.79, 0.41),
        "b": (255.86, 0.36),
        "coverage": (0.9750, 0.0002),
    },
}


@pytest.fixture(scope="module")
def store(shared_data, tmp_path_factory):
    from bertjax.tokenization import load_tokenizer

    path = tmp_path_factory.mktemp("wikipedia")
    names = {f"text/text_AA_wiki_{i:02d}" for i in range(4)}
    with tarfile.open(shared_data / "corpus/wikipedia-good.tar.xz") as tar:
        for member in tar:
            if member.name.removeprefix("./") in names:
                tar.extract(member, path, filter="data")
    tokenizer = load_tokenizer(shared_data / "vocab/bert-base-uncased-vocab.txt", True)
    build_store(f"{path}/text/*", tokenizer, path / "store", heldout_fraction=0, shard_bytes=1 << 20)
    return TokenStore(path / "store")


def test_counts_of_four_files(store):
    # grep -c '<doc ' gives 114; 868,264 tokens by the original's own tokenizer.
    assert (store.num_documents, store.num_tokens) == (114, 868_264)
    assert store.manifest["unknown_rate"] < 1e-4 and not store.manifest["dropped"]


@pytest.mark.parametrize("seq_length", [128, 512])
def test_pairs_have_the_statistics_of_the_original_program(store, seq_length):
    runs = []
    for epoch in range(20):
        index = PairIndex(store, seq_length, seed=0, epoch=epoch, short_seq_prob=0.0)
        pairs = index.describe(np.arange(len(index)))
        runs.append(
            [len(index), index.random_share, pairs[:, 1].mean(), pairs[:, 3].mean(), covered(pairs) / store.num_tokens]
        )
    mean, error = np.mean(runs, 0), np.std(runs, 0) / np.sqrt(len(runs))
    for (name, (expected, its_error)), got, own in zip(ORIGINAL[seq_length].items(), mean, error, strict=True):
        assert abs(got - expected) < 4 * np.hypot(own, its_error), (name, got, expected)


def test_packed_rows_are_full(store):
    assert pair_statistics(store, 512)["packed_fill"] > 0.98
