"""A run in a Jupyter notebook: one picture that follows it, in place of a line for every logged step.

In: the numbers of a run, as the logbook gets them. Out: a table of the latest ones and curves of the losses, which
IPython shows and replaces. Where no notebook runs, the console stays as it is.
"""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

MOST_POINTS = 300  # of a curve
_PAUSE_S = 0.3  # between two pictures at least: each goes to the browser as a whole
_WIDTH, _HEIGHT = 460, 150
# Names of metrics.jsonl -> what the table calls them, and how it writes them.
_SHOWN = {
    "loss": ("loss", "{:.4f}"),
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
    """What the notebook shows of one run. `losses` and `heldout` are points (step, loss)."""

    def __init__(self) -> None:
        self.step, self.last_step, self.line = 0, 0, ""
        self.numbers: dict[str, float | None] = {}
        self.evaluated: dict[str, float | None] = {}
        self.losses: list[tuple[int, float]] = []
        self.heldout: list[tuple[int, float]] = []
        self._handle: Any = None
        self._shown_at = 0.0

    def show(self, step: int, last_step: int | None, metrics: Mapping[str, float | None], line: str) -> None:
        """As `show` of the logbook asks for; an evaluation has no last step."""
        self.step, self.line = step, line
        if last_step is None:
            self.evaluated = {name.removeprefix("eval/"): value for name, value in metrics.items()}
            loss = self.evaluated.get("loss", self.evaluated.get("mlm_loss"))
            self.heldout += [(step, loss)] if _finite(loss) else []
        else:
            self.last_step, self.numbers = last_step, dict(metrics)
            # Of the two losses of pre-training, the one that is evaluated.
            loss = metrics.get("mlm_loss", metrics.get("loss"))
            self.losses += [(step, loss)] if _finite(loss) else []
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
        rows += [(name, form.format(value)) for key, (name, form) in _SHOWN.items() if (value := self.numbers.get(key))]
        if "  ETA " in self.line:
            rows.append(("time left", self.line.partition("  ETA ")[2].partition("  skipped")[0]))
        rows += [(f"{name}, held out", f"{value:.4f}") for name, value in self.evaluated.items() if value is not None]
        share = self.step / self.last_step if self.last_step else 0
        return (
            '<div style="display:flex;flex-wrap:wrap;gap:1.5em;align-items:flex-start">'
            f'<div>{table(rows)}<progress value="{share:.4f}" style="width:100%"></progress></div>'
            f"{curves({'training': self.losses, 'held out': self.heldout})}</div>"
        )


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values, side by side."""
    cells = "".join(
        f'<tr><td style="text-align:left">{html.escape(name)}</td>'
        f'<td style="text-align:right">{html.escape(value)}</td></tr>'
        for name, value in rows
    )
    return f"<table>{cells}</table>"


def curves(lines: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """An SVG of the losses over the steps: the first as a line, the second as dots."""
    points = [point for line in lines.values() for point in line]
    if len({step for step, _ in points}) < 2:
        return ""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    high = max(high, low + 1e-6)

    def place(point: tuple[int, float]) -> tuple[float, float]:
        x = 40 + (_WIDTH - 50) * (point[0] - left) / (right - left)
        return x, 8 + (_HEIGHT - 28) * (high - point[1]) / (high - low)

    first, second = (thinned(line) for line in lines.values())
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, first))
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in map(place, second))
    labels = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'
        for x, y, anchor, text in (
            (36, 14, "end", f"{high:.3g}"),
            (36, _HEIGHT - 18, "end", f"{low:.3g}"),
            (40, _HEIGHT - 3, "start", f"{left:,}"),
            (_WIDTH - 10, _HEIGHT - 3, "end", f"step {right:,}"),
        )
    )
    names = "".join(
        f'<text x="{_WIDTH - 10}" y="{16 + 13 * i}" text-anchor="end" fill="{colour}">{html.escape(name)}</text>'
        for i, (name, colour) in enumerate(zip(lines, ("#2a78c2", "#d9730d"), strict=True))
        if lines[name]
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="loss" '
        'style="font:11px sans-serif;max-width:100%" fill="currentColor">'
        f'<path d="M40 4V{_HEIGHT - 20}H{_WIDTH - 6}" fill="none" stroke="currentColor" stroke-opacity="0.4"/>'
        f'<polyline points="{path}" fill="none" stroke="#2a78c2" stroke-width="1.5"/>'
        f'<g fill="#d9730d">{dots}</g>{labels}{names}</svg>'
    )


def thinned(points: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """At most MOST_POINTS of them, evenly spread, the last one included."""
    every = -(-len(points) // MOST_POINTS)
    return points if every <= 1 else points[::-1][::every][::-1]


def _finite(value: float | None) -> bool:
    return value is not None and abs(value) < float("inf")
