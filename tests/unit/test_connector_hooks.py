"""The connector class as vLLM sees it: signatures, answers without a half, newer hooks, and errors that stay inside."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base as kv_base
from vllm.v1.core.block_pool import BlockPool

import pegaflow.connector
from pegaflow import vllm_plugin
from pegaflow.config import ConnectorConfig
from pegaflow.connector import NoopKVConnector, PegaKVConnector, compat, groups
from pegaflow.connector.guard import KINDS_MAX, Guard
from pegaflow.connector.identity import plain
from pegaflow.connector.metadata import LoadOutcome, RankReport, SaveOutcome, StepPlan
from pegaflow.connector.pins import Pins
from pegaflow.errors import InvalidArgument, PoolBusy, PoolClosed
from pegaflow.metrics import Recorder
from tests.fakes import FakeIdentity, FakePool
from tests.patience import await_
from tests.unit.mini_engine import MiniEngine

PROMPT = list(range(40))


def bare(engine: MiniEngine | None = None, worker: bool = False) -> Any:
    """A connector without vLLM's configuration, with the halves of a small engine."""
    connector = PegaKVConnector.__new__(PegaKVConnector)
    connector._recorder = Recorder()
    connector._guard = Guard(connector._recorder, lambda reason: None)
    connector._connector_metadata = None
    connector._groups, connector._by_block = [(0, ["layer0"], None)], True
    connector._vllm_config = SimpleNamespace(parallel_config=SimpleNamespace())
    connector._kv_cache_config = SimpleNamespace(kv_cache_groups=[None])
    connector._scheduler = engine.scheduler if engine and not worker else None
    connector._store = engine.store if engine and not worker else None
    connector._link = None
    connector._worker = engine.workers[0] if engine and worker else None
    return connector


@pytest.mark.parametrize("connector", [PegaKVConnector, NoopKVConnector])
def test_constructor_names_what_the_factory_looks_for(connector: Any) -> None:
    assert list(inspect.signature(connector).parameters) == ["vllm_config", "role", "kv_cache_config"]
    assert not inspect.isabstract(connector)
    assert issubclass(connector, kv_base.SupportsHMA)


def test_plugin_registers_by_name_and_may_run_twice() -> None:
    vllm_plugin.register()
    vllm_plugin.register()
    for name in vllm_plugin.CONNECTORS:
        assert KVConnectorFactory.get_connector_class_by_name(name) is getattr(pegaflow.connector, name)


def test_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="PdConnector"):
        _ = pegaflow.connector.PdConnector


def test_wrong_options_are_refused_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = SimpleNamespace(kv_connector_extra_config={"pegaflow.pool_sise": "1gb"})
    with pytest.raises(InvalidArgument, match="pool_size"):
        PegaKVConnector.get_required_kvcache_layout(SimpleNamespace(kv_transfer_config=transfer))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    transfer.kv_connector_extra_config = {"pegaflow.pd_tail_load": True}
    with pytest.raises(ValueError, match="set PYTHONHASHSEED"):
        PegaKVConnector.get_required_kvcache_layout(SimpleNamespace(kv_transfer_config=transfer))
    transfer.kv_connector_extra_config = {}
    assert PegaKVConnector.get_required_kvcache_layout(SimpleNamespace(kv_transfer_config=transfer)) is None


def test_a_cache_needs_no_delivery_and_frees_blocks_at_once() -> None:
    engine = MiniEngine()
    connector = bare(engine)
    request = engine.add(PROMPT)
    assert connector.requires_kv_delivery is False
    request.status = SimpleNamespace(name="FINISHED_STOPPED")
    assert connector.request_finished(request, []) == (False, None)
    assert connector.request_finished_all_groups(request, ([],)) == (False, None)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_no_role_needs_delivery(role: Any) -> None:
    connector = bare(MiniEngine())
    connector._kv_transfer_config = KVTransferConfig(kv_connector="PegaKVConnector", kv_role=role)
    assert connector.requires_kv_delivery is False


