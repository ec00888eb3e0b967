"""How the commands show sizes, times, tables and JSON."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

STYLES = {
    "ok": "green",
    "warning": "yellow",
    "error": "bold red",
    "info": "cyan",
    "refused": "yellow",
    "creating": "",
    "in use": "cyan",
    "damaged": "bold red",
    "up": "green",
    "backing off": "bold red",
    "itself": "cyan",
}


def format_bytes(count: int | None) -> str:
    """Bytes for people, in binary units: ``512 B``, ``1.5 GiB``; ``-`` for ``None``."""
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size >= 100 or size == int(size) else f"{size:.1f} {unit}"


def format_seconds(seconds: int | None) -> str:
    """A time span for people, in at most two units: ``45 s``, ``2 h 5 min``; ``-`` for ``None``."""
    if seconds is None:
        return "-"
    rest = max(0, int(seconds))
    parts: list[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, length)
        if count:
            parts.append(f"{count} {unit}")
        elif parts:
            break
    return " ".join(parts[:2]) or "0 s"


def format_count(count: int, noun: str) -> str:
    """``1 process``, ``2 processes``, ``1,024 blocks``."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{count:,} {noun if count == 1 else plural}"


def printable(text: str) -> str:
    """``text`` without control characters: names and labels in a pool come from somebody else."""
    return "".join(char if char.isprintable() else "?" for char in text)


def echo_json(value: Any) -> None:
    """Print one JSON document; dataclasses become objects."""

    def plain(item: Any) -> Any:
        return dataclasses.asdict(item)

    click.echo(json.dumps(value, default=plain, indent=2))


def table(*columns: str, right: Sequence[str] = (), caption: str | None = None) -> Table:
    """A table whose cells wrap rather than lose text; ``right`` names the columns of numbers."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    made.title, made.title_justify, made.title_style = caption, "left", "bold"
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def cell(text: object, style: str = "") -> Text:
    """Table text that is never read as markup and never moves the cursor."""
    return Text(printable(str(text)), style=style)


def state_cell(state: str) -> Text:
    """A state or level in its colour."""
    return cell(state, STYLES.get(state, ""))


def show(*items: object) -> None:
    """Print tables and text to standard output, as wide as the terminal, or 80 columns into a file."""
    # Not kept: tests and pagers replace sys.stdout between calls.
    console = Console(highlight=False, soft_wrap=False)
    for item in items:
        console.print(item, markup=False)
