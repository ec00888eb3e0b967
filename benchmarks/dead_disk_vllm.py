"""What does real vLLM lose while the disk of its SSD tier fails, or hangs?"""

import argparse
import json
import os
import random
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._common import Result, finish, note, pool_place
from benchmarks._tiny_model import TINY_LLAMA
from benchmarks._vllm_rounds import (
    Engine,
    Round,
    Start,
    compared,
    in_turn,
    model_place,
    running,
    settings_of,
    with_connector,
)
from benchmarks.dead_disk import PLACE, library
from pegaflow import _native

PROMPTS = 12
PROMPT_TOKENS = 512
REPEATED = 6
"""Prompts of a round that were asked for some rounds before, when other blocks have pushed theirs out of memory."""

REPEATED_AFTER = 24
WARM_ROUNDS = 30
WORKING_ROUNDS = 30
ROUNDS = int(os.environ.get("PEGAFLOW_DEAD_DISK_ROUNDS", "150"))
KV_BLOCKS = 64
BLOCK_TOKENS = 128


@dataclass(frozen=True)
class Machine:
    """What the engines are on: none of their pools holds what ``REPEATED_AFTER`` rounds leave."""

    model: dict[str, Any] = field(default_factory=lambda: TINY_LLAMA)
    pool_bytes: int = 32 << 20
    ssd_bytes: int = 10**9
    engine: dict[str, Any] = field(default_factory=dict)
    """More arguments of vLLM's."""


def on_gpu(model: Path) -> Machine:
    """Three engines of a real shape on one GPU; the sixty blocks of a round have to fit into a pool."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_key_value_heads"] * config["hidden_size"] // config["num_attention_heads"]
    block_bytes = 2 * 2 * config["num_hidden_layers"] * heads * BLOCK_TOKENS
    # A round leaves 24 blocks that come again: a fifth of those of `REPEATED_AFTER` rounds, and half of them.
    return Machine(config, 120 * block_bytes, 1000 * block_bytes, {"gpu_memory_utilization": 0.25})


def start_of(machine: Machine, model: Path, shm_dir: Path, ssd: Path | None, **environment: str) -> Start:
    """A vLLM with a pool of its own, and with an SSD tier if there is a directory for it."""
    options: dict[str, Any] = {}
    if ssd is not None:
        ssd.mkdir()
        options = {"pegaflow.ssd_cache_path": str(ssd), "pegaflow.ssd_cache_capacity": machine.ssd_bytes}
        # What the library that kills disks can get at.
        options |= {"pegaflow.ssd_admission": "all", "pegaflow.ssd_backend": "threads"}
    settings = settings_of(model, BLOCK_TOKENS, KV_BLOCKS, **machine.engine)
    return Start(with_connector(settings, shm_dir, machine.pool_bytes, **options), environment)


def state(shm_dir: Path) -> str:
    """Of a pool's SSD tier."""
    pool = _native.Pool.open("default", shm_dir=str(shm_dir), create=False, label="benchmark")
    try:
        facts = pool.ssd()
        return "none" if facts is None else f"{facts['state']}, {facts['spilled_blocks']} blocks written"
    finally:
        pool.close()


def prompts_of(number: int, vocabulary: int) -> list[list[int]]:
    """Those of a round: some are new, the others had been new in an earlier one."""

    def new(of: int) -> list[list[int]]:
        draw = random.Random(of)
        return [[draw.randrange(1, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]

    return new(number)[REPEATED:] + (new(number - REPEATED_AFTER)[REPEATED:] if number >= REPEATED_AFTER else [])


def measure(
    engines: dict[str, Engine], shm_dirs: dict[str, Path], triggers: Sequence[Path], vocabulary: int, dead_rounds: int
) -> list[Result]:
    """Rounds in turns: first while all disks work, then while they are dead."""
    results, number = [], 0
    for phase, rounds in (("warm", WARM_ROUNDS), ("disk works", WORKING_ROUNDS), ("dead", dead_rounds)):
        if phase == "dead":
            for trigger in triggers:
                trigger.touch()
        took: dict[str, list[Round]] = {name: [] for name in engines}
        for _ in range(rounds):
            for name in in_turn(list(engines), number):
                took[name].append(engines[name].round(prompts_of(number, vocabulary)))
            number += 1
        plain = took.pop("no SSD")
        note(f"{phase}: " + "; ".join(f"{name}: {state(shm_dirs[name])}" for name in took))
        for name, own in took.items():
            if phase != "warm":
                results += compared(name if phase == "dead" else f"{phase} ({name} later)", own, plain, "no SSD")
    return results


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", type=Path, metavar="MODEL", help="on a GPU, in the shape of the config.json in MODEL")
    parser.add_argument("--shim", type=Path, help="the library that kills disks, where there is no C compiler")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"while disks are dead; {ROUNDS} by default")
    return parser.parse_args()


def main() -> None:
    """Run it and report."""
    options = parse()
    machine = on_gpu(options.gpu) if options.gpu else Machine()
    PLACE.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="dead-disk-vllm-", dir=PLACE)).resolve()
    try:
        shim = options.shim or library(place)
        kinds: dict[str, dict[str, str]] = {
            "no SSD": {},
            "every operation fails": {},
            "no operation ends": {"DEAD_DISK_HANGS": "1"},
        }
        with ExitStack() as stack:
            model = stack.enter_context(model_place(machine.model))
            shm_dirs = {name: stack.enter_context(pool_place(2 * machine.pool_bytes)) for name in kinds}
            starts = {}
            for at, (name, how) in enumerate(kinds.items()):
                preload = {"LD_PRELOAD": str(shim.resolve()), "DEAD_DISK_TRIGGER": str(place / f"trigger-{at}")}
                ssd = place / f"ssd-{at}" if at else None
                starts[name] = start_of(machine, model, shm_dirs[name], ssd, **preload, **how)
            engines = stack.enter_context(running("dead-disk-vllm", starts))
            triggers = [place / f"trigger-{at}" for at in range(len(kinds))]
            results = measure(engines, shm_dirs, triggers, machine.model["vocab_size"], options.rounds)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    finish("dead_disk_vllm", results)


if __name__ == "__main__":
    main()
