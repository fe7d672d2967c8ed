"""A run in a Jupyter notebook: one picture that follows it, in place of a line for every logged step.

In: the numbers of a run, as the logbook gets them. Out: a table of the latest ones and curves of the losses, which
IPython shows and replaces. Where no notebook runs, the console stays as it is.
"""

import html
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bertjax.log.report.charts import thin

MOST_POINTS = 300  # of a curve, about
MOST_DOTS = 30
_PAUSE_S = 0.3  # between two pictures at least: each goes to the browser as a whole
_WIDTH, _HEIGHT = 460, 150
_TRAINING, _HELDOUT = "#2a78c2", "#d9730d"  # colours
# Names of metrics.jsonl -> what the table calls them, and how it writes them.
_NAMES = {
    "loss": ("loss", "{:.4f}"),
    "mlm_loss": ("loss of masked words", "{:.4f}"),
    "nsp_loss": ("loss of next sentences", "{:.4f}"),
    "mlm_accuracy": ("accuracy of masked words", "{:.1%}"),
    "nsp_accuracy": ("accuracy of next sentences", "{:.1%}"),
    "learning_rate": ("learning rate", "{:.2e}"),
    "tokens_per_second": ("tokens a second", "{:,.0f}"),
}


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook: IPython alone is a console."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return getattr(shell, "kernel", None) is not None


def output() -> dict[str, Any]:
    """The arguments of a Logbook for where this process runs."""
    return {"show": Picture().show} if in_notebook() else {}


class Picture:
    """What the notebook shows of one run: `losses`, and of held-out data losses or else scores, as points (step, y)."""

    def __init__(self) -> None:
        self.step, self.last_step, self.line = 0, 0, ""
        self.numbers: Mapping[str, float | None] = {}
        self.evaluated: Mapping[str, float | None] = {}
        self.losses: list[tuple[int, float]] = []
        self.heldout: list[tuple[int, float]] = []
        self.scores: list[tuple[int, float]] = []
        self._handle: Any = None
        self._shown_at = 0.0

    def show(self, step: int, last_step: int | None, metrics: Mapping[str, float | None], line: str) -> None:
        """As `show` of the logbook asks for; an evaluation has no last step."""
        self.step, self.line = step, line
        # Of the losses of pre-training the one of masked words, which is what both measure.
        if last_step is None:
            self.evaluated = {name.removeprefix("eval/"): value for name, value in metrics.items()}
            loss = self.evaluated.get("mlm_loss", self.evaluated.get("loss"))
            add(self.heldout, step, loss)
            if loss is None:
                add(self.scores, step, next(iter(self.evaluated.values()), None))
        else:
            self.last_step, self.numbers = last_step, metrics
            add(self.losses, step, metrics.get("mlm_loss", metrics.get("loss")))
        if last_step is None or step == last_step or time.monotonic() - self._shown_at > _PAUSE_S:
            self._shown_at = time.monotonic()
            self._display()

    def _display(self) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display(self, display_id=True)
        else:
            self._handle.update(self)

    def __repr__(self) -> str:
        return self.line

    def _repr_html_(self) -> str:
        rows = [("step", f"{self.step:,} of {self.last_step:,}")]
        rows += [named(key, self.numbers[key]) for key in _NAMES if self.numbers.get(key)]
        if "  ETA " in self.line:
            rows.append(("time left", self.line.partition("  ETA ")[2].partition("  skipped")[0]))
        told = [named(key, value) for key, value in self.evaluated.items() if value is not None]
        rows += [(f"{name}, held out", value) for name, value in told]
        share = self.step / self.last_step if self.last_step else 0
        charts = curves({"training loss": self.losses, "held out": self.heldout})
        if self.scores:
            charts += curves({f"{next(iter(self.evaluated), '')}, held out": self.scores})
        return (
            '<div style="display:flex;flex-wrap:wrap;gap:1.5em;align-items:flex-start">'
            f'<div>{table(rows)}<progress value="{share:.4f}" style="width:100%"></progress></div>'
            f'<div style="display:flex;flex-direction:column">{charts}</div></div>'
        )


def add(points: list[tuple[int, float]], step: int, value: float | None) -> None:
    """One more point, if there is a number."""
    if value is not None and math.isfinite(value):
        points.append((step, value))


def named(key: str, value: float | None) -> tuple[str, str]:
    """What the table calls a number of metrics.jsonl, and the number as text."""
    name, form = _NAMES.get(key, (key.replace("_", " "), "{:.4f}"))
    return name, form.format(value)


def table(rows: Sequence[tuple[str, str]], values: str = "right") -> str:
    """Names, and values at the right or left of their column."""
    cells = "".join(
        f'<tr><td style="text-align:left">{html.escape(name)}</td>'
        f'<td style="text-align:{values}">{html.escape(value)}</td></tr>'
        for name, value in rows
    )
    return f'<table style="color:inherit">{cells}</table>'


def curves(lines: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """An SVG of lines over the steps; points that are few are dots too."""
    points = [point for line in lines.values() for point in line]
    if len({step for step, _ in points}) < 2:
        return ""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    high = max(high, low + 1e-6)

    def place(point: tuple[int, float]) -> tuple[float, float]:
        x = 40 + (_WIDTH - 50) * (point[0] - left) / (right - left)
        return x, 8 + (_HEIGHT - 28) * (high - point[1]) / (high - low)

    parts = [f'<path d="M40 4V{_HEIGHT - 20}H{_WIDTH - 6}" fill="none" stroke="currentColor" stroke-opacity="0.4"/>']
    drawn = [(name, line) for name, line in lines.items() if line]
    rising = drawn[0][1][-1][1] > drawn[0][1][0][1]  # the names stand where the line is not
    for number, (name, line) in enumerate(drawn):
        colour = _HELDOUT if name.endswith("held out") else _TRAINING
        placed = [place(point) for point in thin(line, MOST_POINTS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(placed) <= MOST_DOTS:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in placed]
        parts.append(_text(_WIDTH - 10, 16 + 13 * number + 100 * rising, "end", html.escape(name), colour))
    parts += [_text(36, 14, "end", f"{high:.3g}"), _text(36, _HEIGHT - 18, "end", f"{low:.3g}")]
    parts += [_text(40, _HEIGHT - 3, "start", f"{left:,}"), _text(_WIDTH - 10, _HEIGHT - 3, "end", f"step {right:,}")]
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="{html.escape(", ".join(name for name, _ in drawn))}" style="font:11px sans-serif;max-width:100%">'
        f"{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, anchor: str, text: str, colour: str = "currentColor") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{text}</text>'
