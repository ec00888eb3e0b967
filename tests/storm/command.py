"""The command: runs worlds until enough requests have been through, and shows the shortest history of a failure."""

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from dataclasses import fields

import vllm

from tests.storm import world
from tests.storm.plan import Plan, draw
from tests.storm.shrink import shrink

WORLD_REQUESTS = 60
REPORT_SECONDS = 60.0


def main() -> None:
    """Read the arguments and exit."""
    parser = argparse.ArgumentParser(prog="python -m tests.storm", description=__doc__)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 31)
    sys.exit(storm(arguments.requests, seed))


def storm(requests: int, seed: int) -> int:
    """Exit status. Each world has a seed of its own, counted up from ``seed``."""
    print(f"storm: vLLM {vllm.__version__}, {requests} requests, seed {seed}", flush=True)
    counts: Counter[str] = Counter()
    started = reported = time.monotonic()
    while counts["requests"] < requests:
        plan = draw(seed, WORLD_REQUESTS)
        try:
            counts += tally(world.run(plan))
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            tell(*shrink(plan, error))
            print(f"storm: failed; again with make storm REQUESTS={WORLD_REQUESTS} SEED={seed}", flush=True)
            return 1
        seed += 1
        if time.monotonic() > reported + REPORT_SECONDS:
            reported = time.monotonic()
            print(f"storm: {counts['requests']} requests", flush=True)
    seconds = time.monotonic() - started
    print("storm: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    print(f"storm: nothing went wrong in {counts['requests']} requests, {seconds:.1f} s, vLLM {vllm.__version__}")
    return 0


def tally(lived: world.World) -> "Counter[str]":
    """What happened in a world."""
    copies = {field.name: getattr(lived.tally, field.name) for field in fields(lived.tally)}
    return lived.counts + Counter(copies)


def tell(plan: Plan, error: Exception) -> None:
    """Print a history."""
    print(f"\nstorm: the shortest history: {len(plan.requests)} request(s), {len(plan.events)} event(s)")
    used = {one.engine for one in (*plan.requests, *plan.events)}
    for number, engine in enumerate(plan.engines):
        if number in used:
            print(f"  engine {number}: {engine}")
    for request in plan.requests:
        print(f"  {request}")
    for event in plan.events:
        print(f"  {event}")
    for engine_lived in getattr(getattr(error, "world", None), "engines", []):
        for line in list(engine_lived.history)[-100:]:
            print(f"  engine {engine_lived.number} {line}")
    print(f"  {type(error).__name__}: {error}")
