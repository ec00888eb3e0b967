"""One vLLM engine of ``dead_disk_vllm``: ``SETTINGS`` (JSON: arguments of ``LLM``); a round for each line of input.

A round is a list of prompts (JSON: lists of token ids); its answer is the seconds that they took together.
"""

import json
import os
import sys
import time

OUTPUT_TOKENS = 8


def main() -> None:
    """Serve until end of input."""
    answers = os.fdopen(os.dup(1), "w")
    # Whatever vLLM prints is no answer.
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(**json.loads(sys.argv[1]))
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in json.loads(line)]
        started = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        if any(len(output.outputs[0].token_ids) != OUTPUT_TOKENS for output in outputs):
            raise SystemExit("A request did not get its tokens.")
        print(seconds, file=answers, flush=True)


if __name__ == "__main__":
    main()
