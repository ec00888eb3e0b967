"""What does the connector cost real vLLM on the CPU when no prompt ever comes again?

Three engines take turns with the same prompts: one with the connector, and two without, which are the same. What the
two differ by is what this machine cannot tell. All have vLLM's own prefix cache, as by default.
"""

import argparse
import random
import tempfile
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from benchmarks._common import Result, finish, median, percentile, pool_place
from benchmarks._timed_connector import CLOCKS, seconds_in_calls
from benchmarks._tiny_model import SMALL_LLAMA
from benchmarks._vllm_rounds import (
    Engine,
    Round,
    Start,
    compared,
    in_turn,
    model_place,
    ratio,
    running,
    settings_of,
    with_connector,
)

OURS = "with the connector"
PLAIN = "without"
CONTROL = "without, again"
PROMPTS_TOGETHER = 8
PROMPTS_ALONE = 2
PROMPT_TOKENS = 512
BLOCK_TOKENS = 64
KV_BLOCKS = 128
AIM_PERCENT = 0.5
POOL_BYTES = 64 << 20
"""Full after a few rounds, as a pool in service is: each block costs an old one its place."""


def prompts_of(number: int, count: int) -> list[list[int]]:
    """New ones for every round."""
    draw = random.Random(f"zero hit {number}")
    return [[draw.randrange(1, SMALL_LLAMA["vocab_size"]) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def measure(engines: dict[str, Engine], clocks: Path, warm: int, rounds: int) -> list[Result]:
    """Rounds of several prompts at once, for throughput, and of one at a time, for latency, in turns."""
    shares: dict[str, list[float]] = {f"{PROMPTS_TOGETHER} prompts at once": [], "one prompt": []}
    together: dict[str, list[Round]] = {name: [] for name in engines}
    alone: dict[str, list[Round]] = {name: [] for name in engines}
    for number in range(warm + rounds):
        prompts = prompts_of(number, PROMPTS_TOGETHER + PROMPTS_ALONE)
        for name in in_turn(list(engines), number):
            readings = [seconds_in_calls(clocks)]
            first = engines[name].round(prompts[:PROMPTS_TOGETHER])
            readings.append(seconds_in_calls(clocks))
            second = engines[name].round(prompts[PROMPTS_TOGETHER:], together=False)
            readings.append(seconds_in_calls(clocks))
            if first.cached or second.cached:
                raise SystemExit("A prompt that nobody had asked for before came from a cache.")
            if number >= warm:
                together[name].append(first)
                alone[name].append(second)
            if number >= warm and name == OURS:
                for what, one, (before, after) in zip(shares, (first, second), pairwise(readings), strict=True):
                    shares[what].append(100 * (after - before) / one.seconds)
    results = [
        Result(f"{what}: time in the connector's calls", median(values), "%", "aim", AIM_PERCENT, better="lower")
        for what, values in shares.items()
    ]
    for name in (OURS, CONTROL):
        results += compared(f"{PROMPTS_TOGETHER} prompts at once, {name}", together[name], together[PLAIN], PLAIN)
    for name in (OURS, CONTROL):
        own, plain = ([one for each in alone[of] for one in each.requests_ms] for of in (name, PLAIN))
        for what, percent in (("p50", 50), ("p99", 99)):
            label = f"one prompt, {name}, {what}"
            results.append(Result(label, percentile(own, percent), "ms", PLAIN, percentile(plain, percent)))
        results.append(ratio(f"ratio of each prompt, {name}", own, plain))
    return results


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm", type=int, default=5, help="rounds before those that count")
    parser.add_argument("--rounds", type=int, default=60)
    return parser.parse_args()


def main() -> None:
    """Run, print, write."""
    options = parse()
    with ExitStack() as stack:
        model = stack.enter_context(model_place(SMALL_LLAMA))
        place = stack.enter_context(pool_place(2 * POOL_BYTES))
        plain = settings_of(model, BLOCK_TOKENS, KV_BLOCKS)
        clocks = stack.enter_context(tempfile.TemporaryDirectory(prefix="pegaflow-clocks-"))
        ours = with_connector(plain, place, POOL_BYTES)
        ours["kv_transfer_config"] |= {
            "kv_connector": "TimedConnector",
            "kv_connector_module_path": "benchmarks._timed_connector",
        }
        starts = {OURS: Start(ours, {CLOCKS: clocks}), PLAIN: Start(plain), CONTROL: Start(plain)}
        engines = stack.enter_context(running("zero-hit", starts))
        results = measure(engines, Path(clocks), options.warm, options.rounds)
    finish("zero_hit", results)


if __name__ == "__main__":
    main()
