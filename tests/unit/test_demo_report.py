"""The demo's verdict cannot be green by accident, and its table fits a terminal."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from demo.report import COLD, Row, table, write_json

ROWS = [
    Row("no connector", 4.0, 0, True, must_hit=False),
    Row("no connector, vLLM's own prefix cache", 0.08, 2016, True, must_hit=False),
    Row(COLD, 4.0, 0, True, must_hit=False),
    Row("warm: fresh process after kill -9", 0.1, 2016, True, must_hit=True),
    Row("host B: from host A, whose first engine is dead, and another one there", 12.25, 2016, True, must_hit=True),
]


@pytest.mark.parametrize("row", ROWS)
def test_good_rows_have_no_problem(row: Row) -> None:
    assert row.problem() is None


def test_another_text_is_a_problem() -> None:
    assert Row(COLD, 4.0, 0, False, must_hit=False).problem() == "cold: the text differs from the reference"


def test_a_warm_row_without_a_hit_is_a_problem() -> None:
    assert Row("warm", 0.1, 0, True, must_hit=True).problem() == "warm: nothing came from the cache"


def test_json_has_one_object_per_row_with_the_four_documented_keys(tmp_path: Path) -> None:
    path = tmp_path / "build" / "demo.json"
    write_json(ROWS, path)
    written = json.loads(path.read_text())
    assert [row["scenario"] for row in written] == [row.scenario for row in ROWS]
    assert all(set(row) == {"scenario", "ttft_s", "cached_tokens", "text_equal"} for row in written)


def test_table_fits_eighty_columns_uncut() -> None:
    console = Console(width=80, record=True, force_terminal=False)
    with console.capture() as capture:
        console.print(table(ROWS, 2024))
    drawn = capture.get()
    assert "\N{HORIZONTAL ELLIPSIS}" not in drawn
    words = set(drawn.split())
    assert all(words.issuperset(row.scenario.split()) for row in ROWS)
    assert all(number in drawn for number in ("40.0 x", "12.250 s", "2,016"))
