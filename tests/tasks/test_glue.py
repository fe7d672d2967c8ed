"""GLUE: official columns, labels, metrics, submission files and refusals."""

import os
import shutil
import types

import numpy as np
import pytest

from bertjax.tasks.glue import GLUE, GlueTask, glue_table
from tests.fakes import FakeTokenizer

# Rows of the official files (gluebenchmark.com), train/dev/test.
OFFICIAL_ROWS = {
    "cola": (8551, 1043, 1063),
    "sst2": (67349, 872, 1821),
    "mrpc": (3668, 408, 1725),
    "stsb": (5749, 1500, 1379),
    "rte": (2490, 277, 3000),
    "wnli": (635, 71, 146),
}


class Words(FakeTokenizer):
    """A tokenizer that gives every word the id of its length."""

    cls_id, sep_id, pad_id = 101, 102, 0

    def encode_batch(self, texts):
        return [[len(word) for word in text.split()] for text in texts]


def one_hot(classes, size):
    return list(np.eye(size)[np.asarray(classes)])


@pytest.fixture
def folder(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return tmp_path

    return write


@pytest.mark.real_data
@pytest.mark.parametrize("name", OFFICIAL_ROWS)
def test_official_files_give_the_official_row_counts(shared_data, name):
    task = GlueTask(name, shared_data / "glue")
    splits = [task.read(split) for split in ("train", "dev", "test")]
    assert tuple(len(split.records) for split in splits) == OFFICIAL_ROWS[name]
    assert [split.labelled for split in splits] == [True, True, False]
    assert all(record.text_a.strip() for split in splits for record in split.records)


@pytest.mark.real_data
def test_the_original_mrpc_files_give_the_same_records_as_the_glue_files(shared_data, tmp_path):
    source = shared_data / "glue" / "MRPC"
    for name in ("msr_paraphrase_train.txt", "msr_paraphrase_test.txt", "dev_ids.tsv"):
        shutil.copyfile(source / name, tmp_path / name)
    original, glue = GlueTask("mrpc", tmp_path), GlueTask("mrpc", source)
    for split in ("train", "dev", "test"):
        left, right = original.read(split).records, glue.read(split).records
        assert [(r.text_a, r.text_b) for r in left] == [(r.text_a, r.text_b) for r in right]
        if split != "test":
            assert [r.label for r in left] == [r.label for r in right]
    assert original.read("test").labelled  # Microsoft's test file has its gold


@pytest.mark.slow
@pytest.mark.real_data
def test_tfds_gives_the_same_records_as_the_files(shared_data, tmp_path, monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")
    import tensorflow_datasets.text  # noqa: F401

    source, manual = shared_data / "glue" / "MRPC", tmp_path / "manual"
    manual.mkdir()
    for name in ("msr_paraphrase_train.txt", "msr_paraphrase_test.txt"):
        shutil.copyfile(source / name, manual / name)
    shutil.copyfile(source / "dev_ids.tsv", manual / "data_mrpc_dev_ids.tsv")
    builder = tfds.builder("glue/mrpc", data_dir=str(tmp_path), file_format="array_record")
    builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(manual_dir=os.fspath(manual), try_download_gcs=False)
    )
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path))
    prepared, files = GlueTask("mrpc", "tfds:glue/mrpc"), GlueTask("mrpc", source)
    for split in ("train", "dev", "test"):
        left, right = prepared.read(split), files.read(split)
        assert [(r.text_a, r.text_b, r.label) for r in left.records] == [
            (r.text_a, r.text_b, r.label) for r in right.records
        ]
        if split == "test":  # train and dev keep the numbers of the file that they were split from
            assert [r.id for r in left.records] == [str(i) for i in range(len(right.records))]
        assert left.labelled == right.labelled


@pytest.mark.parametrize("name", GLUE)
def test_columns_splits_and_label_names_are_those_of_tfds(name):
    tfds = pytest.importorskip("tensorflow_datasets")
    import tensorflow_datasets.text  # noqa: F401

    task, info = GlueTask(name, "nowhere"), tfds.builder(f"glue/{name}").info
    assert set(task.spec.named_text or task.spec.text) | {"label", "idx"} == set(info.features)
    if task.labels and name != "ax":
        assert list(task.labels) == info.features["label"].names
    assert set(task.spec.named) == set(task.splits)


def test_tfds_rows_of_bytes_and_of_str_are_the_same_text():
    from bertjax.data.named import _plain as plain

    row = {"s": b"caf\xc3\xa9", "t": "x", "n": np.int64(-1), "a": {"b": np.array([b"y"])}}
    assert plain(row) == {"s": "caf\u00e9", "t": "x", "n": -1, "a": {"b": ["y"]}}


