"""One engine of ``multi_gpu`` in a process of its own: ``python _instance_child.py SETTINGS.json``. Stands alone.

Settings: ``engine`` (arguments of ``AsyncEngineArgs``), ``transfer`` (of ``KVTransferConfig``, or null). It says when
it is there, and answers each line of input with one line of JSON:

* ``{"ask": [[token, ...], ...], "output_tokens": n, "at_once": n}``: requests, so many at a time, in order;
* ``{"metrics": true}``: sums of all ``vllm:pega_*`` metrics;
* ``{"digests": n}``: of each rank, one number for the bytes of each of the ``n`` blocks of its KV cache.

Times are those of the clock that all processes share.
"""

import asyncio
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def now() -> float:
    """Seconds, by the same clock in all processes."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class Instance:
    """An engine and its requests."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._asked = 0

    async def ask(self, prompt: list[int], output_tokens: int) -> dict[str, Any]:
        """One request, greedy: when it began, when each of its tokens came, how much of the prompt was cached."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._asked += 1
        parameters = SamplingParams(
            max_tokens=output_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        answer: dict[str, Any] = {"began": now(), "came": [], "cached": 0, "prompt_tokens": len(prompt)}
        tokens: list[int] = []
        stream = self._engine.generate({"prompt_token_ids": prompt}, parameters, f"request-{self._asked}")
        async for output in stream:
            if not tokens:
                answer["cached"] = output.num_cached_tokens or 0
            answer["came"].append(now())
            tokens += output.outputs[0].token_ids
        if len(tokens) != output_tokens:
            raise SystemExit(f"A request got {len(tokens)} tokens of {output_tokens}.")
        answer["tokens"] = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:12]
        return answer

    async def ask_all(self, prompts: list[list[int]], output_tokens: int, at_once: int) -> list[dict[str, Any]]:
        """Requests in the order given, ``at_once`` of them at a time."""
        answers: list[dict[str, Any]] = [{} for _ in prompts]
        left = iter(range(len(prompts)))

        async def one_after_the_other() -> None:
            for number in left:
                answers[number] = await self.ask(prompts[number], output_tokens)

        await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
        return answers


def metrics() -> dict[str, float]:
    """Sums over all ranks."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    sums: dict[str, float] = {}
    for metric in get_metrics_snapshot():
        if metric.name.startswith("vllm:pega_"):
            value = getattr(metric, "sum", getattr(metric, "value", 0.0))
            sums[metric.name] = sums.get(metric.name, 0.0) + value
    return sums


def digests(worker: Any, blocks: int) -> list[int]:
    """Runs in each rank: for each block, a random linear form of its bytes in all layers. That two blocks with other
    bytes have the same number happens once in 2^48 pairs or less often."""
    import torch

    sums = torch.zeros(blocks, dtype=torch.int64)
    draw = torch.Generator().manual_seed(1)
    for cache in worker.model_runner.kv_caches:
        rows = cache.movedim(list(cache.shape).index(blocks), 0).reshape(blocks, -1).view(torch.int16)
        factors = torch.randint(-(2**62), 2**62, (rows.shape[1],), generator=draw, dtype=torch.int64)
        sums += (rows.to(torch.int64) * factors.to(rows.device)).sum(1).cpu()
    found: list[int] = sums.tolist()
    return found


async def serve(settings: dict[str, Any], answers: Any) -> None:
    """Start the engine, answer until the end of input, stop."""
    began = now()
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    imported = now()
    transfer = settings["transfer"]
    arguments = {**settings["engine"], "kv_transfer_config": KVTransferConfig(**transfer) if transfer else None}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    instance = Instance(engine)
    print(json.dumps({"import_s": imported - began, "start_s": now() - imported}), file=answers, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        wanted = json.loads(line)
        if "ask" in wanted:
            answer: Any = await instance.ask_all(wanted["ask"], wanted["output_tokens"], wanted["at_once"])
        elif "digests" in wanted:
            answer = await engine.collective_rpc(digests, args=(wanted["digests"],))
        else:
            answer = metrics()
        print(json.dumps(answer), file=answers, flush=True)
    engine.shutdown()


def main() -> None:
    """Whatever vLLM prints is no answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for ``digests``, which goes to the ranks as it is
    asyncio.run(serve(json.loads(Path(sys.argv[1]).read_text()), answers))


if __name__ == "__main__":
    main()
