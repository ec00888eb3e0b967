"""One vLLM engine of ``_vllm_rounds``: ``SETTINGS`` (JSON: arguments of ``LLM``); a round for each line of input.

A round is ``{"prompts": lists of token ids, "together": bool, "output_tokens": int}``. Its answer, a line of JSON too:
``seconds`` that all of it took, ``cached`` tokens that came from a cache, and ``requests_ms``, how long each request
took, unless they ran ``together``.
"""

import json
import os
import sys
import time


def main() -> None:
    """Serve until end of input."""
    answers = os.fdopen(os.dup(1), "w")
    # Whatever vLLM prints is no answer.
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(**json.loads(sys.argv[1]))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        tokens = wanted["output_tokens"]
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in wanted["prompts"]]
        cached, requests_ms = 0, []
        started = time.perf_counter()
        for batch in [prompts] if wanted["together"] else [[prompt] for prompt in prompts]:
            began = time.perf_counter()
            outputs = engine.generate(batch, sampling, use_tqdm=False)
            requests_ms.append(1e3 * (time.perf_counter() - began))
            cached += sum(output.num_cached_tokens or 0 for output in outputs)
            if any(len(output.outputs[0].token_ids) != tokens for output in outputs):
                raise SystemExit("A request did not get its tokens.")
        answer = {"seconds": time.perf_counter() - started, "cached": cached}
        answer["requests_ms"] = [] if wanted["together"] else requests_ms
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
