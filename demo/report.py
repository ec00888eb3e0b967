"""The demo's rows: as a table, as JSON, and as a verdict."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

COLD = "cold"
"""Scenario of the first request with the connector and an empty pool."""


@dataclass(frozen=True)
class Row:
    """One scenario, measured."""

    scenario: str
    ttft_s: float
    cached_tokens: int
    text_equal: bool
    must_hit: bool
    """Whether the scenario is lost if nothing came from the cache."""

    def problem(self) -> str | None:
        """What is wrong with this row, if anything."""
        if not self.text_equal:
            return f"{self.scenario}: the text differs from the reference"
        if self.must_hit and not self.cached_tokens:
            return f"{self.scenario}: nothing came from the cache"
        return None


def table(rows: list[Row], prompt_tokens: int) -> Table:
    """All rows, each compared with the row ``cold``."""
    (cold_ttft_s,) = [row.ttft_s for row in rows if row.scenario == COLD]
    drawn = Table(title=f"A text of {prompt_tokens:,} tokens, continued by real vLLM on the CPU")
    drawn.add_column("scenario")
    drawn.add_column("time to first token", justify="right", width=9)
    drawn.add_column("against cold", justify="right", width=7)
    drawn.add_column("tokens from cache", justify="right", width=6)
    drawn.add_column("text equal", justify="right", width=5)
    for row in rows:
        if row.scenario == COLD:
            drawn.add_section()
        times = f"{cold_ttft_s / row.ttft_s:.1f} x"
        verdict = "[green]yes[/]" if row.text_equal else "[bold red]NO[/]"
        drawn.add_row(row.scenario, f"{row.ttft_s:.3f} s", times, f"{row.cached_tokens:,}", verdict)
    return drawn


def write_json(rows: list[Row], path: Path) -> None:
    """Write the rows to ``path`` as a list of ``{scenario, ttft_s, cached_tokens, text_equal}``."""
    public = [{key: value for key, value in asdict(row).items() if key != "must_hit"} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(public, indent=2) + "\n")
