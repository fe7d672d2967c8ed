"""What a run reads: the stores that a setting names, and TFRecords of the original program, with
what is refused of them, and exact resume."""

import re
import shutil

import jax
import numpy as np
import pytest
from etils import epath

from bertjax.config import TFRECORD, default_config, frozen
from bertjax.config_checks import check_config
from bertjax.data.build import build_store
from bertjax.pretraining import corpora
from bertjax.pretraining import job as pretraining
from bertjax.pretraining.corpora import open_corpus
from bertjax.pretraining.finish import random_share, token_entropy
from bertjax.run.checkpoint import Checkpoints
from bertjax.run.run import summary
from bertjax.tokenization.wordpiece import WordPieceTokenizer
from bertjax.tools import build_corpus
from tests.fakes import SPECIALS
from tests.tfrecords import make_example, write_records

WORDS = [f"w{i}" for i in range(60)]
CLS, SEP, MASK, FIRST = 2, 3, 4, 5


DRAWN = {
    "masking.rate": 0.4,
    "masking.mask_prob": 0.5,
    "masking.random_prob": 0.2,
    "masking.replace_with_special": True,
    "masking.whole_word": True,
    "eval.masking_rate": 0.3,
    "data.short_seq_prob": 0.2,
}


def masked_example(rng, length, predictions):
    """A pair as the original writes it: padded to `length`, one to `predictions` words masked."""
    a, b = rng.integers(FIRST, 65, (2, (length - 3) // 2 - rng.integers(3)))
    ids = np.array([CLS, *a, SEP, *b, SEP])
    types = np.array([0] * (len(a) + 2) + [1] * (len(b) + 1))
    chosen = np.sort(rng.permutation(np.arange(1, len(a) + 1))[: rng.integers(1, predictions + 1)])
    labels = ids[chosen]
    ids[chosen] = MASK

    def pad(values, size):
        return np.concatenate([values, np.zeros(size - len(values), np.asarray(values).dtype)])

    return make_example(
        {
            "input_ids": pad(ids, length),
            "input_mask": pad(np.ones(len(ids), int), length),
            "segment_ids": pad(types, length),
            "masked_lm_positions": pad(chosen, predictions),
            "masked_lm_ids": pad(labels, predictions),
            "masked_lm_weights": pad(np.ones(len(chosen), np.float32), predictions),
            "next_sentence_labels": rng.integers(0, 2, 1),
        }
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A directory of records of 32 and 48 tokens (GZIP), and a vocabulary."""
    directory = tmp_path_factory.mktemp("records")
    rng = np.random.default_rng(0)
    for name, length, predictions, count in (
        ("32-a.tfrecord", 32, 5, 40),
        ("32-b.tfrecord", 32, 5, 30),
        ("48-a.tfrecord.gz", 48, 8, 50),
        ("other.tfrecord", 32, 5, 20),
    ):
        write_records(directory / name, (masked_example(rng, length, predictions) for _ in range(count)))
    WordPieceTokenizer([*SPECIALS, *WORDS], do_lower_case=True).save(directory / "vocab")
    return directory


@pytest.fixture
def config(files):
    config = default_config()
    config.data.corpus = f"{TFRECORD}{files}/{{length}}-*"
    config.data.tokenizer = str(files / "vocab")
    config.model.update(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=32, max_position_embeddings=64
    )
    config.phases = ((4, 32), (4, 48))
    config.batch_size = 16
    config.optimizer.warmup_steps = 2
    config.checkpoint.every_steps = 3
    config.eval.rows = 0
    config.log.tensorboard = False
    config.execution.compilation_cache = ""
    check_config(config)
    return config


def test_the_masks_of_the_files_reach_the_loss_as_they_are(config, tmp_path):
    job = pretraining.prepare(frozen(config), str(tmp_path))
    batch = next(job.phases[0].batches(0))
    objective = job.phases[0].objective
    prepared = objective.prepare(batch, jax.random.key(0))
    assert prepared is batch and (batch["input_ids"] == MASK).sum() == batch["mlm_weights"].sum()
    assert float(objective.denominators(batch)["mlm"]) == batch["mlm_weights"].sum()
    # One of the 70 and of the 50 records is held out, and evaluated on once.
    assert [e.batches.num_pairs for e in job.evaluations] == [1, 1]
    assert "69 records of 32 tokens, 49 records of 48 tokens" in summary(job, 0)
    epochs = 4 * 16 / 69 + 4 * 16 / 49
    assert f"8 steps, {epochs:.1f} epochs of the corpus" in summary(job, 0)


def test_a_small_share_of_an_epoch_is_not_rounded_to_none(config, tmp_path):
    config.phases, config.batch_size = ((1, 32, 8),), 8
    assert "1 steps, 0.12 epochs of the corpus" in summary(pretraining.prepare(frozen(config), str(tmp_path)), 0)


def test_a_stopped_run_on_records_resumes_to_the_same_bits(config, tmp_path):
    config.data.cache = str(tmp_path / "cache")
    config.phases = ((4, 48),)  # of the compressed records
    config.checkpoint.every_steps = 2
    pretraining.run(pretraining.prepare(frozen(config), str(tmp_path / "run")))
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "4")
    (tmp_path / "again" / "checkpoints.committed.json").unlink()
    job = pretraining.prepare(frozen(config), str(tmp_path / "again"))
    assert job.resumed_from == 2
    pretraining.run(job)
    first, second = (Checkpoints(str(tmp_path / name / "checkpoints")).restore_numpy(4)[0] for name in ("run", "again"))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert (tmp_path / "run" / "model" / "vocab.txt").exists()


def test_other_files_to_evaluate_on(config, files, tmp_path):
    config.phases = ((4, 32),)
    config.data.heldout = f"{TFRECORD}{files}/other.tfrecord"
    job = pretraining.prepare(frozen(config), str(tmp_path))
    assert job.evaluations[0].batches.num_pairs == 20
    assert "70 records" in job.corpus.describe()
    share = random_share(job.evaluations[0].batches)
    assert 0 < share < 1 and share * 20 == pytest.approx(round(share * 20))
    counts = job.corpus.token_counts(32)
    assert counts[:FIRST].sum() == 0  # [MASK] is counted as the word that it hides
    assert 3.5 < token_entropy(counts) < np.log(60)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"phases": ((4, 64),), "data.corpus": "32-*"}, r"max_seq_length=32, training is set to 64.*config.phases"),
        ({"masking.max_predictions": 20}, r"max_predictions_per_seq=5, training is set to 20"),
        ({"data.tokenizer": ""}, r"config.data.tokenizer=DIR"),
        ({"data.packed": True}, r"one pair a row"),
        *(({name: value}, f"{name}={value} would have no effect: TFRecords bring") for name, value in DRAWN.items()),
        ({"model.is_decoder": True, "data.nsp": False}, r"is_decoder=True reads text without masks"),
        ({"data.heldout": "store"}, r"write tfrecord:PATTERN"),
        ({"data.corpus": "none-*"}, r"no file matches.*none-"),
        ({"data.corpus": "*-a.*"}, r"do not mix such files"),
    ],
)
def test_settings_that_do_not_go_with_the_files_are_refused(config, files, tmp_path, change, message):
    for name, value in change.items():
        group, _, last = name.rpartition(".")
        if name == "data.corpus":
            value = f"{TFRECORD}{files}/{value}"
        (config[group] if group else config)[last] = value
    with pytest.raises(ValueError, match=message):
        pretraining.prepare(check_config(config), str(tmp_path))


@pytest.mark.parametrize(
    "name, value", [*list(DRAWN.items())[:-1], ("masking.max_predictions", 3), ("log.fill_mask", ("a [MASK]",))]
)
def test_settings_of_masks_are_refused_left_to_right(name, value):
    config = default_config()
    config.update_from_flattened_dict({"model.is_decoder": True, "data.nsp": False, name: value})
    with pytest.raises(ValueError, match=f"{re.escape(f'{name}={value}')} would have no effect.*is_decoder"):
        check_config(config)


def test_a_token_store_with_settings_of_records_is_refused(config, tmp_path):
    config.data.corpus = str(tmp_path / "store")
    with pytest.raises(ValueError, match="config.data.tokenizer=.* would have no effect: it is for TFRecords"):
        check_config(config)


@pytest.mark.parametrize("name", ["a=b", "a,b", "a=1,b=2"])
def test_a_store_may_be_called_what_separates_stores(random_store, tmp_path, name):
    shutil.copytree(random_store, tmp_path / name)
    config = default_config()
    config.data.corpus = str(tmp_path / name)
    assert open_corpus(frozen(config), tmp_path, (0, 1)).weights is None
    if "," not in name:
        config.data.corpus = f"{tmp_path / name}=2,{random_store}=1,"
        corpus = open_corpus(frozen(config), tmp_path, (0, 1))
        assert corpus.weights == [2.0, 1.0] and len(corpus.stores) == 2


def test_a_corpus_of_records_is_known_by_its_content_wherever_it_lies(config, files, tmp_path):
    config.phases = ((2, 32), (2, 48))

    def fingerprint(directory):
        config.data.corpus = f"{TFRECORD}{directory}/{{length}}-*"
        return open_corpus(frozen(config), None, (0, 1)).fingerprint

    shutil.copytree(files, tmp_path / "copy")
    assert fingerprint(tmp_path / "copy") == fingerprint(files)
    write_records(
        tmp_path / "copy" / "32-b.tfrecord", (masked_example(np.random.default_rng(9), 32, 5) for _ in range(30))
    )
    assert fingerprint(tmp_path / "copy") != fingerprint(files)


def test_a_mixture_names_stores_and_weights(tmp_path):
    odd = tmp_path / "a=1,b"
    odd.mkdir()
    for text, expected in (
        ("wiki", [("wiki", "")]),
        ("wiki=2, books=1", [("wiki", "2"), ("books", "1")]),
        ("wiki,,books", [("wiki", ""), ("books", "")]),
        ("a=b=0.5", [("a=b", "0.5")]),
        (str(odd), [(str(odd), "")]),
    ):
        assert list(corpora._mixture(text)) == expected


@pytest.mark.parametrize(
    "text, refusal",
    [
        ("{s}=0,{s}=0", "one positive number for each of the 2"),
        ("{s}=0,{s}", "a weight, or none"),
        ("{s}=many,{s}=1", "is not a number"),
        ("{s}=1,{s}-other=1", "different tokenizers.*s-other"),
        (",", "',' names no token store"),
    ],
)
def test_weights_of_a_mixture_that_cannot_be_are_refused(tmp_path, text, refusal):
    for name, words in {"s": WORDS, "s-other": WORDS[::-1]}.items():
        tokenizer = WordPieceTokenizer([*SPECIALS, *words], do_lower_case=True)
        build_store(None, tokenizer, tmp_path / name, documents=[["w1 w2", "w3"], ["w4", "w5 w6"]] * 9)
    config = default_config()
    config.data.corpus = text.format(s=tmp_path / "s")
    with pytest.raises(ValueError, match=refusal):
        open_corpus(frozen(config), epath.Path(tmp_path), (0, 1)).training(32, 8)


def test_the_demo_corpus_is_built_in_the_workdir_and_only_on_a_local_disk(tmp_path, monkeypatch):
    built = []

    def build(directory, *settings):
        built.append((directory, *settings))
        tokenizer = WordPieceTokenizer([*SPECIALS, *WORDS], do_lower_case=True)
        build_store(None, tokenizer, directory, documents=[["w1 w2", "w3"], ["w4", "w5 w6"]] * 9)
        return directory

    monkeypatch.setattr(corpora, "build_docstring_store", build)
    config = default_config()
    config.data.corpus, config.data.demo_megabytes = "docstrings", 3.0
    opened = open_corpus(frozen(config), epath.Path(tmp_path), (0, 1))
    assert opened.describe().startswith("17 documents")  # one is held out
    assert built == [(tmp_path / "corpus", 3.0, config.data.demo_vocab_size, "wordpiece")]
    with pytest.raises(ValueError, match="not on a local disk"):
        open_corpus(frozen(config), epath.Path("gs://bucket/run"), (0, 1))


def test_a_corpus_is_measured_at_the_start_and_refused_or_trained_on_with_a_word(tmp_path):
    tokenizer = WordPieceTokenizer([*SPECIALS, *WORDS], do_lower_case=True)
    rng = np.random.default_rng(0)
    documents = [[" ".join(rng.choice(WORDS, 120 if i % 2 else 8)) for i in range(10)] for _ in range(12)]
    build_store(None, tokenizer, tmp_path / "s", documents=documents)  # fits rows of 128
    config = default_config()
    config.data.corpus, config.phases = str(tmp_path / "s"), ((2, 128), (2, 64))
    with pytest.raises(ValueError, match="s: .* are in no pair of 64 tokens.*corpus_limits=warn"):
        open_corpus(frozen(config), epath.Path(tmp_path), (0, 1))
    config.data.corpus_limits = "warn"
    opened = open_corpus(frozen(config), epath.Path(tmp_path), (0, 1))
    at_128, at_64 = opened.numbers[str(tmp_path / "s")]
    assert at_128["seen_ever"] > 0.9 > 0.8 > at_64["seen_ever"]
    assert len(opened.facts()) == 2 and "in rows of 64" in opened.facts()[1]
    assert len(opened.remarks) == 1 and opened.remarks[0].startswith(str(tmp_path / "s"))
    config.data.nsp, config.data.corpus_limits = False, "refuse"  # rows without NSP lose nothing
    assert open_corpus(frozen(config), epath.Path(tmp_path), (0, 1)).remarks == []


@pytest.mark.parametrize("nsp", [True, False])
def test_one_document_can_be_trained_on_and_evaluated(tmp_path, nsp):
    tokenizer = WordPieceTokenizer([*SPECIALS, *WORDS], do_lower_case=True)
    manifest = build_store(None, tokenizer, tmp_path / "s", documents=[[f"w{j} w{j + 1}" for j in range(40)]])
    summary = build_corpus.summary(manifest, "s")
    assert "(label 1; 0 = is next), from the same document, the only one" in summary
    assert "the last sentences of 1 document, which count in both splits" in summary
    config = default_config()
    config.data.corpus, config.phases, config.data.nsp = str(tmp_path / "s"), ((2, 64),), nsp
    opened = open_corpus(frozen(config), epath.Path(tmp_path), (0, 1))
    assert ["its random next sentences are of that document too" in remark for remark in opened.remarks] == [True] * nsp
    for batch in (opened.training(64, 8)[0], opened.heldout(64, 8)[0]):
        assert batch["attention_mask"].any() and batch["nsp_weights"].any() == nsp


def test_one_held_out_document_of_several_is_named(tmp_path):
    tokenizer = WordPieceTokenizer([*SPECIALS, *WORDS], do_lower_case=True)
    long, short = [f"w{j} w{j + 1}" for j in range(40)], ["w1 w2", "w3"]
    splits = build_store(None, tokenizer, tmp_path / "s", documents=[long, short])["splits"]
    assert [splits[name]["documents"] for name in ("train", "heldout")] == [2, 1]
    config = default_config()
    config.data.corpus, config.phases = str(tmp_path / "s"), ((2, 64),)
    (remark,) = open_corpus(frozen(config), epath.Path(tmp_path), (0, 1)).remarks
    assert "its random next sentences are of that document too" in remark and "do not compare" in remark


def test_records_are_measured_at_the_start(tmp_path, config):
    rng = np.random.default_rng(0)
    examples = [masked_example(rng, 32, 5) for _ in range(300)]
    write_records(tmp_path / "32.tfrecord", examples)
    config.data.corpus, config.phases = f"{TFRECORD}{tmp_path}/32.tfrecord", ((4, 32),)
    opened = open_corpus(frozen(config), epath.Path(tmp_path), (0, 1))
    training = opened.numbers["training"][0]
    assert 0.4 < training["random_share"] < 0.6 and training["rows"] == 297
    assert opened.remarks == [] and "random pairs" in opened.facts()[0]
    write_records(tmp_path / "32.tfrecord", examples[:20] * 20)
    with pytest.raises(ValueError, match="equal to an earlier one.*corpus_limits=warn"):
        open_corpus(frozen(config), epath.Path(tmp_path), (0, 1))
