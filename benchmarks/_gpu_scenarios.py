"""Scenarios of ``multi_gpu``: each starts its engines anew and leaves rows of one table."""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._gpu_instances import GB, Instance, Instances, Kind, transfer
from benchmarks._model_shapes import SHAPES
from benchmarks._shared_prefixes import SharedPrefixes, instance_of
from benchmarks.vllm_gpu import RunFailed, original_server

SCENARIOS = ("sharing", "kill", "start", "loads", "tp")
SETTLE_SECONDS = 2.0
KILL_AFTER_SECONDS = 2.0
REGISTERED_SECONDS_MAX = 60.0
REPORT_SECONDS = 1.25
SHM_DIR = Path("/dev/shm")
Answers = list[dict[str, Any]]
Sums = dict[str, float]


def ttft_ms(answers: Answers) -> list[float]:
    """Times to the first token."""
    return [(answer["came"][0] - answer["began"]) * 1e3 for answer in answers]


def gaps_ms(answers: Answers, since: float = 0.0, until: float = float("inf")) -> list[float]:
    """Pauses between tokens that ended in a span of time."""
    gaps = []
    for answer in answers:
        came = answer["came"]
        gaps += [(b - a) * 1e3 for a, b in pairwise(came) if since < b <= until]
    return gaps


def mean(values: Sequence[float]) -> float:
    """Of none: 0."""
    return sum(values) / len(values) if values else 0.0


def hit_rate(answers: Answers) -> float:
    """Percent of the prompts' tokens that were not computed."""
    return 100 * sum(one["cached"] for one in answers) / max(1, sum(one["prompt_tokens"] for one in answers))