def test_a_header_is_known_by_its_names_so_no_row_is_lost(folder):
    rows = "".join(f"{i}\tSentence {i}.\n" for i in range(5))
    for text in (rows, "index\tsentence\n" + rows):
        split = GlueTask("cola", folder("CoLA/test.tsv", text)).read("test")
        assert [r.text_a for r in split.records] == [f"Sentence {i}." for i in range(5)]
    labelled = "".join(f"gj04\t{i % 2}\t\tSentence {i}.\n" for i in range(5))
    split = GlueTask("cola", folder("CoLA/dev.tsv", labelled)).read("dev")
    assert [r.label for r in split.records] == [("unacceptable", "acceptable")[i % 2] for i in range(5)]


def test_short_qqp_rows_are_skipped_and_counted_and_elsewhere_refused(folder):
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    path = folder("QQP/train.tsv", header + "1\t2\t3\ta?\tb?\t1\n4\t5\tc?\n6\t7\t8\td?\te?\t0\n")
    split = GlueTask("qqp", path).read("train")
    assert [r.label for r in split.records] == ["duplicate", "not_duplicate"]
    assert split.notes == ("1 short rows skipped",)
    path = folder("MRPC/train.tsv", "Quality\t#1 String\n1\tx\n")
    with pytest.raises(ValueError, match=r"train\.tsv:1: expected a header with '#1 String', '#2"):
        GlueTask("mrpc", path).read("train")


