"""Both sides of the fine-tuning benchmark learn the same labels."""

import pytest

from tests.benchmarks import finetune_peer
from tests.benchmarks.finetune_work import Work


class Tokenizer:
    """What the benchmark uses of transformers'."""

    model_input_names = ("input_ids", "attention_mask")

    def __call__(self, first, second, truncation, max_length):
        assert truncation and max_length == 128
        ids = [[len(text) for text in texts] for texts in zip(*filter(None, (first, second)), strict=True)]
        return {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}


@pytest.mark.parametrize(
    ("task", "content", "labels"),
    [
        ("qnli", "index\tquestion\tsentence\tlabel\n0\tq\tss\tnot_entailment\n1\tqq\tsss\tentailment\n", [1, 0]),
        ("cola", "x\t0\t*\tbad\nx\t1\t\tfine\n", [0, 1]),
    ],
)
def test_transformers_rows_have_the_labels_of_the_task(tmp_path, task, content, labels):
    (tmp_path / "train.tsv").write_text(content)
    work = Work(task, str(tmp_path), "")
    made = finetune_peer.make_task(work)
    records, features, rows = finetune_peer.rows_of(made, "train", work, Tokenizer())
    assert [row["labels"] for row in rows] == labels
    assert [len(row["input_ids"]) for row in rows] == [1 + (record.text_b is not None) for record in records.records]
    outputs = [[float(label == gold) for label in range(2)] for gold in labels]
    assert made.score(records, features, outputs)[made.metric] == 1
