"""One engine of ``vllm_gpu`` in a process of its own: ``python _vllm_child.py SETTINGS.json``. Stands alone.

Settings: ``engine`` (arguments of ``AsyncEngineArgs``), ``transfer`` (of ``KVTransferConfig``, or null), ``scenarios``,
``sizes`` (see ``Sizes``), ``result`` (where the answer goes), ``hold`` (stay until killed once that is written). The
answer holds seconds, and for each scenario a list of measurements.
"""

import asyncio
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WARM_ROUNDS = 3
SAVE_ROUNDS = 3
SAVE_PAUSE_SECONDS = 0.1
STREAM_PROMPT_TOKENS = 512
WARM_UP_PROMPTS = 2
HOLD_SECONDS_MAX = 600
TOKEN_ID_MIN = 10
COUNTED = ("loaded_bytes", "load_moving_us", "saved_bytes", "save_moving_us", "load_failure")


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    prompts: int
    input_tokens: int
    output_tokens: int
    streams: int
    stream_tokens: int
    save_input_tokens: int
    unique_prompts: int
    unique_input_tokens: int
    unique_output_tokens: int
    unique_rounds: int
    fill_prompts: int
    rate: float
    """Requests per second."""
    settle_s: float
    """Between two rounds, for saves to come to an end."""
    seed: int
    vocabulary: int


@dataclass
class Answer:
    """What came of one request."""

    ttft_ms: float = 0.0
    gaps_ms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached: int = 0


