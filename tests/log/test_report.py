"""report.html: one file, offline, with the numbers of the run in it."""

import hashlib
import html.parser
import json
import re
import time
from types import SimpleNamespace

import pytest

from bertjax.log.report import write_report
from bertjax.log.report.charts import charts, thin
from bertjax.log.report.runs import Run
from bertjax.log.report.verdicts import verdicts
from bertjax.tools import report


def make_run(directory, learning_rate=1e-4, steps=50):
    directory.mkdir(parents=True)
    with open(directory / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            record = {
                "step": step,
                "loss": 10 / step,
                "mlm_accuracy": 0.01 * step,
                "learning_rate": learning_rate,
                "tokens_per_second": 1000.0,
                "mfu": None,
                "skipped": 0,
                "time": 100.0 + 60 * step,
            }
            file.write(json.dumps(record) + "\n")
        file.write(json.dumps({"step": steps, "eval/loss": 0.25, "eval/mlm_accuracy": 0.4}) + "\n")
    (directory / "config.json").write_text(
        json.dumps({"optimizer": {"learning_rate": learning_rate, "name": "adamw"}, "seed": 0})
    )
    (directory / "examples.json").write_text(
        json.dumps([{"text": "a [MASK] </script><b>", "predictions": [["dog", 0.5], ["<i>", 0.25]]}])
    )
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
    records = [{"step": step, "eval/accuracy": accuracy} for step, accuracy in ((2, 0.5), (4, 0.9), (6, 0.7))]
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
    for run in runs:
        settings = json.loads((run / "config.json").read_text())
        settings["data"] = {"train": hashlib.sha256(run.name.encode()).hexdigest()}
        (run / "config.json").write_text(json.dumps(settings))
    page = write_report(runs, tmp_path / "both.html").read_text()
    assert data_of(page)["runs"] == ["a", "b"]
    loss = data_of(page)["charts"][0]["series"]
    assert [(s["run"], s["kind"]) for s in loss] == [(0, "train"), (0, "eval"), (1, "train"), (1, "eval")]
    # Above the results, as far as a person can read them: what data are is a long number.
    summary = page[: page.index('id="plots"')]
    assert '<tr class="different"><th>optimizer.learning_rate</th><td>0.0001</td><td>0.0003</td>' in summary
    assert summary.index("optimizer.learning_rate") < summary.index("<th>Steps</th>") and "data.train" not in summary
    settings = page[page.index("Settings") :]
    assert "2 differ" in settings
    assert settings.index("optimizer.learning_rate") < settings.index("optimizer.name")
    assert settings.count('class="different"') == 2


def test_a_comparison_leaves_the_report_of_its_first_run(tmp_path, capsys):
    first, second = str(make_run(tmp_path / "a")), str(make_run(tmp_path / "b"))
    own = write_report([first]).read_text()
    report.main([first, second])
    assert capsys.readouterr().out.strip() == str(tmp_path / "a" / "compared.html")
    assert (tmp_path / "a" / "report.html").read_text() == own and not (tmp_path / "b" / "report.html").exists()


def test_a_report_does_not_take_the_place_of_a_file_of_another_kind(tmp_path):
    run = make_run(tmp_path / "a")
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(SystemExit, match=r"metrics\.jsonl must end in \.html"):
        report.main([str(run), "--output", str(run / "metrics.jsonl")])
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_pre_training_run_stands_beside_a_fine_tuning_run(tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b")]
    gold = {"texts": ["x"], "gold": "yes", "predicted": "no", "right": False}
    (runs[1] / "examples.json").write_text(json.dumps([gold]))
    page = write_report(runs).read_text()
    assert "<mark>[MASK]</mark>" in page and "on dev: the worst mistakes" in page


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
    start = {
        "step": 0,
        "time": "2026-01-02",
        "devices": 2,
        "device_kind": "A <card>",
        "jax": "1.0",
        "bit_for_bit": True,
        "why": [],
    }
    later = {**start, "step": 40, "bit_for_bit": False, "why": ["jax '1.0' -> '1.1'"]}
    (run / "starts.jsonl").write_text(json.dumps(start) + "\n" + json.dumps(later) + "\n")
    page = write_report([run]).read_text()
    assert "1. from step 0" in page and "2 x A &lt;card&gt;, jax 1.0: bit for bit" in page
    assert "2. from step 40" in page and "not bit for bit: jax &#x27;1.0&#x27; -&gt;" in page


def test_scores_of_classes_and_what_the_terminal_said_are_in_the_report(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "result.json").write_text(
        json.dumps(
            {
                "best_step": 50,
                "flags": ["one class only"],
                "results": ["held-out MLM loss 3 (<b>)"],
                "details": {
                    "by_class": {"yes": [0.5, 1.0, 2 / 3, 1200], "<no>": [0, 0, 0, 1]},
                    "confusion": [[1200, 0], [1, 0]],
                },
            }
        )
    )
    page = write_report([run]).read_text()
    assert "doubtful: one class only" in page and "held-out MLM loss 3 (&lt;b&gt;)" in page
    all_right = '<span class="heat right" style="--share:100%">1,200</span>'
    assert f"<th>yes</th><td>50.0</td><td>100.0</td><td>66.7</td><td>1,200</td><td>{all_right}</td><td>0</td>" in page
    assert "as &lt;no&gt;" in page and "1970-01-01" in page


def of_details(tmp_path, name="run", **details):
    """The page of a run with these details."""
    run = make_run(tmp_path / name)
    (run / "result.json").write_text(json.dumps({"details": details}))
    return write_report([run]).read_text()


def test_entities_that_are_not_found_or_made_up_stand_beside_the_types_and_f1_is_in_percent(tmp_path):
    table = {"PER": [1, 0.5, 0.6667, 2], "LOC": [0, 0, 0, 3]}
    mode = "default (conlleval)"
    page = of_details(tmp_path, by_type=table, confusion=[[1, 0, 1], [0, 0, 3], [0, 4, 0]], mode=mode)
    assert f"scored in the mode {mode}" in page
    assert "<th>PER</th><td>100.0</td><td>50.0</td><td>66.7</td><td>2</td>" in page
    assert "<span>as no entity</span>" in page
    assert '<th>no entity</th><td></td><td></td><td></td><td></td><td>0</td><td><span class="heat wrong"' in page
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 50, "eval/f1": 0.135}\n')
    assert "held-out</small>13.5 %" in write_report([tmp_path / "run"]).read_text()


def test_of_many_classes_the_worst_and_the_most_confused_come_first(tmp_path):
    table = {f"class {n}": [0.9, 0.9, 0.5 + n / 100, 40] for n in range(30, 0, -1)}
    page = of_details(tmp_path, by_class=table, confused=[["class 3", "class 4", 10], ["class 9", "class 1", 5]])
    assert page.index("<th>class 1</th>") < page.index("<th>class 2</th>") < page.index("<th>class 30</th>")
    assert "<th>class 3</th><td>class 4</td><td>10</td><td>25.0</td>" in page and "<span>as " not in page


def test_pairs_of_a_matrix_are_sorted_by_their_rows(tmp_path):
    table = {name: [0.5, 0.5, 0.5, 10] for name in "abcd"}
    matrix = [[5, 1, 4, 0], [0, 10, 0, 0], [0, 0, 10, 0], [7, 0, 0, 3]]
    page = of_details(tmp_path, by_class=table, confusion=matrix)
    pairs = page[page.index("Most confused") :]
    assert re.findall(r"<th>(.)</th><td>(.)</td><td>(\d+)</td><td>([\d.]+)</td>", pairs)[:3] == [
        ("d", "a", "7", "70.0"),
        ("a", "c", "4", "40.0"),
        ("a", "b", "1", "10.0"),
    ]


def test_questions_with_and_without_an_answer_have_scores_of_their_own(tmp_path):
    page = of_details(tmp_path, f1=60.0, total=30, HasAns_f1=50.0, HasAns_total=20, NoAns_f1=80.0, NoAns_total=10)
    assert "<th>with an answer</th><td>50.0</td><td>20</td>" in page
    assert "<th>without an answer</th><td>80.0</td><td>10</td>" in page


def test_classes_of_several_runs_stand_side_by_side(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("a", "b")]
    for run, f1 in zip(runs, (0.25, 0.5), strict=True):
        (run / "result.json").write_text(json.dumps({"details": {"by_class": {"<yes>": [1, 1, f1, 7]}}}))
    assert "<th>&lt;yes&gt;</th><td>25.0</td><td>50.0</td>" in write_report(runs).read_text()


@pytest.mark.parametrize(
    "name, text",
    [("config.json", "[" * 100_000), ("result.json", "[]"), ("examples.json", "{}"), ("hardware.json", "1" * 10_000)],
)
def test_a_damaged_file_of_a_run_is_named(tmp_path, name, text):
    run = make_run(tmp_path / "run")
    (run / name).write_text(text)
    with pytest.raises(ValueError, match=name):
        write_report([run])


def test_runs_whose_losses_do_not_compare_are_told(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("a", "b")]
    assert "do not compare" not in write_report(runs).read_text()
    (runs[1] / "config.json").write_text(json.dumps({"masking": {"rate": 0.4}}))
    page = write_report(runs).read_text()
    assert "since they differ in masking.rate<" in page and "<th>masking.rate</th><td>–</td><td>0.4</td>" in page


def test_a_metric_with_one_value_has_no_chart(tmp_path):
    charts = {chart["title"] for chart in data_of(write_report([make_run(tmp_path / "run")]).read_text())["charts"]}
    assert "MLM accuracy" in charts and "eval/f1" not in charts
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 50, "eval/f1": 0.135}\n')
    page = write_report([tmp_path / "run"]).read_text()
    assert "F1" not in {chart["title"] for chart in data_of(page)["charts"]}
    assert "13.5 %" in page


