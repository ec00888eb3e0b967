"""Hit rates of our policies, of those of libcachesim (if it is installed), and of the optimum, over traces:
``python -m benchmarks.replay TRACE...``; without a trace, over conversations that are made up.

libcachesim simulates caches of single objects. Each block is an object of one byte here; the blocks of a prompt are
asked for last one first, so that its tail goes before its head. A hit is a block that is there with all blocks before
it, as everywhere in this project. Prints Markdown, the best policy of each column in bold.
"""

import argparse
import importlib.util
import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks._common import Result, finish, median, seconds_of
from pegaflow.cli.replay import CAPACITIES, blocks_of
from pegaflow.replay.policies import OPTIMUM, POLICIES, hits_of
from pegaflow.replay.trace import Prompt, distinct_blocks, read_trace

OTHERS = (
    "LRU",
    "SLRU",
    "TwoQ",
    "LIRS",
    "ARC",
    "S3FIFO",
    "Sieve",
    "WTinyLFU",
    "LeCaR",
    "Cacheus",
    "LHD",
    "GDSF",
    "ClockPro",
)
OURS = "pool"
RUNS = 3
CONVERSATIONS, TURNS_MAX, OPEN_MAX = 2_000, 12, 60


def conversations(seed: int) -> list[Prompt]:
    """Conversations that take turns; each turn asks for all before it and a few blocks more."""
    chance = random.Random(seed)
    prompts: list[Prompt] = []
    running: list[list[int | str]] = []
    for number in range(CONVERSATIONS):
        running.append([f"system {chance.randrange(4)}"])
        for turn in range(chance.randint(1, TURNS_MAX)):
            talk = running[chance.randrange(len(running))]
            talk += [f"{number} {turn} {block}" for block in range(chance.randint(1, 8))]
            prompts.append(list(talk))
        if len(running) > OPEN_MAX:
            running.pop(chance.randrange(len(running)))
    return prompts


class Simulated:
    """A cache of libcachesim."""

    def __init__(self, name: str, blocks_max: int, numbers: dict[int | str, int]) -> None:
        simulator = importlib.import_module("libcachesim")
        self._cache = getattr(simulator, name)(cache_size=blocks_max)
        self._numbers = numbers
        self._request = simulator.Request()
        self._request.obj_size = 1

    def _of(self, block: int | str) -> Any:
        self._request.obj_id = self._numbers[block]
        return self._request

    def find(self, prompt: Prompt) -> int:
        """How many blocks from the first on are there."""
        for position, block in enumerate(prompt):
            if self._cache.find(self._of(block), update_cache=False) is None:
                return position
        return len(prompt)

    def store(self, prompt: Prompt) -> None:
        """All blocks of the prompt were used, and those that were absent are stored."""
        for block in reversed(prompt):
            self._cache.get(self._of(block))


def hits_of_other(name: str, prompts: Sequence[Prompt], blocks_max: int) -> int:
    """Blocks found by a cache of libcachesim."""
    numbers: dict[int | str, int] = {}
    counter = itertools.count(1)
    for prompt in prompts:
        for block in prompt:
            if block not in numbers:
                numbers[block] = next(counter)
    cache = Simulated(name, blocks_max, numbers)
    hits = 0
    for prompt in prompts:
        hits += cache.find(prompt)
        cache.store(prompt)
    return hits


def rows_of(prompts: Sequence[Prompt]) -> dict[str, list[float]]:
    """Per cent of the blocks found, for each policy and capacity."""
    asked, distinct = sum(map(len, prompts)), distinct_blocks(prompts)
    runs: dict[str, Callable[[int], int]] = {name: partial(hits_of, name, prompts) for name in (*POLICIES, OPTIMUM)}
    if importlib.util.find_spec("libcachesim"):
        runs |= {f"libcachesim {name}": partial(hits_of_other, name, prompts) for name in OTHERS}
    sizes = [blocks_of(capacity, distinct) for capacity in CAPACITIES]
    return {name: [100 * run(blocks) / asked for blocks in sizes] for name, run in runs.items()}


def print_table(title: str, rows: dict[str, list[float]]) -> None:
    """As Markdown."""
    print(f"\n{title}\n\n| policy | " + " | ".join(CAPACITIES) + " |")
    print("|---|" + "---:|" * len(CAPACITIES))
    real = [values for name, values in rows.items() if name != OPTIMUM]
    best = [max(column) for column in zip(*real, strict=True)]
    for name, values in rows.items():
        cells = [
            f"**{value:.1f}**" if value == top else f"{value:.1f}" for value, top in zip(values, best, strict=True)
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")


def results_of(trace: str, rows: dict[str, list[float]]) -> list[Result]:
    """Ours against the optimum, and against the best of all others, by capacity."""
    results = []
    for at, capacity in enumerate(CAPACITIES):
        others = {name: values[at] for name, values in rows.items() if name not in (OURS, OPTIMUM)}
        best = max(others, key=lambda name: others[name])
        label = f"{trace}, {capacity}: blocks found"
        results.append(Result(label, rows[OURS][at], "%", OPTIMUM, rows[OPTIMUM][at]))
        results.append(Result(label, rows[OURS][at], "%", f"best other ({best})", others[best]))
    return results


def main() -> None:
    """Run all policies over all traces."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*", type=Path)
    traces = {trace.name: read_trace(trace) for trace in parser.parse_args().traces}
    results = []
    for name, prompts in (traces or {"conversations": conversations(1)}).items():
        rows = rows_of(prompts)
        print_table(f"`{name}`: blocks found, %, by capacity as a share of the distinct blocks", rows)
        results += results_of(name, rows)
        blocks = blocks_of(CAPACITIES[2], distinct_blocks(prompts))
        seconds = median([seconds_of(partial(hits_of, OURS, prompts, blocks)) for _ in range(RUNS)])
        results.append(Result(f"{name}: requested blocks replayed", sum(map(len, prompts)) / seconds, "blocks/s"))
    finish("replay", results)


if __name__ == "__main__":
    main()
