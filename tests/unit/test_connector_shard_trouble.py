"""Replicas over several hosts when hosts lose blocks, are late, are reset, or have something else than the others."""

from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from pegaflow.connector import shard_asks, shard_worker
from pegaflow.connector.metadata import ShardAnswer
from pegaflow.keys import PRIVATE, PRIVATE_MARK, shard_fingerprint
from tests.unit.mini_engine import HYBRID, SINGLE, MiniEngine
from tests.unit.shard_hosts import PROMPT, STEPS_MAX, FakeHosts, hit

BLOCKS = len(PROMPT) // 4


def names(hosts: FakeHosts) -> list[bytes]:
    return [key for pool in hosts.pools for key, _ in pool._namespaces]


def keys_of(engine: MiniEngine) -> list[bytes]:
    request = engine.add(PROMPT)
    engine.run(STEPS_MAX)
    return request.block_hashes


# -- names ----------------------------------------------------------------------------------------------------------


def test_every_rank_has_names_of_its_own() -> None:
    hosts, one_pool = FakeHosts(), MiniEngine(ranks=4)
    hit(hosts.engine())
    hit(one_pool)
    assert len(set(names(hosts))) == len(names(hosts)) == 4
    assert not {key for key, _ in one_pool.pool._namespaces} & set(names(hosts))
    for pool in hosts.pools:
        assert {len(space.part_bytes) for space in pool._namespaces.values()} == {1}


def test_names_follow_shard_count_part_and_weights() -> None:
    replica = b"r" * 32
    made = [
        shard_fingerprint(replica, 0, 2, 0, ["w"]),
        shard_fingerprint(replica, 1, 2, 0, ["w"]),
        shard_fingerprint(replica, 0, 4, 0, ["w"]),
        shard_fingerprint(replica, 0, 2, 1, ["w"]),
        shard_fingerprint(replica, 0, 2, 0, ["v"]),
        shard_fingerprint(b"s" * 32, 0, 2, 0, ["w"]),
    ]
    assert len(set(made)) == len(made)
    assert not any(key.endswith(PRIVATE_MARK) for key in made)


@pytest.mark.parametrize(
    ("replica", "weights"), [(b"r" * 24 + PRIVATE_MARK, [["sampled"]]), (b"r" * 32, [["private", "x"]])]
)
def test_a_private_replica_or_host_has_private_names(replica: bytes, weights: Any) -> None:
    assert shard_fingerprint(replica, 0, 2, 0, weights).endswith(PRIVATE_MARK)


def test_replicas_divided_in_other_ways_share_nothing() -> None:
    hosts = FakeHosts(2)
    hit(hosts.engine())
    four = FakeHosts(4)
    four.pools = [*hosts.pools, *four.pools[:2]]
    assert hit(four.engine()) == 0


def test_what_a_host_with_other_weights_computed_is_not_found_once_it_has_the_right_ones() -> None:
    hosts = FakeHosts(weights=["new", "old"])
    engine = hosts.engine()
    hit(engine)
    assert hit(engine) == len(PROMPT)
    hosts.weights = ["new", "new"]
    repaired = hosts.engine()
    assert hit(repaired) == 0
    assert hit(repaired) == len(PROMPT)


