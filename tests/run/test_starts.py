"""Each start of a run is recorded, and one that cannot be bit for bit says so and why."""

import json

from bertjax import jax_settings
from bertjax.config import Config, decides_bits
from bertjax.log.logbook import read_records
from bertjax.log.report.runs import STARTS_FILE
from bertjax.run import starts
from bertjax.run.starts import Starts
from bertjax.training.programs import Programs
from bertjax.training.sharding import make_mesh


class Book:
    def __init__(self):
        self.lines = []

    def message(self, line):
        self.lines.append(line)


def begin(workdir, step, settings=None, made_of=None):
    """One start, and its lines on the console."""
    start, book = Starts(workdir, settings, made_of), Book()
    start.begin(step, book)
    return start, book.lines


def test_a_start_on_the_same_machine_is_bit_for_bit(tmp_path):
    assert begin(tmp_path, 0)[1] == []
    assert begin(tmp_path, 40)[1] == []
    first, second = read_records(tmp_path / STARTS_FILE)
    assert (first["step"], second["step"]) == (0, 40)
    assert first["bit_for_bit"] and second["bit_for_bit"] and second["jax"] and second["time"]


def test_another_card_version_or_number_of_devices_is_said(tmp_path, monkeypatch):
    begin(tmp_path, 0)
    for name, value in (
        ("device_kind", "NVIDIA H100"),
        ("devices", 3),
        ("processes", 2),
        ("jax", "9.9"),
        ("XLA_FLAGS", "--xla_x=1"),
    ):
        facts = starts.facts
        with monkeypatch.context() as patch:
            patch.setattr(starts, "facts", lambda facts=facts, n=name, v=value: {**facts(), n: v})
            [line] = begin(tmp_path, 10)[1]
        assert line.startswith(f"goes on from step 10, but not bit for bit: {name}: ")
        assert repr(value) in line
        assert not read_records(tmp_path / STARTS_FILE)[-1]["bit_for_bit"]
        begin(tmp_path, 20)  # and back again


def test_another_environment_of_the_compilers_is_said(tmp_path, monkeypatch):
    begin(tmp_path, 0)
    monkeypatch.setattr(jax_settings, "environment", lambda: {"NCCL_ALGO": "Tree"})
    assert begin(tmp_path, 5)[1] == ["goes on from step 5, but not bit for bit: NCCL_ALGO: None -> 'Tree'"]
    assert begin(tmp_path, 6)[1] == []


def test_settings_that_change_the_numbers_are_said(tmp_path):
    begun = Config()
    begin(tmp_path, 0, decides_bits(begun))
    for name, value in {
        "accumulation": 2,
        "batch_size": 16,
        "optimizer.name": "lamb",
        "phases": ((5, 16),),
        "seed": 1,
        "mesh.data": 4,
    }.items():
        [line] = begin(tmp_path, 10, decides_bits(begun.replace({name: value})))[1]
        assert line.startswith(f"goes on from step 10, but not bit for bit: config.{name}: ")
        begin(tmp_path, 20, decides_bits(begun))  # and back again
    assert begin(tmp_path, 30, decides_bits(begun.replace({"log.every_steps": 7, "eval.rows": 8})))[1] == []


def test_other_data_are_said(tmp_path):
    begin(tmp_path, 0, made_of={"content": "a1"})
    assert begin(tmp_path, 10, made_of={"content": "a1"})[1] == []
    assert begin(tmp_path, 20, made_of={"content": "b2"})[1][0].endswith("not bit for bit: content: 'a1' -> 'b2'")


def test_a_fresh_start_forgets_the_starts_of_a_run_before(tmp_path):
    begin(tmp_path, 0, {"accumulation": 1})
    begin(tmp_path, 10, {"accumulation": 1})
    assert begin(tmp_path, 0, {"accumulation": 2})[1] == []
    assert [start["step"] for start in read_records(tmp_path / STARTS_FILE)] == [0]


def test_a_reason_that_is_found_later_is_recorded_once(tmp_path):
    begin(tmp_path, 0)
    start, lines = begin(tmp_path, 10)
    start.differs("a program")
    start.differs("a program")
    assert lines == ["goes on from step 10, but not bit for bit: a program"]
    assert read_records(tmp_path / STARTS_FILE)[-1]["why"] == ["a program"]


def test_damaged_lines_are_left_out(tmp_path):
    begin(tmp_path, 0)
    with open(tmp_path / STARTS_FILE, "a") as file:
        file.write('{"step": \n\x00\x00\n[1]\n{"no": "step"}\n' + json.dumps({"step": 5}) + "\n")
    assert [start["step"] for start in read_records(tmp_path / STARTS_FILE)] == [0, 5]
    begin(tmp_path, 10)


def test_programs_are_kept_on_gpus_only(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(Programs, "keep_in", lambda self, directory, *_: asked.append(directory))
    Starts(tmp_path).keep(Programs(), make_mesh())
    assert not asked
