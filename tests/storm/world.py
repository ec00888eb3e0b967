"""One world of a storm from beginning to end, and what must be true of it."""

import json
import logging
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from pegaflow import _native
from pegaflow.connector import compat, following, loads, pins, saves, scheduler, shard_asks, waiting
from tests.storm import vllm_objects
from tests.storm.copier import Tally
from tests.storm.engine import Client, Engine
from tests.storm.plan import Plan

POOL = "storm"
TICK_SECONDS = 0.002
SOUND_SECONDS_MAX, SOUND_PAUSE_SECONDS = 240.0, 0.02
"""How long the pool's own threads may take to end what they are at, on any machine."""
STILL_TICKS_MAX = 700
"""Longer than anybody waits for a prefix."""
PATIENCE_TICKS = 2_000
"""After the last request, where vLLM may preempt for ever."""
LOGGER = logging.getLogger("vllm.pegaflow")
ENVIRONMENT = {"PEGAFLOW_SHARE_DUMMY_WEIGHTS": "1", "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1"}


class StormError(AssertionError):
    """Something that must not happen did."""


class Errors(logging.Handler):
    """What was logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.messages.append(record.getMessage() + (f" {record.exc_info[1]!r}" if record.exc_info else ""))


class World:
    """Runs a plan."""

    def __init__(self, plan: Plan, shm_dir: str) -> None:
        self.plan, self._shm_dir = plan, shm_dir
        self.tally = Tally()
        self.counts: Counter[str] = Counter()
        self.ticks = 0
        self.ended = False
        self.engines: list[Engine] = []
        self._generation: Counter[int] = Counter()
        self._may_fail = any(one.trouble.load_fails or one.trouble.damage for one in plan.engines)
        self._options = {
            "pool_name": POOL,
            "shm_dir": shm_dir,
            "pool_size": plan.segments << 16,
            "segment_size": 1 << 16,
        }

    def run(self) -> None:
        """Everything. Raises whatever goes wrong."""
        with _listening() as self._errors, _made_up(self), vllm_objects.hash_root():
            self._live()

    def _live(self) -> None:
        self.engines += [self._start(number) for number in range(len(self.plan.engines))]
        requests = sorted(self.plan.requests, key=lambda one: one.tick)
        events = sorted(self.plan.events, key=lambda one: one.tick)
        last = max((one.tick for one in (*requests, *events)), default=0)
        ticks_max = last + 2_000 + sum(len(one.prompt) + 20 * one.more for one in requests)
        done, since = 0, 0
        while requests or events or not all(engine.idle for engine in self.engines):
            while requests and requests[0].tick <= self.ticks:
                self.engines[requests[0].engine].add(requests.pop(0))
                self.counts["requests"] += 1
            while events and events[0].tick <= self.ticks:
                event = events.pop(0)
                self._happen(event.engine, event.kind)
            for engine in self.engines:
                engine.tick()
            for number in [engine.number for engine in self.engines if engine.dead]:
                self._check(self._may_fail, "an engine ended that nobody has disturbed")
                self._happen(number, "stop")
                self.counts["engines ended by a worker"] += 1
            self.ticks += 1
            self._check(not self._errors.messages, f"logged: {self._errors.messages[:3]}")
            self._check(self._may_fail or not self.tally.loads_failed, "a load failed that nobody has disturbed")
            if done != sum(engine.progress for engine in self.engines) or requests or events:
                done, since = sum(engine.progress for engine in self.engines), self.ticks
            stands = self.ticks - since > STILL_TICKS_MAX
            if stands and vllm_objects.may_wait_for_ever():
                self.counts["gave up"] += sum(engine.give_up(waiting=True) for engine in self.engines)
                stands, since = False, self.ticks
            self._check(not stands, f"not at rest, and nothing happens: {self._who_is_left()}")
            if self.ticks > last + PATIENCE_TICKS and self.ticks % 100 == 0 and vllm_objects.may_wait_for_ever():
                self.counts["gave up"] += sum(engine.give_up() for engine in self.engines)
            self._check(self.ticks < ticks_max, f"not at rest after {ticks_max} ticks: {self._who_is_left()}")
        self._at_rest()
        for engine in self.engines:
            self._book(engine)
            engine.stop()
        self._empty()

    def _start(self, number: int) -> Engine:
        plan = self.plan.engines[number]
        self._generation[number] += 1
        engine = Engine(plan, number, self.plan.seed * 1000 + self._generation[number], self._options, self.tally)
        self._check(not self._errors.messages, f"logged: {self._errors.messages[:3]}")
        engine.get_ready()
        return engine

    def _happen(self, number: int, kind: str) -> None:
        engine = self.engines[number]
        self.counts[kind] += 1
        if kind == "reset":
            engine.reset()
        elif kind == "stop":
            self._book(engine)
            engine.stop()
            self.engines[number] = self._start(number)
        elif engine.wanted is None:
            engine.wanted = kind

    # -- what must be true --------------------------------------------------------------------------------------------

    def _check(self, holds: bool, message: str) -> None:
        if not holds:
            raise StormError(f"tick {self.ticks}: {message}")

    def _who_is_left(self) -> list[str]:
        engines = [
            f"engine {engine.number} wants {engine.wanted}, saves {engine.connector.has_pending_push_work()}, copies "
            f"{[copier.in_flight() for copier in engine.copiers]}"
            for engine in self.engines
            if not engine.idle
        ]
        return engines + [
            f"{name} {request.status.name} {request.num_computed_tokens}/{request.num_tokens}"
            for engine in self.engines
            for name, request in engine.scheduler.requests.items()
        ]

    def _book(self, engine: Engine) -> None:
        """Take over what an engine has done; each of its clients must have got what it should."""
        for client in engine.clients.values():
            self._check_answer(engine, client)
        self.counts["preempted"] += engine.preempted
        self.counts["updated"] += engine.updates
        self.counts["steps"] += engine.ticks
        self.counts["compared"] += sum(runner.compared for runner in engine.runners)
        recorder = engine.connector._recorder
        self._check(not recorder.counters.get("hook_errors"), f"hook errors of engine {engine.number}")

    def _check_answer(self, engine: Engine, client: Client) -> None:
        name, text = client.plan.name, client.text
        expected = text.tokens[text.prompt_tokens : text.limit]
        if client.plan.stops_after is not None:
            stop = expected[client.plan.stops_after - 1]
            expected = expected[: expected.index(stop) + 1]
        got = client.tokens
        self._check(got == expected[: len(got)], f"{name} was told {got}, not {expected}")
        self.counts[f"ended: {client.ended or 'engine stopped'}"] += 1
        if client.ended in ("stop", "length"):
            self._check(len(got) == len(expected), f"{name} ended early with {got}, not {expected}")
        elif client.ended == "error":
            self._check(self._may_fail and not engine.plan.recompute, f"{name} ended in an error")

    def _at_rest(self) -> None:
        """Nothing is left of any request, in vLLM and in the connector."""
        for engine in self.engines:
            at = f"engine {engine.number}: "
            pool, half = engine.scheduler.kv_cache_manager.block_pool, engine.connector._scheduler
            free = pool.get_num_free_blocks()
            self._check(free == engine.plan.blocks - 1, f"{at}{engine.plan.blocks - 1 - free} blocks are not free")
            self._check(not engine.scheduler.requests, f"{at}requests are left")
            self._check(all(client.ended for client in engine.clients.values()), f"{at}a request never ended")
            self._check(len(half.table) == 0 and half.table.loading == 0, f"{at}states of requests are left")
            self._check(half._pins.count == 0, f"{at}{half._pins.count} blocks are pinned")
            self._check(not half.has_pending_saves(), f"{at}saves or loads are left")
            self._check(engine.connector._store.off is None, f"{at}the cache is off: {engine.connector._store.off}")
            self._check(not any(copier.in_flight() for copier in engine.copiers), f"{at}copies are left")
        self._check_pool()

    def _empty(self) -> None:
        self.ended = True
        self._check_pool()
        self._check(not self._errors.messages, f"logged: {self._errors.messages[:3]}")

    def _check_pool(self) -> None:
        for space in self._inspect()["namespaces"] if not self.counts["stop"] or self.ended else ():
            self._check(space["leases"] == 0, f"{space['leases']} leases in namespace {space['id']}")
        # Segments may be changing hands just now, and who looks meanwhile sees neither the one nor the other.
        deadline = time.monotonic() + SOUND_SECONDS_MAX
        while (problem := self._problem_of_pool()) and time.monotonic() < deadline:
            time.sleep(SOUND_PAUSE_SECONDS)
        self._check(not problem, problem)

    def _inspect(self) -> dict[str, Any]:
        [path] = [one["path"] for one in json.loads(_native.list_pools(self._shm_dir))]
        known: dict[str, Any] = json.loads(_native.inspect(path))
        return known

    def _problem_of_pool(self) -> str:
        """What is broken in the pool, or held that its own threads may hold; nothing if all is well."""
        known = self._inspect()
        held: tuple[str, ...] = ("blocks_reserved", "blocks_quarantined")
        if self.counts["stop"]:
            # What an engine was copying when it stopped is let go when its process leaves the pool, or by time.
            held = ("blocks_reserved",) if self.ended else ()
        for space in known["namespaces"]:
            for what in held:
                if space[what]:
                    return f"{space[what]} {what} in namespace {space['id']}"
        found = json.loads(_native.verify(known["path"], checksums=False))
        return f"the pool is not sound: {found}" if found.get("problems") else ""


@contextmanager
def _listening() -> Iterator[Errors]:
    """What is logged as an error. vLLM is not heard: it complains of failed loads and refused resets, as it should."""
    errors, vllm_logger = Errors(), logging.getLogger("vllm")
    levels = LOGGER.level, vllm_logger.level
    LOGGER.addHandler(errors)
    LOGGER.setLevel(logging.ERROR)
    vllm_logger.setLevel(logging.CRITICAL)
    try:
        yield errors
    finally:
        LOGGER.removeHandler(errors)
        LOGGER.setLevel(levels[0])
        vllm_logger.setLevel(levels[1])


@contextmanager
def _made_up(world: World) -> Iterator[None]:
    """Time passes by ticks, vLLM steps an idle engine unless the plan says otherwise, and small blocks have stages."""
    clock = SimpleNamespace(monotonic=lambda: 1_000.0 + world.ticks * TICK_SECONDS)
    settles = [engine.settle for engine in world.plan.engines]
    patches: list[tuple[Any, str, Any]] = [
        (module, "time", clock) for module in (loads, pins, saves, scheduler, shard_asks, waiting)
    ]
    patches.append((following, "STAGE_BYTES_MIN", 8))
    patches.append((following, "STAGE_BYTES_AIM", 64))
    patches.append((compat, "nobody_steps_when_idle", lambda: any(settles)))
    patches.append((compat, "worker_rank", compat.worker_rank))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        with mock.patch.dict(os.environ, ENVIRONMENT):
            yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextmanager
def shm_directory() -> Iterator[str]:
    """A directory for pools that is gone afterwards."""
    directory = tempfile.mkdtemp(prefix="pegaflow-storm-", dir="/dev/shm")
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def run(plan: Plan) -> World:
    """Run one plan in a pool of its own. What goes wrong is raised, with the world as its ``world``."""
    with shm_directory() as directory:
        world = World(plan, directory)
        try:
            world.run()
        except Exception as error:
            error.world = world  # type: ignore[attr-defined]
            raise
        return world
