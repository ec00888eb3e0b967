"""One vLLM engine, driven by lines of JSON: ``python -m demo.worker SETTINGS``.

Reads requests from standard input and answers each with one line on what was standard output at the start; whatever
vLLM and its own processes print goes to standard error.

* ``{"do": "ask", "text": ..., "tokens": n}`` -> ``{"ttft_s", "cached_tokens", "prompt_tokens", "text"}``
* ``{"do": "reset"}`` -> ``{"reset": bool}``: forget vLLM's own prefix cache, not the pool
* ``{"do": "close"}`` -> ends
"""

import asyncio
import itertools
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

RESET_WAIT_S = 20.0
"""vLLM refuses to reset while blocks are in use, for instance because they are still being saved."""

request_numbers = itertools.count()


def main() -> None:
    """Start the engine of ``sys.argv[1]`` (JSON: arguments of vLLM's ``AsyncEngineArgs``) and serve until told."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asyncio.run(serve(json.loads(sys.argv[1]), answers))


async def serve(settings: dict[str, Any], answers: TextIO) -> None:
    """Answer one request after the other."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))
    try:
        # The first request of an engine also pays for what is set up lazily.
        await ask(engine, "A few words that are in no way part of the text to come.", 4)
        reply(answers, {"ready": True})
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = json.loads(line)
            if request["do"] == "close":
                break
            if request["do"] == "reset":
                reply(answers, {"reset": await reset(engine)})
            else:
                reply(answers, await ask(engine, request["text"], request["tokens"]))
    finally:
        engine.shutdown()


async def ask(engine: "AsyncLLM", text: str, tokens: int) -> dict[str, Any]:
    """Continue ``text`` greedily, timing the first token of this same request."""
    from vllm import SamplingParams, TokensPrompt

    room = engine.model_config.max_model_len - tokens
    prompt = TokensPrompt(prompt_token_ids=engine.get_tokenizer().encode(text)[:room])
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    ttft_s = None
    started = time.perf_counter()
    async for output in engine.generate(prompt, sampling, f"demo-{next(request_numbers)}"):
        if ttft_s is None:
            ttft_s = time.perf_counter() - started
        last = output
    return {
        "ttft_s": ttft_s,
        "cached_tokens": last.num_cached_tokens,
        "prompt_tokens": len(last.prompt_token_ids or ()),
        "text": last.outputs[0].text,
    }


async def reset(engine: "AsyncLLM") -> bool:
    """Forget vLLM's own prefix cache."""
    deadline = time.monotonic() + RESET_WAIT_S
    while not await engine.reset_prefix_cache():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.1)
    return True


def reply(answers: TextIO, answer: dict[str, Any]) -> None:
    """One line, at once."""
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
