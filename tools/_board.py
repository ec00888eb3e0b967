"""The Grafana board as Prometheus and people get it: panels and their places, queries with the variables filled in."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BOARD = Path(__file__).resolve().parents[1] / "docs" / "grafana" / "pegaflow.json"
COLUMNS = 24
"""Of a board, whatever its width."""

LABEL_VALUES = re.compile(r"label_values\(([\w:]+), (\w+)\)")
LABEL_NAME = re.compile(r"\{\{(\w+)\}\}")
VARIABLE = re.compile(r"\$(\w+)")


@dataclass(frozen=True)
class Place:
    """Where something is, in columns and rows of the board."""

    x: int
    y: int
    w: int
    h: int


@dataclass(frozen=True)
class Query:
    """One question of a panel."""

    expression: str
    """PromQL, without variables."""
    legend: str
    """With labels of the answer in double braces."""

    def legend_of(self, labels: Mapping[str, str]) -> str:
        """What a series with these labels is called."""
        return LABEL_NAME.sub(lambda name: labels.get(name[1], ""), self.legend).strip()


@dataclass(frozen=True)
class Panel:
    """A time series panel."""

    title: str
    place: Place
    row: str
    """The heading above it."""
    unit: str
    """As Grafana calls it."""
    stacked: bool
    opacity: float
    """Of the area below a line, 0 to 1."""
    low: float | None
    high: float | None
    """Bounds of the axis; ``None``: as the values are."""
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class Variable:
    """A choice above the board: values of a label of a metric."""

    name: str
    title: str
    metric: str
    label: str


@dataclass(frozen=True)
class Board:
    """All of it. Titles are different ones."""

    title: str
    rows: dict[str, Place]
    panels: tuple[Panel, ...]
    variables: tuple[Variable, ...]


def read_board(path: Path = BOARD, rate_seconds: int = 60) -> Board:
    """The board with everything chosen, and ``rate_seconds`` as the interval of its rates. A ``KeyError`` if a query
    has a variable that the board does not know."""
    whole = json.loads(path.read_text())
    lists = [one for one in whole["templating"]["list"] if one["type"] == "query"]
    values = {one["name"]: one["allValue"] for one in lists} | {"__rate_interval": f"{rate_seconds}s"}
    rows, panels = {}, []
    for one in whole["panels"]:
        place = Place(**one["gridPos"])
        if one["type"] == "row":
            row = one["title"]
            rows[row] = place
            continue
        looks = one["fieldConfig"]["defaults"]
        panels.append(
            Panel(
                title=one["title"],
                place=place,
                row=row,
                unit=looks["unit"],
                stacked=looks["custom"].get("stacking", {}).get("mode") == "normal",
                opacity=looks["custom"]["fillOpacity"] / 100,
                low=looks.get("min"),
                high=looks.get("max"),
                queries=tuple(
                    Query(VARIABLE.sub(lambda name: values[name[1]], target["expr"]), target["legendFormat"])
                    for target in one["targets"]
                ),
            )
        )
    variables = [Variable(one["name"], one["label"], *LABEL_VALUES.findall(one["query"]["query"])[0]) for one in lists]
    return Board(whole["title"], rows, tuple(panels), tuple(variables))