def test_defaults_that_suit_a_store_are_left_as_they_are() -> None:
    connector = bare(MiniEngine())
    connector._role = kv_base.KVConnectorRole.SCHEDULER
    connector._kv_cache_config.prefix_cacheable_group_ids = (0, 2)
    assert connector.role is kv_base.KVConnectorRole.SCHEDULER
    assert connector.supports_divergent_local_hybrid_hits is False
    assert connector.get_loaded_kv_cache_group_ids(None) == (0, 2)
    assert connector.get_mem_pool_context() is None
    assert connector.get_finished_count() is None
    assert connector.get_kv_connector_kv_cache_events() is None
    assert PegaKVConnector.requires_piecewise_for_cudagraph({}) is False
    connector.set_host_xfer_buffer_ops(None)
    connector.finish_forward()
    assert not connector.has_connector_metadata()
    connector.bind_connector_metadata(StepPlan(runs_model=True))
    assert connector._plan().runs_model
    connector.clear_connector_metadata()
    assert connector._plan() == StepPlan()


def real_block_pool(blocks: int = 40) -> Any:
    return BlockPool(num_gpu_blocks=blocks, enable_caching=True, hash_block_size=4)


def test_cache_manager_brings_the_block_pool() -> None:
    engine = MiniEngine()
    engine.scheduler._pins = Pins()
    connector = bare(engine)
    facts = (("full_attention", None),)
    connector.bind_kv_cache_manager(SimpleNamespace(block_pool=real_block_pool(), kv_cache_event_metadata=facts))
    assert engine.scheduler._pins.bound
    assert connector._group_facts(0) == ("full_attention", None)


def test_reset_of_vllm_has_to_be_asked_for_again_while_blocks_are_held() -> None:
    pool, pins = real_block_pool(), Pins()
    pins.bind(pool)
    blocks = pool.get_new_blocks(3)
    held = pins.pin([block.block_id for block in blocks[:2]])
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache() is False
    free = pool.get_num_free_blocks()
    pins.unpin(held)
    assert pool.get_num_free_blocks() == free + 2
    assert pool.reset_prefix_cache() is True


def test_state_in_the_middle_of_a_block_is_never_taken_over() -> None:
    parameters = inspect.signature(kv_base.KVConnectorBase_V1.register_finished_partial_tail).parameters
    assert list(inspect.signature(PegaKVConnector.register_finished_partial_tail).parameters) == list(parameters)
    engine = MiniEngine()
    request = engine.add(PROMPT)
    assert bare(engine).register_finished_partial_tail(request, ([1],), [(0, 1, 37)]) is False
    engine.abort(request)
    engine.assert_nothing_held()


def test_hits_are_attributed_to_host_memory() -> None:
    connector = bare(MiniEngine())
    assert connector.get_external_cache_hit_sources(None, 96) == {compat.host_hit_source(): 96}
    assert connector.get_external_cache_hit_sources(None, 0) == {}


def test_error_in_any_scheduler_hook_is_a_miss() -> None:
    engine = MiniEngine()
    connector = bare(engine)

    class Broken:
        request_id = "broken"
        sampling_params = SimpleNamespace(prompt_logprobs=None)

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    broken = Broken()
    broken.skip_reading_prefix_cache = False  # type: ignore[attr-defined]
    broken.status = SimpleNamespace(name="FINISHED_STOPPED")  # type: ignore[attr-defined]
    connector.on_new_request(broken)
    assert connector.get_num_new_matched_tokens(broken, 0) == (0, False)
    assert connector.request_finished(broken, []) == (False, None)
    connector.update_connector_output(SimpleNamespace(finished_recving=object(), kv_connector_worker_meta=None))
    assert connector._recorder.counters["hook_errors"] >= 3


def test_error_while_planning_saves_loses_no_load() -> None:
    engine = MiniEngine()
    engine.add(PROMPT)
    engine.run()
    engine.add(PROMPT)
    engine._schedule()
    step = SimpleNamespace(total_num_scheduled_tokens=0)  # lacks everything that saves are planned from
    plan = bare(engine).build_connector_meta(step)
    assert len(plan.loads) == 1


def without_scheduler(monkeypatch: pytest.MonkeyPatch, error: Exception, broken: str) -> tuple[Any, FakePool]:
    """A connector whose scheduler half is about to be made, with one function that fails."""
    pool = FakePool()
    connector = bare()
    connector._vllm_config = None
    connector._kv_transfer_config = SimpleNamespace(engine_id="engine")
    module = "pegaflow.connector.connector"
    monkeypatch.setattr(groups, "geometry", lambda *arguments: MiniEngine().geometry)
    for name in ("rank_count", "replica_count"):
        monkeypatch.setattr(compat, name, lambda *arguments: 1)
    monkeypatch.setattr(f"{module}.ModelIdentity", lambda *arguments: FakeIdentity())
    monkeypatch.setattr(f"{module}._open_pool", lambda *arguments: pool)

    def fail(*arguments: Any) -> Any:
        raise error

    monkeypatch.setattr(f"{module}.{broken}", fail)
    return connector, pool


