"""Real vLLM engines in a process of their own, driven by lines of JSON: ``python -m tests.vllm.engine_process``.

Importing vLLM costs more than starting a tiny engine, so one process serves any number of engines, one at a time.
Answers go to what was standard output at the start; whatever vLLM prints goes to standard error.
"""

import gc
import itertools
import json
import os
import sys
import time
from typing import Any

RESET_SECONDS_MAX = 240.0
READY_SECONDS_MAX = 240.0
ROOM_SECONDS_MAX = 20.0
"""After a reset: a group of which nothing was saved may have no slots until something is."""


class Engines:
    """The commands of the protocol; each takes and returns plain values."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._ids = itertools.count()

    def open(self, **arguments: Any) -> None:
        """Start an engine."""
        from vllm import LLM

        from pegaflow.connector import worker

        # Nobody steps an engine of this process once its requests have ended: what is being saved then is waited for.
        worker.SETTLE_SECONDS_MAX = READY_SECONDS_MAX
        self._llm = LLM(**arguments)
        core = getattr(self._llm.llm_engine.engine_core, "engine_core", None)
        if core is not None and core.scheduler.connector is not None:
            if hasattr(core.scheduler.connector, "_connectors"):
                self.generate([[3]], 1)  # layouts come with the first step
            self._wait_for_room(core.scheduler.connector, READY_SECONDS_MAX)

    @staticmethod
    def _wait_for_room(connector: Any, seconds_max: float) -> None:
        """Until the pool has slots for the first blocks: a busy machine may take longer than a tiny request."""
        for child in getattr(connector, "_connectors", [connector]):
            store = getattr(child, "_store", None)
            deadline = time.monotonic() + seconds_max
            while store is not None and store.off is None and time.monotonic() < deadline:
                namespaces = store.namespaces()
                if namespaces and all(space.stats()["slots_free"] for space in namespaces.values()):
                    break
                time.sleep(0.01)

    def close(self) -> None:
        """Stop the engine and forget it."""
        from vllm.distributed import cleanup_dist_env_and_memory

        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            gc.collect()
            cleanup_dist_env_and_memory()

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        salt: str | None = None,
        adapter: tuple[str, int, str] | None = None,
        **sampling: Any,
    ) -> list[dict[str, Any]]:
        """Greedy continuations: ``[{tokens, cached, reason}]``. ``salt``: requests with others share no blocks.
        ``adapter``: name, number and directory of a LoRA adapter."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        parameters = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **sampling
        )
        salted = {} if salt is None else {"cache_salt": salt}
        inputs = [{"prompt_token_ids": prompt, **salted} for prompt in prompts]
        lora = LoRARequest(*adapter) if adapter is not None else None
        outputs = self._llm.generate(inputs, parameters, use_tqdm=False, lora_request=lora)
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "cached": output.num_cached_tokens,
                "reason": output.outputs[0].finish_reason,
            }
            for output in outputs
        ]

    def reset(self, connector: bool = False) -> bool:
        """Forget vLLM's own prefix cache, and with ``connector`` the pool's blocks of this model too."""
        deadline = time.monotonic() + RESET_SECONDS_MAX
        while True:
            if self._llm.reset_prefix_cache(reset_connector=connector):
                core = getattr(self._llm.llm_engine.engine_core, "engine_core", None)
                if connector and core is not None:
                    # What is saved from now on has a place of its own.
                    self._wait_for_room(core.scheduler.connector, ROOM_SECONDS_MAX)
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)

    def pause(self) -> None:
        """Pause as before new weights or a sleep, then go on."""
        core = self._llm.llm_engine.engine_core.engine_core
        core.pause_scheduler("abort")
        core.resume_scheduler()

    def start_and_abort(self, prompt: list[int], steps: int) -> int:
        """Add a request, step, abort it, and step until nothing is left. Returns how many steps that took."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        request_id = f"abort-{next(self._ids)}"
        engine.add_request(request_id, {"prompt_token_ids": prompt}, SamplingParams(max_tokens=20, detokenize=False))
        for _ in range(steps):
            engine.step()
        engine.abort_request([request_id])
        core = engine.engine_core.engine_core
        for step in range(500):
            if not core.scheduler.has_requests():
                return step
            engine.step()
        raise AssertionError("the engine never came to rest")

    def metrics(self) -> dict[str, float]:
        """Counters and histogram counts of the connector."""
        found = {}
        for metric in self._llm.get_metrics():
            if metric.name.startswith("vllm:pega_"):
                found[metric.name] = float(getattr(metric, "value", None) or getattr(metric, "count", 0))
        return found

    def probe(self) -> None:
        """Record digests of copied blocks from now on."""
        from tests.vllm.probe import install

        self._llm.collective_rpc(install)

    def digests(self) -> list[dict[str, dict[str, str]]]:
        """What the probe recorded, by rank."""
        from tests.vllm.probe import recorded

        return list(self._llm.collective_rpc(recorded))

    def arm(self, name: str) -> None:
        """Kill this process at a crash point of the engine."""
        from pegaflow import _native

        _native.crash_point_arm(name)


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engines = Engines()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"answer": getattr(engines, command.pop("do"))(**command)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    engines.close()


if __name__ == "__main__":
    main()
