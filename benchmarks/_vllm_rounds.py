"""vLLM engines that answer rounds of prompts, each in a process of its own, so that several can take turns or run at
once; and what the ratios of such rounds say.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._common import Result, median, note

OUTPUT_TOKENS = 8
LOGS = Path("build")
END_SECONDS_MAX = 30.0
DRAWS = 2000
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# vLLM keeps one processor free for its scheduler, and another one if there is a connector, whichever it is. Engines
# with and without one are to compute on as many.
CPUS = sorted(os.sched_getaffinity(0))
COMPUTING = CPUS[1:] or CPUS
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, COMPUTING)),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "PEGAFLOW_SHARE_DUMMY_WEIGHTS": "1",
}


@dataclass(frozen=True)
class Round:
    """What a round of prompts took."""

    seconds: float
    cpu_seconds: float
    """Of all processes of the engine."""
    cached: int
    """Tokens that came from a cache."""
    requests_ms: tuple[float, ...]
    """Of each request, if they ran one at a time."""


def settings_of(model: Path, block_tokens: int, kv_blocks: int, **more: Any) -> dict[str, Any]:
    """Arguments of an engine without a connector, with made-up weights in the shape of ``model / config.json``."""
    return {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 1024,
        "block_size": block_tokens,
        "num_gpu_blocks_override": kv_blocks,
        "prefix_caching_hash_algo": "sha256_cbor",
        **more,
    }


def with_connector(settings: dict[str, Any], shm_dir: Path, pool_bytes: int, **options: Any) -> dict[str, Any]:
    """The same engine with our connector, on the pool in ``shm_dir``, which whoever comes first makes."""
    extra = {"pegaflow.shm_dir": str(shm_dir), "pegaflow.pool_size": pool_bytes, **options}
    transfer = {
        "kv_connector": "PegaKVConnector",
        "kv_connector_module_path": "pegaflow.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return {**settings, "kv_transfer_config": transfer}


class Engine:
    """A vLLM in a process of its own. Starts at once; its log goes to ``log``."""

    def __init__(self, settings: dict[str, Any], log: Path, **environment: str) -> None:
        self._log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks._vllm_rounds_child", json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | ENVIRONMENT | environment,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Ends the benchmark if the engine does not start."""
        self._answer()

    def begin(self, prompts: Sequence[list[int]], *, together: bool = True) -> None:
        """Ask for a round, all prompts at once or one at a time; ``end`` waits for it."""
        assert self.process.stdin is not None
        self._cpu_before = self._cpu_seconds()
        wanted = {"prompts": prompts, "together": together, "output_tokens": OUTPUT_TOKENS}
        self.process.stdin.write(json.dumps(wanted) + "\n")
        self.process.stdin.flush()

    def end(self) -> Round:
        """What the round took that was asked for last."""
        answer = json.loads(self._answer())
        cpu_seconds = self._cpu_seconds() - self._cpu_before
        return Round(answer["seconds"], cpu_seconds, answer["cached"], tuple(answer["requests_ms"]))

    def round(self, prompts: Sequence[list[int]], *, together: bool = True) -> Round:
        """Both."""
        self.begin(prompts, together=together)
        return self.end()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"An engine of the benchmark ended early: see {self._log}.")
        return line

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


@dataclass(frozen=True)
class Start:
    """What one engine of several is started with."""

    settings: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)


@contextmanager
def running(benchmark: str, starts: dict[str, Start]) -> Iterator[dict[str, Engine]]:
    """Engines by the names of their starts, all of them ready. Their logs go to ``build``.

    All their processes end with the block. They are asked to, since what vLLM has in shared memory outlives it when it
    is killed; but one that hangs in the kernel's stead has to be.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    engines: dict[str, Engine] = {}
    try:
        for at, (name, start) in enumerate(starts.items()):
            engines[name] = Engine(start.settings, LOGS / f"{benchmark}-{at}.log", **start.environment)
        note(f"vLLM starts {len(engines)} times ...")
        started = time.monotonic()
        for engine in engines.values():
            engine.wait_until_ready()
        note(f"after {time.monotonic() - started:.0f} s")
        yield engines
    finally:
        end_all([engine.process for engine in engines.values()])


def end_all(processes: Sequence["subprocess.Popen[str]"]) -> None:
    """End of input tells them to end; what is left of them and their children after ``END_SECONDS_MAX`` is killed."""
    for process in processes:
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
    deadline = time.monotonic() + END_SECONDS_MAX
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def model_place(config: dict[str, Any]) -> Iterator[Path]:
    """A directory with this ``config.json``, which is all that engines with made-up weights need."""
    with tempfile.TemporaryDirectory(prefix="pegaflow-bench-model-") as place:
        (Path(place) / "config.json").write_text(json.dumps(config))
        yield Path(place)


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """The order of round ``number``, drawn by lot: none is always first, nor always behind the same other one, whose
    bytes fill the processor's caches and who may still have something to do."""
    return random.Random(f"turn {number}").sample(list(names), len(names))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Within which the median of such values lies in 95 of 100 drawings from them."""
    draw = random.Random(1)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(DRAWS))
    return medians[DRAWS * 25 // 1000], medians[DRAWS * 975 // 1000]


def compared(name: str, ours: Sequence[Round], theirs: Sequence[Round], reference: str) -> list[Result]:
    """Medians of the same rounds of two engines, and of the ratios of each round, with their intervals; the seconds
    and those of CPU, which other programs on the machine change less."""
    results = []
    for what, seconds in (("", lambda one: one.seconds), (", CPU", lambda one: one.cpu_seconds)):
        own, other = [seconds(one) for one in ours], [seconds(one) for one in theirs]
        results.append(Result(f"a round, {name}{what}", 1e3 * median(own), "ms", reference, 1e3 * median(other)))
        if all(other):  # in rounds that take no time there is nothing to compare
            results.append(ratio(f"ratio of each round, {name}{what}, to {reference}", own, other))
    return results


def ratio(name: str, ours: Sequence[float], theirs: Sequence[float]) -> Result:
    """The median of what each round took of the same round of another, with its interval."""
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    low, high = interval(ratios)
    note(f"{name}: {median(ratios):.4f}, 95 %: {low:.4f} to {high:.4f}, {len(ratios)} rounds")
    return Result(name, median(ratios), "x", low=low, high=high)
