"""The pieces of the published numbers: what is run, what is kept, what a page shows of it."""

import importlib
import json
import pathlib
import sys

import pytest

from bertjax.tools.arguments import Parser
from tests.benchmarks import all as pieces
from tests.benchmarks.all import PIECES, Piece

GIVEN = {"store": "", "glue": "data", "data": "", "model": "", "text": "", "vocab": "", "original": "", "commit": "abc"}
TABLE = "print('noise'); print('| step | | ms |'); print('|---|---|---|'); print('| base | ours | 5 |')"


@pytest.fixture
def only(monkeypatch):
    """Replaces the pieces, and their programs by a line of Python."""

    def replace(code, **found):
        monkeypatch.setattr(pieces, "PIECES", found)
        monkeypatch.setattr(pieces.harness, "python", lambda module, *flags: [sys.executable, "-c", code])

    return replace


@pytest.mark.parametrize("name", PIECES)
def test_a_piece_is_a_command_that_its_program_takes(name, monkeypatch):
    class Parsed(Exception):
        """The command line has been read."""

    def parse(real):
        def parse_and_leave(self, args=None, namespace=None):
            raise Parsed(real(self, args, namespace))

        return parse_and_leave

    for method in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(Parser, method, parse(getattr(Parser, method)))
    for program, *flags in pieces.commands(name):
        with pytest.raises(Parsed):
            importlib.import_module(f"tests.benchmarks.{program}").main(flags)


def test_a_finished_piece_is_kept_and_not_chosen_again(only, tmp_path):
    only(TABLE, first=Piece("first --data={glue} --out={out}/x", 4, gpus=0), second=Piece("second", 4, gpus=0))
    assert pieces.to_run([], GIVEN, 0, 9, tmp_path) == ["first", "second"]
    pieces.run("first", GIVEN, tmp_path)
    record = json.loads((tmp_path / "first.json").read_text())
    assert record["tables"] == [["| step | | ms |", "|---|---|---|", "| base | ours | 5 |"]]
    assert (
        record["commands"] == ["python -m tests.benchmarks.first --data=GLUE --out=bench/x"]
        and record["commit"] == "abc"
    )
    assert pieces.to_run([], GIVEN, 0, 9, tmp_path) == ["second"]
    assert pieces.to_run(["first"], GIVEN, 0, 9, tmp_path) == ["first"]  # whoever names it wants it


def test_pieces_without_their_data_their_gpus_or_time_wait(only, tmp_path):
    only("", a=Piece("a --store={store}", 1), b=Piece("b --data={glue}", 5), c=Piece("c", 5), d=Piece("d", 1, gpus=2))
    assert pieces.to_run([], GIVEN, 1, 9, tmp_path) == ["b"]


@pytest.mark.parametrize("code", ["print('no table')", TABLE + "; raise SystemExit(3)"])
def test_a_piece_that_fails_leaves_no_record(only, tmp_path, code):
    only(code, first=Piece("first", 4))
    with pytest.raises(ValueError, match="first"):
        pieces.run("first", GIVEN, tmp_path)
    assert not (tmp_path / "first.json").exists()


def record(*rows, head="| step | | ms |", command="python -m one", date="2026-01-01"):
    made = {"card": "H200", "versions": "jax 1", "commit": "abc", "date": date, "commands": [command]}
    return {**made, "tables": [[head, "|---|---|---|", *rows]]}


def test_a_page_joins_tables_of_the_same_columns_and_later_rows_replace_earlier_ones():
    found = {
        "step-base": record("| base | ours | 5 |"),
        "step-large": record("| base | ours | 4 |", "| large | ours | 9 |", command="python -m two"),
    }
    page = "before\n<!-- measured: step-base step-large packed -->\nold\n<!-- end -->\nafter\n"
    shown = pieces.rewritten(page, found)
    assert shown.count("| step | | ms |") == 1 and "| base | ours | 4 |\n| large | ours | 9 |" in shown
    assert "| 5 |" not in shown and "old" not in shown
    assert "H200, jax 1, abc, 2026-01-01:\n\n```bash\npython -m one\npython -m two\n```" in shown
    assert shown.startswith("before\n<!-- measured: step-base step-large packed -->\n") and shown.endswith("after\n")
    assert pieces.rewritten(shown, found) == shown


def test_a_section_without_a_measured_piece_stays_and_an_unknown_piece_is_refused():
    page = "<!-- measured: packed -->\nold\n<!-- end -->"
    assert pieces.rewritten(page, {}) == page
    with pytest.raises(ValueError, match="nothing is not one of"):
        pieces.rewritten("<!-- measured: nothing -->\n<!-- end -->", {})


def test_tables_that_touch_are_two():
    lines = ["| a | b |", "|---|---|", "| 1 | 2 |", "| a | b |", "|---|---|", "| 3 | 4 |", "then", "| c |", "|---|"]
    assert pieces.tables(lines) == [lines[:3], lines[3:6], lines[7:]]


def test_the_page_of_benchmarks_is_made_of_the_records_beside_it():
    docs = pathlib.Path(__file__).parents[2] / "docs"
    page, found = (docs / "benchmarks.md").read_text(encoding="utf-8"), pieces.records(docs / "measured")
    assert {path.stem for path in (docs / "measured").iterdir()} == set(found)
    assert all(f"<!-- measured: {name}" in page or f" {name} " in page for name in found)
    assert pieces.rewritten(page, found) == page
