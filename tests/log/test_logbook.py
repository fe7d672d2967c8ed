"""metrics.jsonl, TensorBoard events and the progress line."""

import json
import os

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bertjax.config import LogSettings
from bertjax.log.logbook import Logbook, counted, human_count, human_time, progress_line, read_records, truncate_records

METRICS = {
    "loss": 7.12345,
    "mlm_loss": 6.45,
    "nsp_loss": 0.673,
    "mlm_accuracy": 0.123,
    "nsp_accuracy": 0.5,
    "learning_rate": 1.2e-5,
    "grad_norm": 0.9,
    "tokens_per_second": 410_000.0,
    "mfu": 0.312,
    "step_time": 0.2,
    "data_wait": 0.0,
}


def test_a_record_holds_step_and_metrics_as_json(tmp_path):
    lines = []
    with Logbook(tmp_path, write=lines.append) as book:
        book.train(3, 10, {**METRICS, "skipped": 2, "mfu": None})
        book.evaluation(3, {"eval/loss": 1.5})
    first, second = read_records(tmp_path / "metrics.jsonl")
    assert first["step"] == 3 and first["loss"] == 7.12345 and first["mfu"] is None
    assert first["skipped"] == 2 and isinstance(first["skipped"], int)
    assert {"step": 3, "eval/loss": 1.5}.items() <= second.items()
    assert lines[1] == "evaluation at step 3: eval/loss 1.5000"


def test_the_remaining_time_includes_evaluations_and_savings_to_come(tmp_path, monkeypatch):
    lines, clock = [], [0.0]
    monkeypatch.setattr("bertjax.log.logbook.time.monotonic", lambda: clock[0])
    with Logbook(tmp_path, log=LogSettings(tensorboard=False), write=lines.append) as book:
        # (seconds since the start, step): 2 s a step, the first compiled for 20 s; from step 10 on
        # an evaluation of 60 s every 10 steps.
        for clock[0], step in ((22, 1), (40, 10), (120, 20), (200, 30), (280, 40)):
            book.train(step, 40, {"loss": 1.0, "step_time": 2.0 if step > 1 else None})
    times = [line.rpartition("ETA ")[2] for line in lines if "ETA" in line]
    # 30 x 2 s; then what evaluations have taken a step so far: 20 x (2 + 60/19), 10 x (2 + 120/29).
    assert times == ["60 s", "2 min", "61 s"]
    assert "ETA" not in lines[-1]