def test_bad_labels_name_file_line_and_the_allowed_values(folder):
    path = folder("RTE/dev.tsv", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tneutral\n")
    with pytest.raises(ValueError, match=r"dev\.tsv:2: label 'neutral' is not one of entailment"):
        GlueTask("rte", path).read("dev")
    path = folder("STS-B/dev.tsv", "sentence1\tsentence2\tscore\na\tb\tnan\n")
    with pytest.raises(ValueError, match=r"dev\.tsv:2: score 'nan' is not a number"):
        GlueTask("stsb", path).read("dev")


@pytest.mark.parametrize("split, told", [("test_matched", "test"), ("dev_matched", "dev")])
def test_the_name_of_a_file_is_answered_by_its_split(folder, split, told):
    with pytest.raises(ValueError, match=rf"mnli has no split '{split}'; one of .*{told} \({split}.tsv\)"):
        GlueTask("mnli", folder("MNLI/test_matched.tsv", "")).read(split)


def test_test_labels_of_minus_one_are_no_labels(folder):
    path = folder("WNLI/test.tsv", "sentence1\tsentence2\tlabel\n" + "a b\tc\t-1\n" * 5)
    task = GlueTask("wnli", path)
    split = task.read("test")
    assert not split.labelled
    features = task.features(split, Words(), 32, training=False)
    assert len(features) == 5 and "labels" not in features[0]
    with pytest.raises(ValueError, match="no labels \\(GLUE keeps those of its test sets.*scoring"):
        task.score(split, features, one_hot([0] * 5, 2))
    with pytest.raises(ValueError, match="no labels.*training"):
        task.features(split, Words(), 32, training=True)
    mixed = folder("WNLI/dev.tsv", "sentence1\tsentence2\tlabel\na\tb\t1\na\tb\t-1\n")
    with pytest.raises(ValueError, match=r"dev\.tsv:3: no label, although"):
        GlueTask("wnli", mixed).read("dev")


def test_qnli_of_another_size_is_suspected_to_be_version_one(folder):
    path = folder("QNLI/dev.tsv", "index\tquestion\tsentence\tlabel\n0\ta\tb\tentailment\n")
    assert "version 1" in GlueTask("qnli", path).read("dev").notes[0]


def test_wnli_below_the_majority_is_flagged_with_the_reason(folder):
    rows = "".join(f"a\tb\t{int(i >= 40)}\n" for i in range(71))
    task = GlueTask("wnli", folder("WNLI/dev.tsv", "sentence1\tsentence2\tlabel\n" + rows))
    split = task.read("dev")
    features = task.features(split, Words(), 32, training=False)
    gold = np.array([f["labels"] for f in features])
    wrong = task.score(split, features, one_hot(1 - gold, 2))
    assert wrong["accuracy"] == 0.0
    assert wrong["majority"] == pytest.approx(0.563380, abs=5e-7)
    assert "below the majority baseline" in wrong.flags
    assert "adversarial" in wrong.details["note"]
    right = task.score(split, features, one_hot(gold, 2))
    assert right["accuracy"] == 1.0 and right.flags == ()


def test_submission_files_carry_the_values_of_the_official_files(folder, tmp_path):
    path = folder("MNLI/test_mismatched.tsv", "index\tsentence1\tsentence2\n7\ta\tb\n9\tc\td\n")
    task = GlueTask("mnli", path)
    split = task.read("test_mismatched")
    features = task.features(split, Words(), 32, training=False)
    written = task.write(split, features, one_hot([2, 0], 3), tmp_path / "out")
    assert [p.name for p in written] == ["predictions_test_mismatched.jsonl", "MNLI-mm.tsv"]
    assert written[1].read_text() == "index\tprediction\n7\tcontradiction\n9\tentailment\n"
    path = folder("CoLA/test.tsv", "index\tsentence\n0\ta\n1\tb\n")
    task = GlueTask("cola", path)
    split = task.read("test")
    files = task.write(split, [], one_hot([1, 0], 2), tmp_path / "out")
    assert files[1].read_text() == "index\tprediction\n0\t1\n1\t0\n"
    path = folder("STS-B/test.tsv", "index\tsentence1\tsentence2\n0\ta\tb\n1\tc\td\n")
    task = GlueTask("stsb", path)
    files = task.write(task.read("test"), [], [[5.4], [1.23456]], tmp_path / "out")
    assert files[1].read_text() == "index\tprediction\n0\t5.000\n1\t1.235\n"


def test_mnli_rows_without_a_majority_label_are_left_out_and_counted(folder):
    rows = "index\tsentence1\tsentence2\tgold_label\n0\ta\tb\tneutral\n1\tc\td\t-\n"
    split = GlueTask("mnli", folder("MNLI/train.tsv", rows)).read("train")
    assert len(split.records) == 1 and split.notes == ("1 rows without a gold label skipped",)


def test_every_task_names_a_metric_that_its_scores_contain():
    for name, spec in GLUE.items():
        task = GlueTask(name, "nowhere")
        gold = [0.0, 1.0, 2.0] if not task.labels else [0, 1, 1]
        rows = [{"targets": g, "labels": g} for g in gold]
        split = types.SimpleNamespace(require_labels=lambda purpose: None, name="dev")
        outputs = [[g] for g in gold] if not task.labels else one_hot(gold, len(task.labels))
        scores = task.score(split, rows, outputs)
        assert scores[task.metric] == pytest.approx(1.0)
        assert set(task.metric_names) <= set(scores.values)
        assert set(spec.reported) <= set(scores.values)


def test_f1_is_of_the_benchmarks_second_class_and_only_where_it_reports_f1():
    gold, predicted = [1, 1, 1, 0], [1, 1, 0, 0]  # 1 = equivalent, of which 2 of 3 are found
    split = types.SimpleNamespace(require_labels=lambda purpose: None, name="dev")
    task = GlueTask("mrpc", "nowhere")
    rows = [{"labels": g} for g in gold]
    assert task.score(split, rows, one_hot(predicted, 2))["f1"] == pytest.approx(0.8)
    # A head with the classes the other way round, as the labels of a table are sorted.
    task.labels = ("equivalent", "not_equivalent")
    rows = [{"labels": 1 - g} for g in gold]
    assert task.score(split, rows, one_hot([1 - p for p in predicted], 2))["f1"] == pytest.approx(0.8)
    other = GlueTask("sst2", "nowhere")
    assert not {"f1", "accuracy_f1"} & {*other.metric_names, *other.score(split, rows, one_hot(predicted, 2)).values}


def test_the_glue_table_averages_as_the_benchmark_does():
    text = glue_table(
        {
            "cola": {"matthews": 0.5},
            "mrpc": {"f1": 0.9, "accuracy": 0.8},
            "mnli": {"accuracy": 0.84},
            "mnli_mm": {"accuracy": 0.82},
            "wnli": {"accuracy": 0.1},
        }
    )
    assert text.splitlines() == [
        "| cola, matthews | mrpc, f1/accuracy | mnli, accuracy | mnli_mm, accuracy | wnli, accuracy | mean |",
        "|---|---|---|---|---|---|",
        "| 50.0 | 90.0/80.0 | 84.0 | 82.0 | 10.0 | 72.7 |",  # (50 + 85 + 83) / 3
    ]


def test_an_unknown_task_or_split_names_the_valid_ones():
    with pytest.raises(ValueError, match="one of cola, sst2"):
        GlueTask("boolq", "nowhere")
    with pytest.raises(ValueError, match="no split 'validation'; one of train, dev"):
        GlueTask("rte", "nowhere").read("validation")
