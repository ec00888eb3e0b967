"""The command: runs worlds until enough requests have been through, and shows the shortest history of a failure."""

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from dataclasses import fields

import vllm

from pegaflow.connector import compat
from tests.storm import world
from tests.storm.plan import Plan, draw, over_hosts
from tests.storm.shrink import shrink

WORLD_REQUESTS = 60
REPORT_SECONDS = 60.0
OVER_HOSTS = 4
"""In one world of so many, engines have their ranks on several hosts."""


def main() -> None:
    """Read the arguments and exit."""
    parser = argparse.ArgumentParser(prog="python -m tests.storm", description=__doc__)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 31)
    sys.exit(storm(arguments.requests, seed))


def say(text: str) -> None:
    """A line, now."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def storm(requests: int, seed: int) -> int:
    """Exit status. Each world has a seed of its own, counted up from ``seed``."""
    say(f"storm: vLLM {vllm.__version__}, {requests} requests, seed {seed}")
    counts: Counter[str] = Counter()
    started = reported = time.monotonic()
    while counts["requests"] < requests:
        plan = draw(seed, WORLD_REQUESTS, compat.features().failed_requests and compat.features().block_state)
        plan = over_hosts(plan) if seed % OVER_HOSTS == 0 else plan
        try:
            counts += tally(world.run(plan))
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            tell(*shrink(plan, error))
            say(f"storm: failed; again with make storm REQUESTS={WORLD_REQUESTS} SEED={seed}")
            return 1
        seed += 1
        if time.monotonic() > reported + REPORT_SECONDS:
            reported = time.monotonic()
            say(f"storm: {counts['requests']} requests")
    seconds = time.monotonic() - started
    say("storm: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    say(f"storm: nothing went wrong in {counts['requests']} requests, {seconds:.1f} s, vLLM {vllm.__version__}")
    return 0


def tally(lived: world.World) -> "Counter[str]":
    """What happened in a world."""
    copies = {field.name: getattr(lived.tally, field.name) for field in fields(lived.tally)}
    return lived.counts + Counter(copies)


def tell(plan: Plan, error: Exception) -> None:
    """Print a history."""
    say(f"\nstorm: the shortest history: {len(plan.requests)} request(s), {len(plan.events)} event(s)")
    used = {one.engine for one in (*plan.requests, *plan.events)}
    for number, engine in enumerate(plan.engines):
        if number in used:
            say(f"  engine {number}: {engine}")
    for request in plan.requests:
        say(f"  {request}")
    for event in plan.events:
        say(f"  {event}")
    for engine_lived in getattr(getattr(error, "world", None), "engines", []):
        for line in list(engine_lived.history)[-100:]:
            say(f"  engine {engine_lived.number} {line}")
    say(f"  {type(error).__name__}: {error}")
