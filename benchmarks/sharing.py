"""What do instances of vLLM on one host gain from one pool, against pools of their own that are as large together?

Each instance has a processor of its own. All get the same requests in the same order, which share prefixes, go round
the instances in turn, and never come again as a whole.
"""

import argparse
import os
from contextlib import ExitStack

from benchmarks._common import Result, finish, median, note, pool_place
from benchmarks._shared_prefixes import SharedPrefixes, instance_of
from benchmarks._tiny_model import SMALL_LLAMA
from benchmarks._vllm_rounds import (
    Engine,
    Round,
    Start,
    in_turn,
    interval,
    model_place,
    running,
    settings_of,
    with_connector,
)

BLOCK_TOKENS = 32
TOKEN_BYTES = 2 * 2 * SMALL_LLAMA["num_hidden_layers"] * SMALL_LLAMA["num_key_value_heads"] * SMALL_LLAMA["head_dim"]
SHARED = "one pool"
APART = "pools apart"
REQUESTS = 8
"""Of each instance in each round."""

KV_BLOCKS = 96
"""Of each instance: vLLM's own prefix cache holds two or three prompts."""

WORKLOAD = SharedPrefixes(
    prefixes=32, prefix_tokens=768, tail_tokens=96, vocabulary=SMALL_LLAMA["vocab_size"], skew=1.0
)


def pool_bytes(share: float) -> int:
    """Room for ``share`` of all prefixes."""
    return int(share * WORKLOAD.prefixes * WORKLOAD.prefix_tokens * TOKEN_BYTES)


class Fleet:
    """Instances that serve one round at once."""

    def __init__(self, engines: list[Engine]) -> None:
        self._engines = engines

    def round(self, number: int) -> tuple[float, float]:
        """Requests per second, and the share of the prompts' tokens that came from a cache."""
        count = len(self._engines) * REQUESTS
        requests = range(number * count, (number + 1) * count)
        for at, engine in enumerate(self._engines):
            engine.begin([WORKLOAD.prompt(one) for one in requests if instance_of(one, len(self._engines)) == at])
        took: list[Round] = [engine.end() for engine in self._engines]
        cached = sum(one.cached for one in took)
        return count / max(one.seconds for one in took), cached / (count * WORKLOAD.prompt_tokens)


def starts_of(stack: ExitStack, instances: int, share: float) -> dict[str, Start]:
    """All instances, those on one pool and those on pools of their own."""
    model = stack.enter_context(model_place(SMALL_LLAMA))
    settings = settings_of(model, BLOCK_TOKENS, KV_BLOCKS, max_num_seqs=2)
    total = pool_bytes(share)
    shared = stack.enter_context(pool_place(2 * total))
    starts: dict[str, Start] = {}
    cpus = sorted(os.sched_getaffinity(0))
    for at in range(instances):
        environment = {"VLLM_CPU_OMP_THREADS_BIND": str(cpus[at % len(cpus)])}
        starts[f"{SHARED} {at}"] = Start(with_connector(settings, shared, total), environment)
        own = stack.enter_context(pool_place(2 * total // instances))
        starts[f"{APART} {at}"] = Start(with_connector(settings, own, total // instances), environment)
    return starts


def measure(engines: dict[str, Engine], instances: int, warm: int, rounds: int) -> list[Result]:
    """Rounds of both in turns, with the same requests."""
    fleets = {name: Fleet([engines[f"{name} {at}"] for at in range(instances)]) for name in (SHARED, APART)}
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in fleets}
    for number in range(warm + rounds):
        for name in in_turn(list(fleets), number):
            result = fleets[name].round(number)
            if number >= warm:
                took[name].append(result)
    shared, apart = took[SHARED], took[APART]
    gains = [one[0] / other[0] for one, other in zip(shared, apart, strict=True)]
    low, high = interval(gains)
    speeds = {name: median([speed for speed, _ in all_rounds]) for name, all_rounds in took.items()}
    hits = {name: 100 * sum(hit for _, hit in all_rounds) / rounds for name, all_rounds in took.items()}
    numbers = range((warm + rounds) * instances * REQUESTS)
    bound = {name: 100 * WORKLOAD.found_at_most(numbers, instances, name == SHARED, BLOCK_TOKENS) for name in fleets}
    note(f"without limits one pool would find {bound[SHARED]:.1f} %, and pools apart {bound[APART]:.1f} %")
    return [
        Result("requests/s, one pool", speeds[SHARED], "1/s", "pools apart", speeds[APART]),
        Result("ratio of each round, requests/s", median(gains), "x", low=low, high=high, better="higher"),
        Result("tokens found, one pool", hits[SHARED], "%", "pools apart", hits[APART]),
    ]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--share", type=float, default=1.0, help="of the prefixes that all pools hold together (1)")
    parser.add_argument("--warm", type=int, default=12, help="rounds before those that count")
    parser.add_argument("--rounds", type=int, default=24)
    return parser.parse_args()


def main() -> None:
    """Run, print, write."""
    options = parse()
    with ExitStack() as stack:
        starts = starts_of(stack, options.instances, options.share)
        engines = stack.enter_context(running("sharing", starts))
        results = measure(engines, options.instances, options.warm, options.rounds)
    finish("sharing", results)


if __name__ == "__main__":
    main()