def milliseconds(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles."""
    ordered = sorted(values)

    def at(percent: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))], 2)

    mean = round(sum(ordered) / len(ordered), 2)
    return {"mean": mean, "p50": at(50), "p99": at(99), "max": round(ordered[-1], 2), "n": len(ordered)}


def digest(answers: Sequence[Answer]) -> str:
    """Names the tokens of some answers in few characters."""
    return hashlib.sha256(json.dumps([answer.tokens for answer in answers]).encode()).hexdigest()[:12]


class Session:
    """An engine and its requests."""

    def __init__(self, engine: Any, sizes: Sizes) -> None:
        self._engine, self._sizes = engine, sizes
        self._asked = 0
        self._counted: dict[str, float] = {}

    def prompts(self, count: int, tokens: int, kind: str) -> list[list[int]]:
        """Random prompts, the same ones for the same ``kind``."""
        draw = random.Random(f"{self._sizes.seed} {kind}")
        return [[draw.randrange(TOKEN_ID_MIN, self._sizes.vocabulary) for _ in range(tokens)] for _ in range(count)]

    async def ask(self, prompt: list[int], output_tokens: int) -> Answer:
        """One request, greedy."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._asked += 1
        answer, last = Answer(), time.perf_counter()
        parameters = SamplingParams(
            max_tokens=output_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        stream = self._engine.generate({"prompt_token_ids": prompt}, parameters, f"request-{self._asked}")
        async for output in stream:
            now = time.perf_counter()
            if not answer.tokens:
                answer.ttft_ms, answer.cached = (now - last) * 1e3, output.num_cached_tokens or 0
            else:
                answer.gaps_ms.append((now - last) * 1e3)
            answer.tokens += output.outputs[0].token_ids
            last = now
        return answer

    async def arrive(self, prompts: Sequence[list[int]], output_tokens: int, rate: float) -> list[Answer]:
        """Requests at random times, the same ones whenever there are as many; all at once if ``rate`` is 0."""
        draw, tasks = random.Random(self._sizes.seed), []
        for prompt in prompts:
            tasks.append(asyncio.create_task(self.ask(prompt, output_tokens)))
            if rate:
                await asyncio.sleep(draw.expovariate(rate))
        return list(await asyncio.gather(*tasks))

    async def one_at_a_time(self, prompts: Sequence[list[int]], output_tokens: int) -> list[Answer]:
        """Each request after the one before it."""
        return [await self.ask(prompt, output_tokens) for prompt in prompts]

    async def settle(self) -> None:
        """Let saves come to an end."""
        await asyncio.sleep(self._sizes.settle_s)

    async def warm_up(self) -> None:
        """Requests like those to come: whatever an engine does only once it does now."""
        prompts = self.prompts(WARM_UP_PROMPTS, self._sizes.input_tokens, "warm-up")
        for _ in range(2):
            await self.one_at_a_time(prompts, 2)
            await self.settle()
        self.copied()

    def copied(self) -> dict[str, float]:
        """What our connector copied since the last call: GB/s by direction, for as long as bytes were on their way."""
        from vllm.v1.metrics.reader import get_metrics_snapshot

        now: dict[str, float] = {}
        for metric in get_metrics_snapshot():
            key = metric.name.removeprefix("vllm:pega_").removesuffix("_total")
            if metric.name.startswith("vllm:pega_") and key in COUNTED:
                value = getattr(metric, "sum", getattr(metric, "value", 0.0))
                now[key] = now.get(key, 0.0) + value
        since = {key: value - self._counted.get(key, 0.0) for key, value in now.items()}
        self._counted = now
        speeds = {}
        for way in ("load", "save"):
            moving_us = since.get(f"{way}_moving_us", 0.0)
            if moving_us:
                moved = "loaded_bytes" if way == "load" else "saved_bytes"
                speeds[f"{way} GB/s"] = round(since.get(moved, 0.0) / moving_us / 1e3, 1)
        if since.get("load_failure"):
            speeds["failed loads"] = since["load_failure"]
        return speeds

    def measured(self, what: str, answers: Sequence[Answer], **more: Any) -> dict[str, Any]:
        """Times to the first token of one round."""
        return {
            "what": what,
            "unit": "ms",
            **milliseconds([answer.ttft_ms for answer in answers]),
            "cached": sum(answer.cached for answer in answers),
            "tokens": digest(answers),
            **self.copied(),
            **more,
        }

    # -- scenarios ----------------------------------------------------------------------------------------------------

    async def ttft(self) -> list[dict[str, Any]]:
        """Prompts at a rate, cold and then warm; then one at a time."""
        sizes = self._sizes
        prompts = self.prompts(sizes.prompts, sizes.input_tokens, "ttft")
        rows = []
        for what in ("cold", *(f"warm {number + 1}" for number in range(WARM_ROUNDS))):
            answers = await self.arrive(prompts, sizes.output_tokens, sizes.rate)
            await self.settle()
            rows.append(self.measured(f"first token, {what}", answers))
        answers = await self.one_at_a_time(prompts, sizes.output_tokens)
        await self.settle()
        return [*rows, self.measured("first token, one at a time", answers)]

    async def itl(self) -> list[dict[str, Any]]:
        """Streams decode, first alone and then while warm prompts arrive at a rate."""
        sizes = self._sizes
        warm = self.prompts(sizes.prompts, sizes.input_tokens, "itl")
        streams = self.prompts(sizes.streams, STREAM_PROMPT_TOKENS, "streams")
        await self.one_at_a_time(warm, 1)
        await self.settle()
        rows = []
        for what in ("alone", "beside warm prompts"):
            tasks = [asyncio.create_task(self.ask(prompt, sizes.stream_tokens)) for prompt in streams]
            loads: list[asyncio.Task[Answer]] = []
            while what != "alone" and not any(task.done() for task in tasks):
                loads.append(asyncio.create_task(self.ask(warm[len(loads) % len(warm)], 1)))
                await asyncio.sleep(1 / sizes.rate)
            answers = list(await asyncio.gather(*tasks))
            arrived = list(await asyncio.gather(*loads))
            await self.settle()
            row: dict[str, Any] = {"what": f"between tokens, {what}", "unit": "ms"}
            row |= milliseconds([gap for answer in answers for gap in answer.gaps_ms])
            rows.append({**row, "tokens": digest(answers), "prompts": len(arrived)})
            if arrived:
                rows.append(self.measured("first token of these prompts", arrived, tokens=""))
        return rows

    async def save(self) -> list[dict[str, Any]]:
        """Prompts that one step computes, each after a pause: while they are saved, the GPU has nothing else to do."""
        sizes, rows = self._sizes, []
        for number in range(SAVE_ROUNDS):
            answers = []
            for prompt in self.prompts(sizes.prompts, sizes.save_input_tokens, f"save {number}"):
                answers.append(await self.ask(prompt, 1))
                await asyncio.sleep(SAVE_PAUSE_SECONDS)
            await self.settle()
            rows.append(self.measured(f"first token, computed, round {number + 1}", answers))
        return rows

    async def unique(self) -> list[dict[str, Any]]:
        """Prompts that nobody sees again, all at once: what saving costs."""
        sizes, rows = self._sizes, []
        for number in range(sizes.unique_rounds):
            prompts = self.prompts(sizes.unique_prompts, sizes.unique_input_tokens, f"unique {number}")
            start = time.perf_counter()
            answers = await self.arrive(prompts, sizes.unique_output_tokens, 0)
            rate = len(prompts) / (time.perf_counter() - start)
            await self.settle()
            row = {"what": f"requests, round {number + 1}", "unit": "1/s", "mean": round(rate, 3), "n": len(prompts)}
            rows.append({**row, "tokens": digest(answers), **self.copied()})
        return rows

    async def fill(self) -> list[dict[str, Any]]:
        """Prompts that others will ask for."""
        sizes = self._sizes
        prompts = self.prompts(sizes.fill_prompts, sizes.input_tokens, "fill")
        answers = await self.one_at_a_time(prompts, sizes.output_tokens)
        await self.settle()
        return [self.measured("first token, cold", answers)]

    async def warm(self) -> list[dict[str, Any]]:
        """The same prompts in another process: the first by itself, then some more."""
        sizes = self._sizes
        prompts = self.prompts(sizes.fill_prompts, sizes.input_tokens, "fill")[: sizes.prompts]
        answers = await self.one_at_a_time(prompts, sizes.output_tokens)
        return [
            self.measured("first token, first request", answers[:1]),
            self.measured("first token, later requests", answers[1:] or answers),
        ]


async def serve(settings: dict[str, Any]) -> dict[str, Any]:
    """Start the engine, run the scenarios, stop."""
    start = time.perf_counter()
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    imported = time.perf_counter()
    transfer = settings["transfer"]
    arguments = {**settings["engine"], "kv_transfer_config": KVTransferConfig(**transfer) if transfer else None}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    started = time.perf_counter()
    answer: dict[str, Any] = {"import_s": round(imported - start, 2), "start_s": round(started - imported, 2)}
    session = Session(engine, Sizes(**settings["sizes"]))
    scenarios: list[str] = settings["scenarios"]
    if scenarios and scenarios[0] != "warm":  # whose first request is what is timed
        await session.warm_up()
    for name in scenarios:
        answer[name] = await getattr(session, name)()
    result = Path(settings["result"])
    unfinished = result.with_suffix(".part")
    unfinished.write_text(json.dumps(answer))
    unfinished.rename(result)
    if settings["hold"]:
        await asyncio.sleep(HOLD_SECONDS_MAX)
    engine.shutdown()
    return answer


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    asyncio.run(serve(json.loads(Path(sys.argv[1]).read_text())))
