"""The picture of a run in a notebook, without one: what it shows, and when."""

import re
import sys
import types

import pytest

from bertjax.log import notebook
from bertjax.log.logbook import Logbook


@pytest.fixture
def shown(monkeypatch):
    """What IPython displays: the HTML of each picture, and whether it replaces the one before."""
    pictures = []

    class Handle:
        def update(self, thing):
            pictures.append((thing._repr_html_(), True))

    def display(thing, display_id):
        pictures.append((thing._repr_html_(), False))
        return Handle()

    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    monkeypatch.setattr(notebook, "_PAUSE_S", 0.0)
    return pictures


def values(page):
    return dict(re.findall(r"<td[^>]*>([^<]*)</td><td[^>]*>([^<]*)</td>", page))


def test_a_notebook_shows_one_picture_that_is_replaced_and_prints_the_other_lines(shown, tmp_path):
    lines = []
    with Logbook(tmp_path, write=lines.append, **notebook.output()) as logbook:
        for step in range(1, 5):
            logbook.train(step, 4, {"loss": 9.0 - step, "mlm_loss": 8.0 - step, "learning_rate": 1e-4})
        logbook.evaluation(4, {"eval/mlm_loss": 4.5, "eval/mlm_accuracy": 0.25, "eval/loss": 5.0})
        logbook.message("done")
    assert [replaces for _, replaces in shown] == [False, True, True, True, True]
    assert lines[-1] == "done" and not any("loss" in line for line in lines)
    page = shown[-1][0]
    assert values(page) == {
        "step": "4 of 4",
        "loss": "5.0000",
        "loss of masked words": "4.0000",
        "learning rate": "1.00e-04",
        "loss of masked words, held out": "4.5000",
        "accuracy of masked words, held out": "25.0%",
        "loss, held out": "5.0000",
    }
    training, heldout = re.findall(r'<polyline points="([^"]*)"', page)
    assert len(training.split()) == 4 and len(heldout.split()) == 1
    # The held-out loss, 4.5, is drawn between the training losses 5 and 4: it is the same one.
    heights = [float(point.split(",")[1]) for point in training.split()]
    assert heights[2] < float(heldout.split(",")[1]) < heights[3]


def test_a_score_on_held_out_data_has_a_chart_of_its_own(shown):
    picture = notebook.Picture()
    for step in (1, 2):
        picture.show(step, 2, {"loss": 1.0 / step}, "")
        picture.show(step, None, {"eval/f1<b>": 0.5 * step, "eval/accuracy": 0.1}, "")
    page = shown[-1][0]
    assert page.count("<svg") == 2 and "f1&lt;b&gt;, held out" in page and "<b>" not in page


def test_what_is_not_finite_leaves_a_gap_and_long_runs_are_thinned(shown):
    picture = notebook.Picture()
    for step in range(1, 1002):
        picture.show(step, 1001, {"loss": float("nan") if step == 5 else 1.0}, "")
    assert len(picture.losses) == 1000
    drawn = re.findall(r'<polyline points="([^"]*)"', shown[-1][0])[0].split()
    assert 100 < len(drawn) <= notebook.MOST_POINTS and drawn[-1].startswith(f"{notebook._WIDTH - 10:.1f},")


def test_without_a_kernel_the_console_stays_as_it_is(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert notebook.output() == {}
    shell = types.SimpleNamespace()  # of IPython in a terminal
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert notebook.output() == {}