def of_records(records, settings=None, result=None, name="run"):
    return Run(name, records, settings or {}, result=result or {})


def loss_series(*runs):
    return charts(runs)[0]["series"]


def test_an_axis_of_tokens_follows_the_phases():
    records = [{"step": step, "loss": 1 / step} for step in (1, 10, 12, 15)]
    settings = {"phases": "[[10, 128], [5, 512]]", "batch_size": "4", "budget_minutes": "0.0"}
    (series,) = loss_series(of_records(records, settings))
    assert series["tokens"] == [512, 5120, 5120 + 2 * 2048, 5120 + 5 * 2048]
    # Beyond the phases, as after a change of the settings: rows as long as the last.
    (series,) = loss_series(of_records([*records, {"step": 20, "loss": 0.1}], settings))
    assert series["tokens"][-1] == 5120 + 10 * 2048


def test_an_axis_of_tokens_knows_phases_with_rows_of_their_own():
    records = [{"step": step, "loss": 1 / step} for step in (1, 10, 12)]
    settings = {"phases": "[[10, 128, 2], [5, 512]]", "batch_size": "4", "budget_minutes": "0.0"}
    (series,) = loss_series(of_records(records, settings))
    assert series["tokens"] == [256, 2560, 2560 + 2 * 2048]


def test_an_axis_of_tokens_without_phases_adds_up_the_rates():
    records = [
        {"step": 1, "loss": 3, "tokens_per_second": None, "step_time": None},
        {"step": 11, "loss": 2, "tokens_per_second": 50.0, "step_time": 2.0},
        {"step": 16, "eval/loss": 2.5},
        {"step": 21, "loss": 1, "tokens_per_second": 400.0, "step_time": 0.5},
        {"step": 25, "eval/loss": 2.0},
    ]
    train, held_out = loss_series(of_records(records))
    assert train["tokens"] == [100, 1100, 3100]  # 100 tokens a step, then 200
    assert held_out["tokens"] == [2100, 3900]
    # A run by the clock: its phases are a scale, so lengths change at other steps.
    by_clock = {"phases": "[[9, 8], [9, 16]]", "batch_size": "2", "budget_minutes": "5"}
    assert loss_series(of_records(records, by_clock))[0]["tokens"] == [100, 1100, 3100]


