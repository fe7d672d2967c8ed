"""Multiple choice files: quoting, columns by name, unlabelled tests."""

import numpy as np
import pytest

from bertjax.tasks.batches import collate
from bertjax.tasks.swag import MultipleChoiceTask
from tests.fakes import FakeTokenizer


class Letters(FakeTokenizer):
    cls_id, sep_id, pad_id = 1, 2, 0

    def encode_batch(self, texts):
        return [[ord(c) for c in text] for text in texts]


HEADER = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3"
ROW = '0,v,17,"He stops, She","He stops,",She,gold,"go on, slowly.",runs.,sits.,eats.'


def test_endings_with_commas_stay_whole_and_give_four_rows_a_question(tmp_path):
    (tmp_path / "train.csv").write_text(f"{HEADER},label\n{ROW},2\n")
    task = MultipleChoiceTask(tmp_path)
    split = task.read("train")
    assert split.records[0].endings[0] == "go on, slowly."
    features = task.features(split, Letters(), 40, training=True)
    batch = collate(features, 40, 1, pad_id=0)
    assert batch["input_ids"].shape == (1, 4, 40) and batch["labels"].tolist() == [2]
    text = "".join(chr(i) for i in features[0]["input_ids"][1] if i > 2)
    assert text == "He stops,She runs."
    kinds = features[0]["token_type_ids"][1]
    assert kinds.sum() == len("She runs.") + 1 and (np.diff(kinds) >= 0).all()
    scores = task.score(split, features, [np.array([0.0, 1.0, 3.0, 2.0])])
    assert scores["accuracy"] == 1.0
    assert set(scores.values) - {"majority", "f1"} == set(task.metric_names)


def test_every_question_has_its_own_endings(tmp_path):
    (tmp_path / "train.csv").write_text(f"{HEADER},label\n{ROW},2\n{ROW.replace('She', 'Ann')},0\n")
    task = MultipleChoiceTask(tmp_path)
    first, second = task.features(task.read("train"), Letters(), 40, training=True)
    assert len(first["input_ids"]) == len(second["input_ids"]) == 4
    texts = ["".join(chr(i) for i in ids if i > 2) for ids in second["input_ids"]]
    assert all("Ann" in text for text in texts)


@pytest.mark.parametrize("label", [None, "", "-1"])
def test_an_unlabelled_test_file_is_predicted_but_not_scored(tmp_path, label):
    name, cell = ("", "") if label is None else (",label", f",{label}")
    (tmp_path / "test.csv").write_text(f"{HEADER}{name}\n{ROW}{cell}\n")
    task = MultipleChoiceTask(tmp_path)
    split = task.read("test")
    features = task.features(split, Letters(), 40, training=False)
    outputs = [np.array([0.0, 1.0, 3.0, 2.0])]
    [path] = task.write(split, features, outputs, tmp_path)
    assert '"id": "17", "prediction": 2, "text": "sits."' in path.read_text()
    with pytest.raises(ValueError, match="no labels"):
        task.score(split, features, outputs)


def test_a_bad_label_or_column_is_named(tmp_path):
    (tmp_path / "train.csv").write_text(f"{HEADER},label\n{ROW},4\n")
    with pytest.raises(ValueError, match=r"train\.csv:2: label '4'"):
        MultipleChoiceTask(tmp_path).read("train")
    (tmp_path / "val.csv").write_text("sent1,ending0\nx,y\n")
    with pytest.raises(ValueError, match="expected a header with 'sent1', 'sent2'"):
        MultipleChoiceTask(tmp_path).read("dev")
    (tmp_path / "val.csv").write_text(f"{HEADER},ending4,label\n{ROW},e,0\n")
    with pytest.raises(ValueError, match="a question has 4 endings, and there is a column ending4"):
        MultipleChoiceTask(tmp_path).read("dev")


@pytest.mark.real_data
def test_codah_files_without_header_are_read(shared_data):
    folder = shared_data / "multiple_choice" / "codah" / "cv_split" / "fold_0"
    task = MultipleChoiceTask(folder, {s: f"{s}.tsv" for s in ("train", "dev", "test")}, "codah")
    assert [len(task.read(s).records) for s in task.splits] == [1665, 556, 555]
    assert task.read("train").records[0].endings[2] == "crosses the road."


def test_questions_with_an_empty_ending_are_told(tmp_path):
    (tmp_path / "train.csv").write_text(f"{HEADER},label\n{ROW},2\n{ROW.replace('eats.', ' ')},0\n")
    assert MultipleChoiceTask(tmp_path).read("train").notes == ("questions with an empty ending: 1",)