@pytest.mark.parametrize("broken", ["groups.geometry", "ModelIdentity", "compat.replica_count", "config_problem"])
def test_error_while_starting_turns_the_cache_off_and_vllm_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    connector, pool = without_scheduler(monkeypatch, AttributeError("renamed"), broken)
    with caplog.at_level("ERROR", "vllm.pegaflow"):
        connector._start_scheduler(ConnectorConfig())
    assert [record.getMessage().count("renamed") for record in caplog.records] == [1]
    assert connector.build_connector_meta(None) == StepPlan()
    assert connector.get_num_new_matched_tokens(MiniEngine().add(PROMPT), 0) == (0, False)
    assert pool.closed is (broken == "config_problem")


def test_option_that_the_engine_refuses_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    connector, _ = without_scheduler(monkeypatch, InvalidArgument("too small"), "_open_pool")
    with pytest.raises(InvalidArgument, match="too small"):
        connector._start_scheduler(ConnectorConfig())


def test_pool_that_was_busy_at_the_start_is_opened_later(monkeypatch: pytest.MonkeyPatch) -> None:
    connector, pool = without_scheduler(monkeypatch, RuntimeError("unused"), "_attach_pool")
    answers: list[Any] = [PoolBusy("busy"), PoolBusy("busy"), pool]

    def open_pool(*arguments: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    module = "pegaflow.connector.connector"
    monkeypatch.setattr(f"{module}._open_pool", open_pool)
    monkeypatch.setattr(f"{module}.config_problem", lambda config: None)
    monkeypatch.setattr(compat, "numbers_media", lambda config: False)
    monkeypatch.setattr(compat, "names_layers", lambda config: False)
    monkeypatch.setattr(compat, "wiped_by_first_pass", lambda config: False)
    monkeypatch.setattr(compat, "adapters", lambda config: None)
    monkeypatch.setattr(f"{module}._warn", lambda *arguments: None)
    monkeypatch.setattr("pegaflow.connector.namespaces.RETRY_SECONDS", 0.01)
    connector._start_scheduler(ConnectorConfig())
    connector._set_shapes([MiniEngine().workers[0].shape()])
    await_(lambda: connector._store.namespaces() is not None)
    assert connector._store.off is None
    assert connector._store.pool is pool
    connector.shutdown()
    assert pool.closed


def test_worker_that_does_not_know_its_rank_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = bare()
    connector._native = None

    def fail(*arguments: Any) -> Any:
        raise AssertionError("no groups")

    monkeypatch.setattr(compat, "worker_rank", fail)
    connector.register_kv_caches({})
    assert "no groups" in (connector.get_handshake_metadata().problem or "")
    connector.start_load_kv(None)
    assert connector.get_finished(set()) == (None, None)


def test_plan_is_never_none() -> None:
    assert bare().build_connector_meta(None) == StepPlan()
    assert NoopKVConnector.build_connector_meta(bare(), None) == StepPlan()


def test_worker_hooks_before_registration_do_nothing() -> None:
    connector = bare()
    connector.start_load_kv(None)
    connector.wait_for_layer_load("layer")
    connector.save_kv_layer("layer", None, None)
    connector.wait_for_save()
    assert connector.get_finished(set()) == (None, None)
    assert connector.get_transfer_results(set()) == kv_base.KVConnectorTransferResults()
    assert connector.get_block_ids_with_load_errors() == set()
    assert connector.build_connector_worker_meta() is None
    assert connector.get_handshake_metadata() is None
    connector.unregister_kv_caches()
    connector.restore_kv_caches()
    connector.shutdown()


def test_saves_of_a_step_without_forward_pass_start_without_their_hook() -> None:
    engine = MiniEngine()
    engine.add(PROMPT)
    engine.run()
    connector = bare(engine, worker=True)
    refs = [ref for _, ref in engine.store.namespaces()[0].reserve([b"new"])]  # type: ignore[index]
    from pegaflow.connector.metadata import SaveJob

    plan = StepPlan(engine.store.address(), (), (SaveJob(9, ((0, tuple(refs), (1,)),)),), runs_model=False)
    connector.bind_connector_metadata(plan)
    connector.get_finished(set())
    assert connector.build_connector_worker_meta().saves[9].ranks == 1
    connector.get_finished(set())
    assert connector.build_connector_worker_meta() is None


def test_sleep_waits_for_copies_and_wakes_up_with_them() -> None:
    engine = MiniEngine()
    engine.add(PROMPT)
    engine.run()
    connector = bare(engine, worker=True)
    engine.add([5] * 12)
    engine.copiers[0].held = True
    engine.step()
    engine.copiers[0].held = False
    connector.unregister_kv_caches()
    connector.unregister_kv_caches()
    assert engine.copiers[0].in_flight() == 0
    assert engine.workers[0]._layouts == {}
    connector.restore_kv_caches()
    connector.restore_kv_caches()
    engine.run()
    again = engine.add(PROMPT)
    engine.run()
    assert again.hit_tokens == len(PROMPT)
    engine.assert_nothing_held()
    assert PegaKVConnector.supports_sleep_mode(None)


def test_sleep_with_copies_that_do_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MiniEngine()
    engine.add(PROMPT)
    engine.run()
    engine.add([5] * 12)
    engine.copiers[0].held = True
    engine.step()
    monkeypatch.setattr("pegaflow.connector.worker.DRAIN_SECONDS_MAX", 0.05)
    with pytest.raises(PoolBusy, match="retry"):
        engine.workers[0].unregister()


def test_layouts_of_all_pipeline_ranks_are_taken() -> None:
    engine = MiniEngine(ranks=2)
    connector = bare(engine)
    shapes = {rank: worker.shape() for rank, worker in enumerate(engine.workers)}
    connector.set_xfer_handshake_metadata_pp_aware({(0, rank): shape for rank, shape in shapes.items()})
    assert engine.store.off is None
    connector.set_xfer_handshake_metadata({0: shapes[0]})
    assert engine.store.off == "only 1 of 2 workers reported how they hold the KV cache."


def test_reports_of_ranks_add_up_in_any_order() -> None:
    reports = [
        RankReport({1: SaveOutcome(1, frozenset({5}), 0.1)}, {"a": LoadOutcome(True, frozenset(), 0.2)}),
        RankReport({1: SaveOutcome(1, frozenset(), 0.3), 2: SaveOutcome(1, frozenset(), 0.1)}, problem="gone"),
        RankReport({}, {"a": LoadOutcome(False, frozenset({7}), 0.1)}),
    ]
    left = reports[0].aggregate(reports[1]).aggregate(reports[2])
    right = reports[2].aggregate(reports[0].aggregate(reports[1]))
    assert left == right
    assert left.saves[1] == SaveOutcome(2, frozenset({5}), 0.3)
    assert left.loads["a"] == LoadOutcome(False, frozenset({7}), 0.2, 2)
    assert len(reports[0].saves) == 1
    assert not RankReport()


def test_errors_are_logged_once_per_kind_and_counted_always(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    reasons: list[str] = []
    guard = Guard(recorder, reasons.append)

    def fail(error: Exception) -> None:
        raise error

    with caplog.at_level("ERROR", "vllm.pegaflow"):
        for _ in range(5):
            assert guard.run("hook", 7, lambda: fail(ValueError("x"))) == 7  # type: ignore[arg-type,return-value]
        guard.run("hook", None, lambda: fail(KeyError("y")))
        for number in range(KINDS_MAX + 10):
            guard.run(f"hook{number}", None, lambda: fail(ValueError("z")))
    assert recorder.counters["hook_errors"] == 16 + KINDS_MAX
    assert not reasons
    guard.run("hook", None, lambda: fail(PoolClosed("closed")))
    assert reasons == ["closed"]
    assert guard.run("hook", 0, lambda: 3) == 3


def test_identity_ignores_what_changes_no_byte() -> None:
    first = {"_name_or_path": "/a", "hidden_size": 64, "eos_token_id": 1, "nested": {"pad_token_id": 3, "x": (1, 2)}}
    second = {"_name_or_path": "/b", "hidden_size": 64, "nested": {"x": [1, 2]}}
    assert plain(first) == plain(second)
    assert plain({"a": object()}) == {"a": "builtins.object"}
    assert plain({"hidden_size": 65}) != plain({"hidden_size": 64})