def test_a_full_disk_is_told_once_and_ends_no_run_that_is_still_to_be_saved(tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    lines = []
    with Logbook(tmp_path, log=LogSettings(tensorboard=False), write=lines.append) as book:
        book._file.close()
        book._file = open("/dev/full", "a")
        for step in (1, 2):
            book.train(step, 10, METRICS)
    told = [line for line in lines if "could not be written" in line]
    assert len(told) == 1 and told[0].startswith("metrics of step 1 could not be written")
    assert "No space left" in told[0] and sum("step " in line for line in lines) >= 2


def test_a_loss_that_is_not_finite_is_null_in_valid_json(tmp_path):
    lines = []
    with Logbook(tmp_path, write=lines.append) as book:
        book.train(1, 10, {"loss": float("nan"), "grad_norm": float("inf")})
        book.evaluation(1, {"eval/matthews": float("nan")})
    text, *_ = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(text, parse_constant=pytest.fail)
    assert record["loss"] is None and record["grad_norm"] is None
    assert "loss not finite" in lines[0] and "eval/matthews not finite" in lines[1]


def test_resume_removes_the_records_that_will_be_repeated(tmp_path):
    with Logbook(tmp_path, write=lambda line: None) as book:
        for step in range(1, 8):
            book.train(step, 10, METRICS)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "lo')  # the kill came in the middle of a line
    with Logbook(tmp_path, start_step=5, write=lambda line: None) as book:
        book.train(6, 10, METRICS)
    assert [r["step"] for r in read_records(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_records_that_are_lost_are_told(tmp_path):
    said = []
    for content, start_step in (("", 0), ("", 5), ('{"step": 1}\n', 5)):
        (tmp_path / "metrics.jsonl").write_text(content)
        Logbook(tmp_path, start_step, LogSettings(tensorboard=False), write=said.append).close()
    assert said == ["metrics.jsonl is lost: curves and report begin at step 5"]


def test_truncation_replaces_the_file_in_one_operation(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        truncate_records(path, 1, print)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    monkeypatch.undo()
    truncate_records(path, 1, print)
    assert path.read_text() == '{"step": 1}\n'
    truncate_records(tmp_path / "absent", 1, print)
    assert not (tmp_path / "absent").exists()


def test_lines_of_metrics_that_are_no_records_are_counted_and_kept_aside(tmp_path):
    path, said = tmp_path / "metrics.jsonl", []
    lines = ['{"step": 1}', "\0\0\0", '{"step": 1e999}', "[" * 100_000, "7", '{"step": 2}']
    path.write_text("\n".join(lines) + '\n{"step": 3, "lo')
    truncate_records(path, 5, said.append)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert said == ["metrics.jsonl: 4 lines of 6 could not be read and went to metrics.jsonl.damaged"]
    assert (tmp_path / "metrics.jsonl.damaged").read_text().splitlines() == lines[1:5]
    truncate_records(path, 5, said.append)
    assert len(said) == 1


def test_records_beside_a_damaged_one_are_read(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step\xff": 2}\n\0\xfe\n{"step": 3}\n{"step": 4, "lo')
    assert read_records(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 3}]


def test_tensorboard_reads_the_events_and_drops_what_a_resume_repeats(tmp_path):
    for start in (0, 2):
        with Logbook(tmp_path, start_step=start, write=lambda line: None) as book:
            for step in range(start + 1, start + 4):
                book.train(step, 10, {"loss": step + 0.1 * start})
                book.evaluation(step, {"eval/loss": 1.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "eval/loss"}
    found = [(e.step, round(e.value, 3)) for e in events.Scalars("train/loss")]
    assert found == [(1, 1.0), (2, 2.0), (3, 3.2), (4, 4.2), (5, 5.2)]


def test_no_tensorboard_when_it_is_off(tmp_path):
    Logbook(tmp_path, log=LogSettings(tensorboard=False), write=lambda line: None).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hardware.json", "metrics.jsonl"]
    hardware = json.loads((tmp_path / "hardware.json").read_text())
    assert hardware["devices"] == 8 and hardware["platform"] == "cpu"


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    with Logbook(tmp_path / "run", write=pytest.fail) as book:
        book.train(1, 2, METRICS)
        book.evaluation(1, {"eval/loss": 1.0})
        book.message("hello")
        book.flush()
    assert not (tmp_path / "run").exists()


def test_progress_line():
    assert progress_line(1200, 10_000, METRICS) == (
        "step 1,200/10,000  loss 7.1235 (mlm 6.4500, nsp 0.6730)  acc % mlm 12.3, nsp 50.0  "
        "lr 1.20e-05  410k tok/s  MFU 31.2 %  ETA 29 min"
    )
    assert progress_line(1, 10, {"loss": 1.0}) == "step 1/10  loss 1.0000"
    assert "DATA WAIT 50 %" in progress_line(1, 10, {**METRICS, "data_wait": 0.1})
    assert "skipped 3" in progress_line(1, 10, {"loss": 1.0, "skipped": 3})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (4.2, "4 s"),
        (99, "99 s"),
        (100, "2 min"),
        (5940, "99 min"),
        (12_000, "3 h 20 min"),
        (190_800, "2 d 5 h"),
        (7 * 86400, "7 d 0 h"),
    ],
)
def test_human_time(seconds, text):
    assert human_time(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(950, "950"), (12_345, "12.3k"), (4.1e6, "4.1M"), (1.02e12, "1.02T"), (0.5, "0.5")]
)
def test_human_count(number, text):
    assert human_count(number) == text


def test_one_of_a_thing_is_not_a_plural():
    assert [counted(n, "epoch") for n in (0, 1, 2, 4000)] == ["0 epochs", "1 epoch", "2 epochs", "4,000 epochs"]


def test_files_of_a_remote_run_are_written_here_and_copied_at_each_flush(bucket):
    book = Logbook(bucket / "runs" / "base", log=LogSettings(tensorboard=False), write=lambda _: None)
    assert book.directory.name == "base" and book.directory.is_dir()  # the report has its name
    (book.directory / "model").mkdir()
    (book.directory / "model" / "vocab.txt").write_text("x")
    book.train(1, 2, METRICS)
    assert not (bucket / "runs" / "base" / "model").exists()
    book.flush()
    assert (bucket / "runs" / "base" / "model" / "vocab.txt").read_text() == "x"
    (bucket / "runs" / "base" / "model" / "vocab.txt").unlink()
    book.train(2, 2, METRICS)
    book.close()
    assert not (bucket / "runs" / "base" / "model").exists()  # not changed, so not copied again
    assert not book.directory.parent.exists()
    with Logbook(bucket / "runs" / "base", 1, log=LogSettings(tensorboard=False), write=lambda _: None) as again:
        assert [r["step"] for r in read_records(again.directory / "metrics.jsonl")] == [1]


def test_a_run_goes_on_where_nobody_reads_its_output_any_more(tmp_path, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as output, Logbook(tmp_path, log=LogSettings(tensorboard=False)) as book:
        monkeypatch.setattr("sys.stdout", output)
        for step in (1, 2):
            book.train(step, 2, {"loss": 1.0})
        book.message("done")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