def test_an_axis_of_time_is_since_the_first_record_and_never_goes_back():
    records = [
        {"step": 1, "loss": 3, "time": 1000.0},
        {"step": 2, "loss": 2, "time": 1060.5},
        {"step": 2, "eval/loss": 2, "time": 1090.0},
        {"step": 3, "loss": 1, "time": 1030.0},
        {"step": 4, "loss": 1, "time": 1200.0},
    ]
    train, held_out = loss_series(of_records(records))
    assert train["time"] == [0, 60.5, 60.5, 200] and held_out["time"] == [60.5]


def test_an_axis_is_there_only_if_every_run_has_it(tmp_path):
    timed = [{"step": s, "loss": 1, "time": 10.0 * s} for s in (1, 2)]
    settings = {"phases": "[[2, 8]]", "batch_size": "2"}
    both = loss_series(of_records(timed, settings), of_records(timed, settings))
    assert all(s["tokens"] == [16, 32] and s["time"] == [0, 10] for s in both)
    some = loss_series(of_records(timed, settings), of_records(timed))
    assert all("tokens" not in s and "time" in s for s in some)
    page = write_report([make_run(tmp_path / "run")]).read_text()
    assert page.count('<select id="axis">') == 1 and "Horizontal axis" in page


@pytest.mark.parametrize(
    "settings",
    [{"phases": "{", "batch_size": "2"}, {"phases": "[[1, 2]]"}, {"phases": '[["a", "b"]]', "batch_size": "2"}],
)
def test_settings_without_usable_phases_give_no_axis_of_tokens(settings):
    records = [{"step": s, "loss": 1} for s in (1, 2)]
    assert "tokens" not in loss_series(of_records(records, settings))[0]


