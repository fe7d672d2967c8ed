"""report.html: one file, offline, with the numbers of the run in it."""

import json
import re

import pytest

from bertjax.training.report import write_report
from bertjax.training.report.charts import thin


def make_run(directory, learning_rate=1e-4, steps=50):
    directory.mkdir()
    with open(directory / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            record = {"step": step, "loss": 10 / step, "mlm_accuracy": 0.01 * step,
                      "learning_rate": learning_rate, "tokens_per_second": 1000.0, "mfu": None,
                      "skipped": 0, "time": 100.0 + 60 * step}
            file.write(json.dumps(record) + "\n")
        file.write(json.dumps({"step": steps, "eval/loss": 0.25, "eval/mlm_accuracy": 0.4}) + "\n")
    (directory / "config.json").write_text(json.dumps(
        {"optimizer": {"learning_rate": learning_rate, "name": "adamw"}, "seed": 0}))
    (directory / "examples.json").write_text(json.dumps(
        [{"text": "a [MASK] </script><b>", "predictions": [["dog", 0.5], ["<i>", 0.25]]}]))
    return directory


def data_of(page):
    return json.loads(re.search(r"const data = (.*);\n", page).group(1))


def test_the_report_is_one_offline_file_with_curves_and_held_out_points(tmp_path):
    path = write_report([make_run(tmp_path / "run")])
    assert path == tmp_path / "run" / "report.html"
    page = path.read_text()
    # the only address is the name of the SVG namespace, which nothing fetches
    assert set(re.findall(r"https?://[^\"' <]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(link|img|script src)", page)
    charts = {chart["title"]: chart for chart in data_of(page)["charts"]}
    train, held_out = charts["Loss"]["series"]
    assert train["x"] == list(range(1, 51)) and train["y"][1] == 5
    assert (held_out["kind"], held_out["x"], held_out["y"]) == ("eval", [50], [0.25])
    assert "Learning rate" in charts and "Tokens per second" in charts
    assert "Model FLOPs utilisation" not in charts and "Skipped steps" not in charts
    assert "40.0 %" in page and "49 min" in page and "optimizer.learning_rate" in page


def test_scores_of_a_run_that_keeps_its_best_step_are_those_of_that_step(tmp_path):
    records = [{"step": step, "eval/accuracy": accuracy}
               for step, accuracy in ((2, 0.5), (4, 0.9), (6, 0.7))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    page = write_report([tmp_path]).read_text()
    assert "held-out</small>70.0 %" in page and "Best step" not in page
    (tmp_path / "result.json").write_text('{"best_step": 4}')
    page = write_report([tmp_path]).read_text()
    assert "held-out</small>90.0 %" in page and "which is kept</small>4<" in page


@pytest.mark.parametrize("text", ["{{data}}", "{{tables}} {{title}}", "{{absent}}", "\\1 \\g"])
def test_the_name_of_a_place_of_the_page_stays_text(tmp_path, text):
    run = make_run(tmp_path / "run")
    (run / "examples.json").write_text(json.dumps([{"text": text, "predictions": [[text, 0.5]]}]))
    (run / "config.json").write_text(json.dumps({text: text}))
    page = write_report([run]).read_text()
    assert page.count(text) == 4
    assert page.count("<html") == 1 and data_of(page)["charts"]


def test_text_of_examples_cannot_break_the_page(tmp_path):
    page = write_report([make_run(tmp_path / "run")]).read_text()
    assert page.count("</script>") == 1
    assert "&lt;/script&gt;&lt;b&gt;" in page and "&lt;i&gt;" in page
    assert "<mark>[MASK]</mark>" in page


def test_several_runs_are_compared_and_what_differs_comes_first(tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", learning_rate=3e-4)]
    page = write_report(runs, tmp_path / "both.html").read_text()
    assert data_of(page)["runs"] == ["a", "b"]
    loss = data_of(page)["charts"][0]["series"]
    assert [(s["run"], s["kind"]) for s in loss] == [(0, "train"), (0, "eval"), (1, "train"),
                                                     (1, "eval")]
    settings = page[page.index("Settings"):]
    assert "1 differ" in settings
    assert settings.index("optimizer.learning_rate") < settings.index("optimizer.name")
    assert settings.count('class="different"') == 1


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    runs = [make_run(tmp_path / "x" / "run"), make_run(tmp_path / "y" / "run")]
    assert len(set(data_of(write_report(runs).read_text())["runs"])) == 2


def test_a_directory_without_records_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no metrics.jsonl"):
        write_report([tmp_path])
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="no record yet"):
        write_report([tmp_path])


def test_long_curves_are_thinned_without_losing_a_spike():
    points = [(step, 0.0) for step in range(100_000)]
    points[54_321] = (54_321, 9.0)
    kept = thin(points, 1000)
    assert len(kept) <= 1100 and (54_321, 9.0) in kept
    assert kept == sorted(kept) and kept[-1] == points[-1]
    assert thin(points[:500], 1000) == points[:500]


def test_the_starts_of_a_run_are_listed_with_what_was_not_bit_for_bit(tmp_path):
    run = make_run(tmp_path / "run")
    assert "Starts" not in write_report([run]).read_text()
    start = {"step": 0, "time": "2026-01-02", "devices": 2, "device_kind": "A <card>", "jax": "1.0",
             "bit_for_bit": True, "why": []}
    later = {**start, "step": 40, "bit_for_bit": False, "why": ["jax '1.0' -> '1.1'"]}
    (run / "starts.jsonl").write_text(json.dumps(start) + "\n" + json.dumps(later) + "\n")
    page = write_report([run]).read_text()
    assert "1. from step 0" in page and "2 x A &lt;card&gt;, jax 1.0: bit for bit" in page
    assert "2. from step 40" in page and "not bit for bit: jax &#x27;1.0&#x27; -&gt;" in page


def test_scores_of_classes_and_what_the_terminal_said_are_in_the_report(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "result.json").write_text(json.dumps({
        "best_step": 50, "flags": ["one class only"], "results": ["held-out MLM loss 3 (<b>)"],
        "details": {"by_class": {"yes": [0.5, 1.0, 2 / 3, 1200], "<no>": [0, 0, 0, 1]},
                    "confusion": [[1200, 0], [1, 0]]}}))
    page = write_report([run]).read_text()
    assert "doubtful: one class only" in page and "held-out MLM loss 3 (&lt;b&gt;)" in page
    assert ("<th>yes</th><td>50.0</td><td>100.0</td><td>66.7</td><td>1,200</td><td>1,200</td>"
            "<td>0</td>") in page
    assert "as &lt;no&gt;" in page and "1970-01-01" in page


def test_types_of_entities_have_no_matrix_and_f1_is_in_percent(tmp_path):
    run = make_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 50, "eval/f1": 0.135}\n')
    (run / "result.json").write_text(json.dumps(
        {"details": {"by_type": {"PER": [1, 0.5, 0.6667, 2], "LOC": [0, 0, 0, 3]}}}))
    page = write_report([run]).read_text()
    assert "<th>PER</th><td>100.0</td><td>50.0</td><td>66.7</td><td>2</td></tr>" in page
    assert "held-out</small>13.5 %" in page and "as PER" not in page


@pytest.mark.parametrize("name, text", [
    ("config.json", "[" * 100_000), ("result.json", "[]"), ("examples.json", "{}"),
    ("hardware.json", "1" * 10_000)])
def test_a_damaged_file_of_a_run_is_named(tmp_path, name, text):
    run = make_run(tmp_path / "run")
    (run / name).write_text(text)
    with pytest.raises(ValueError, match=name):
        write_report([run])


def test_runs_whose_losses_do_not_compare_are_told(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("a", "b")]
    assert "do not compare" not in write_report(runs).read_text()
    (runs[1] / "config.json").write_text(json.dumps({"masking": {"rate": 0.4}}))
    assert "differ in masking.rate (–, 0.4)" in write_report(runs).read_text()


def test_a_metric_with_one_value_has_no_chart(tmp_path):
    charts = {chart["title"] for chart in data_of(
        write_report([make_run(tmp_path / "run")]).read_text())["charts"]}
    assert "MLM accuracy" in charts and "eval/f1" not in charts
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 50, "eval/f1": 0.135}\n')
    page = write_report([tmp_path / "run"]).read_text()
    assert "F1" not in {chart["title"] for chart in data_of(page)["charts"]}
    assert "13.5 %" in page
