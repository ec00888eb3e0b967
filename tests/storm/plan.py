"""What a storm consists of: plain data, drawn from a seed, of which any part can be left out."""

import random
from dataclasses import dataclass, replace
from typing import Any

from tests.storm.texts import FIRST_TOKEN, VOCABULARY


@dataclass(frozen=True)
class GroupPlan:
    """One KV cache group: each token sees ``window`` tokens, or those since the last multiple of ``chunk``, or nothing
    but a ``state`` of all before it; otherwise all."""

    block_tokens: int
    window: int = 0
    chunk: int = 0
    state: bool = False

    def first_seen(self, position: int) -> int:
        """The first token that the one at ``position`` sees."""
        if self.chunk:
            return position - position % self.chunk
        return max(0, position - self.window + 1) if self.window else 0


@dataclass(frozen=True)
class ModelPlan:
    """A model that is made up. Engines with equal ones share blocks."""

    groups: tuple[GroupPlan, ...]
    layers: int
    """Of each group."""
    width: int = 1
    """Numbers of 8 bytes that a layer keeps of each token."""
    seed: int = 0
    block_outermost: bool = False
    """Whether a block's layers lie together."""


@dataclass(frozen=True)
class Trouble:
    """How bad things are: chances for each copy, and steps that it takes at most."""

    delay_max: int = 4
    busy: float = 0.0
    load_fails: float = 0.0
    save_fails: float = 0.0
    damage: float = 0.0


@dataclass(frozen=True)
class EnginePlan:
    """One vLLM instance."""

    model: ModelPlan
    blocks: int
    requests_max: int
    step_tokens_max: int
    ranks: int = 1
    asynchronous: bool = False
    priorities: bool = False
    local_caching: bool = True
    recompute: bool = True
    settle: bool = False
    second_runner: bool = False
    """Whether resumed requests come as new ones, as the second model runner wants them."""
    shapes_with_steps: bool = False
    """Whether the workers tell their layout with the first step, not at the start."""
    chunk_tokens: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    """The connector's, without prefix."""
    trouble: Trouble = Trouble()


@dataclass(frozen=True)
class RequestPlan:
    """One request to one engine."""

    tick: int
    engine: int
    name: str
    prompt: tuple[int, ...]
    more: int
    priority: int = 0
    salt: str | None = None
    adapter: str | None = None
    stops_after: int | None = None
    """The model says a stop token after so many."""
    abort: tuple[str, int] | None = None
    """``(state in which the client goes away, ticks that it lasted)``."""


@dataclass(frozen=True)
class EventPlan:
    """Something that happens to an engine: ``reset``, ``update`` (new weights), ``sleep`` or ``stop``."""

    tick: int
    engine: int
    kind: str


@dataclass(frozen=True)
class Plan:
    """One world: a pool, engines, what they are asked and what happens to them."""

    seed: int
    segments: int
    """Of the pool; the smallest that there are."""
    engines: tuple[EnginePlan, ...]
    requests: tuple[RequestPlan, ...] = ()
    events: tuple[EventPlan, ...] = ()

    def __len__(self) -> int:
        return len(self.requests) + len(self.events)

    def without(self, gone: set[int]) -> "Plan":
        """All but some requests and events, counted through both."""
        first = len(self.requests)
        return replace(
            self,
            requests=tuple(one for index, one in enumerate(self.requests) if index not in gone),
            events=tuple(one for index, one in enumerate(self.events, first) if index not in gone),
        )


TOKENS_MAX = 250
"""Of a request, its answer included."""

ADAPTERS = ("a", "b")
SALTS = ("s", "t")
"""Not called like adapters: before 0.31 vLLM itself takes one for the other."""

ABORTS = ("queued", "loading", "running", "preempted", "saving")


def draw(seed: int, requests: int, hybrid: bool = True) -> Plan:
    """A world with ``requests`` requests. ``hybrid``: models may have several KV cache groups."""
    dice = random.Random(f"storm {seed}")
    models = [_model(dice, 0)]
    if not hybrid:
        models = [replace(models[0], groups=tuple(group for group in models[0].groups if not group.window)[:1])]
    if dice.random() < 0.25:
        models.append(replace(models[0], seed=1))
    engines = tuple(_engine(dice, dice.choice(models)) for _ in range(dice.choice((1, 1, 2, 2, 3))))
    pace = dice.choice((0.3, 1.0, 3.0))
    families = [_tokens(dice, dice.randrange(1, 80)) for _ in range(dice.choice((1, 3, 8)))]
    salted, adapted = dice.random() < 0.3, dice.random() < 0.15
    asked, tick = [], 0.0
    for index in range(requests):
        tick += dice.expovariate(pace)
        asked.append(_request(dice, index, int(tick), len(engines), families, salted, adapted))
        if dice.random() < 0.3:
            families[dice.randrange(len(families))] = asked[-1].prompt
    events = tuple(
        EventPlan(dice.randrange(1, int(tick) + 2), dice.randrange(len(engines)), _event(dice))
        for _ in range(dice.choice((0, 0, 1, 2, 4)))
    )
    least = sum(engine.ranks * len(engine.model.groups) for engine in engines)
    return Plan(seed, least * dice.choice((1, 2, 4, 16)), engines, tuple(asked), events)


