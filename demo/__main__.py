"""``python -m demo [--model MODEL]``: run the scenarios, print the table, write ``build/demo.json``."""

import sys
from pathlib import Path

from rich.console import Console

from demo import command
from demo.scenarios import Demo


def _make(model: str, text: str, logs: Path, console: Console) -> Demo:
    return Demo(model, text, logs, command.BUILD / "demo-ssd", console)


if __name__ == "__main__":
    sys.exit(command.run("PegaFlow under real vLLM on the CPU.", "demo.json", _make))