def plots_of(page):
    return {plot["title"]: plot for plot in data_of(page)["plots"]}


def test_calibration_is_a_curve_over_the_bins_that_hold_rows(tmp_path):
    assert plots_of(of_details(tmp_path, "none")) == {}
    bins = [[0, 0.0, 0.0]] * 8 + [[40, 0.85, 0.5], [1000, 0.97, 0.9]]
    plot = plots_of(of_details(tmp_path, calibration={"ece": 0.0802, "bins": bins}))["Calibration"]
    assert plot["note"].startswith("expected calibration error 8.0 %")
    (series,) = plot["series"]
    assert (series["x"], series["y"], series["size"]) == ([0.85, 0.97], [0.5, 0.9], [3.2, 8.0])
    assert series["text"][1] == "1,000 at 97.0 %: 90.0 % right"


def test_the_threshold_curve_marks_the_best_of_both_scores(tmp_path):
    best = {"best_exact": 60.0, "best_exact_thresh": -1.0, "best_f1": 70.0, "best_f1_thresh": 2.0}
    page = of_details(tmp_path, threshold_curve=[[-1.0, 60.0, 61.0], [2.0, 59.0, 70.0]], **best)
    plot = plots_of(page)["Threshold of no answer"]
    exact, best_exact, f1, best_f1 = plot["series"]
    assert (f1["x"], f1["y"], exact["y"]) == ([-1.0, 2.0], [0.61, 0.7], [0.6, 0.59])
    assert (best_exact["x"], best_exact["y"], best_f1["x"], best_f1["y"]) == ([-1.0], [0.6], [2.0], [0.7])
    assert "best F1 70.0 % at 2.00" in plot["note"]