def over_hosts(plan: Plan) -> Plan:
    """The same world, in which the two ranks of each engine are on hosts of their own. (They meet in one pool all the
    same: names keep them apart.)"""
    engines = []
    for engine in plan.engines:
        options = [option for option in engine.options if not option[0].startswith("wait_for_full_prefix")]
        options.append(("tp_shard_endpoints", "host-a:1,host-b:1"))
        trouble = replace(engine.trouble, damage=0.0)
        engines.append(replace(engine, ranks=2, settle=False, options=tuple(options), trouble=trouble))
    least = sum(2 * len(engine.model.groups) for engine in engines)
    return replace(plan, segments=max(plan.segments, 2 * least), engines=tuple(engines))


def _event(dice: random.Random) -> str:
    return dice.choice(("reset", "reset", "update", "update", "sleep", "stop"))


def _model(dice: random.Random, seed: int) -> ModelPlan:
    size = dice.choice((4, 8, 16))
    groups = [GroupPlan(size)]
    kind = dice.random()
    if kind < 0.35:
        groups.append(GroupPlan(size, dice.choice((1, size - 1, size, 2 * size + 1, 3 * size))))
    if kind < 0.12:
        groups.append(GroupPlan(size, groups[1].window))
    if kind < 0.05:
        groups.reverse()
    return ModelPlan(
        tuple(groups),
        layers=dice.choice((1, 2, 3)),
        width=dice.choice((1, 4, 16)),
        seed=seed,
        block_outermost=dice.random() < 0.3,
    )


def _engine(dice: random.Random, model: ModelPlan) -> EnginePlan:
    per_request = sum(-(-TOKENS_MAX // group.block_tokens) for group in model.groups)
    requests_max = dice.choice((1, 2, 4, 8))
    options: list[tuple[str, Any]] = []
    if dice.random() < 0.3:
        options.append(("pd_tail_save", True))
    if dice.random() < 0.3:
        options.append(("pd_tail_load", True))
    if dice.random() < 0.1:
        options.append(("wait_for_full_prefix", True))
        options.append(("wait_for_full_prefix_seconds", 1))
    if dice.random() < 0.05:
        options.append(("mode", "save_only"))
    options.append(("layerwise", dice.choice(("on", "off", "auto"))))
    bad = dice.random() < 0.35
    ranks = 2 if dice.random() < 0.2 else 1
    return EnginePlan(
        model,
        blocks=2 + per_request + int(per_request * requests_max * dice.choice((0.0, 0.1, 0.3, 1.0))),
        requests_max=requests_max,
        step_tokens_max=dice.choice((16, 32, 64, 256)),
        ranks=ranks,
        asynchronous=dice.random() < 0.5,
        priorities=dice.random() < 0.25,
        local_caching=dice.random() < 0.7,
        recompute=dice.random() < 0.8,
        settle=dice.random() < 0.1,
        second_runner=dice.random() < 0.3,
        shapes_with_steps=dice.random() < 0.2,
        chunk_tokens=dice.choice((0, 0, 0, 8)),
        options=tuple(options),
        trouble=Trouble(
            delay_max=dice.choice((0, 1, 4, 12)),
            busy=dice.choice((0.0, 0.2)) if bad else 0.0,
            load_fails=dice.choice((0.0, 0.1, 0.4)) if bad else 0.0,
            save_fails=dice.choice((0.0, 0.1)) if bad else 0.0,
            # The checksum of a block in several parts is that of all together, so no rank can compare its own.
            damage=dice.choice((0.0, 0.1)) if bad and ranks == 1 else 0.0,
        ),
    )


def _request(
    dice: random.Random,
    index: int,
    tick: int,
    engines: int,
    families: list[tuple[int, ...]],
    salted: bool,
    adapted: bool,
) -> RequestPlan:
    family = dice.choice(families)
    kept = len(family) if dice.random() < 0.5 else dice.randrange(1, len(family) + 1)
    added = 0 if dice.random() < 0.25 else dice.randrange(1, 50)
    prompt = (family[:kept] + _tokens(dice, added))[:200]
    more = dice.choice((1, 1, 2, 5, 20, 40))
    return RequestPlan(
        tick,
        dice.randrange(engines),
        f"r{index}",
        prompt,
        more,
        priority=dice.randrange(3),
        salt=dice.choice((None, *SALTS)) if salted else None,
        adapter=dice.choice((None, *ADAPTERS)) if adapted else None,
        stops_after=dice.randrange(1, more + 1) if dice.random() < 0.3 else None,
        abort=(dice.choice(ABORTS), dice.randrange(4)) if dice.random() < 0.2 else None,
    )


def _tokens(dice: random.Random, count: int) -> tuple[int, ...]:
    return tuple(FIRST_TOKEN + dice.randrange(VOCABULARY) for _ in range(count))
