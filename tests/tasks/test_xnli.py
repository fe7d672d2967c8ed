"""XNLI in its official tsv layout: languages, spellings, refusals."""

import pytest

from bertjax.tasks.job import make_task
from bertjax.tasks.xnli import XnliTask

# The first lines of the official files, shortened: xnli.dev.tsv has 19 columns.
HEADER = ["language", "gold_label", "sentence1_binary_parse", "sentence2_binary_parse",
          "sentence1_parse", "sentence2_parse", "sentence1", "sentence2", "promptID", "pairID",
          "genre", "label1", "label2", "label3", "label4", "label5", "sentence1_tokenized",
          "sentence2_tokenized", "match"]  # fmt: skip


def row(language, label, first, second, pair):
    cells = dict.fromkeys(HEADER, "") | {
        "language": language, "gold_label": label, "sentence1": first, "sentence2": second,
        "pairID": pair, "match": "True",
    }  # fmt: skip
    return "\t".join(cells.values())


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "XNLI-1.0").mkdir()
    (tmp_path / "XNLI-MT-1.0" / "multinli").mkdir(parents=True)
    lines = ["\t".join(HEADER), row("en", "neutral", 'And he said, "Mama', "He called.", "1"),
             row("de", "entailment", "Und er sagte", "Er sprach.", "1"),
             row("en", "contradiction", "I am home.", "He is not.", "2")]  # fmt: skip
    for name in ("dev", "test"):
        (tmp_path / "XNLI-1.0" / f"xnli.{name}.tsv").write_text("\n".join(lines) + "\n")
    train = tmp_path / "XNLI-MT-1.0" / "multinli" / "multinli.train.en.tsv"
    train.write_text("premise\thypo\tlabel\nA cat .\tAn animal .\tentailment\n"
                     "A cat .\tA dog .\tcontradictory\n")
    return tmp_path


def test_one_language_is_read_and_labels_are_matched_by_name(folder):
    task = make_task("xnli", str(folder), {"language": "en"})
    dev = task.read("dev")
    assert [r.text_a for r in dev.records] == ['And he said, "Mama', "I am home."]
    assert [r.label for r in dev.records] == ["neutral", "contradiction"]
    assert [r.id for r in dev.records] == ["1", "2"]
    # The translated training files spell it 'contradictory'.
    assert [r.label for r in task.read("train").records] == ["entailment", "contradiction"]
    zero_shot = XnliTask(folder, "de", train_language="en")
    assert [r.label for r in zero_shot.read("test").records] == ["entailment"]
    assert len(zero_shot.read("train").records) == 2


def test_wrong_languages_and_labels_are_refused(folder):
    with pytest.raises(ValueError, match="no language 'nl'; one of ar, bg"):
        XnliTask(folder, "nl")
    with pytest.raises(ValueError, match="holds no row of language 'fr'"):
        XnliTask(folder, "fr").read("dev")
    path = folder / "XNLI-1.0" / "xnli.dev.tsv"
    path.write_text(path.read_text().replace("neutral", "maybe"))
    with pytest.raises(ValueError, match=r"xnli.dev.tsv:2: label 'maybe' is not one of"):
        XnliTask(folder).read("dev")
