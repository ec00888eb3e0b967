"""Blocks of other hosts: asked for once, brought when it pays, waited for within bounds, and left to others."""

from types import SimpleNamespace
from typing import Any

import pytest

from pegaflow.connector import namespaces, peer_watch, peering, runs, waiting
from pegaflow.connector.geometry import Geometry
from pegaflow.connector.peer_runs import Everything, PeerView
from pegaflow.connector.speed import ComputeSpeed
from tests.engine_races import random_events
from tests.fake_peers import BROKEN, FakePeers
from tests.fake_ssd import FakeSsd
from tests.fakes import FakePool
from tests.unit.mini_engine import DRAFTED, EVERY_KIND, HYBRID, SINGLE, MiniEngine

PROMPT = list(range(500, 542))


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of tests take no time."""
    monkeypatch.setattr(namespaces, "SSD_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(waiting, "PROBE_SECONDS", 0.0)
    monkeypatch.setattr(peer_watch, "ASK_SECONDS", 0.0)
    monkeypatch.setattr(peer_watch, "GRACE_SECONDS", 0.0)


def computed(geometry: Geometry, *prompts: list[int], **options: Any) -> FakePool:
    """A pool of another host on which these prompts were computed."""
    pool = FakePool()
    engine = MiniEngine(geometry, pool, blocks=400, **options)
    for prompt in prompts:
        engine.add(prompt)
    engine.run()
    return pool


def engine_with_peer(
    geometry: Geometry = SINGLE, prompt: list[int] = PROMPT, **options: Any
) -> tuple[MiniEngine, FakePeers]:
    """An engine with an empty pool, and a peer that has ``prompt``."""
    peers = FakePeers(FakePool(), computed(geometry, prompt, pd_tail_save=options.get("pd_tail_load", False)))
    return MiniEngine(geometry, peers.pool, blocks=400, peers=peers, **options), peers


def assert_nothing_asked(engine: MiniEngine, peers: FakePeers) -> None:
    """Nothing is held here, and no question or fetch is open, but perhaps the last one for all who waited."""
    engine.scheduler._loads._watch.close()
    assert peers.open == []
    assert peers.queries == []
    engine.assert_nothing_held()


def counted(engine: MiniEngine) -> tuple[int, ...]:
    names = ("hit_tokens_ram", "hit_tokens_ssd", "hit_tokens_peer", "miss_tokens")
    return tuple(engine.recorder.counters.get(name, 0) for name in names)


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("blocks_per_poll", [1, 3, 1_000])
@pytest.mark.parametrize("answer_after_polls", [0, 3])
def test_prompt_comes_from_a_peer_to_the_byte_as_far_as_from_memory(
    kind: str, blocks_per_poll: int, answer_after_polls: int
) -> None:
    engine, peers = engine_with_peer(EVERY_KIND[kind])
    peers.blocks_per_poll, peers.answer_after_polls = blocks_per_poll, answer_after_polls
    from_peer = engine.add(PROMPT)
    engine.run()
    from_memory = engine.add(PROMPT)
    engine.run()
    assert from_peer.hit_tokens == from_memory.hit_tokens > 0
    assert counted(engine)[:3] == (from_memory.hit_tokens, 0, from_peer.hit_tokens)
    assert engine.recorder.samples["peer_wait_seconds"]
    assert len(peers.asked) == 1, "one round, and none for what is here"
    assert_nothing_asked(engine, peers)


def test_tail_comes_from_a_peer_too() -> None:
    engine, peers = engine_with_peer(pd_tail_load=True)
    request = engine.add(PROMPT)
    engine.run()
    assert request.hit_tokens == 42
    assert_nothing_asked(engine, peers)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_peer_that_brings_less_than_it_is_asked_for_is_asked_again(kind: str) -> None:
    engine, peers = engine_with_peer(EVERY_KIND[kind])
    peers.keys_max = 2
    from_peer = engine.add(PROMPT)
    engine.run()
    from_memory = engine.add(PROMPT)
    engine.run()
    assert from_peer.hit_tokens == from_memory.hit_tokens > 0
    assert_nothing_asked(engine, peers)


def test_long_prompts_are_fetched_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "KEYS_MAX", 3)
    engine, peers = engine_with_peer(HYBRID)
    peers.blocks_per_poll = 2
    request = engine.add(PROMPT)
    engine.run()
    assert request.hit_tokens == 40
    assert max(peers.fetched) == 3
    assert_nothing_asked(engine, peers)


@pytest.mark.parametrize("here", [{0}, {0, 1, 2}, {0, 1, 4, 5}, {9}, {1, 3, 5, 7}])
def test_blocks_of_a_peer_between_blocks_in_memory_are_one_prefix(here: set[int]) -> None:
    engine, peers = engine_with_peer()
    first = engine.add(PROMPT)
    keys = first.block_hashes
    engine.run()
    for ref, slot in list(engine.pool.slots.items()):
        if slot.key not in [keys[block] for block in here]:
            del engine.pool.slots[ref]
    peers.asked.clear()
    request = engine.add(PROMPT)
    engine.run()
    assert request.hit_tokens == 40
    leading = next(block for block in range(11) if block not in here)
    assert peers.asked == [[(10 - leading, True)]]
    assert sum(peers.fetched[1:]) == 10 - len(here), "what is here is not fetched"
    assert_nothing_asked(engine, peers)


def test_prefix_comes_in_segments_from_several_peers() -> None:
    whole = computed(SINGLE, PROMPT)
    parts = [FakePool(), FakePool()]
    for number, part in enumerate(parts):
        [(name, space)] = whole._namespaces.items()
        copy = part.namespace(name[0], name[1], space.part_bytes)
        for position, slot in enumerate(list(whole.slots.values())):
            if position % 2 == number:
                ref = part.take_slot(copy, slot.key)
                assert ref is not None
                part.slots[ref].parts, part.slots[ref].state = dict(slot.parts), "sealed"
    peers = FakePeers(FakePool(), *parts)
    engine = MiniEngine(SINGLE, peers.pool, blocks=400, peers=peers)
    request = engine.add(PROMPT)
    engine.run()
    assert request.hit_tokens == 40


def test_request_is_put_off_while_peers_answer_and_others_run() -> None:
    engine, peers = engine_with_peer()
    peers.answer_after_polls, peers.blocks_per_poll = 2, 1
    waits, runs_on = engine.add(PROMPT), engine.add([1, 2, 3], more=4)
    engine.step()
    assert (waits.state, runs_on.state) == ("waiting", "running")
    engine.run()
    assert waits.hit_tokens == 40


@pytest.mark.parametrize("trouble", ["nobody has it", "peers are down", "too much is in flight"])
def test_without_anybody_to_bring_it_a_request_goes_on_at_once(trouble: str) -> None:
    engine, peers = engine_with_peer()
    if trouble == "nobody has it":
        peers.others = [FakePool()]
    elif trouble == "peers are down":
        peers.state = "backing off"
    else:
        peers.fetches_max = 0
    request = engine.add(PROMPT)
    engine.step()
    assert request.state != "waiting"
    engine.run()
    assert request.hit_tokens == 0
    assert counted(engine) == (0, 0, 0, 40)
    assert_nothing_asked(engine, peers)


def test_short_requests_are_not_asked_for() -> None:
    engine, peers = engine_with_peer()
    engine.add([500, 501, 502])
    engine.run()
    assert peers.asked == []


def test_nobody_waits_if_computing_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ComputeSpeed, "seconds", lambda self, tokens: tokens * 1e-6)
    engine, peers = engine_with_peer()
    peers.bytes_per_second = 1e3
    request = engine.add(PROMPT)
    engine.step()
    assert request.state != "waiting"
    engine.run()
    assert peers.asked == []
    assert counted(engine) == (0, 0, 0, 40)


def test_few_blocks_that_a_peer_has_are_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ComputeSpeed, "seconds", lambda self, tokens: 10.0 if tokens > 30 else 1e-9)
    engine, peers = engine_with_peer(prompt=PROMPT[:12])
    request = engine.add(PROMPT)
    engine.run()
    assert len(peers.asked) == 1
    assert peers.fetched == []
    assert request.hit_tokens == 0
    assert_nothing_asked(engine, peers)


@pytest.mark.parametrize("silent", [True, False])
def test_nobody_waits_longer_than_computing_takes(monkeypatch: pytest.MonkeyPatch, silent: bool) -> None:
    monkeypatch.setattr(ComputeSpeed, "seconds", lambda self, tokens: 2e-3)
    engine, peers = engine_with_peer()
    peers.bytes_per_second = None
    peers.blocks_per_poll = 0
    peers.answer_after_polls = 1_000_000 if silent else 0
    request = engine.add(PROMPT)
    engine.run(1_000_000)
    assert request.hit_tokens < 40
    assert engine.recorder.counters["peer_incomplete"] == 1
    assert_nothing_asked(engine, peers)


def test_wait_ends_at_its_limit_and_takes_what_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr(peering, "time", SimpleNamespace(monotonic=lambda: now))
    engine, peers = engine_with_peer(prefetch_wait_ms_max=20)
    peers.blocks_per_poll = 1
    request = engine.add(PROMPT)
    for _ in range(3):
        engine.step()
    peers.blocks_per_poll = 0
    engine.step()
    assert request.state == "waiting"
    now += 0.02
    engine.step()
    assert request.state != "waiting"
    engine.run()
    assert 0 < request.hit_tokens < 40
    assert counted(engine)[2] == request.hit_tokens
    assert engine.recorder.counters["peer_incomplete"] == 1
    assert_nothing_asked(engine, peers)


def test_without_a_limit_nobody_waits() -> None:
    engine, peers = engine_with_peer(prefetch_wait_ms_max=0)
    request = engine.add(PROMPT)
    engine.step()
    assert request.state != "waiting"
    engine.run()
    assert peers.asked == []


def test_peer_that_dies_while_it_sends_leaves_what_has_come() -> None:
    engine, peers = engine_with_peer()
    peers.blocks_per_poll = 1
    request = engine.add(PROMPT)
    for _ in range(4):
        engine.step()
    peers.state = "backing off"
    engine.step()
    assert request.state != "waiting"
    engine.run()
    assert 0 < request.hit_tokens < 40
    assert_nothing_asked(engine, peers)


def test_engine_that_only_saves_asks_nobody() -> None:
    engine, peers = engine_with_peer(mode="save_only")
    engine.add(PROMPT)
    engine.run()
    assert peers.asked == []


def test_blocks_of_an_aborted_request_are_there_for_others() -> None:
    engine, peers = engine_with_peer()
    peers.blocks_per_poll = 4
    request = engine.add(PROMPT)
    for _ in range(2):
        engine.step()
    engine.abort(request)
    assert engine.pool.leased() == 0
    assert (peers.open, peers.queries) == ([], [])
    peers.state = "backing off"
    other = engine.add(PROMPT)
    engine.run()
    assert other.hit_tokens >= 16
    engine.assert_nothing_held()


def test_failure_of_the_connections_is_a_miss_and_reaches_nobody() -> None:
    engine, peers = engine_with_peer()
    peers.blocks_per_poll = 1
    request = engine.add(PROMPT)
    engine.step()
    peers.fails = BROKEN
    while engine.requests:
        engine.step()
    engine.add(PROMPT)
    while engine.requests:
        engine.step()
    assert request.hit_tokens < 40
    assert engine.pool.leased() == 0
    assert engine.recorder.counters["hook_errors"] > 0


def test_reset_ends_waits_and_what_is_private_is_asked_of_nobody() -> None:
    engine, peers = engine_with_peer()
    peers.blocks_per_poll = 1
    request = engine.add(PROMPT)
    engine.step()
    assert engine.scheduler.reset()
    assert engine.pool.leased() == 0
    engine.run()
    assert request.hit_tokens == 0
    asked = len(peers.asked)
    engine.add(list(range(700, 742)))
    engine.run()
    assert len(peers.asked) == asked
    assert_nothing_asked(engine, peers)


def test_engine_that_sleeps_holds_nothing_that_was_brought() -> None:
    engine, peers = engine_with_peer(keep_on_sleep=True)
    peers.blocks_per_poll, peers.keys_max = 1, 2
    request = engine.add(PROMPT, more=30)
    for _ in range(4):
        engine.step()
    assert request.state == "waiting"
    assert engine.pool.leased() > 0
    assert engine.scheduler.reset(pausing=True)
    assert engine.pool.leased() == 0
    engine.run()
    assert_nothing_asked(engine, peers)


def test_held_blocks_are_a_part_of_the_pool_at_most() -> None:
    engine, peers = engine_with_peer()
    peers.blocks_per_poll = 0
    spaces = engine.store.namespaces()
    assert spaces is not None
    engine.pool.pool_bytes = peering.SHARE_MAX * 10 * spaces[0].block_bytes
    first, second = engine.add(PROMPT), engine.add(PROMPT)
    engine.step()
    assert first.state == "waiting"
    assert second.state != "waiting"


def test_preempted_request_may_ask_once_more_and_no_more() -> None:
    engine, peers = engine_with_peer()
    request = engine.add(PROMPT, more=30)
    for _ in range(4):
        while request.state != "running":
            engine.step()
        for ref in [ref for ref in engine.pool.slots if not engine.pool.leases[ref]]:
            del engine.pool.slots[ref]
        engine.preempt(request)
    engine.run()
    assert len(peers.asked) == peering.ROUNDS_MAX
    assert_nothing_asked(engine, peers)


def test_what_is_on_ssd_comes_from_there_and_the_rest_from_peers() -> None:
    engine, peers = engine_with_peer()
    pool = engine.pool
    pool.tier = FakeSsd()
    before = MiniEngine(SINGLE, pool, blocks=400)
    before.add(PROMPT[:22])
    before.run()
    pool.tier.spill(pool)
    request = engine.add(PROMPT)
    engine.run()
    assert request.hit_tokens == 40
    assert counted(engine) == (0, 20, 20, 0)
    assert sum(peers.fetched) == 5
    assert not pool.tier.open
    assert_nothing_asked(engine, peers)


@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_events_beside_peers_leaves_nothing_behind(seed: int) -> None:
    peers = FakePeers(FakePool(), FakePool())
    peers.blocks_per_poll, peers.answer_after_polls = 1 + seed % 3, seed % 2

    def engine_on(geometry: Any = SINGLE, **options: Any) -> MiniEngine:
        other = MiniEngine(geometry, peers.others[0], blocks=400)
        for first in range(0, 8, 2):
            other.add([first] * 40)
        other.add(list(range(40)))
        other.run()
        return MiniEngine(geometry, peers.pool, peers=peers, **options)

    random_events(engine_on, seed, finish=lambda engine: (engine.run(100_000), engine.assert_nothing_held()))
    assert (peers.open, peers.queries) == ([], [])


def decode_with_peer(geometry: Geometry = SINGLE, **options: Any) -> tuple[MiniEngine, MiniEngine, FakePeers]:
    """An engine on another host that computes prompts, one here that waits for them, and the connections between."""
    tails = geometry is SINGLE
    prefill = MiniEngine(geometry, FakePool(), blocks=400, pd_tail_save=tails)
    peers = FakePeers(FakePool(), prefill.pool)
    waits = {"wait_for_full_prefix": True, "pd_tail_load": tails, **options}
    return prefill, MiniEngine(geometry, peers.pool, blocks=400, peers=peers, **waits), peers


@pytest.mark.parametrize("geometry", [SINGLE, HYBRID, DRAFTED])
def test_request_waits_until_the_last_of_its_prompt_is_with_a_peer(geometry: Geometry) -> None:
    prefill, decode, peers = decode_with_peer(geometry)
    request = decode.add(PROMPT)
    for _ in range(3):
        decode.step()
    prefill.add(PROMPT)
    while prefill.requests or prefill.scheduler.has_pending_saves():
        prefill.step()
        decode.step()
        assert request.state in ("waiting", "loading", "running") or request.hit_tokens
    decode.run()
    assert request.hit_tokens == {SINGLE: 42, HYBRID: 40, DRAFTED: 36}[geometry]
    assert "full_prefix_incomplete" not in decode.recorder.counters
    assert_nothing_asked(decode, peers)


def test_prompt_that_a_peer_has_already_is_taken_without_waiting_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ComputeSpeed, "seconds", lambda self, tokens: 1e-9)  # whatever computing would take
    prefill, decode, peers = decode_with_peer()
    prefill.add(PROMPT)
    prefill.run()
    request = decode.add(PROMPT)
    decode.run()
    assert request.hit_tokens == 42
    assert_nothing_asked(decode, peers)


@pytest.mark.parametrize("state", ["backing off", "itself"])
def test_request_gives_up_at_once_when_no_peer_is_up(state: str) -> None:
    _prefill, decode, peers = decode_with_peer()
    request = decode.add(PROMPT)
    for _ in range(3):
        decode.step()
    assert request.state == "waiting"
    peers.state = state
    decode.step()
    assert request.state != "waiting"
    decode.run()
    assert decode.recorder.counters["full_prefix_incomplete"] == 1
    assert_nothing_asked(decode, peers)


def test_peer_that_was_late_once_is_still_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_watch, "GRACE_SECONDS", 1_000.0)
    prefill, decode, peers = decode_with_peer()
    request = decode.add(PROMPT)
    decode.step()
    peers.state = "backing off"
    for _ in range(3):
        decode.step()
    assert request.state == "waiting"
    peers.state = "up"
    prefill.add(PROMPT)
    prefill.run()
    decode.run()
    assert request.hit_tokens == 42
    assert_nothing_asked(decode, peers)


def test_sibling_is_waited_for_although_no_peer_is_up() -> None:
    _prefill, decode, peers = decode_with_peer()
    peers.state = "backing off"
    decode.pool.others = 1
    request = decode.add(PROMPT)
    for _ in range(3):
        decode.step()
    assert request.state == "waiting"


def test_all_who_wait_are_asked_for_in_one_question_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_watch, "ASK_SECONDS", 1_000.0)
    _prefill, decode, peers = decode_with_peer()
    for first in range(5):
        decode.add([first, *PROMPT])
    for _ in range(5):
        decode.step()
    assert len(peers.asked) == 1
    monkeypatch.setattr(peer_watch, "ASK_SECONDS", 0.0)
    decode.scheduler._loads._watch._next_at = 0.0
    for _ in range(2):
        decode.step()
    assert peers.asked[1] == [(5, False)]


@pytest.mark.parametrize("geometry", [SINGLE, HYBRID, DRAFTED])
@pytest.mark.parametrize("seconds_later", [0.0, 1.0])
def test_prompt_that_was_with_a_peer_is_asked_for_again_after_a_while(
    geometry: Geometry, seconds_later: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(peer_watch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(peer_watch, "PRESENT_SECONDS", 1.0)
    prefill, decode, peers = decode_with_peer(geometry)
    for engine in (prefill, decode):
        engine.add(PROMPT)
        engine.run()
    for engine in (prefill, decode):
        engine.pool.slots.clear()  # evicted
    now[0] += seconds_later
    request = decode.add(PROMPT)
    for _ in range(5):
        decode.step()
    if not seconds_later:
        assert request.state != "waiting", "the peer had it a moment ago"
        return
    assert request.state == "waiting"
    prefill.add(PROMPT)
    prefill.run()
    decode.run()
    assert request.hit_tokens == {SINGLE: 42, HYBRID: 40, DRAFTED: 36}[geometry]
    assert "full_prefix_incomplete" not in decode.recorder.counters
    assert_nothing_asked(decode, peers)


@pytest.mark.parametrize("step_seconds", [0.0, 0.08, 0.9, 2.0])
def test_answer_to_a_question_of_long_ago_says_nothing_of_now(
    step_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits asks in steps, and leaves when all is there: what was asked last may be answered much later."""
    now = [100.0]
    monkeypatch.setattr(peer_watch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    prefill, decode, peers = decode_with_peer()
    prefill.add(PROMPT)
    prefill.run()
    decode.add(PROMPT)
    while decode.requests:
        decode.step()
        now[0] += step_seconds
    for engine in (prefill, decode):
        engine.pool.slots.clear()  # evicted
    now[0] += 3600.0
    request = decode.add(PROMPT)
    for _ in range(5):
        decode.step()
        now[0] += step_seconds
    assert request.state == "waiting"
    prefill.add(PROMPT)
    prefill.run()
    while decode.requests:
        decode.step()
        now[0] += step_seconds
    assert request.hit_tokens == 42
    assert_nothing_asked(decode, peers)


def test_waiting_ends_after_its_time_with_what_a_peer_has() -> None:
    prefill, decode, peers = decode_with_peer(wait_for_full_prefix_seconds=0.02)
    prefill.add(PROMPT[:24])
    prefill.run()
    request = decode.add(PROMPT)
    while request.state == "waiting":
        decode.step()
    decode.run()
    assert request.hit_tokens == 24
    assert decode.recorder.counters["full_prefix_incomplete"] == 1
    assert_nothing_asked(decode, peers)


def test_failing_connections_end_the_wait() -> None:
    _prefill, decode, peers = decode_with_peer()
    request = decode.add(PROMPT)
    decode.step()
    peers.fails = BROKEN
    while decode.requests:
        decode.step()
    assert request.num_tokens > len(PROMPT)
    assert decode.recorder.counters["hook_errors"] > 0


@pytest.mark.parametrize("start", [0, 3, 7, 30])
def test_views_count_as_memory_and_peers_together_would(start: int) -> None:
    keys = [bytes([number]) for number in range(30)]

    class Space:
        def lookup(self, keys: list[bytes], start: int = 0) -> int:
            return next((at for at in range(len(keys) - start) if keys[start + at][0] % 3 == 0), len(keys) - start)

        def contains(self, keys: list[bytes]) -> bytes:
            return bytes(key[0] % 3 != 0 for key in keys)

    held: Any = [bytes([number]) for number in range(0, 20, 3)]
    view = PeerView(Space(), held)  # type: ignore[arg-type]
    assert view.lookup(keys, start) == max(0, 21 - start)
    assert view.contains(keys).find(0) == 21
    assert PeerView(Space(), None).lookup(keys, 1) == 2  # type: ignore[arg-type]
    assert Everything().lookup(keys, start) == len(Everything().contains(keys)) - start
