"""Two engines of ``vllm_pd``, one that computes prompts and one that goes on from there, on one GPU:
``python _vllm_pd_child.py SETTINGS.json``.

Settings: ``engine`` (arguments of ``AsyncEngineArgs`` for both), ``prefill`` and ``decode`` (arguments of
``KVTransferConfig``, or null), ``nixl``, ``at_once`` (also send prompts to both sides at the same time), ``sizes`` (see
``Sizes``) and ``result`` (where the answer goes).
"""

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WARM_UP_PROMPTS = 2
TOKEN_ID_MIN = 10
NIXL_PORT_FIRST = 5600
NIXL_ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a router that uses NIXL sends to the prefill side; its answer goes to the decode side as it is."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    prompts: int
    input_tokens: int
    output_tokens: int
    seed: int
    vocabulary: int


@dataclass
class Answer:
    """What came of one request."""

    ttft_ms: float = 0.0
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    transfer: dict[str, Any] | None = None
    """What the connector tells the router."""


class Side:
    """An engine."""

    def __init__(self, arguments: dict[str, Any], transfer: dict[str, Any] | None, number: int) -> None:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(NIXL_PORT_FIRST + number)
        config = KVTransferConfig(**transfer) if transfer else None
        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, kv_transfer_config=config))
        self._asked = 0

    async def ask(self, prompt: list[int], output_tokens: int, transfer: dict[str, Any] | None = None) -> Answer:
        """One request, greedy."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._asked += 1
        answer, start = Answer(), time.perf_counter()
        parameters = SamplingParams(
            max_tokens=output_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )
        async for output in self.engine.generate({"prompt_token_ids": prompt}, parameters, f"request-{self._asked}"):
            if not answer.tokens:
                answer.ttft_ms, answer.cached = (time.perf_counter() - start) * 1e3, output.num_cached_tokens or 0
            answer.tokens += output.outputs[0].token_ids
            answer.transfer = output.kv_transfer_params or answer.transfer
        return answer


class Pair:
    """Both sides, and the part of a router."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._sizes = Sizes(**settings["sizes"])
        self._nixl = bool(settings["nixl"])
        self._at_once = bool(settings["at_once"])
        start = time.perf_counter()
        self.prefill = Side(settings["engine"], settings["prefill"], 0)
        self.decode = Side(settings["engine"], settings["decode"], 1)
        self.start_s = time.perf_counter() - start

    def _prompts(self, count: int, kind: str) -> list[list[int]]:
        sizes, draw = self._sizes, random.Random(f"{self._sizes.seed} {kind}")
        return [
            [draw.randrange(TOKEN_ID_MIN, sizes.vocabulary) for _ in range(sizes.input_tokens)] for _ in range(count)
        ]

    async def _one_after_the_other(self, prompt: list[int]) -> tuple[Answer, Answer, float]:
        """What both sides answer, and milliseconds from the request to the decode side's first token."""
        start = time.perf_counter()
        first = await self.prefill.ask(prompt, 1, NIXL_ASK if self._nixl else None)
        between = (time.perf_counter() - start) * 1e3
        second = await self.decode.ask(prompt, self._sizes.output_tokens, first.transfer if self._nixl else None)
        return first, second, between + second.ttft_ms

    async def _both_at_once(self, prompt: list[int]) -> tuple[Answer, Answer, float]:
        first, second = await asyncio.gather(
            self.prefill.ask(prompt, 1), self.decode.ask(prompt, self._sizes.output_tokens)
        )
        return first, second, second.ttft_ms

    async def run(self) -> list[dict[str, Any]]:
        """Prompts that nobody has seen, one at a time."""
        for prompt in self._prompts(WARM_UP_PROMPTS, "warm-up"):
            await self._one_after_the_other(prompt)
        rows = []
        ways = {"prefill, then decode": self._one_after_the_other}
        if self._at_once:
            ways["both asked at once"] = self._both_at_once
        for kind, way in ways.items():
            answers = [await way(prompt) for prompt in self._prompts(self._sizes.prompts, kind)]
            decode = [second for _, second, _ in answers]
            uncached = max(self._sizes.input_tokens - second.cached for second in decode)
            if way == self._one_after_the_other:
                rows.append(row(f"{kind}: prefill side's first token", [first.ttft_ms for first, _, _ in answers]))
                times = [second.ttft_ms for second in decode]
                rows.append({**row(f"{kind}: decode side's first token", times), "computed there": uncached})
            rows.append({**row(f"{kind}: in all", [total for _, _, total in answers]), "computed there": uncached})
            same = all(first.tokens == second.tokens[:1] for first, second, _ in answers)
            rows[-1]["both sides agree"] = same
        return rows


def row(what: str, values: Sequence[float]) -> dict[str, Any]:
    """Mean and extremes, in milliseconds."""
    ordered = sorted(values)
    mean = round(sum(ordered) / len(ordered), 1)
    middle = round(ordered[len(ordered) // 2], 1)
    return {"what": what, "unit": "ms", "mean": mean, "p50": middle, "max": round(ordered[-1], 1), "n": len(ordered)}


async def serve(settings: dict[str, Any]) -> None:
    """Start both engines, run, write, stop."""
    pair = Pair(settings)
    rows = await pair.run()
    rows.append({"what": "both engines' start", "unit": "s", "mean": round(pair.start_s, 1), "n": 1})
    result = Path(settings["result"])
    unfinished = result.with_suffix(".part")
    unfinished.write_text(json.dumps({"pd": rows}))
    unfinished.rename(result)
    for side in (pair.prefill, pair.decode):
        side.engine.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    asyncio.run(serve(json.loads(Path(sys.argv[1]).read_text())))
