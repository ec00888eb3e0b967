"""The picture of the Grafana board, drawn from answers that a real Prometheus gave once, and what keeps it from being
drawn."""

import itertools
import json
import threading
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from wsgiref.simple_server import make_server

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from pegaflow.cli.scrape_server import Handler
from tools import board_picture
from tools._board import read_board
from tools._board_drawing import SCALES, draw, scale_of
from tools._prometheus import Refused, ask

RECORDED = Path(__file__).with_name("board_answers.json")
PICTURE_BYTES_MAX = 300_000
BOARD = read_board(rate_seconds=board_picture.RATE_SECONDS)


def recorded() -> board_picture.Answers:
    answers: board_picture.Answers = json.loads(RECORDED.read_text())
    return answers


@pytest.fixture
def answered() -> Iterator[tuple[str, list[bytes]]]:
    """A server in place of Prometheus, and what it answers, in this order: all with the status 422."""
    answers: list[bytes] = []

    def answer(_environment: Any, start: Any) -> list[bytes]:
        start("422 Unprocessable Entity", [("Content-Type", "application/json")])
        return [answers.pop(0)]

    with make_server("127.0.0.1", 0, answer, handler_class=Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}", answers
        server.shutdown()
        thread.join()


def test_picture_of_recorded_answers_has_all_titles_and_legends_and_is_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for picture in pictures:
        assert board_picture.main(["--answers", str(RECORDED), "--out", str(picture)]) == 0
    drawn = unescape(pictures[0].read_text())
    times = board_picture.times_of(recorded())
    for panel in BOARD.panels:
        assert f">{panel.title}<" in drawn
        for one in board_picture.series_of(panel, recorded()["panels"][panel.title], times):
            assert f">{one.legend}<" in drawn
    assert "as Prometheus answered them, not by Grafana" in drawn
    assert 0 < pictures[0].stat().st_size < PICTURE_BYTES_MAX
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    said = capsys.readouterr().out
    assert said.count("ok ") > said.count("-- ") > 0
    assert drawn.count(">No data<") == said.count("-- ") // 2


def test_no_two_texts_of_the_picture_lie_on_each_other() -> None:
    answers = recorded()
    times = board_picture.times_of(answers)
    lines = {
        panel.title: board_picture.series_of(panel, answers["panels"][panel.title], times) for panel in BOARD.panels
    }
    figure = draw(BOARD, times, lines, board_picture.WHY_EMPTY, "caption")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [one for one in figure.findobj(Text) if isinstance(one, Text) and one.get_text() and one.get_visible()]
    assert len(texts) > 200
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in texts]
    for text, box in boxes:
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1, text
    for (text, box), (other, other_box) in itertools.combinations(boxes, 2):
        assert not (
            min(box.x1, other_box.x1) - max(box.x0, other_box.x0) > 1
            and min(box.y1, other_box.y1) - max(box.y0, other_box.y0) > 1
        ), f"{text!r} and {other!r}"


def test_panel_without_data_fails_unless_it_is_known_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = recorded()
    answers["panels"]["Time of a load"] = [[], [], []]
    changed = tmp_path / "answers.json"
    changed.write_text(json.dumps(answers))
    assert board_picture.main(["--answers", str(changed), "--out", str(tmp_path / "board.svg")]) == 1
    assert "NOT Time of a load: 0 of 0 series have data." in capsys.readouterr().out


def test_missing_program_is_said_in_a_sentence_before_anything_is_started() -> None:
    with pytest.raises(SystemExit, match=r"There is no program 'no-prometheus': install Prometheus \(on Debian: .*\)"):
        board_picture.main(["--prometheus", "no-prometheus"])


def test_query_that_is_refused_ends_the_command_with_what_prometheus_said(
    answered: tuple[str, list[bytes]], tmp_path: Path
) -> None:
    address, answers = answered
    refusal = json.dumps({"status": "error", "errorType": "bad_data", "error": "parse error: what is that"}).encode()
    answers.append(refusal)
    with pytest.raises(Refused, match="parse error: what is that"):
        ask(address, "query", query="what is that")
    empty = json.dumps({"status": "success", "data": {"result": []}}).encode()
    some = json.dumps({"status": "success", "data": ["one"]}).encode()
    queries = sum(len(panel.queries) for panel in BOARD.panels)
    answers += [refusal, *[empty] * (queries - 1), *[some] * len(BOARD.variables)]
    with pytest.raises(SystemExit, match="NOT Where tokens of prompts came from: parse error: what is that"):
        board_picture.ask_all(address, BOARD, 0.0, 1.0)


@pytest.mark.parametrize(
    ("unit", "value", "shown"),
    [
        ("percentunit", 1.0, (0.01, "%")),
        ("s", 0.004, (1e-3, " ms")),
        ("s", 1e-9, (1e-6, " us")),
        ("bytes", 48 << 20, (1 << 20, " MiB")),
        ("Bps", 2_500_000, (1e6, " MB/s")),
        ("short", 12, (1, "")),
    ],
)
def test_values_are_written_in_a_unit_that_fits_them(unit: str, value: float, shown: tuple[float, str]) -> None:
    assert scale_of(unit, value) == shown
    assert {panel.unit for panel in BOARD.panels} <= SCALES.keys()