def test_a_map_has_a_colour_a_gold_class_and_crosses_for_mistakes(tmp_path):
    run = make_run(tmp_path / "run")
    points = [[0, 1, "x", "x", True, "one"], [2, 3, "x", "y", False, "two"], [4, 5, "y", "y", True, "three"]]
    (run / "map.json").write_text(json.dumps({"share": 0.5, "points": points}))
    plot = plots_of(write_report([run]).read_text())["Map"]
    assert plot["legend"] == ["x", "y"] and "50 % of the variance" in plot["note"]
    assert [(s["color"], s["shape"], s["text"]) for s in plot["series"]] == [
        (0, "dots", ["one [x]"]),
        (0, "crosses", ["two [gold x, predicted y]"]),
        (1, "dots", ["three [y]"]),
    ]
    many = [[n, n, f"class {n % 12}", "x", True, ""] for n in range(30)]
    (run / "map.json").write_text(json.dumps({"share": 0.5, "points": many}))
    assert plots_of(write_report([run]).read_text())["Map"]["legend"][7:] == ["5 others"]
    numbers = [[n, n, f"{n / 10:.2f}", "1.00", None, ""] for n in range(40)]
    (run / "map.json").write_text(json.dumps({"share": 0.5, "points": numbers}))
    plot = plots_of(write_report([run]).read_text())["Map"]
    assert plot["legend"] == ["below 1", "to 2", "to 3", "above"] and [len(s["x"]) for s in plot["series"]] == [10] * 4
    pairs = [[n, n, "0.2 and 0.7", "0.1 and 0.8", None, ""] for n in range(4)]  # golds of a head of one's own
    (run / "map.json").write_text(json.dumps({"share": 0.5, "points": pairs}))
    assert plots_of(write_report([run]).read_text())["Map"]["legend"] == ["0.2 and 0.7"]
    # Of several runs there is none: they have vectors of their own.
    assert "Map" not in plots_of(write_report([run, make_run(tmp_path / "other")]).read_text())


def test_gold_numbers_stand_beside_the_predicted_ones(tmp_path):
    page = of_details(tmp_path, gold_and_predicted=[[1.0, 1.5], [2.0, 0.5]])
    (series,) = plots_of(page)["Gold and predicted numbers"]["series"]
    assert (series["x"], series["y"]) == ([1.0, 2.0], [1.5, 0.5])


def test_words_are_shaded_by_how_much_they_matter(tmp_path):
    run = make_run(tmp_path / "run")
    example = {"texts": ["a <b> c d", "e"], "gold": "x", "predicted": "y", "right": False, "score": 0.5}
    example["mattered"] = [[[1, 2.0], [5, -1.0], [7, 0.01]], []]
    (run / "examples.json").write_text(json.dumps([example]))
    page = write_report([run]).read_text()
    assert '<i class="for" style="--share:100%" title="+2.00">a</i>' in page
    assert '<i class="against" style="--share:50%" title="-1.00"> &lt;b&gt;</i> c d</p><p dir="auto">e</p>' in page


class Tags(html.parser.HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, *(name for name, _ in attributes)))


def hostile_run(directory, bad):
    """A run whose every text is `bad`."""
    run = make_run(directory)
    example = {"texts": [bad], "gold": bad, "predicted": bad, "right": False, "score": 1, "predictions": [[bad, 0.5]]}
    words = {"texts": [], "gold": "", "predicted": "", "right": False, "score": 1, "words": [[bad, bad, "O"]]}
    mattered = {**example, "mattered": [[[4, 1.0], [len(bad), -1.0]]]}
    table = {bad: [0.5, 0.5, 0.5, 9], **{f"{bad}{n}": [0.5, 0.5, 0.5, 9] for n in range(3)}}
    details = {"by_class": table, "confusion": [[1, 2, 3, 4]] * 4, "calibration": {"ece": 0.1, "bins": [[1, 0.5, 0.5]]}}
    files = {
        "examples.json": [example, words, mattered],
        "map.json": {"share": 0.5, "points": [[0, 1, bad, bad, True, bad], [1, 0, "b", bad, False, bad]]},
        "result.json": {
            "details": details,
            "task": bad,
            "checkpoint": bad,
            "flags": [bad],
            "about": [bad],
            "notes": [],
        },
        "config.json": {bad: bad},
        "hardware.json": {bad: bad},
        "starts.jsonl": {"step": 0, "time": bad, "devices": bad, "device_kind": bad, "jax": bad, "why": [bad]},
    }
    for name, content in files.items():
        (run / name).write_text(json.dumps(content) + "\n")
    with open(run / "starts.jsonl", "a") as file:
        file.write(json.dumps(files["starts.jsonl"]) + "\n")
    with open(run / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps({"step": 50 + n, bad: 1.0 * n, f"eval/{bad}": 2.0}) + "\n" for n in range(3))
    return run


BAD = "<script>alert(1)<!-- '\"><img src=x onerror=console.error(1)>"


