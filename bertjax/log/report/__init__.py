"""report.html of one run, or of several side by side: one file that opens offline.

In: the directories of runs. Out: HTML with its data, style and script inside; it loads nothing.

    runs.py       what the files of a run say
    charts.py     curves of the metrics
    plots.py      of a fine-tuned model: calibration, thresholds, numbers, a map
    verdicts.py   what the numbers say, in words
    sections.py   results, classes, examples, settings, hardware
    page.html     the page that these are put into at {{title}}, {{summary}}, {{classes}}, {{examples}}, {{tables}} and
                  {{data}}. Its script draws charts and plots as SVG: training curves as a faint line with a smoothed
                  one over it, held-out values as dots. The horizontal axis is the step, or the tokens or the time
                  where these are known of every run.
"""

import contextlib
import html
import json
import logging
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bertjax.formats.files import write_whole
from bertjax.log.report import sections
from bertjax.log.report.charts import charts
from bertjax.log.report.plots import plots
from bertjax.log.report.runs import load

log = logging.getLogger(__name__)


@contextlib.contextmanager
def as_warning(what: str) -> Iterator[None]:
    """Turns an error in the block into a warning that begins with `what`: a report that fails must not end a run."""
    try:
        yield
    except Exception as error:
        log.warning("%s: %s", what, f"{type(error).__name__}: {error}".split("\n")[0])


def write_report(
    directories: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str] | None = None
) -> pathlib.Path:
    """Writes the report of the runs in `directories`; returns its path.

    Args:
      output: default: in the first directory, report.html, or of several runs compared.html.

    Raises:
      ValueError: a directory holds no metrics.jsonl, or no record in it; or a file of a run holds what no run writes.
    """
    runs = load(directories)
    data = {
        "runs": [run.name for run in runs],
        "charts": _made("metrics.jsonl", lambda: charts(runs)),
        "plots": _made("result.json or map.json", lambda: plots(runs)),
    }
    summary, *classes = _made("result.json", lambda: [sections.summary(runs), *sections.classes(runs)])
    # One run's examples come first; of several runs the curves do.
    examples = _made("examples.json", lambda: sections.examples(runs))
    settings = _made("config.json, hardware.json or starts.jsonl", lambda: sections.details(runs))
    contents = {
        "title": html.escape(" vs ".join(run.name for run in runs)),
        "summary": summary,
        "classes": "\n".join(f"<section>{part}</section>" for part in classes if part),
        "examples": examples * (len(runs) == 1),
        "tables": "\n".join([examples * (len(runs) > 1), *settings]),
        # '<' escaped: the data must not be able to end the script element it stands in.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    # In one pass: a content that holds the name of a place, as a text may, stays as it is.
    template = pathlib.Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    page = re.sub(r"{{(\w+)}}", lambda place: contents[place[1]], template)
    name = "compared.html" if len(runs) > 1 else "report.html"  # the first run keeps its own
    path = pathlib.Path(output or pathlib.Path(directories[0]) / name)
    write_whole(path, page)
    return path


def _made(file: str, make: Callable[[], Any]) -> Any:
    """A part of the report; an error in it is one of the file that it is made from."""
    try:
        return make()
    except (TypeError, AttributeError, LookupError, ValueError, ArithmeticError) as error:
        raise ValueError(
            f"{file} of a run holds what no run writes ({type(error).__name__}: {error}); move it away, and the "
            "report is made without it"
        ) from error
