"""KV events: what a router has heard is what an instance can load from the pool."""

import random
from collections import OrderedDict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.distributed import kv_events

from pegaflow.connector import compat, events
from pegaflow.connector.event_maker import KVEventMaker
from pegaflow.connector.events import Events, RemovedBlock, StoredBlock
from pegaflow.connector.geometry import Geometry
from tests.unit.mini_engine import HYBRID, SINGLE, MiniEngine
from tests.unit.test_connector_adapters import asks_for, known, make_adapter

PROMPT = list(range(40))


class Maker:
    """Hands our own events on."""

    def extra_keys(self, request: Any, start: int, stop: int) -> tuple[Any, ...] | None:
        return None

    def stored(self, blocks: Any) -> list[StoredBlock]:
        return list(blocks)

    def removed(self, blocks: Any) -> list[RemovedBlock]:
        return list(blocks)


class Router:
    """What somebody knows who listens to one engine."""

    def __init__(self, engine: MiniEngine) -> None:
        self.engine = engine
        self.blocks: dict[tuple[int, bytes], StoredBlock] = {}
        self.stored = self.removed = 0

    def listen(self) -> None:
        for run in self.engine.scheduler.take_events():
            for event in run:
                name = (event.group, event.block_hash)
                if isinstance(event, StoredBlock):
                    assert name not in self.blocks, "announced twice"
                    self.blocks[name] = event
                    self.stored += 1
                else:
                    del self.blocks[name]
                    self.removed += 1


def engine_and_router(geometry: Geometry = SINGLE, pool: Any = None, **more: Any) -> tuple[MiniEngine, Router]:
    engine = MiniEngine(geometry, pool, event_maker=Maker(), **more)
    return engine, Router(engine)


@pytest.fixture(autouse=True)
def look_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LOOK_SECONDS", 0.0)


def in_pool(engine: MiniEngine) -> set[tuple[int, bytes]]:
    return {
        (slot.namespace.id, slot.key)
        for slot in engine.pool.slots.values()
        if slot.state == "sealed" and slot.epoch == slot.namespace.epoch
    }


@pytest.mark.parametrize("geometry", [SINGLE, HYBRID], ids=["single", "hybrid"])
def test_blocks_are_announced_once_they_are_visible(geometry: Geometry) -> None:
    engine, router = engine_and_router(geometry)
    request = engine.add(PROMPT)
    engine.step()
    for copier in engine.copiers:
        copier.held = True
    engine.step()
    router.listen()
    assert router.blocks.keys() <= in_pool(engine)
    for copier in engine.copiers:
        copier.held = False
    engine.run()
    router.listen()
    assert router.blocks.keys() == in_pool(engine)
    whole = [block for block in router.blocks.values() if block.group == 0]
    assert [token for block in whole for token in block.tokens] == PROMPT
    assert [block.parent_hash for block in whole] == [None, *request.block_hashes[:9]]
    engine.assert_nothing_held()


def test_blocks_that_a_sibling_saved_are_announced_when_they_are_met() -> None:
    saver = MiniEngine()
    saver.add(PROMPT)
    saver.run()
    engine, router = engine_and_router(pool=saver.pool)
    router.listen()
    assert not router.blocks
    assert engine.add(PROMPT).hit_tokens == 0
    engine.run()
    router.listen()
    assert len(router.blocks) == 10
    engine.add(PROMPT)
    engine.run()
    router.listen()
    assert router.stored == 10


def test_blocks_that_went_are_announced_as_removed_and_announced_again_when_they_come_back() -> None:
    engine, router = engine_and_router()
    engine.add(PROMPT)
    engine.run()
    router.listen()
    gone = [ref for ref, slot in engine.pool.slots.items()][:4]
    for ref in gone:
        del engine.pool.slots[ref]
    router.listen()
    assert router.removed == 4
    assert router.blocks.keys() == in_pool(engine)
    engine.add(PROMPT)
    engine.run()
    router.listen()
    assert len(router.blocks) == 10
    assert router.blocks.keys() == in_pool(engine)