def test_text_of_data_labels_settings_and_names_stays_text(tmp_path):
    plain = Tags(write_report([hostile_run(tmp_path / "plain", "plain text")]).read_text())
    bad = [hostile_run(tmp_path / BAD.replace("/", "") / "run", BAD), hostile_run(tmp_path / "b" / "run", BAD)]
    assert {tag for tag, *_ in plain.found} >= {"script", "table", "li", "i"}
    assert Tags(write_report(bad[:1]).read_text()).found == plain.found
    assert not {"img", "link"} & {tag for tag, *_ in Tags(write_report(bad).read_text()).found}


def test_a_report_of_the_most_that_a_run_keeps_is_small_and_made_at_once(tmp_path):
    run = make_run(tmp_path / "run", steps=3000)
    names = [f"class {n}" for n in range(300)]
    example = {"texts": ["word " * 60] * 2, "gold": "x", "predicted": "y", "right": False, "score": 0.5}
    details = {
        "by_class": {name: [0.5, 0.5, 0.5, 9] for name in names},
        "confused": [[names[n], names[n + 1], 3] for n in range(30)],
        "threshold_curve": [[n / 7, n / 3, n / 2] for n in range(200)],
        **{f"best_{name}": 50.0 for name in ("exact", "f1", "exact_thresh", "f1_thresh")},
        "gold_and_predicted": [[n / 7, n / 3] for n in range(500)],
    }
    (run / "result.json").write_text(json.dumps({"details": details}))
    (run / "examples.json").write_text(json.dumps([example] * 12))
    points = [[n / 7, n / 3, names[n % 300], "class 1", False, "word " * 20] for n in range(400)]
    (run / "map.json").write_text(json.dumps({"share": 0.5, "points": points}))
    started = time.process_time()
    size = write_report([run]).stat().st_size
    assert size < 1_500_000 and time.process_time() - started < 3


def said(result=None, records=(), settings=None):
    return verdicts(of_records(list(records), settings, result))


@pytest.mark.parametrize(
    "loss, words",
    [
        (6.09, "better than from their frequencies alone, by 0.42 nats"),
        (7.01, "worse than from their frequencies alone, by 0.50 nats"),
        (6.508, "as well as from their frequencies alone"),
    ],
)
def test_a_verdict_on_tokens_names_the_distance_to_their_frequencies(loss, words):
    (verdict,) = said({"numbers": {"mlm_loss": loss, "unigram_entropy": 6.51}})
    assert words in verdict


@pytest.mark.parametrize(
    "accuracy, words",
    [
        (0.71, "NSP: 71.0 %, 5.8 standard errors above the best constant guess (65.2 %)"),
        (0.64, "cannot be told from the best constant guess (65.2 %; -1.2 standard errors)"),
        (0.60, "5.2 standard errors below the best constant guess"),
    ],
)
def test_a_verdict_on_next_sentences_counts_standard_errors(accuracy, words):
    (verdict,) = said({"numbers": {"nsp_accuracy": accuracy, "nsp_error": 0.01, "nsp_chance": 0.652}})
    assert words in verdict
    perfect = said({"numbers": {"nsp_accuracy": 1.0, "nsp_error": 0.0, "nsp_chance": 0.5}})
    assert perfect == ["NSP: 100.0 %, the best constant guess gives 50.0 %"]


@pytest.mark.parametrize(
    "flag, details, words",
    [
        ("one class only", {"by_class": {}, "confusion": []}, "One class only: the head predicts"),
        ("one class only", {}, "One class only: the head predicts"),
        ("one class only", {"by_class": {}}, "Every row gets the same labels"),
        ("one class only", {"by_type": {}}, "No entity is predicted"),
        ("one class only", {"exact": 0.0}, "No question is answered"),
        ("constant", {}, "no correlation is defined"),
    ],
)
def test_a_verdict_on_constant_predictions_by_the_kind_of_head(flag, details, words):
    (verdict,) = said({"flags": [flag], "details": details})
    assert words in verdict


