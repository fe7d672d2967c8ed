"""report.html in a real browser: the script runs without a complaint and draws every curve."""

import json
import math
import re
import shutil
import subprocess

import pytest

from bertjax.log.report import write_report
from tests.log.test_report import BAD, Tags, hostile_run

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
            *([] if any("window-size" in flag for flag in flags) else ["--window-size=1280,1400"]),
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


@pytest.mark.parametrize(
    "name, low, step", [("mlm_accuracy", 0.9023, 3e-6), ("loss", 7.16, 3e-6), ("tokens_per_second", 2e4, 0.3)]
)
def test_no_two_ticks_of_an_axis_say_the_same(tmp_path, name, low, step):
    records = [{"step": n, "loss": 1.0, name: low + n * step} for n in range(9)]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    dom, console = chromium(write_report([tmp_path / "run"]), tmp_path / "home", "--dump-dom")
    assert console == []
    for svg in re.findall(r"<svg [^>]*aria-label.*?</svg>", dom, re.DOTALL):
        texts = re.findall(r'text-anchor="end">(.*?)</text>', svg)
        assert len(set(texts)) == len(texts) >= 3


@pytest.mark.parametrize("text, sign", [("one two three", 1), ("אחד שתים שלוש", -1), ("واحد اثنان ثلاثة", -1)])
def test_examples_are_read_in_the_direction_of_their_script(tmp_path, text, sign):
    run = make_run(tmp_path / "run", 0.02)
    words = [[word, "B-X", "O"] for word in text.split()]
    sure = {"gold": "x", "predicted": "y", "right": False, "score": 0.5}
    (run / "examples.json").write_text(
        json.dumps([{**sure, "words": words}, {**sure, "texts": [text]}, {"text": text, "predictions": []}])
    )
    page = write_report([run])
    measure = """<script>document.title = [...document.querySelectorAll(".example p[dir]")].map(p => {
      const spans = [...p.querySelectorAll("span")].map(s => s.getBoundingClientRect().x);
      return spans.length ? Math.sign(spans.at(-1) - spans[0])
        : getComputedStyle(p).direction === "rtl" ? -1 : 1;
    })</script>"""
    page.write_text(page.read_text().replace("</html>", f"{measure}</html>"))
    dom, _ = chromium(page, tmp_path / "home", "--dump-dom")
    assert re.search("<title>(.*)</title>", dom)[1] == f"{sign},{sign},{sign}"


def finetuned_run(directory):
    """A run with every plot, wide tables and long words."""
    run = make_run(directory, 0.02)
    names = [f"class_{n}_with_a_long_name" for n in range(12)]
    curve = [[n / 10 - 5, 50 + n / 4, 40 + n / 3] for n in range(100)]
    details = {
        "by_class": {name: [0.5, 0.5, 0.5, 90] for name in names},
        "confusion": [[n * m for n in range(12)] for m in range(12)],
        "calibration": {"ece": 0.1, "bins": [[n, n / 10, n / 11] for n in range(10)]},
        "threshold_curve": curve,
        "gold_and_predicted": [[n / 7, n / 3] for n in range(50)],
        **{"best_exact": 74.75, "best_exact_thresh": 4.9, "best_f1": 73.0, "best_f1_thresh": 4.9},
    }
    (run / "result.json").write_text(json.dumps({"details": details}))
    points = [[n % 7, n % 5, names[n % 12], names[n % 9], n % 12 == n % 9, "word " * 20] for n in range(60)]
    (run / "map.json").write_text(json.dumps({"share": 0.5, "points": points}))
    example = {"texts": ["long" * 70], "gold": names[0], "predicted": names[1], "right": False, "score": 0.5}
    (run / "examples.json").write_text(json.dumps([{**example, "mattered": [[[100, 1.0], [280, -0.5]]]}]))
    return run


def test_every_plot_is_drawn_and_says_what_is_at_the_pointer(tmp_path):
    page = write_report([finetuned_run(tmp_path / "run")])
    point = """<script>for (const svg of document.querySelectorAll(".plot svg")) {
      const box = svg.querySelectorAll("circle, path")[1].getBoundingClientRect();
      svg.dispatchEvent(new PointerEvent("pointermove",
        {clientX: box.x + box.width / 2, clientY: box.y + box.height / 2}));
    }</script>"""
    page.write_text(page.read_text().replace("</html>", f"{point}</html>"))
    dom, console = chromium(page, tmp_path / "home", "--dump-dom")
    assert console == []
    drawn = dict(re.findall(r'<svg [^>]*aria-label="([^"]*)"(.*?)</svg>', dom, re.DOTALL))
    marks = {name: (svg.count("<circle") - 1, svg.count("<path")) for name, svg in drawn.items() if "cross" in svg}
    assert marks["Calibration"] == (9, 1)  # the dots of the bins with rows, and their line
    assert marks["Threshold of no answer"] == (2, 2)
    assert marks["Gold and predicted numbers"] == (50, 0)
    assert sum(marks["Map"]) == 60 and marks["Map"][1] == 42  # a cross is a path
    assert "NaN" not in "".join(drawn.values()) and "undefined" not in "".join(drawn.values())
    said = re.findall(r"<h3>(Calibration|Map)<span>(.*?)</span>", dom)
    assert re.fullmatch(r"\d at \d+.0 %: \d+.\d % right", said[0][1]) and "word word" in said[1][1]


def test_a_phone_scrolls_down_only_and_a_dark_screen_is_dark(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    page = write_report([finetuned_run(tmp_path / "run"), finetuned_run(tmp_path / "other")], tmp_path / "both.html")
    measure = "<script>document.title = `${document.documentElement.scrollWidth} of ${innerWidth}`</script>"
    for path in (page, write_report([tmp_path / "run"], tmp_path / "one.html")):
        path.write_text(path.read_text().replace("</html>", f"{measure}</html>"))
        dom, _ = chromium(path, tmp_path / "home", "--dump-dom", "--window-size=500,900")
        wide, screen = re.search(r"<title>(\d+) of (\d+)</title>", dom).groups()
        assert int(wide) <= int(screen) <= 500
    for name, flag, corner in (
        ("light", "--disable-features=x", (0xF5, 0xF6, 0xF8)),
        ("dark", "--blink-settings=preferredColorScheme=0", (0x14, 0x18, 0x1E)),
    ):
        chromium(page, tmp_path / "home", flag, f"--screenshot={tmp_path / name}.png")
        pixel = (image.imread(tmp_path / f"{name}.png")[2, 2, :3] * 255).round()
        assert tuple(pixel) == corner


def test_text_of_a_run_is_text_whatever_it_holds(tmp_path):
    page = write_report([hostile_run(tmp_path / BAD.replace("/", ""), BAD)])
    dom, console = chromium(page, tmp_path / "home", "--dump-dom")
    tags = [tag for tag, *_ in Tags(dom).found]
    assert console == [] and "img" not in tags and tags.count("script") == 1
    assert dom.count("onerror=console.error(1)&gt;") > 20


def test_the_picture_has_the_colours_of_both_runs(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    runs = [make_run(tmp_path / "slow", 0.02), make_run(tmp_path / "fast", 0.06)]
    page = write_report(runs, tmp_path / "report.html")
    chromium(page, tmp_path / "home", f"--screenshot={tmp_path / 'page.png'}")
    pixels = (image.imread(tmp_path / "page.png")[..., :3] * 255).round().astype(int)
    below = pixels[500:]  # past the table and the legend, which have the colours too
    for colour in ((0x25, 0x63, 0xEB), (0xDC, 0x68, 0x03)):
        assert (abs(below - colour).sum(-1) < 12).sum() > 100
