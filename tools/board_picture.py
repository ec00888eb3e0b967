"""Draw the Grafana board as Prometheus answers its queries: ``python -m tools.board_picture [--seconds N]``.

A real Prometheus scrapes a real vLLM server and ``pegaflow exporter`` while both are used; then it is asked for every
query of the board over that time. The command fails if it refuses one, or if a panel has no data and nothing says why.
The answers are kept in ``build/board.json``, from which ``--answers`` draws again. Grafana takes no part in it.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools._board import BOARD, Board, Panel, read_board
from tools._board_drawing import Series, draw, save
from tools._board_traffic import make_traffic, served
from tools._prometheus import Refused, ask, find_program, prometheus
from tools.try_examples import ROOT

PICTURE = BOARD.with_suffix(".svg")
ANSWERS = ROOT / "build" / "board.json"
SCRAPE_SECONDS = 2
RATE_SECONDS = 4 * SCRAPE_SECONDS
"""What Grafana takes for ``$__rate_interval`` where points are as close as scrapes."""

WHY_EMPTY = {"SSD": "There is no SSD cache here.", "Other hosts": "There are no other hosts here."}
"""By row of the board."""

CAPTION = (
    "Drawn from the board's own queries as Prometheus answered them, not by Grafana: {} s of a tiny model on CPUs."
)

Answers = dict[str, Any]
"""As JSON: ``seconds``, ``step``, and ``panels``: by title, what Prometheus said to each query, times from 0 on."""


def ask_all(address: str, board: Board, began: float, ended: float) -> Answers:
    """All answers. Ends the command if one is refused."""
    panels: dict[str, list[Any]] = {}
    refused = []
    for panel in board.panels:
        panels[panel.title] = []
        for query in panel.queries:
            when = {"start": f"{began:.3f}", "end": f"{ended:.3f}", "step": str(SCRAPE_SECONDS)}
            try:
                found = ask(address, "query_range", query=query.expression, **when)["result"]
            except Refused as why:
                refused.append(f"NOT {panel.title}: {why}\n    {query.expression}")
                continue
            for one in found:
                one["values"] = [[round(at - began, 3), value] for at, value in one["values"]]
            panels[panel.title].append(found)
    for variable in board.variables:
        values = ask(address, f"label/{variable.label}/values", **{"match[]": variable.metric})
        if not values:
            refused.append(f"NOT {variable.title}: there is nothing to choose from")
    if refused:
        sys.exit("\n".join(refused))
    return {"seconds": round(ended - began, 3), "step": SCRAPE_SECONDS, "panels": panels}


def times_of(answers: Answers) -> list[float]:
    """Seconds since the beginning, of all values."""
    return [number * answers["step"] for number in range(int(answers["seconds"] / answers["step"]) + 1)]


def series_of(panel: Panel, results: Sequence[Sequence[Mapping[str, Any]]], times: Sequence[float]) -> list[Series]:
    """The lines of a panel."""
    lines = []
    for query, found in zip(panel.queries, results, strict=True):
        for one in found:
            values = {round(at, 1): float(value) for at, value in one["values"]}
            shown = tuple(values.get(round(at, 1), math.nan) for at in times)
            lines.append(Series(query.legend_of(one["metric"]), shown))
    return lines


def draw_all(board: Board, answers: Answers, path: Path) -> bool:
    """Draw, and say which panels have no data. False if one of them should have."""
    times = times_of(answers)
    lines = {panel.title: series_of(panel, answers["panels"][panel.title], times) for panel in board.panels}
    good = True
    for panel in board.panels:
        with_data = sum(one.has_data for one in lines[panel.title])
        why = "" if with_data else WHY_EMPTY.get(panel.row, "Something should be there.")
        good &= bool(with_data) or panel.row in WHY_EMPTY
        state = "ok " if with_data else "-- " if panel.row in WHY_EMPTY else "NOT"
        print(f"{state} {panel.title}: {with_data} of {len(lines[panel.title])} series have data. {why}".rstrip())
    save(draw(board, times, lines, WHY_EMPTY, CAPTION.format(round(answers["seconds"]))), path)
    print(f"drawn: {path} ({path.stat().st_size / 1e3:.0f} kB)")
    return good


def look(program: str, board: Board, seconds: float) -> Answers:
    """Start everything, use it for so long, and ask."""
    with tempfile.TemporaryDirectory(prefix="pegaflow-board-") as name:
        folder = Path(name)
        with served(folder) as where:
            targets = {"vllm": f"127.0.0.1:{where.port}", "pegaflow": where.exporter}
            with prometheus(program, targets, SCRAPE_SECONDS, folder) as address:
                began = time.time()
                make_traffic(where, seconds, folder)
                return ask_all(address, board, began, time.time())


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw it; the status is 1 if a panel has no data and should have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long vLLM and the pool are used")
    parser.add_argument("--prometheus", default="prometheus", metavar="PATH", help="the program")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="draw what was answered before; start nothing")
    parser.add_argument("--out", type=Path, default=PICTURE, help="the picture")
    chosen = parser.parse_args(arguments)
    board = read_board(rate_seconds=RATE_SECONDS)
    if chosen.answers is not None:
        answers: Answers = json.loads(chosen.answers.read_text())
    else:
        answers = look(find_program(chosen.prometheus), board, chosen.seconds)
        ANSWERS.parent.mkdir(exist_ok=True)
        ANSWERS.write_text(json.dumps(answers))
    return 0 if draw_all(board, answers, chosen.out) else 1


if __name__ == "__main__":
    sys.exit(main())