class Scenarios:
    """All runs with the same options."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self._options, self._scratch = options, scratch
        self.rows: list[dict[str, Any]] = []

    def run(self, name: str) -> None:
        """One scenario; what fails is a row."""
        if name in ("sharing", "loads"):
            for kind in self._options.kinds:
                if name == "sharing" or kind.connector in ("ours", "original"):
                    self._try(name, kind, getattr(self, f"_{name}"))
        elif name == "tp":
            for kind in (one for one in self._options.kinds if one.connector != "offloading"):
                if kind.shared:
                    self._try(name, kind, self._tp)
        else:
            self._try(name, Kind("ours"), getattr(self, f"_{name}"))

    def _try(self, name: str, kind: Kind, function: Callable[[Kind, Instances, Path], None]) -> None:
        options = self._options
        homes = {"ours": options.ours, "original": options.original}
        before = len(self.rows)
        try:
            with ExitStack() as stack:
                place = Path(tempfile.mkdtemp(prefix="pegaflow-bench-", dir=SHM_DIR))
                stack.callback(shutil.rmtree, place, ignore_errors=True)
                instances = Instances(self._scratch, options.seconds_max, homes)
                if kind.connector == "original":
                    log, environment = self._scratch / f"server-{name}.log", instances.environment("original", ())
                    stack.enter_context(original_server(options.original, options.pool_gb, log, environment))
                function(kind, stack.enter_context(instances), place)
        except RunFailed as error:
            self._row(kind, "failed", str(error))
        for row in self.rows[before:]:
            row["scenario"] = name
            print(json.dumps(row), flush=True)

    def _row(self, kind: Kind, what: str, value: str, **numbers: float) -> None:
        self.rows.append({"scenario": "", "cache": kind.name, "what": what, "value": value, **numbers})

    # -- engines ------------------------------------------------------------------------------------------------------

    def _engine(self, instances: int, tensor_parallel: int = 1) -> dict[str, Any]:
        options = self._options
        longest = 2 * options.prefix_tokens + options.tail_tokens + options.stream_tokens
        arguments = {
            "model": str(self._scratch),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "block_size": options.block_tokens,
            "max_model_len": (longest // 1024 + 2) * 1024 if not options.tiny else 2048,
            "enforce_eager": not options.compile,
            "tensor_parallel_size": tensor_parallel,
            "num_gpu_blocks_override": options.gpu_tokens // options.block_tokens,
            "seed": 0,
        }
        on_one = -(-instances * tensor_parallel // options.gpus) if options.gpus else 2 * instances
        return {**arguments, "gpu_memory_utilization": round(0.85 / on_one, 3), **options.engine}

    def _started(
        self, instances: Instances, kind: Kind, place: Path, numbers: Sequence[int], of: int
    ) -> list[Instance]:
        """All at the same time."""
        gpus = self._options.gpus
        started = []
        for number in numbers:
            settings = transfer(kind, number, self._options.pool_bytes, of, place, self._options.extra)
            started.append(instances.start(kind, self._engine(of), settings, [number % gpus] if gpus else []))
        for one in started:
            one.wait_ready()
        return started

    def _workload(self) -> SharedPrefixes:
        options = self._options
        vocabulary = SHAPES[options.shape]["vocab_size"]
        return SharedPrefixes(
            options.prefixes, options.prefix_tokens, options.tail_tokens, vocabulary, options.skew, options.seed
        )

    def _long_prompts(self, count: int, seed: int) -> list[list[int]]:
        """Of twice a prefix, and nobody else's."""
        source = SharedPrefixes(
            count, 2 * self._options.prefix_tokens, 1, SHAPES[self._options.shape]["vocab_size"], seed=seed
        )
        return [source.prefix(rank) for rank in range(count)]

    def _ask_all(self, instances: Sequence[Instance], numbers: Sequence[int], output_tokens: int) -> Answers:
        """Requests of the workload, each to the instance whose turn it is, all instances at the same time."""
        work, of = self._workload(), len(instances)
        apart = [[n for n in numbers if instance_of(n, of) == which] for which in range(of)]
        for one, own in zip(instances, apart, strict=True):
            prompts = [work.prompt(n) for n in own]
            one.send({"ask": prompts, "output_tokens": output_tokens, "at_once": self._options.at_once})
        answers: list[dict[str, Any]] = [{} for _ in numbers]
        for one, own in zip(instances, apart, strict=True):
            for number, answer in zip(own, one.answer(), strict=True):
                answers[number - numbers[0]] = answer
        return answers

    # -- scenarios ----------------------------------------------------------------------------------------------------

    def _sharing(self, kind: Kind, instances: Instances, place: Path) -> None:
        """Requests that share prefixes, dealt out in turn."""
        options = self._options
        of = options.instances
        engines = self._started(instances, kind, place, range(of), of)
        warm = range(options.warm_requests)
        self._ask_all(engines, warm, options.output_tokens)
        time.sleep(SETTLE_SECONDS)
        measured = range(len(warm), len(warm) + options.requests)
        answers = self._ask_all(engines, measured, options.output_tokens)
        seconds = max(one["came"][-1] for one in answers) - min(one["began"] for one in answers)
        rate, hits, first = len(answers) / seconds, hit_rate(answers), ttft_ms(answers)
        self._row(kind, f"requests/s of {of} instances", f"{rate:.2f}", per_second=rate)
        self._row(kind, "tokens of prompts that were cached", f"{hits:.1f} %", percent=hits)
        self._row(kind, "first token, mean / worst", f"{mean(first):.0f} / {max(first):.0f} ms", ms=mean(first))
        known = 100 * self._workload().found_at_most(range(measured.stop), of, kind.shared, options.block_tokens)
        self._row(kind, "by caches without limits, of all requests", f"{known:.1f} %")

    def _kill(self, kind: Kind, instances: Instances, place: Path) -> None:
        """One engine is killed while it loads and saves; the other one decodes."""
        options = self._options
        first, second = self._started(instances, kind, place, (0, 1), 2)
        prompts = self._long_prompts(8, 7)
        cold = first.ask(prompts, 4, 1)
        time.sleep(SETTLE_SECONDS)
        streams = self._workload()
        own = [streams.prompt(number)[-options.tail_tokens :] for number in range(options.at_once)]
        first.ask(own, 4, options.at_once)
        first.send({"ask": own, "output_tokens": options.stream_tokens, "at_once": options.at_once})
        second.send({"ask": [streams.prompt(number) for number in range(400)], "output_tokens": 4, "at_once": 4})
        time.sleep(KILL_AFTER_SECONDS)
        killed = second.kill()
        answers: Answers = first.answer()
        ended = min(one["came"][-1] for one in answers)
        before, after = gaps_ms(answers, until=killed), gaps_ms(answers, since=killed, until=ended)
        self._row(kind, "between tokens before the kill, mean / worst", pair(before))
        self._row(kind, "between tokens after the kill, mean / worst", pair(after), ms=max(after, default=0.0))
        (successor,) = self._started(instances, kind, place, [1], 2)
        warm = successor.ask(prompts, 4, 1)
        same = [one["tokens"] for one in warm] == [one["tokens"] for one in cold]
        times = ttft_ms(warm)
        self._row(kind, "successor: start", f"{successor.started['start_s']:.1f} s")
        self._row(kind, "successor: first token of its first prompt / of later ones", pair_of(times[0], times[1:]))
        self._row(kind, "successor: cached; tokens", f"{hit_rate(warm):.1f} %; {'equal' if same else 'DIFFER'}")
        self._row(kind, "computed instead: first token, mean", f"{mean(ttft_ms(cold)):.0f} ms")

    def _start(self, kind: Kind, instances: Instances, place: Path) -> None:
        """Engines that attach a pool that another one has filled and left."""
        options = self._options
        (filler,) = self._started(instances, kind, place, [0], options.instances)
        prompts = self._long_prompts(options.fill_prompts, 11)
        cold = filler.ask(prompts, 1, 1)
        time.sleep(SETTLE_SECONDS)
        filler.ask(prompts, 1, 1)  # what a young pool had no room for yet
        time.sleep(SETTLE_SECONDS)
        self._row(kind, "nothing there yet: start of one", f"{filler.started['start_s']:.1f} s")
        self._row(kind, "prompts that were computed: first token, mean", f"{mean(ttft_ms(cold)):.0f} ms")
        filler.kill()
        self._row(kind, "blocks in the pool", f"{bytes_in(place) / GB:.1f} GB")
        bare = self._started(instances, Kind("none"), place, range(options.instances), options.instances)
        self._row(Kind("none"), f"starts of {len(bare)} at the same time", seconds_of(bare))
        for one in bare:
            one.kill()
        engines = self._started(instances, kind, place, range(options.instances), options.instances)
        self._row(kind, f"starts of {len(engines)} that find them, at the same time", seconds_of(engines))
        with ThreadPoolExecutor(len(engines)) as pool:
            warm = list(pool.map(lambda one: one.ask(prompts[:4], 1, 1), engines))
        firsts = [ttft_ms(answers)[0] for answers in warm]
        later = [ms for answers in warm for ms in ttft_ms(answers)[1:]]
        self._row(kind, "first token of the first request, mean / worst", pair(firsts))
        self._row(kind, "first token of later ones, mean / worst", pair(later))
        self._row(kind, "cached", f"{hit_rate([one for answers in warm for one in answers]):.1f} %")
        self._registered(kind, engines, prompts[-1])

    def _registered(self, kind: Kind, engines: Sequence[Instance], prompt: list[int]) -> None:
        """Until page-locking has come to its end in all engines."""
        began, before = time.monotonic(), [-1.0] * len(engines)
        while time.monotonic() - began < REGISTERED_SECONDS_MAX:
            now = [self._sums(one, prompt).get("vllm:pega_registered_bytes", 0.0) for one in engines]
            if now == before:
                break
            before = now
        seconds = time.monotonic() - began
        self._row(kind, "page-locked by each", ", ".join(f"{one / GB:.1f}" for one in before) + " GB")
        self._row(kind, "nothing more to page-lock after", f"{seconds:.1f} s", seconds=seconds)

    def _loads(self, kind: Kind, instances: Instances, place: Path) -> None:
        """Loads and saves of each instance alone, then of all at the same time: GB/s by the connector's own account."""
        options = self._options
        engines = self._started(instances, kind, place, range(options.instances), options.instances)
        count = max(2, options.fill_prompts // options.instances // 2)
        alone: list[float] = []
        for number, one in enumerate(engines):
            prompts = self._long_prompts(count, 100 + number)
            one.ask(prompts, 1, 1)
            time.sleep(SETTLE_SECONDS)
            alone.append(self._bytes_per_second(one, prompts))
        began = time.monotonic()
        with ThreadPoolExecutor(len(engines)) as pool:
            sets = [self._long_prompts(count, 100 + number) for number in range(len(engines))]
            together = list(pool.map(self._bytes_per_second, engines, sets))
        seconds = time.monotonic() - began
        self._row(kind, "prompts loaded one at a time, sum of single runs", f"{sum(alone) / GB:.1f} GB/s")
        self._row(kind, "all instances at the same time, in sum", f"{sum(together) / GB:.1f} GB/s", seconds=seconds)

    def _bytes_per_second(self, one: Instance, prompts: list[list[int]]) -> float:
        """KV bytes of cached tokens by the time to the first token, prompts one at a time."""
        answers = one.ask(prompts, 1, 1)
        tokens = sum(answer["cached"] for answer in answers)
        return tokens * kv_bytes_per_token(self._options.shape) / (sum(ttft_ms(answers)) / 1e3)

    def _tp(self, kind: Kind, instances: Instances, place: Path) -> None:
        """One engine over several GPUs: what is stored, and what loads take."""
        options = self._options
        ranks = options.tensor_parallel
        settings = transfer(kind, 0, options.pool_bytes, 1, place, options.extra)
        gpus = list(range(ranks)) if options.gpus else []
        (one,) = [instances.start(kind, self._engine(1, ranks), settings, gpus)]
        one.wait_ready()
        prompts = self._long_prompts(8, 13)
        cold = one.ask(prompts, 4, 1)
        time.sleep(SETTLE_SECONDS)
        blocks = options.gpu_tokens // options.block_tokens
        computed = one.digests(blocks)
        # Whatever is left in the GPUs' own cache goes.
        evictors = one.ask(self._long_prompts(options.gpu_tokens // options.prefix_tokens // 2 + 2, 14), 1, 1)
        time.sleep(SETTLE_SECONDS)
        before = self._sums(one, prompts[0]) if kind.connector == "ours" else {}
        warm = one.ask(prompts, 4, 1)
        same = [answer["tokens"] for answer in warm] == [answer["tokens"] for answer in cold]
        self._row(kind, f"{ranks} ranks: computed, first token, median / worst", middle(ttft_ms(cold)))
        self._row(kind, f"{ranks} ranks: loaded, first token, median / worst", middle(ttft_ms(warm)))
        self._row(kind, "cached; tokens", f"{hit_rate(warm):.1f} %; {'equal' if same else 'DIFFER'}")
        self._row(kind, "blocks with the same bytes again, by rank", self._same_bytes(computed, one.digests(blocks)))
        found = kv_bytes_per_token(options.shape) * sum(answer["cached"] for answer in warm)
        self._row(kind, "KV of prompts that were found, by first token", f"{found / sum(ttft_ms(warm)) / 1e6:.1f} GB/s")
        if kind.connector == "ours":
            after = self._sums(one, prompts[0])
            self._moved(kind, ranks, "saves", "saved_bytes", "save_moving_us", {}, before)
            self._moved(kind, ranks, "loads", "loaded_bytes", "load_moving_us", before, after)
            locked = after.get("vllm:pega_registered_bytes", 0.0) / GB
            self._row(kind, "page-locked by one rank / memory of the pool", f"{locked:.1f} / {memory_of(place):.1f} GB")
            stored = bytes_in(place)
            tokens = sum(answer["prompt_tokens"] for answer in (*cold, *evictors))
            by_shape = kv_bytes_per_token(options.shape)
            self._row(kind, "stored per token / by the shape", f"{stored / max(1, tokens):.0f} / {by_shape} bytes")
        later = one.ask(self._long_prompts(8, 15), 4, 1)
        self._row(kind, "others, computed in the end: first token, median / worst", middle(ttft_ms(later)))

    @staticmethod
    def _sums(one: Instance, prompt: list[int]) -> Sums:
        """What its connector has counted. It looks once a second, in steps of the engine."""
        time.sleep(REPORT_SECONDS)
        one.ask([prompt[:64]], 1, 1)
        return one.metrics()

    def _same_bytes(self, computed: list[list[int]], loaded: list[list[int]]) -> str:
        """How many blocks of the last prompts that fit are in the GPUs' caches again. The last block of each is not
        found but computed."""
        options = self._options
        fit = max(1, options.gpu_tokens // (2 * options.prefix_tokens) - 1)
        least = fit * (2 * options.prefix_tokens // options.block_tokens - 1)
        same = [len(set(before) & set(after)) for before, after in zip(computed, loaded, strict=True)]
        return f"{', '.join(map(str, same))} of at least {least}{'' if min(same) >= least else ': BYTES DIFFER'}"

    def _moved(self, kind: Kind, ranks: int, way: str, moved: str, moving_us: str, before: Sums, after: Sums) -> None:
        """What the ranks copied between two readings. Both sums are of all ranks, which copy at the same time."""
        count, micros = (
            after.get(f"vllm:pega_{name}", 0.0) - before.get(f"vllm:pega_{name}", 0.0) for name in (moved, moving_us)
        )
        each = count / max(micros, 1.0) / 1e3
        self._row(kind, f"{way}: of one rank / of {ranks}", f"{each:.1f} / {each * ranks:.1f} GB/s")


def seconds_of(engines: Sequence[Instance]) -> str:
    """How long each took to start, imports left out."""
    return ", ".join(f"{one.started['start_s']:.1f}" for one in engines) + " s"


def pair(values: Sequence[float]) -> str:
    """Mean and worst of milliseconds."""
    return f"{mean(values):.1f} / {max(values, default=0.0):.1f} ms"


def middle(values: Sequence[float]) -> str:
    """Median and worst of milliseconds. The first load of an engine takes longer than all others."""
    return f"{median(values):.1f} / {max(values):.1f} ms"


def pair_of(first: float, others: Sequence[float]) -> str:
    """One of them apart."""
    return f"{first:.0f} / {mean(others):.0f} ms"


def kv_bytes_per_token(shape: str) -> int:
    """Of all ranks together; compressed attention is the same on each of them and counted once."""
    config = SHAPES[shape]
    if "kv_lora_rank" in config:
        return int(2 * config["num_hidden_layers"] * (config["kv_lora_rank"] + config["qk_rope_head_dim"]))
    return int(4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])


def memory_of(place: Path) -> float:
    """GB that the pool there takes."""
    return sum(path.stat().st_blocks * 512 for path in place.rglob("*") if path.is_file()) / GB


def bytes_in(place: Path) -> int:
    """Bytes of blocks in the pool that lies there."""
    from pegaflow import _native

    total = 0
    for pool in json.loads(_native.list_pools(shm_dir=str(place))):
        facts = json.loads(_native.inspect(pool["path"]))
        total += sum(space["bytes_sealed"] for space in facts["namespaces"])
    return total
