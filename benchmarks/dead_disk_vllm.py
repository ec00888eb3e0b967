"""What does real vLLM lose while the disk of its SSD tier fails, or hangs?"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._common import Result, finish, median, note, pool_place
from benchmarks._tiny_model import TINY_LLAMA
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
DRAWS = 2000
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "PEGAFLOW_SHARE_DUMMY_WEIGHTS": "1",
}


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


class Engine:
    """A vLLM with a pool of its own, and with an SSD tier if there is a directory for it."""

    def __init__(
        self, machine: Machine, model: Path, shm_dir: Path, log: Path, ssd: Path | None, **environment: str
    ) -> None:
        self.shm_dir = shm_dir
        options: dict[str, Any] = {"pegaflow.shm_dir": str(shm_dir), "pegaflow.pool_size": machine.pool_bytes}
        if ssd is not None:
            ssd.mkdir()
            options |= {"pegaflow.ssd_cache_path": str(ssd), "pegaflow.ssd_cache_capacity": machine.ssd_bytes}
            # What the library that kills disks can get at.
            options |= {"pegaflow.ssd_admission": "all", "pegaflow.ssd_backend": "threads"}
        settings = {
            "model": str(model),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 1024,
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": KV_BLOCKS,
            "prefix_caching_hash_algo": "sha256_cbor",
            "kv_transfer_config": {
                "kv_connector": "PegaKVConnector",
                "kv_connector_module_path": "pegaflow.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": options,
            },
            **machine.engine,
        }
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks._dead_disk_vllm_child", json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | ENVIRONMENT | environment,
                start_new_session=True,
            )

    def answer(self) -> str:
        """The next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise SystemExit("An engine of the benchmark ended early: its log is beside the others.")
        return line

    def round(self, prompts: list[list[int]]) -> tuple[float, float]:
        """Seconds, and seconds of CPU of all its processes."""
        assert self.process.stdin is not None
        before = self._cpu_seconds()
        self.process.stdin.write(json.dumps(prompts) + "\n")
        self.process.stdin.flush()
        return float(self.answer()), self._cpu_seconds() - before

    def state(self) -> str:
        """Of its tier."""
        pool = _native.Pool.open("default", shm_dir=str(self.shm_dir), create=False, label="benchmark")
        try:
            facts = pool.ssd()
            return "none" if facts is None else f"{facts['state']}, {facts['spilled_blocks']} blocks written"
        finally:
            pool.close()

    def _cpu_seconds(self) -> float:
        ticks = 0
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self.process.pid:
                ticks += int(fields[11]) + int(fields[12])
        return ticks / TICKS_PER_SECOND


@contextmanager
def running(engine: Engine) -> Iterator[Engine]:
    """All its processes are killed in the end: one that hangs in the kernel's stead does not end by itself."""
    try:
        yield engine
    finally:
        os.killpg(engine.process.pid, signal.SIGKILL)
        engine.process.wait()


def prompts_of(number: int, vocabulary: int) -> list[list[int]]:
    """Those of a round: some are new, the others had been new in an earlier one."""

    def new(of: int) -> list[list[int]]:
        draw = random.Random(of)
        return [[draw.randrange(1, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]

    return new(number)[REPEATED:] + (new(number - REPEATED_AFTER)[REPEATED:] if number >= REPEATED_AFTER else [])


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Within which the median of such ratios lies in 95 of 100 drawings from them."""
    draw = random.Random(1)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return medians[DRAWS * 25 // 1000], medians[DRAWS * 975 // 1000]


def report(name: str, own: list[tuple[float, float]], plain: list[tuple[float, float]]) -> list[Result]:
    """Medians of both, and of what each round took against the same round without SSD."""
    results = []
    for at, what in enumerate(("", ", CPU")):
        ours, theirs = [pair[at] for pair in own], [pair[at] for pair in plain]
        results.append(Result(f"a round, {name}{what}", 1e3 * median(ours), "ms", "no SSD", 1e3 * median(theirs)))
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True) if other > 0]
        low, high = interval(ratios)
        results.append(Result(f"ratio of each round, {name}{what}", median(ratios), "x"))
        note(f"{name}{what}: {median(ratios):.3f} times as long, 95 %: {low:.3f} to {high:.3f}, {len(ratios)} rounds")
    return results


def measure(engines: dict[str, Engine], triggers: Sequence[Path], vocabulary: int, dead_rounds: int) -> list[Result]:
    """Rounds in turns: first while all disks work, then while they are dead."""
    results, number = [], 0
    for phase, rounds in (("warm", WARM_ROUNDS), ("disk works", WORKING_ROUNDS), ("dead", dead_rounds)):
        if phase == "dead":
            for trigger in triggers:
                trigger.touch()
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        for _ in range(rounds):
            # None is always the one that finds the processor's cache full of another's bytes.
            names = sorted(engines, key=lambda name: (list(engines).index(name) + number) % len(engines))
            for name in names:
                times[name].append(engines[name].round(prompts_of(number, vocabulary)))
            number += 1
        plain = times.pop("no SSD")
        note(f"{phase}: " + "; ".join(f"{name}: {engines[name].state()}" for name in times))
        for name, own in times.items():
            if phase != "warm":
                results += report(name if phase == "dead" else f"{phase} ({name} later)", own, plain)
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
        (place / "model").mkdir()
        (place / "model" / "config.json").write_text(json.dumps(machine.model))
        kinds: dict[str, dict[str, str]] = {
            "no SSD": {},
            "every operation fails": {},
            "no operation ends": {"DEAD_DISK_HANGS": "1"},
        }
        with ExitStack() as stack:
            engines: dict[str, Engine] = {}
            for at, (name, how) in enumerate(kinds.items()):
                shm_dir = stack.enter_context(pool_place(2 * machine.pool_bytes))
                preload = {"LD_PRELOAD": str(shim.resolve()), "DEAD_DISK_TRIGGER": str(place / f"trigger-{at}")}
                ssd = place / f"ssd-{at}" if at else None
                log = PLACE / f"dead-disk-vllm-{at}.log"
                engine = Engine(machine, place / "model", shm_dir, log, ssd, **preload, **how)
                engines[name] = stack.enter_context(running(engine))
            note("vLLM starts three times ...")
            started = time.monotonic()
            for engine in engines.values():
                engine.answer()
            note(f"after {time.monotonic() - started:.0f} s")
            triggers = [place / f"trigger-{at}" for at in range(len(kinds))]
            results = measure(engines, triggers, machine.model["vocab_size"], options.rounds)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    finish("dead_disk_vllm", results)


if __name__ == "__main__":
    main()