def test_reset_removes_everything_and_nothing_in_flight_is_announced() -> None:
    engine, router = engine_and_router()
    engine.add(PROMPT)
    engine.run()
    router.listen()
    engine.add([9] * 20)
    engine.step()
    engine.copiers[0].held = True
    engine.step()
    engine.scheduler.reset()
    router.listen()
    assert not router.blocks
    engine.copiers[0].held = False
    engine.run()
    router.listen()
    assert not router.blocks
    engine.add(PROMPT)
    engine.run()
    router.listen()
    assert len(router.blocks) == 10


def test_reset_of_a_sibling_is_noticed() -> None:
    engine, router = engine_and_router()
    engine.add(PROMPT)
    engine.run()
    router.listen()
    sibling = MiniEngine(pool=engine.pool)
    sibling.add([1] * 20)
    sibling.run()
    sibling.scheduler.reset()
    router.listen()
    assert not router.blocks


def test_cache_that_was_turned_off_takes_everything_back() -> None:
    engine, router = engine_and_router()
    engine.add(PROMPT)
    engine.run()
    router.listen()
    engine.store.turn_off("for a test")
    router.listen()
    assert not router.blocks
    assert router.removed == 10


def test_what_is_announced_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "ANNOUNCED_MAX", 6)
    engine, router = engine_and_router()
    engine.add(PROMPT)
    engine.run()
    router.listen()
    assert len(router.blocks) == 6
    monkeypatch.setattr(events, "QUEUED_MAX", 3)
    engine.add([8] * 40)
    engine.run()
    router.listen()
    assert router.stored == 13


class Walked(OrderedDict[tuple[int, bytes], bytes]):
    """Counts how many of its names somebody went through."""

    seen = 0

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        for name in super().__iter__():
            self.seen += 1
            yield name


def test_surplus_costs_what_it_is_and_not_what_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "ANNOUNCED_MAX", 1_000)
    ours = Events(Maker(), lambda: None)
    blocks = [StoredBlock(0, b"%d" % i, b"%d" % i, None, (), None, None, None) for i in range(1_003)]
    ours._announce(blocks[:1_000])
    walked = ours._announced = Walked(ours._announced)
    ours._announce(blocks[1_000:])
    assert list(ours._queue[-3:]) == [RemovedBlock(0, b"%d" % i) for i in range(3)]
    assert walked.seen <= 4


def test_only_a_part_is_looked_up_in_each_step_and_all_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LOOK_BLOCKS_MIN", 3)
    engine, router = engine_and_router()
    engine.add(PROMPT)
    engine.run()
    router.listen()
    engine.pool.slots.clear()
    left = []
    for _ in range(4):
        router.listen()
        left.append(len(router.blocks))
    assert left == [7, 4, 1, 0]


def test_nothing_is_prepared_for_nobody() -> None:
    engine = MiniEngine()
    engine.add(PROMPT)
    engine.run()
    assert engine.scheduler.take_events() == []
    assert engine.scheduler._events._announced == {}


@pytest.mark.parametrize("seed", range(20))
def test_router_knows_what_is_there_whatever_happened(seed: int) -> None:
    """Each time that the router has listened, it knows no block that is gone; in the end it knows all that it may."""
    rng = random.Random(seed)
    engine, router = engine_and_router(rng.choice([SINGLE, HYBRID]), blocks=96)
    engine.pool.slots_max = rng.choice([10, 40, 400])
    prompts = [[family] * rng.randrange(1, 20) + PROMPT[: rng.randrange(1, 40)] for family in range(3)]
    for _ in range(120):
        event = rng.random()
        if event < 0.3 and len(engine.requests) < 3:
            engine.add(rng.choice(prompts), more=rng.randrange(1, 12))
        elif event < 0.34:
            engine.scheduler.reset()
        elif event < 0.4:
            for copier in engine.copiers:
                copier.held = rng.random() < 0.5
        engine.step()
        router.listen()
        assert router.blocks.keys() <= in_pool(engine)
    for copier in engine.copiers:
        copier.held = False
    engine.run()
    router.listen()
    assert router.blocks.keys() <= in_pool(engine)
    engine.assert_nothing_held()


