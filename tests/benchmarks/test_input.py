"""The comparison of inputs runs whole, on a little text."""

import json
import pathlib

import pytest

from tests.benchmarks import all as everything
from tests.benchmarks import input as measured

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "dog",
    "cat",
    "runs",
    "sleeps",
    "and",
    ".",
    "bird",
    "sings",
]


@pytest.mark.slow
def test_the_comparison_of_inputs_prints_a_table_that_a_page_can_take(tmp_path, capsys):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    subjects, verbs = ("dog", "cat", "bird"), ("runs", "sleeps", "sings")
    lines = [
        f"The {subjects[i % 3]} {verbs[i // 3 % 3]} and {verbs[i % 2]}.\n" + "\n" * (i % 9 == 8) for i in range(3000)
    ]
    (tmp_path / "text.txt").write_text("".join(lines))
    out = tmp_path / "out"
    measured.main([f"--text={tmp_path}/text.txt", f"--vocab={tmp_path}/vocab.txt", "--piece_mb=0.05", f"--out={out}"])
    (table,) = everything.tables(capsys.readouterr().out.splitlines())
    rows = {row.split("|")[1].strip(): float(row.split("|")[2].replace(",", "")) for row in table[2:]}
    assert {"tokenize, tokens/s", "hash documents, tokens/s"} < set(rows)
    assert all(rows.values()) and len(rows) == 12
    assert json.loads(pathlib.Path(out, "input.json").read_text())["rows"]["128 packed"]["fill"] > 0.8
    assert (out / "input.png").stat().st_size > 10_000
