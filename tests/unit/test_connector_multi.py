"""Beside other connectors in vLLM's own MultiConnector, in any order: each gets what is its own, and nothing more."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.outputs import KVConnectorOutput

from pegaflow.connector.metadata import RankReport
from pegaflow.connector.noop import NoopKVConnector
from tests.fakes import FakePool
from tests.unit.mini_engine import SINGLE, MiniEngine
from tests.unit.test_connector_hooks import bare

PROMPT = list(range(40))


class Peer(NoopKVConnector):
    """Another connector: workers tell its scheduler half where they are, and it may have some tokens."""

    def __init__(self, tokens: int | None = 0) -> None:
        self.tokens = tokens
        self.heard: dict[Any, Any] = {}
        self.allocated: list[int] = []

    def get_handshake_metadata(self) -> Any:
        return "peer's address"

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        assert set(metadata.values()) == {"peer's address"}
        self.heard = metadata

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.allocated.append(num_external_tokens)


def multi(*children: Any) -> Any:
    """vLLM's MultiConnector of connectors that were made by hand."""
    made = MultiConnector.__new__(MultiConnector)
    made._connectors = list(children)
    made._requests_to_connector = {}
    made._extra_async_saves = {}
    made._all_support_hma = True
    return made


def ordered(ours: Any, other: Any, first: str) -> tuple[Any, ...]:
    return (ours, other) if first == "ours" else (other, ours)


@pytest.mark.parametrize("first", ["ours", "other"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_layouts_reach_our_half_without_the_handshake_of_another(
    monkeypatch: pytest.MonkeyPatch, first: str, ranks: int
) -> None:
    engine = MiniEngine(SINGLE, FakePool(), ranks=ranks, wrapped=True)
    answers = {}
    for rank in range(ranks):
        worker = bare(engine, worker=True)
        worker._worker = engine.workers[rank]
        workers = multi(*ordered(worker, Peer(), first))
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", workers)
        answers[0, rank] = workers.get_handshake_metadata()
    peer = Peer()
    schedulers = multi(*ordered(bare(engine), peer, first))
    schedulers.set_xfer_handshake_metadata_pp_aware(answers)
    assert peer.heard == answers
    assert engine.store.namespaces() is None
    assert engine.store.off is None
    request = engine.add(PROMPT)
    engine.run()
    assert engine.store.namespaces() is not None
    again = engine.add(PROMPT)
    engine.run()
    assert (request.hit_tokens, again.hit_tokens) == (0, 40)
    engine.assert_nothing_held()


def test_connector_that_vllm_asks_itself_answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MiniEngine(SINGLE, FakePool(), wrapped=True)
    worker = bare(engine, worker=True)
    for agent in (worker, None):
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", agent)
        assert worker.get_handshake_metadata() == engine.workers[0].shape()
    assert not engine.workers[0].take_report()


def test_request_waits_a_moment_for_layouts_that_are_on_their_way() -> None:
    pool = FakePool()
    first = MiniEngine(SINGLE, pool)
    first.add(PROMPT)
    first.run()
    second = MiniEngine(SINGLE, pool, wrapped=True)
    request = second.add(PROMPT)
    second.run()
    assert request.hit_tokens == 40


def test_shapes_of_all_ranks_are_put_together_from_reports() -> None:
    engine = MiniEngine(SINGLE, FakePool(), ranks=2, wrapped=True)
    shapes = [worker.shape() for worker in engine.workers]
    for shape in shapes:
        assert engine.store.namespaces() is None
        engine.scheduler.update(RankReport(shapes={shape.rank: shape}), ())
    assert engine.store.namespaces() is not None
    assert engine.store.off is None


@pytest.mark.parametrize("first", ["ours", "other"])
@pytest.mark.parametrize(("theirs", "hit"), [(0, 0), (16, 16), (None, None)])
def test_engine_that_only_saves_leaves_the_loading_to_others(first: str, theirs: int | None, hit: int | None) -> None:
    pool = FakePool()
    engine = MiniEngine(SINGLE, pool, mode="save_only")
    engine.add(PROMPT)
    engine.run()
    assert len(pool.slots) == 10
    peer = Peer(theirs)
    connectors = multi(*ordered(bare(engine), peer, first))
    request = SimpleNamespace(
        request_id="other", num_tokens=40, num_prompt_tokens=40, lora_request=None, sampling_params=None,
        skip_reading_prefix_cache=False, block_hashes=[], status=SimpleNamespace(name="FINISHED_ABORTED"),
        num_computed_tokens=0,
    )  # fmt: skip
    connectors.on_new_request(request)
    assert connectors.get_num_new_matched_tokens(request, 0) == (hit, False)
    if hit is not None:
        connectors.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4],)), hit)
        assert peer.allocated == [hit]
    assert connectors.request_finished_all_groups(request, ([],)) == (False, None)
    assert connectors.requires_kv_delivery is False
    engine.assert_nothing_held()


@pytest.mark.parametrize(("first", "chosen"), [("ours", 40), ("other", 16)])
def test_hit_of_the_first_that_has_one_is_taken_and_ours_is_given_back_if_it_was_not_ours(
    first: str, chosen: int
) -> None:
    pool = FakePool()
    engine = MiniEngine(SINGLE, pool)
    engine.add(PROMPT)
    engine.run()
    connectors = multi(*ordered(bare(engine), Peer(16), first))
    request = engine.add(PROMPT)
    request.skip_reading_prefix_cache = False  # type: ignore[attr-defined]
    request.status = SimpleNamespace(name="FINISHED_ABORTED")  # type: ignore[attr-defined]
    tokens, is_async = connectors.get_num_new_matched_tokens(request, 0)
    assert (tokens, is_async) == (chosen, first == "ours")
    assert pool.leased() == 10
    engine._allocate(request, 40)
    connectors.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: request.tables), tokens)
    assert pool.leased() == (10 if first == "ours" else 0)


@pytest.mark.parametrize("bad", [0, 3])
def test_nothing_is_saved_that_was_computed_from_blocks_another_could_not_fill(bad: int) -> None:
    pool = FakePool()
    engine = MiniEngine(SINGLE, pool)
    good = engine.add(list(range(900, 912)))
    request = engine.add(PROMPT)
    connector = bare(engine)
    original = engine.scheduler.update

    def update(report: Any, received: Any) -> None:
        engine.scheduler.update = original  # type: ignore[method-assign]
        output = KVConnectorOutput(
            finished_recving=set(received), invalid_block_ids={request.tables[0][bad]}, kv_connector_worker_meta=report
        )
        connector.update_connector_output(output)

    engine.chunk_tokens = 16
    engine.scheduler.update = update  # type: ignore[method-assign]
    engine.step()
    engine.abort(request)
    engine.run()
    keys = {slot.key for slot in pool.slots.values()}
    assert keys == set(good.block_hashes[:3])
    engine.assert_nothing_held()
