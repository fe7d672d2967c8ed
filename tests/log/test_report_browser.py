"""report.html in a real browser: the script runs without a complaint and draws every curve."""

import json
import math
import re
import shutil
import subprocess

import pytest

from bertjax.log.report import write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium (Debian: apt-get install chromium)"),
]


def make_run(directory, speed):
    directory.mkdir()
    records = [
        {
            "step": step,
            "loss": 4 + 5 * math.exp(-speed * step),
            "learning_rate": 1e-4 / step,
            "mlm_accuracy": 0.2 * (1 - math.exp(-speed * step)),
            "time": 60.0 * step,
        }
        for step in range(1, 101)
    ]
    records += [{"step": step, "eval/loss": 4.2 + 5 * math.exp(-speed * step)} for step in (25, 50, 75, 100)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (directory / "config.json").write_text(json.dumps({"seed": 0, "speed": speed}))
    return directory


def chromium(page, home, *flags):
    """Loads the page headless; returns standard output and what the console said."""
    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={home}",
            "--window-size=1280,1400",
            "--enable-logging=stderr",
            "--virtual-time-budget=3000",
            *flags,
            f"file://{page}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_every_curve_is_drawn_and_the_console_is_empty(tmp_path):
    runs = [make_run(tmp_path / "slow", 0.02), make_run(tmp_path / "fast", 0.06)]
    page = write_report(runs, tmp_path / "report.html")
    dom, console = chromium(page, tmp_path / "home", "--dump-dom")
    assert console == []
    charts = re.findall(r'<svg [^>]*aria-label="([^"]*)".*?</svg>', dom, re.DOTALL)
    assert charts[0] == "Loss" and {"MLM accuracy", "Learning rate"} <= set(charts)
    loss = re.search(r'<svg [^>]*aria-label="Loss".*?</svg>', dom, re.DOTALL)[0]
    lines = re.findall(r'<path [^>]*\bd="(M[^"]+)"', loss)
    # Each run: its training curve faint and smoothed, and its held-out points.
    assert sorted(line.count("L") for line in lines) == [3, 3, 99, 99, 99, 99]
    assert loss.count("<circle") == 8
    drawn = "".join(re.findall(r"<svg .*?</svg>", dom, re.DOTALL))
    assert "NaN" not in drawn and "undefined" not in drawn


@pytest.mark.parametrize(
    "axis, tick, farthest", [("x", "100", 100), ("tokens", "100k", 1e5), ("time", "50 min", 99 * 60)]
)
def test_the_axis_is_switched_for_all_runs(tmp_path, axis, tick, farthest):
    runs = [make_run(tmp_path / "slow", 0.02), make_run(tmp_path / "fast", 0.06)]
    for run in runs:
        settings = {"phases": [[100, 50]], "batch_size": 20}
        (run / "config.json").write_text(json.dumps(settings))
    page = write_report(runs, tmp_path / "report.html")
    switch = f"<script>axis.value = '{axis}'; axis.dispatchEvent(new Event('change'))</script>"
    page.write_text(page.read_text().replace("</html>", f"{switch}</html>"))
    dom, console = chromium(page, tmp_path / "home", "--dump-dom")
    assert console == []
    assert re.findall(r'<option value="(\w+)"', dom) == ["x", "tokens", "time"]
    data = json.loads(re.search(r"const data = (.*);\n", dom)[1])
    assert all(s[axis][-1] == farthest for s in data["charts"][0]["series"])
    loss = re.search(r'<svg [^>]*aria-label="Loss".*?</svg>', dom, re.DOTALL)[0]
    assert f">{tick}</text>" in loss and "NaN" not in loss and loss.count("<circle") == 8


def test_predictions_are_text_whatever_they_hold(tmp_path):
    run = make_run(tmp_path / "run", 0.02)
    bad = "<img src=x onerror=console.error(1)><script>console.error(2)</script>"
    (run / "examples.json").write_text(
        json.dumps(
            [
                {
                    "texts": [bad],
                    "gold": bad,
                    "predicted": bad,
                    "right": False,
                    "score": 1.0,
                    "predictions": [[bad, 0.75], ["other", 0.25]],
                },
                {
                    "texts": [],
                    "gold": "",
                    "predicted": "",
                    "right": True,
                    "score": 0.0,
                    "words": [["Anna", "B-PER", "B-PER"], [bad, "O", "B-LOC"]],
                },
            ]
        )
    )
    dom, console = chromium(write_report([run]), tmp_path / "home", "--dump-dom")
    assert console == [] and "<img" not in dom
    assert dom.count("onerror=console.error(1)&gt;") == 5
    assert '<span style="width:75.0%">' in dom and "<s>B-LOC</s> O" in dom


def test_the_picture_has_the_colours_of_both_runs(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    runs = [make_run(tmp_path / "slow", 0.02), make_run(tmp_path / "fast", 0.06)]
    page = write_report(runs, tmp_path / "report.html")
    chromium(page, tmp_path / "home", f"--screenshot={tmp_path / 'page.png'}")
    pixels = (image.imread(tmp_path / "page.png")[..., :3] * 255).round().astype(int)
    below = pixels[500:]  # past the table and the legend, which have the colours too
    for colour in ((0x25, 0x63, 0xEB), (0xDC, 0x68, 0x03)):
        assert (abs(below - colour).sum(-1) < 12).sum() > 100