@pytest.mark.parametrize("replicas", [2, 4])
def test_ranks_with_equal_bytes_keep_one_copy_on_each_host(replicas: int) -> None:
    hosts = FakeHosts()
    engine = hosts.engine(replicas=replicas)
    hit(engine)
    assert hit(engine) == len(PROMPT)
    assert [hosts.blocks(number) for number in range(2)] == [BLOCKS * (2 // min(replicas, 2))] * 2
    hosts.assert_nothing_held()


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_ranks_whose_weights_are_private_find_what_their_replica_saved_and_nobody_else_does(replicas: int) -> None:
    hosts = FakeHosts()

    def engine() -> MiniEngine:
        made = hosts.engine(replicas=replicas)
        for worker in made.workers:
            worker._weights = [["sampled"], [PRIVATE, uuid4().hex]]  # type: ignore[attr-defined]
        return made

    for replica in (engine(), engine()):
        assert [hit(replica) for _ in range(3)] == [0, len(PROMPT), len(PROMPT)]
    assert all(key.endswith(PRIVATE_MARK) for key in names(hosts))
    assert hosts.blocks(0) == hosts.blocks(1) == 2 * BLOCKS * (2 // min(replicas, 2))


def test_a_shard_whose_ranks_are_on_two_hosts_turns_the_cache_off(caplog: pytest.LogCaptureFixture) -> None:
    hosts = FakeHosts()
    engine = hosts.engine()
    engine.workers[1]._host = "elsewhere"
    engine.store.set_shapes({worker._rank: worker.shape() for worker in engine.workers})
    assert hit(engine) == 0
    assert "an endpoint for each host" in caplog.text


# -- what hosts have ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("kept", [0, 3, BLOCKS])
def test_the_host_that_has_least_decides(number: int, kept: int) -> None:
    hosts = FakeHosts()
    keys = keys_of(hosts.engine())
    hosts.evict(number, keep=keys[:kept])
    engine = hosts.engine()
    assert hit(engine) == kept * 4
    # What was missing was computed and saved again, there alone.
    assert hit(engine) == len(PROMPT)
    assert [hosts.blocks(each) for each in range(2)] == [2 * BLOCKS] * 2
    hosts.assert_nothing_held()


def test_a_host_that_came_back_with_an_empty_pool_is_filled_again() -> None:
    hosts = FakeHosts()
    hit(hosts.engine())
    hosts.pools[1] = FakeHosts(1).pools[0]
    engine = hosts.engine()
    assert hit(engine) == 0
    assert hit(engine) == len(PROMPT)
    assert hosts.blocks(0) == hosts.blocks(1) == 2 * BLOCKS


@pytest.mark.parametrize("geometry", [SINGLE, HYBRID], ids=["single", "hybrid"])
def test_what_was_counted_as_a_hit_stays_until_it_is_loaded(geometry: Any) -> None:
    hosts = FakeHosts()
    hit(hosts.engine(geometry))
    engine = hosts.engine(geometry)
    evicted: list[int] = []

    def evict() -> None:
        if request.state == "loading" or engine.plans[-1].shards is None or not engine.plans[-1].shards.asks:
            evicted.extend(hosts.evict(number) for number in range(2))

    request = engine.add(PROMPT)
    engine.before_workers = evict
    engine.run(STEPS_MAX)
    assert request.hit_tokens == geometry.hit_tokens_max(len(PROMPT))
    assert evicted
    engine.assert_nothing_held()
    hosts.assert_nothing_held()


def test_a_hit_that_vllm_has_no_room_for_is_held_however_long_it_queues() -> None:
    hosts = FakeHosts()
    hit(hosts.engine())
    engine = hosts.engine(blocks=16)
    other = engine.add([50] * 44, more=12)
    while other.state != "running":
        engine.step()
    waiting = engine.add(PROMPT)
    for _ in range(8):
        engine.step()
        hosts.evict(1)
    assert waiting.state == "waiting"
    engine.abort(other)
    engine.run(STEPS_MAX)
    assert waiting.hit_tokens == len(PROMPT)
    hosts.assert_nothing_held()


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_whose_blocks_are_gone_when_it_loads_reports_a_failed_load(rank: int) -> None:
    hosts = FakeHosts()
    hit(hosts.engine())
    engine = hosts.engine()
    request = engine.add(PROMPT)

    def lose() -> None:
        worker: Any = engine.workers[rank]
        if engine.plans[-1].loads:
            worker._release(tuple(worker._held))

    engine.before_workers = lose
    engine.run(STEPS_MAX)
    assert request.num_tokens == len(PROMPT) + 1
    assert request.hit_tokens == 0
    assert engine.recorder.counters["load_failure"] == 1
    engine.assert_nothing_held()
    hosts.assert_nothing_held()


def test_a_block_that_one_rank_cannot_load_is_not_tried_again() -> None:
    hosts = FakeHosts()
    hit(hosts.engine())
    engine = hosts.engine()
    hit(engine, [9] * 8)
    hosts.copiers[-1].failing_loads = {4}
    assert hit(engine) == 16
    assert hit(engine) == 16  # the same copier would fail on another index now; the block itself is what is avoided
    assert engine.recorder.counters["load_failure"] == 1


def test_a_block_that_one_rank_did_not_save_is_no_hit() -> None:
    hosts = FakeHosts()
    engine = hosts.engine()
    hit(engine, [9] * 8)
    engine.add(PROMPT)
    engine.chunk_tokens = len(PROMPT)
    for copier in hosts.copiers:
        copier.held = True
    while not any(copier.queued for copier in hosts.copiers):
        engine.step()
    for _, _, _, refs, _ in hosts.copiers[2].queued.values():
        refs[4] = 0  # this block's copy goes nowhere
    for copier in hosts.copiers:
        copier.held = False
    engine.run(STEPS_MAX)
    assert hit(hosts.engine()) == 16
    hosts.assert_nothing_held()


def test_a_block_that_one_rank_has_no_room_for_is_freed_by_all() -> None:
    hosts = FakeHosts()
    hosts.pools[1].slots_max = 12
    engine = hosts.engine()
    engine.chunk_tokens = len(PROMPT)
    hit(engine)
    assert engine.recorder.counters["save_failure"] == 1
    assert [hosts.blocks(number) for number in range(2)] == [4, 4]
    hosts.assert_nothing_held()
    assert hit(engine) == 2 * 4


# -- time and bounds ------------------------------------------------------------------------------------------------


class Silent:
    """Keeps back what one rank answers."""

    def __init__(self, engine: MiniEngine, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
        worker: Any = engine.workers[rank]
        take = worker.take_report
        self.kept: dict[int, ShardAnswer] = {}
        self.over = False

        def report() -> Any:
            made = take()
            if made is not None:
                self.kept |= made.answers
                made.answers, self.kept = (self.kept, {}) if self.over else ({}, self.kept)
            return made

        monkeypatch.setattr(worker, "take_report", report)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_does_not_answer_in_time_is_a_miss(
    rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shard_asks, "ANSWER_SECONDS_MAX", 0.05)
    hosts = FakeHosts()
    hit(hosts.engine())
    engine = hosts.engine()
    silent = Silent(engine, rank, monkeypatch)
    assert hit(engine) == 0
    assert hit(engine, PROMPT[:20]) == 0
    assert engine.recorder.counters["shard_late"] == 2
    assert caplog.text.count("not all ranks have said") == 1
    hosts.assert_nothing_held()
    silent.over = True  # what it says now is for nobody
    monkeypatch.setattr(shard_asks, "ANSWER_SECONDS_MAX", 600.0)
    assert hit(engine) == len(PROMPT)
    hosts.assert_nothing_held()


@pytest.mark.parametrize("steps", range(5))
def test_a_request_that_goes_away_at_any_step_leaves_nothing(steps: int) -> None:
    hosts = FakeHosts()
    hit(hosts.engine())
    engine = hosts.engine()
    request = engine.add(PROMPT, more=8)
    for _ in range(steps):
        engine.step()
    engine.abort(request)
    engine.run(STEPS_MAX)
    engine.assert_nothing_held()
    hosts.assert_nothing_held()


def test_a_request_that_goes_away_before_anybody_was_asked_is_not_asked_for() -> None:
    hosts = FakeHosts()
    hit(hosts.engine())
    engine = hosts.engine()
    request = engine.add(PROMPT)
    assert engine.scheduler.match(request, 0, False) == (None, False)
    engine.abort(request)
    engine.step()
    assert engine.plans[-1].shards is None
    hosts.assert_nothing_held()


@pytest.mark.parametrize(("tokens", "computed"), [(3, 0), (40, 40)])
def test_nobody_is_asked_where_nothing_can_be_gained(tokens: int, computed: int) -> None:
    engine = FakeHosts().engine()
    hit(engine)
    request = engine.add(PROMPT[:tokens])
    assert engine.scheduler.match(request, computed, False) == (0, False)
    assert not engine.pool.has_orders


def test_what_was_asked_under_other_names_is_asked_again() -> None:
    hosts = FakeHosts()
    hit(hosts.engine())
    engine = hosts.engine()
    request = engine.add(PROMPT)
    engine.step()
    engine.pool.names += 1
    engine.run(STEPS_MAX)
    assert request.hit_tokens == len(PROMPT)
    assert sum(len(plan.shards.asks) for plan in engine.plans if plan.shards is not None) == 2
    hosts.assert_nothing_held()


def test_blocks_are_not_held_for_who_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = FakeHosts()
    hit(hosts.engine())
    engine = hosts.engine()
    request = engine.add(PROMPT)
    engine.step()
    assert hosts.pools[0].leased() == 2 * BLOCKS
    request.state = "forgotten"
    with monkeypatch.context() as patch:
        patch.setattr(shard_asks, "HELD_SECONDS_MAX", 0.0)
        engine.step()
    hosts.assert_nothing_held()
    request.state = "waiting"
    engine.run(STEPS_MAX)
    assert request.hit_tokens == len(PROMPT)


def test_more_requests_than_may_be_asked_for_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_asks, "OPEN_MAX", 2)
    hosts = FakeHosts()
    prompts = [[family] * 16 for family in range(30, 37)]
    first = hosts.engine()
    for prompt in prompts:
        hit(first, prompt)
    engine = hosts.engine()
    requests = [engine.add(prompt) for prompt in prompts]
    most = 0
    for _ in range(1_000):
        engine.step()
        most = max(most, len(engine.scheduler._shards._by_number))  # type: ignore[union-attr]
    assert [request.hit_tokens for request in requests] == [16] * len(prompts)
    assert most == 2


@pytest.mark.parametrize(
    ("ranks", "replicas", "copies", "here"),
    [(2, 1, 1, 1), (4, 1, 2, 1), (8, 1, 4, 1), (8, 4, 1, 1), (8, 8, 1, 1), (4, 1, 2, 2)],
)
def test_the_ranks_of_a_host_hold_no_more_than_a_share_of_its_pool_together(
    ranks: int, replicas: int, copies: int, here: int
) -> None:
    hosts = FakeHosts()
    hit(hosts.engine(ranks=ranks, replicas=replicas))
    pool = hosts.pools[1]
    block_bytes = next(iter(pool._namespaces.values())).block_bytes
    pool.pool_bytes = shard_worker.HELD_SHARE_MAX * here * copies * 6 * block_bytes
    engine = hosts.engine(ranks=ranks, replicas=replicas)
    for worker in engine.workers:
        worker._shard = replace(worker._shard, here=here)  # type: ignore[attr-defined]
    request = engine.add(PROMPT)
    engine.step()
    held = sum(leases > 0 for leases in pool.leases.values())
    assert held * block_bytes * here == pool.pool_bytes // shard_worker.HELD_SHARE_MAX
    engine.run(STEPS_MAX)
    assert request.hit_tokens == 6 * 4
    assert hit(engine) == 6 * 4
    hosts.assert_nothing_held()


def test_keys_beyond_the_largest_question_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_asks, "KEYS_MAX", 5)
    hosts = FakeHosts()
    hit(hosts.engine())
    assert hit(hosts.engine()) == 20
