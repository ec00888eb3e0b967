"""The board as a picture: each panel at its place, with its title, unit and legend, drawn by matplotlib as SVG."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.textpath import text_to_path
from matplotlib.ticker import MaxNLocator

from tools._board import COLUMNS, Board, Panel, Place

# All in pixels of a picture that is as wide as Grafana in a small window.
COLUMN, ROW = 50, 27
WIDTH = COLUMNS * COLUMN
HEAD = 84
MARGIN, GAP = 4, 12
TITLE, BELOW, LEFT = 34, 27, 74
"""Of a panel: above its axes, between them and the legend, and left of them."""
LEGEND_LINE, MARK = 16, 18
BIG, NORMAL, SMALL = 22, 12.5, 11
STYLE: Any = {
    "figure.dpi": 72,  # one point is one pixel
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib, and is wider than what browsers have instead
    "svg.fonttype": "none",
    "svg.hashsalt": "board",
}
PAGE, CARD, EDGE, INK, PALE = "#f4f5f5", "#ffffff", "#d8d9da", "#24292e", "#70757b"
COLOURS = (
    "#1f78c1", "#e0752d", "#3f9c35", "#ba43a9", "#e5ac0e", "#e24d42", "#17a2b8", "#705da0", "#8c564b", "#7f7f7f",
)  # fmt: skip
PATH, NUMBER = re.compile(r' d="[^"]*"'), re.compile(r"\d+\.\d\d+")
"""In SVG; a tenth of a pixel is enough."""
TICKS_MAX = 4
INTERVAL_SECONDS = 30
"""Of the marks on the axis of time."""

SCALES: dict[str, tuple[tuple[float, str], ...]] = {
    "percentunit": ((0.01, "%"),),
    "short": ((1, ""), (1e3, " K"), (1e6, " Mil")),
    "ops": ((1, " ops/s"), (1e3, "k ops/s"), (1e6, "M ops/s")),
    "s": ((1e-6, " us"), (1e-3, " ms"), (1, " s")),
    "bytes": ((1, " B"), (1 << 10, " KiB"), (1 << 20, " MiB"), (1 << 30, " GiB")),
    "Bps": ((1, " B/s"), (1e3, " kB/s"), (1e6, " MB/s"), (1e9, " GB/s")),
}
"""By Grafana's name of a unit: what one of something is, and how it is written."""


@dataclass(frozen=True)
class Series:
    """One line of a panel."""

    legend: str
    values: tuple[float, ...]
    """One for each time; NaN where Prometheus has none."""

    @property
    def has_data(self) -> bool:
        """Whether there is anything to see."""
        return any(math.isfinite(value) for value in self.values)


def scale_of(unit: str, largest: float) -> tuple[float, str]:
    """In what values up to ``largest`` are written: its size, and its name."""
    return max((scale for scale in SCALES[unit] if scale[0] <= largest), default=SCALES[unit][0])


def draw(
    board: Board,
    times: Sequence[float],
    answers: Mapping[str, Sequence[Series]],
    reasons: Mapping[str, str],
    caption: str,
) -> Figure:
    """The picture. ``times``: seconds since the beginning; ``answers``: series by title of a panel; ``reasons``: why a
    panel of a row may have no data."""
    rows = max(place.y + place.h for place in (*(panel.place for panel in board.panels), *board.rows.values()))
    height = HEAD + rows * ROW + GAP
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH / 72, height / 72), facecolor=PAGE)
        sheet = _Sheet(figure, height)
        sheet.text(GAP, 30, board.title, BIG, weight="bold")
        chosen = " | ".join(f"{variable.title}: All" for variable in board.variables)
        sheet.text(WIDTH - GAP, 30, chosen, NORMAL, colour=PALE, align="right")
        sheet.text(GAP, 62, caption, NORMAL, colour=PALE)
        for title, place in board.rows.items():
            sheet.text(GAP, HEAD + (place.y + 0.5) * ROW, title, NORMAL + 2, weight="bold")
        for panel in board.panels:
            _draw_panel(sheet, panel, times, answers[panel.title], reasons.get(panel.row, ""))
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write it as SVG, without what nobody sees; the same picture is the same file."""
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    drawn = PATH.sub(lambda found: NUMBER.sub(lambda one: f"{float(one[0]):.1f}", found[0]), path.read_text())
    path.write_text(re.sub(r"\n\s+", "\n", drawn))


def text_width(text: str, size: float) -> float:
    """Of one line, in pixels."""
    with matplotlib.rc_context(STYLE):
        return float(text_to_path.get_text_width_height_descent(text, FontProperties(size=size), False)[0])


class _Sheet:
    """A figure whose pixels are counted from the upper left corner."""

    def __init__(self, figure: Figure, height: float) -> None:
        self._figure, self._height = figure, height

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float,
        *,
        colour: str = INK,
        weight: str = "normal",
        align: str = "left",
    ) -> None:
        """One line, whose middle is at ``y``."""
        self._figure.text(
            x / WIDTH, 1 - y / self._height, text, fontsize=size, color=colour, fontweight=weight, ha=align,
            va="center_baseline",
        )  # fmt: skip

    def card(self, x: float, y: float, w: float, h: float) -> None:
        """What a panel stands on."""
        at = (x / WIDTH, 1 - (y + h) / self._height)
        self._figure.add_artist(
            Rectangle(at, w / WIDTH, h / self._height, facecolor=CARD, edgecolor=EDGE, linewidth=1, zorder=-1)
        )

    def mark(self, x: float, y: float, colour: str) -> None:
        """The line before a legend's text."""
        ends = [x / WIDTH, (x + MARK - 6) / WIDTH]
        self._figure.add_artist(Line2D(ends, [1 - y / self._height] * 2, color=colour, linewidth=3))

    def axes(self, x: float, y: float, w: float, h: float) -> Axes:
        """Where lines are drawn."""
        return self._figure.add_axes((x / WIDTH, 1 - (y + h) / self._height, w / WIDTH, h / self._height))


