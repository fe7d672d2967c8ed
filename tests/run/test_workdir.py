"""What a run has written down of itself, damaged: file and remedy are named, nothing is guessed."""

import json

import numpy as np
import pytest
from etils import epath

from bertjax.config import Config, resume_conflicts
from bertjax.formats.checkpoint import CheckpointError
from bertjax.pretraining.job import goes_on_with
from bertjax.run.checkpoint import Checkpoints
from bertjax.run.workdir import DamagedRecord, read_record
from bertjax.run.workdir import step_to_resume as resume
from bertjax.tokenization.wordpiece import WordPieceTokenizer

DAMAGED = [b"", b'{"a": 1,', b"\0" * 40, b"[1]", b"[" * 100_000, b"\xff\xfe{}"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]


class Corpus:
    fingerprint = "the text"

    def __init__(self, words):
        self.tokenizer = WordPieceTokenizer(words, do_lower_case=True)


@pytest.fixture
def workdir(tmp_path):
    """A run at step 7."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(7, {"x": np.ones(3)})
    checkpoints.close()
    (tmp_path / "config.json").write_text(Config().to_json())
    corpus = Corpus(VOCABULARY)
    corpus.tokenizer.save(tmp_path)
    (tmp_path / "corpus.json").write_text(
        json.dumps({"content": "the text", "vocabulary": corpus.tokenizer.fingerprint})
    )
    return epath.Path(tmp_path)


def step_to_resume(config, workdir):
    return resume(config, workdir, lambda before: resume_conflicts(before, config))


def resumed(resume="auto"):
    return Config().replace({"resume": resume})


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_record_of_the_settings_is_named_with_the_remedy(workdir, content):
    assert step_to_resume(resumed(), workdir) == 7
    (workdir / "config.json").write_bytes(content)
    with pytest.raises(DamagedRecord, match="config.json .*--config.resume=changed") as refused:
        step_to_resume(resumed(), workdir)
    assert len(str(refused.value).splitlines()) == 1
    assert step_to_resume(resumed("changed"), workdir) == 7
    assert step_to_resume(resumed("overwrite"), workdir) is None


@pytest.mark.parametrize("content", [*DAMAGED, b'{"content": "the text"}', b'{"content": "the text", "vocabulary": 3}'])
def test_a_damaged_record_of_the_corpus_is_named_and_other_words_are_never_meant(workdir, content):
    corpus = Corpus(VOCABULARY)
    assert goes_on_with(resumed(), workdir, corpus)
    (workdir / "corpus.json").write_bytes(content)
    with pytest.raises(DamagedRecord, match="corpus.json .*put a copy of it back"):
        goes_on_with(resumed(), workdir, corpus)
    assert goes_on_with(resumed("changed"), workdir, corpus)
    assert not goes_on_with(resumed("overwrite"), workdir, corpus)
    with pytest.raises(ValueError, match="another vocabulary"):
        goes_on_with(resumed("changed"), workdir, Corpus([*VOCABULARY[:-1], "b"]))


def test_a_damaged_record_of_a_fine_tuning_run_is_named(tmp_path):
    (tmp_path / "finetune.json").write_text("{")
    with pytest.raises(DamagedRecord, match="finetune.json"):
        read_record(epath.Path(tmp_path / "finetune.json"))


def test_a_damaged_ledger_of_checkpoints_still_tells_that_there_were_some(workdir):
    (workdir / "checkpoints" / "7").rmtree()
    (workdir / "checkpoints.committed.json").write_text("\0")
    with pytest.raises(CheckpointError, match="some were saved. Put the checkpoints back"):
        step_to_resume(resumed(), workdir)
