"""The results of ``vllm_gpu`` as one Markdown table."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

COLUMNS = ("scenario", "connector", "block", "what", "unit", "mean", "p50", "p99", "max", "n", "tokens", "more")
SHOWN_APART = ("what", "unit", "mean", "p50", "p99", "max", "n", "tokens")


@dataclass
class Run:
    """One engine: what it was, and what was measured or why nothing was."""

    scenario: str
    connector: str
    block_tokens: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Measurements: ``what``, ``unit``, numbers, ``tokens`` (a digest of what was generated) and more."""
    error: str | None = None


def table(runs: Sequence[Run]) -> str:
    """All measurements. Tokens are compared with the first ones of their scenario that have as many prompts."""
    lines = [list(COLUMNS), ["---"] * len(COLUMNS)]
    references: dict[tuple[str, str], str] = {}
    for run in runs:
        head = [run.scenario, run.connector, str(run.block_tokens)]
        if run.error is not None:
            lines.append([*head, run.error.replace("|", "/"), *[""] * (len(COLUMNS) - 4)])
        for row in run.rows:
            numbers = [number(row.get(name)) for name in ("mean", "p50", "p99", "max", "n")]
            more = ", ".join(f"{key} {number(value)}" for key, value in row.items() if key not in SHOWN_APART)
            lines.append([*head, row["what"], row["unit"], *numbers, verdict(run, row, references), more])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def verdict(run: Run, row: dict[str, Any], references: dict[tuple[str, str], str]) -> str:
    """Whether the tokens of a measurement are those that were generated first from the same prompts."""
    tokens = row.get("tokens")
    if not tokens:
        return ""
    same_prompts = row["what"] if run.scenario in ("unique", "successor") else str(row.get("n"))
    if run.scenario == "itl":
        same_prompts = "streams"
    first = references.setdefault((run.scenario, same_prompts), tokens)
    return "equal" if tokens == first else "DIFFER"


def number(value: Any) -> str:
    """Numbers with thousands separated, everything else as it is."""
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int | float) else str(value)
