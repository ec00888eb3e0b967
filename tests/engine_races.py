"""What happens to requests while their blocks are being copied, on any copier: real pools, every byte checked.

``engine_on`` makes a small engine on the one pool of a test. Its copies take their time, so blocks are preempted,
freed, aborted and reused while they are read and written.
"""

import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from pegaflow import _native
from tests.patience import await_
from tests.unit.mini_engine import EVERY_KIND, MiniEngine, MiniRequest

EngineOn = Callable[..., MiniEngine]
PROMPT = list(range(40))
STEPS_MAX = 1_000_000
REPEATS_MAX = 1_000


def finish(engine: MiniEngine, damaged: int = 0) -> None:
    """Run to the end; nothing is held and the pool is sound."""
    engine.run(STEPS_MAX)
    engine.assert_nothing_held()
    for worker in engine.workers:
        worker.shutdown()
    for path in engine.pool_paths or (engine.pool.path,):
        # Exact only while nobody changes the pool, and its own thread may be growing it: what counts is what stays.
        await_(partial(is_sound, path, damaged), partial(problems_of, path))


def is_sound(path: str, damaged: int) -> bool:
    """Whether nothing is held, and nothing is wrong but what a test has damaged."""
    return leases_in(path) == 0 and len(problems_of(path)) == damaged


def leases_in(path: str) -> int:
    """Leases on blocks of a pool, whoever has them."""
    return sum(int(space["leases"]) for space in json.loads(_native.inspect(path))["namespaces"])


def problems_of(path: str) -> list[Any]:
    """What is wrong with a pool."""
    found: list[Any] = json.loads(_native.verify(path))["problems"]
    return found


def saved(engine_on: EngineOn, *prompts: list[int]) -> None:
    """Another engine has computed these prompts."""
    engine = engine_on(blocks=400)
    for prompt in prompts:
        engine.add(prompt)
    finish(engine)


def hits(engine_on: EngineOn, *prompts: list[int]) -> list[int]:
    """Tokens of each prompt that a fresh engine loads; it compares all bytes."""
    engine = engine_on(blocks=400)
    requests = [engine.add(prompt) for prompt in prompts]
    finish(engine)
    return [request.hit_tokens for request in requests]


def preempted_while_saving(engine_on: EngineOn) -> None:
    """Blocks of a preempted request are computed anew by others as soon as vLLM may hand them out."""
    engine = engine_on(blocks=24)
    victim = engine.add(PROMPT, more=4)
    while victim.state != "running":  # hosts may have to be asked first
        engine.step()
    engine.preempt(victim)
    others = [[family] * 44 for family in range(200, 206)]
    for other in others:
        engine.add(other)
        engine.step()
    finish(engine)
    assert sum(hits(engine_on, PROMPT, *others)) > 0  # few blocks may be pinned in so small an engine


def aborted_while_loading(engine_on: EngineOn) -> None:
    """A request goes away while its blocks are being loaded; others take them once vLLM may hand them out."""
    saved(engine_on, PROMPT)
    engine = engine_on(blocks=24)
    aborted = engine.add(PROMPT)

    def abort() -> None:
        if aborted.state == "loading":
            engine.abort(aborted)

    engine.before_workers = abort
    others = [[family] * 44 for family in range(210, 214)]
    for other in others:
        engine.add(other)
        engine.step()
    finish(engine)
    assert aborted.state == "aborted"
    assert hits(engine_on, PROMPT, *others)[0] == 40


def saved_and_loaded_beside_each_other(engine_on: EngineOn) -> None:
    """One request loads while another fills blocks that are saved, with no block to spare."""
    warm = [[family] * 40 for family in range(220, 224)]
    saved(engine_on, *warm)
    engine = engine_on(blocks=40)
    cold = [[family] * 40 for family in range(230, 234)]
    requests: list[MiniRequest] = []
    for one, other in zip(warm, cold, strict=True):
        requests += [engine.add(one), engine.add(other, more=8)]
        engine.step()
    finish(engine)
    assert [request.hit_tokens for request in requests[::2]] == [40] * len(warm)
    found = hits(engine_on, *warm, *cold)
    assert found[: len(warm)] == [40] * len(warm)
    assert sum(found[len(warm) :]) > 0  # as above


def random_events(
    engine_on: EngineOn, seed: int, events: int = 400, finish: Callable[[MiniEngine], object] = finish
) -> None:
    """Requests come, are aborted and preempted, caches are reset: in the end nothing is left behind."""
    rng = random.Random(seed)
    tails = {"pd_tail_save": rng.random() < 0.7, "pd_tail_load": rng.random() < 0.7}
    engine = engine_on(
        rng.choice([*EVERY_KIND.values()]), ranks=rng.choice([1, 2]), blocks=rng.choice([64, 160]), **tails
    )
    prompts = [[family] * rng.randrange(1, 30) + list(range(rng.randrange(1, 60))) for family in range(40)]
    for _ in range(events):
        event = rng.random()
        running = [request for request in engine.requests.values() if request.state == "running"]
        if event < 0.35 and len(engine.requests) < 4:
            prompt = rng.choice(prompts)
            engine.add(prompt[: rng.randrange(1, len(prompt) + 1)], more=rng.randrange(1, 12))
        elif event < 0.40 and engine.requests:
            victim = rng.choice(list(engine.requests.values()))
            if victim.state != "aborted":
                engine.abort(victim)
        elif event < 0.45 and running:
            engine.preempt(rng.choice(running))
        elif event < 0.46:
            engine.scheduler.reset()
        engine.step()
    for _ in range(REPEATS_MAX):  # where copies are slow, all requests so far may have been ahead of them
        if engine.recorder.counters.get("load_success"):
            break
        engine.add(PROMPT)
        engine.run(STEPS_MAX)
    finish(engine)
    assert engine.recorder.counters["save_success"]
    assert engine.recorder.counters["load_success"]


RACES = (preempted_while_saving, aborted_while_loading, saved_and_loaded_beside_each_other)