def _draw_panel(sheet: _Sheet, panel: Panel, times: Sequence[float], series: Sequence[Series], reason: str) -> None:
    x, y, w, h = _box(panel.place)
    sheet.card(x, y, w, h)
    sheet.text(x + GAP, y + TITLE / 2, panel.title, NORMAL, weight="bold")
    legend = legend_places([one.legend for one in series], w - 2 * GAP)
    lines = legend[-1][1] + 1 if legend else 0
    for number, (place, one) in enumerate(zip(legend, series, strict=True)):
        left, middle = x + GAP + place[0], y + h - GAP - LEGEND_LINE * (lines - place[1] - 0.5) + 4
        sheet.mark(left, middle, COLOURS[number % len(COLOURS)])
        sheet.text(left + MARK, middle, one.legend, SMALL)
    plot = (x + LEFT, y + TITLE, w - LEFT - 1.5 * GAP, h - TITLE - BELOW - LEGEND_LINE * lines - GAP / 2)
    axes = sheet.axes(*plot)
    axes.set_xlim(times[0], times[-1])
    marks = numpy.arange(0, times[-1] + 1, INTERVAL_SECONDS)
    axes.set_xticks(marks, [f"{int(mark) // 60}:{int(mark) % 60:02}" for mark in marks])
    axes.tick_params(labelsize=SMALL, labelcolor=PALE, length=0, pad=5)
    axes.tick_params(axis="x", pad=9)
    axes.grid(color="#e4e6e8", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.patch.set_visible(False)
    for edge in axes.spines.values():
        edge.set_visible(False)
    if any(one.has_data for one in series):
        _plot(axes, panel, times, series)
    else:
        axes.set_yticks([])
        middle = plot[1] + plot[3] / 2
        sheet.text(plot[0] + plot[2] / 2, middle - 8, "No data", NORMAL, colour=PALE, align="center")
        sheet.text(plot[0] + plot[2] / 2, middle + 12, reason, SMALL, colour=PALE, align="center")


def _box(place: Place) -> tuple[float, float, float, float]:
    return (
        place.x * COLUMN + MARGIN,
        HEAD + place.y * ROW + MARGIN,
        place.w * COLUMN - 2 * MARGIN,
        place.h * ROW - 2 * MARGIN,
    )


def legend_places(texts: Sequence[str], width: float) -> list[tuple[float, int]]:
    """For each text how far from the left, in pixels, and in which line it stands."""
    places: list[tuple[float, int]] = []
    x, line = 0.0, 0
    for text in texts:
        needed = MARK + text_width(text, SMALL)
        if x and x + needed > width:
            x, line = 0.0, line + 1
        places.append((x, line))
        x += needed + 1.5 * GAP
    return places


def _plot(axes: Axes, panel: Panel, times: Sequence[float], series: Sequence[Series]) -> None:
    """Lines, areas and the axis of values."""
    below = numpy.zeros(len(times))
    largest = smallest = 0.0
    for number, one in enumerate(series):
        if not one.has_data:
            continue
        values, colour = numpy.array(one.values), COLOURS[number % len(COLOURS)]
        there = numpy.isfinite(values)
        tops = numpy.where(there, values + below, numpy.nan)
        # What is nothing hides no line that it is stacked on.
        lines = numpy.where(values == 0, numpy.nan, tops) if panel.stacked else tops
        axes.plot(times, lines, color=colour, linewidth=1.4)
        if panel.opacity and values[there].any():
            axes.fill_between(times, below, tops, where=there.tolist(), color=colour, alpha=panel.opacity, linewidth=0)
        if panel.stacked:
            below = below + numpy.where(there, values, 0)
        largest, smallest = max(largest, float(numpy.nanmax(tops))), min(smallest, float(numpy.nanmin(tops)))
    low = smallest if panel.low is None else panel.low
    high = panel.high or largest * 1.08 or 1.0
    size, name = scale_of(panel.unit, high)
    ticks = MaxNLocator(TICKS_MAX, steps=[1, 2, 2.5, 5, 10]).tick_values(low / size, high / size)
    shown = [tick for tick in ticks if low / size <= tick <= high / size]
    axes.set_yticks([tick * size for tick in shown], [f"{tick:g}{name}" for tick in shown])
    axes.set_ylim(low - 0.01 * (high - low), high + 0.02 * (high - low))