def test_events_of_vllm_hold_all_that_a_router_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    maker = KVEventMaker(lambda group: ("full_attention", None))
    first = StoredBlock(2, b"k1", b"\x01" * 32, None, (1, 2), (("lora", "name", "path"),), 7, "name")
    second = StoredBlock(2, b"k2", b"\x02" * 32, b"\x01" * 32, (3, 4), None, 7, "name")
    stored = maker.stored([first, second])
    removed = maker.removed([RemovedBlock(2, b"\x02" * 32)])
    assert isinstance(stored, kv_events.BlockStored)
    assert isinstance(removed, kv_events.BlockRemoved)
    assert (stored.block_hashes, stored.parent_block_hash) == ([b"\x01" * 32, b"\x02" * 32], None)
    assert (stored.token_ids, stored.block_size, stored.medium) == ([1, 2, 3, 4], 2, "CPU")
    assert (stored.lora_id, stored.lora_name, stored.extra_keys) == (7, "name", [("name",), None])
    assert (stored.group_idx, stored.kv_cache_spec_kind) == (2, "full_attention")
    assert (removed.block_hashes, removed.medium, removed.group_idx) == ([b"\x02" * 32], "CPU", 2)
    batch = kv_events.KVEventBatch(ts=1.0, events=[stored, removed])
    sent = msgspec.msgpack.Decoder(kv_events.KVEventBatch).decode(msgspec.msgpack.encode(batch))
    assert [type(event) for event in sent.events] == [kv_events.BlockStored, kv_events.BlockRemoved]
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    assert maker.removed([RemovedBlock(0, b"\x02" * 32)]).block_hashes == [int.from_bytes(b"\x02" * 8)]


def test_fields_that_an_older_vllm_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older(msgspec.Struct):
        block_hashes: list[bytes]
        medium: str | None

    monkeypatch.setattr(kv_events, "BlockRemoved", Older)
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    assert KVEventMaker(lambda group: (None, None)).removed([RemovedBlock(0, b"x")]) == Older([b"x"], "CPU")


def test_runs_end_where_a_chain_or_a_kind_of_event_ends() -> None:
    def block(number: int, parent: int | None, group: int = 0) -> StoredBlock:
        before = None if parent is None else b"%d" % parent
        return StoredBlock(group, b"%d" % number, b"%d" % number, before, (number,), None, None, None)

    chain = [block(1, None), block(2, 1), block(3, 2)]
    queue = [*chain, block(5, 4), block(6, None, group=1), RemovedBlock(0, b"1"), RemovedBlock(0, b"2"), block(1, None)]
    ours = Events(Maker(), lambda: None)
    ours._queue = list(queue)
    assert [len(run) for run in ours.take()] == [3, 1, 1, 2, 1]


def test_blocks_with_adapters_are_announced_by_vllms_hash(tmp_path: Any) -> None:
    engine, router = engine_and_router()
    lora_request = asks_for(make_adapter(tmp_path / "a"))
    known(engine.scheduler._adapters, lora_request)
    request = engine.add(PROMPT, lora_request=lora_request)
    engine.run()
    router.listen()
    assert [name[1] for name in router.blocks] == request.block_hashes[:10]
    assert {block.lora_name for block in router.blocks.values()} == {"adapter"}
    assert router.blocks.keys().isdisjoint(in_pool(engine))


@pytest.mark.parametrize(("config", "wanted"), [(None, False), (False, False), (True, True)])
def test_events_are_wanted_if_vllm_publishes_them(config: bool | None, wanted: bool) -> None:
    made = None if config is None else SimpleNamespace(enable_kv_cache_events=config)
    assert compat.wants_events(SimpleNamespace(kv_events_config=made)) is wanted
    facts = SimpleNamespace(kv_cache_event_metadata=(("full_attention", None), ("sliding_window", 64)))
    assert compat.group_facts(facts, 1) == ("sliding_window", 64)
    assert compat.group_facts(object(), 1) == (None, None)
