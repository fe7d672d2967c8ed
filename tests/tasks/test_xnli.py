"""XNLI in its official tsv layout: languages, spellings, refusals."""

import numpy as np
import pytest

from bertjax.tasks.make import make_task
from bertjax.tasks.xnli import LANGUAGES, XnliTask

# The first lines of the official files, shortened: xnli.dev.tsv has 19 columns.
HEADER = [
    "language",
    "gold_label",
    "sentence1_binary_parse",
    "sentence2_binary_parse",
    "sentence1_parse",
    "sentence2_parse",
    "sentence1",
    "sentence2",
    "promptID",
    "pairID",
    "genre",
    "label1",
    "label2",
    "label3",
    "label4",
    "label5",
    "sentence1_tokenized",
    "sentence2_tokenized",
    "match",
]


def row(language, label, first, second, pair):
    cells = dict.fromkeys(HEADER, "") | {
        "language": language,
        "gold_label": label,
        "sentence1": first,
        "sentence2": second,
        "pairID": pair,
        "match": "True",
    }
    return "\t".join(cells.values())


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "XNLI-1.0").mkdir()
    (tmp_path / "XNLI-MT-1.0" / "multinli").mkdir(parents=True)
    lines = [
        "\t".join(HEADER),
        row("en", "neutral", 'And he said, "Mama', "He called.", "1"),
        row("de", "entailment", "Und er sagte", "Er sprach.", "1"),
        row("en", "contradiction", "I am home.", "He is not.", "2"),
    ]
    for name in ("dev", "test"):
        (tmp_path / "XNLI-1.0" / f"xnli.{name}.tsv").write_text("\n".join(lines) + "\n")
    train = tmp_path / "XNLI-MT-1.0" / "multinli" / "multinli.train.en.tsv"
    train.write_text("premise\thypo\tlabel\nA cat .\tAn animal .\tentailment\nA cat .\tA dog .\tcontradictory\n")
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


def test_several_languages_are_scored_together_and_each(folder):
    task = make_task("xnli", str(folder), {"language": "de,en", "train_language": "en"})
    assert task.name == "xnli_de_en"
    dev = task.read("dev")
    assert [(r.id, r.language, r.text_b) for r in dev.records] == [
        ("en-1", "en", "He called."),
        ("de-1", "de", "Er sprach."),
        ("en-2", "en", "He is not."),
    ]
    labels = [task.labels.index(record.label) for record in dev.records]
    rows = [{"labels": label, "example": i} for i, label in enumerate(labels)]
    scores = task.score(dev, rows, np.eye(3)[[labels[0], labels[1], labels[0]]])
    assert scores["accuracy"] == pytest.approx(2 / 3)
    assert (scores["accuracy_de"], scores["accuracy_en"]) == (1.0, 0.5)
    assert set(task.metric_names) <= set(scores.values)  # 'accuracy_en' may choose the best
    one = XnliTask(folder, "de")
    assert not any(name.startswith("accuracy_") for name in one.metric_names)


def test_all_languages_are_fifteen_and_training_data_of_several_are_joined(folder):
    assert XnliTask(folder, "all").languages == XnliTask(folder, LANGUAGES).languages == LANGUAGES
    train = folder / "XNLI-MT-1.0" / "multinli" / "multinli.train.th.tsv"
    # Thai has no blanks between words; a line separator inside a text ends no line.
    train.write_text("premise\thypo\tlabel\r\nแมว\u2028ตัวหนึ่ง\tสัตว์\tentailment\r\n", newline="")
    split = XnliTask(folder, "en", train_language=["en", "th"]).read("train")
    assert [r.language for r in split.records] == ["en", "en", "th"]
    assert split.records[2].text_a == "แมว\u2028ตัวหนึ่ง" and split.records[2].label == "entailment"


def test_a_file_that_is_cut_short_is_noted(folder):
    assert XnliTask(folder, "de").read("dev").notes == (
        "XNLI dev has 1 rows of de, not the 2,490 of the published files",
    )


def test_a_missing_archive_is_named(folder):
    with pytest.raises(ValueError, match=r"multinli.train.de.tsv is neither in .*XNLI-MT-1.0.zip"):
        XnliTask(folder, "de").read("train")
    # The files themselves may lie in the folder: the layout of google-research/bert.
    assert len(XnliTask(folder / "XNLI-1.0", "de").read("test").records) == 1
    with pytest.raises(ValueError, match="XNLI has no language 'xx'"):
        XnliTask(folder, "de,xx")


def test_wrong_languages_and_labels_are_refused(folder):
    with pytest.raises(ValueError, match="no language 'nl'; one of ar, bg"):
        XnliTask(folder, "nl")
    with pytest.raises(ValueError, match="holds no row of language 'fr'"):
        XnliTask(folder, "fr").read("dev")
    path = folder / "XNLI-1.0" / "xnli.dev.tsv"
    path.write_text(path.read_text().replace("neutral", "maybe"))
    with pytest.raises(ValueError, match=r"xnli.dev.tsv:2: label 'maybe' is not one of"):
        XnliTask(folder).read("dev")
