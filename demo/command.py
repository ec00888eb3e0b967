"""What every demo does as a command: run the scenarios, print the table, write the rows as JSON."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rich.console import Console

from demo.engine import EngineError
from demo.report import Row, table, write_json
from demo.two_hosts import CannotMakeHosts

TEXT = Path(__file__).with_name("text.txt")
BUILD = Path("build")


class Demo(Protocol):
    """Scenarios, and the rows that they have given so far."""

    rows: list[Row]

    @property
    def prompt_tokens(self) -> int:
        """Length of the text."""
        ...

    def run(self) -> list[Row]:
        """All rows."""
        ...


def run(description: str, result: str, make: Callable[[str, str, Path, Console], Demo]) -> int:
    """Exit status: 0 if no row has a problem. ``result``: name of the JSON file. ``make`` takes the name or directory
    of the model, the text, the directory for logs, and where to write."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default="build/models/gemma3-270m", help="Hugging Face name or directory")
    model: str = parser.parse_args().model
    console = Console()
    logs = BUILD / "demo-logs"
    logs.mkdir(parents=True, exist_ok=True)
    name = str(Path(model).resolve()) if Path(model).is_dir() else model
    demo = make(name, TEXT.read_text().rstrip(), logs, console)
    try:
        rows = demo.run()
    except (EngineError, CannotMakeHosts) as error:
        console.print("error:", error, style="bold red", markup=False, highlight=False)
        return 1
    finally:
        write_json(demo.rows, BUILD / result)
    console.print(table(rows, demo.prompt_tokens))
    problems = [problem for row in rows if (problem := row.problem())]
    for problem in problems:
        console.print(f"[bold red]{problem}[/]")
    console.print(f"Rows are in {BUILD / result}, logs of the engines in {logs}/", highlight=False)
    return 1 if problems else 0
