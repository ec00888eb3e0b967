"""Connectors that are broken on purpose: a storm notices each of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pegaflow.connector.copies import Copies
from pegaflow.connector.following import Follower
from pegaflow.connector.guard import MustStop
from pegaflow.connector.landing import Landings
from pegaflow.connector.loads import Loads
from pegaflow.connector.namespaces import Store
from pegaflow.connector.pins import Pins
from pegaflow.connector.request_state import RequestTable
from pegaflow.connector.saves import Saves
from pegaflow.connector.scheduler import SchedulerHalf
from pegaflow.connector.tails import Tails
from pegaflow.connector.worker import WorkerHalf
from tests.storm import world
from tests.storm.command import WORLD_REQUESTS
from tests.storm.plan import EventPlan, Plan, Trouble, draw

WORLDS_MAX = 200
"""Mostly the first one is enough; which one is depends on how fast the pool grows."""


def plain(plan: Plan) -> Plan:
    """Copies that take their time and no other trouble."""
    engines = [replace(engine, trouble=Trouble(delay_max=12), settle=False) for engine in plan.engines]
    return replace(plan, engines=tuple(engines), events=())


def updated(plan: Plan) -> Plan:
    """New weights every now and then."""
    last = max(one.tick for one in plan.requests)
    return replace(plain(plan), events=tuple(EventPlan(tick, 0, "update") for tick in range(10, last, 25)))


def followed(plan: Plan) -> Plan:
    """Loads that vLLM goes on with before they are over."""
    engines = [
        replace(engine, options=(("layerwise", "on"),), model=replace(engine.model, layers=3, groups=groups[:1]))
        for engine in plain(plan).engines
        for groups in [tuple(group for group in engine.model.groups if not group.window)]
    ]
    return replace(plan, engines=tuple(engines), events=())


def tailed(plan: Plan) -> Plan:
    """The last block of each prompt is saved and loaded."""
    options = (("pd_tail_save", True), ("pd_tail_load", True))
    engines = [replace(engine, options=options, local_caching=False) for engine in plain(plan).engines]
    return replace(plan, engines=tuple(engines), events=())


def failing(plan: Plan) -> Plan:
    """Loads fail."""
    trouble = Trouble(delay_max=6, load_fails=0.4)
    engines = [replace(engine, trouble=trouble, recompute=True, local_caching=False) for engine in plan.engines]
    return replace(plan, engines=tuple(engines), events=())


def failing_late(plan: Plan) -> Plan:
    """Loads fail that vLLM goes on with."""
    engines = [replace(engine, trouble=Trouble(delay_max=6, load_fails=1.0)) for engine in followed(plan).engines]
    return replace(plan, engines=tuple(replace(engine, recompute=True) for engine in engines), events=())


def noticed(make: Callable[[Plan], Plan]) -> str:
    """What a storm says; fails if it says nothing."""
    for seed in range(500, 500 + WORLDS_MAX):
        try:
            world.run(make(draw(seed, WORLD_REQUESTS)))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{WORLDS_MAX} worlds went by, and nobody noticed")


def pin_nothing(self: Pins, block_ids: Any) -> list[Any]:
    return [self._pool.blocks[block_id] for block_id in block_ids]


def keep_first(let_go: Any) -> Any:
    def let_all_but_one_go(self: Pins, blocks: list[Any]) -> None:
        let_go(self, blocks[1:])

    return let_all_but_one_go


def ignore(*arguments: Any, **named: Any) -> None:
    return None


def pretend(*arguments: Any, **named: Any) -> bool:
    return True


def end_early(start: Any) -> Any:
    def start_and_end(self: Copies, task: Any, blocks: Any, layouts: Any) -> None:
        start(self, task, blocks, layouts)
        if task.load is not None:
            self._ended.append(replace(task))

    return start_and_end


def save_early(plan: Any) -> Any:
    def one_block_early(self: Saves, state: Any, tables: Any, computed_tokens: int, *states: Any) -> Any:
        return plan(self, state, tables, computed_tokens + self._geometry.groups[0].block_tokens, *states)

    return one_block_early


def match_more(match: Any) -> Any:
    def match_whole_prompt(self: Loads, state: Any, computed_tokens: int) -> Any:
        tokens, asynchronous = match(self, state, computed_tokens)
        room = state.request.num_tokens - computed_tokens
        return (min(room, tokens + 1) if tokens else tokens), asynchronous

    return match_whole_prompt


def share_after_reset(reset: Any) -> Any:
    def reset_and_share(self: Store, **named: Any) -> bool:
        done: bool = reset(self, **named)
        self._private = None
        return done

    return reset_and_share


def forget_failures(self: WorkerHalf) -> set[int]:
    return set()


def report_success(poll: Any) -> Any:
    def polled(self: Copies) -> Any:
        tasks = poll(self)
        for task in tasks:
            if task.load is not None:
                task.ok = True
                task.failed_refs.clear()
                task.failed_blocks.clear()
        return tasks

    return polled


def go_on(poll: Any) -> Any:
    def poll_and_go_on(self: WorkerHalf, settle: bool = False) -> Any:
        try:
            return poll(self, settle)
        except MustStop:
            return set(), set()

    return poll_and_go_on


def lose_a_load(take: Any) -> Any:
    def take_all_but_one(self: Loads) -> Any:
        return take(self)[1:]

    return take_all_but_one


def wrong_tail(find: Any) -> Any:
    def find_longer(self: Tails, request: Any) -> Any:
        tail = find(self, request)
        return replace(tail, key=b"tail" * 8) if tail is not None else None

    return find_longer


MUTANTS: dict[str, tuple[Callable[[Plan], Plan], Any, str, Any, str]] = {
    "pins are never released": (plain, Pins, "let_go", keep_first, "not free|not at rest|Error"),
    "leases are never released": (plain, Loads, "_release", ignore, "leases"),
    "loads end before their copies": (plain, Copies, "start", end_early, "WrongBytes|Error"),
    "blocks are saved before they are computed": (plain, Saves, "plan", save_early, "WrongBytes|logged"),
    "hits are longer than what is there": (plain, Loads, "match", match_more, "logged|WrongBytes|Error"),
    "a load is lost": (plain, Loads, "take_jobs", lose_a_load, "not at rest"),
    "resets are ignored": (updated, SchedulerHalf, "reset", pretend, "WrongBytes"),
    "resets leave the pool alone": (updated, Store, "reset", pretend, "WrongBytes"),
    "new weights are shared": (updated, Store, "reset", share_after_reset, "WrongBytes"),
    "requests of before a reset are saved": (updated, RequestTable, "__iter__", lambda self: iter(()), "WrongBytes"),
    "layers do not wait for their load": (followed, Follower, "_wait", ignore, "WrongBytes"),
    "blocks that have landed are held for ever": (followed, Landings, "let_go", ignore, "not free"),
    "failed blocks are kept silent": (failing, WorkerHalf, "take_invalid_blocks", forget_failures, "WrongBytes"),
    "failed loads are called good": (failing, Copies, "poll", report_success, "WrongBytes"),
    "engines go on with what was lost": (failing_late, WorkerHalf, "poll", go_on, "WrongBytes"),
    "all tails have one key": (tailed, Tails, "_find", wrong_tail, "WrongBytes"),
}
WRAPPERS = (
    keep_first, end_early, save_early, match_more, share_after_reset, report_success, lose_a_load, wrong_tail, go_on,
)  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_storm_notices(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    make, owner, method, replacement, says = MUTANTS[name]
    if replacement in WRAPPERS:
        replacement = replacement(getattr(owner, method))
    monkeypatch.setattr(owner, method, replacement)
    said = noticed(make)
    assert any(word in said for word in says.split("|")), said


def test_storm_notices_that_saves_do_not_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pins, "pin", pin_nothing)
    monkeypatch.setattr(Pins, "unpin", ignore)
    assert "WrongBytes" in noticed(plain)


@pytest.mark.parametrize("make", [plain, updated, followed, tailed, failing, failing_late])
def test_storm_has_nothing_to_say_of_the_connector_as_it_is(make: Callable[[Plan], Plan]) -> None:
    for seed in range(500, 504):
        world.run(make(draw(seed, WORLD_REQUESTS)))