def test_a_verdict_on_accuracy_is_against_the_most_frequent_class():
    def of(accuracy, majority=0.684):
        return said({"scores": {"accuracy": accuracy, "majority": majority}, "rows": {"train": 9, "dev": 400}})[0]

    assert "8.7 standard errors above always the most frequent class (68.4 %)" in of(0.842)
    assert "cannot be told from always the most frequent class" in of(0.70)
    assert "standard errors below always the most frequent class" in of(0.5)
    assert said({"scores": {"accuracy": 0.5}, "rows": {"dev": 9}}) == []


def test_a_verdict_on_the_course_of_the_score_on_dev():
    result = {"metric": "f1", "best_step": 4, "history": [[2, 0.5], [4, 0.6], [6, 0.6]]}
    assert said(result) == ["The f1 on dev did not improve after step 4"]
    result |= {"best_step": 8, "history": [*result["history"], [8, 0.7]]}
    assert said(result) == ["The f1 on dev was best at the last evaluation"]
    assert said(result | {"history": [[8, 0.7]]}) == []


def test_a_verdict_on_the_course_of_the_training_loss():
    def of(loss, count=400, phases="[[400, 8]]"):
        noise = [0.05 * (-1) ** step for step in range(count)]
        return said(
            records=[{"step": step + 1, "mlm_loss": loss(step) + noise[step]} for step in range(count)],
            settings={"phases": phases},
        )

    (verdict,) = of(lambda step: 8 - 0.01 * step)
    assert "still falling (mean 4.505 in the last quarter of the records, 5.505 in" in verdict
    (verdict,) = of(lambda step: 6 + 0.01 * step)
    assert "still rising" in verdict
    (verdict,) = of(lambda step: 8 - 0.01 * min(step, 150))
    assert "has levelled off" in verdict
    assert of(lambda step: 8 - 0.01 * step, count=20) == []  # too few to tell
    assert of(lambda step: 0.05 + 1e-5 * step) == []  # noise, and more of it than 1 %
    # Longer rows have another loss: only those of the last phase are compared.
    (verdict,) = of(lambda step: 8 if step < 300 else 6, phases="[[300, 8], [100, 16]]")
    assert "has levelled off" in verdict


def test_a_loss_that_is_not_finite_is_told_and_not_the_last_one_that_was(tmp_path):
    directory = make_run(tmp_path / "run", steps=3)
    with open(directory / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "loss": null, "skipped": 6, "time": 900.0}\n')
    page = write_report([directory]).read_text()
    assert "The training loss is not finite: 6 steps were skipped" in page
    told = re.sub(r"<[^>]*>|\s+", " ", page.split("<script")[0])
    assert re.search("Loss, last logged step +not finite", told) and "3.333" not in told


def test_verdicts_stand_above_the_numbers_of_one_run_and_of_several(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("a", "b")]
    assert 'class="verdicts"' not in write_report(runs).read_text()
    (runs[0] / "result.json").write_text('{"flags": ["one class only"]}')
    page = write_report(runs[:1]).read_text()
    assert page.index('<ul class="verdicts"><li>One class only') < page.index('class="tiles"')
    page = write_report(runs, tmp_path / "both.html").read_text()
    assert page.index('<ul class="verdicts"><li>a: One class only') < page.index("<table>")


def test_a_report_that_cannot_be_made_ends_no_run(tmp_path, caplog):
    from bertjax.log.logbook import Logbook
    from bertjax.run import run

    make_run(tmp_path / "run")
    job = SimpleNamespace(workdir=tmp_path / "run", finish=lambda *_: {"value": 1})
    said = []
    with Logbook(tmp_path / "run", start_step=50, write=said.append) as logbook:
        assert run.write_results(job, None, logbook, None) == {"value": 1}
        assert said[-1] == f"report: {tmp_path / 'run' / 'report.html'}" and not caplog.messages
        (tmp_path / "run" / "report.html").unlink()
        (tmp_path / "run" / "examples.json").write_text("[3]")
        assert run.write_results(job, None, logbook, None) == {"value": 1}
    (warning,) = caplog.messages
    assert warning.startswith("no report.html: ValueError: examples.json of a run holds what no run writes")
    assert not (tmp_path / "run" / "report.html").exists()
