"""``python -m demo [--model MODEL]``: run the scenarios, print the table, write ``build/demo.json``."""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from demo.engine import EngineError
from demo.report import table, write_json
from demo.scenarios import Demo

TEXT = Path(__file__).with_name("text.txt")
BUILD = Path("build")


def main() -> int:
    """Exit status: 0 if every text was equal and every warm row took tokens from the cache."""
    parser = argparse.ArgumentParser(description="PegaFlow under real vLLM on the CPU.")
    parser.add_argument("--model", default="build/models/gemma3-270m", help="Hugging Face name or directory")
    model: str = parser.parse_args().model
    console = Console()
    logs = BUILD / "demo-logs"
    logs.mkdir(parents=True, exist_ok=True)
    name = str(Path(model).resolve()) if Path(model).is_dir() else model
    demo = Demo(name, TEXT.read_text().rstrip(), logs, BUILD / "demo-ssd", console)
    try:
        rows = demo.run()
    except EngineError as error:
        console.print("error:", error, style="bold red", markup=False, highlight=False)
        return 1
    finally:
        write_json(demo.rows, BUILD / "demo.json")
    console.print(table(rows, demo.prompt_tokens))
    problems = [problem for row in rows if (problem := row.problem())]
    for problem in problems:
        console.print(f"[bold red]{problem}[/]")
    console.print(f"Rows are in {BUILD}/demo.json, logs of the engines in {logs}/", highlight=False)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
