"""Counting, and the way of the counts through vLLM."""

import pickle
from functools import partial
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm

from pegaflow import vllm_plugin
from pegaflow.connector.connector import PegaKVConnector
from pegaflow.connector.prometheus import PegaStats
from pegaflow.metrics import COUNTERS, GAUGES, SAMPLES_MAX, Recorder, merge


def sample() -> PegaStats:
    recorder = Recorder()
    recorder.count("load_success", 2)
    recorder.observe("load_blocks", 3)
    recorder.gauge("pending_save_requests", 4)
    return PegaStats(data=recorder.take() or {})


def test_what_was_taken_is_gone() -> None:
    recorder = Recorder()
    assert recorder.take() is None
    recorder.count("load_success")
    assert recorder.take() == {"counters": {"load_success": 1}, "samples": {}, "gauges": {}}
    assert recorder.take() is None


def test_gauge_is_reported_when_it_changes() -> None:
    recorder = Recorder()
    recorder.gauge("pinned_blocks", 1)
    assert recorder.take()
    recorder.gauge("pinned_blocks", 1)
    assert recorder.take() is None
    recorder.gauge("pinned_blocks", 0)
    assert recorder.take() == {"counters": {}, "samples": {}, "gauges": {"pinned_blocks": 0}}


def test_samples_are_bounded() -> None:
    recorder = Recorder()
    for _ in range(SAMPLES_MAX + 10):
        recorder.observe("load_blocks", 1)
    assert len(recorder.samples["load_blocks"]) == SAMPLES_MAX
    total = {"samples": {"load_blocks": [1.0] * SAMPLES_MAX}}
    merge(total, {"samples": {"load_blocks": [2.0]}})
    assert len(total["samples"]["load_blocks"]) == SAMPLES_MAX


def test_sum_leaves_both_reports_alone() -> None:
    first, second = sample(), sample()
    total = first.aggregate(second)
    assert total.data["counters"] == {"load_success": 4}
    assert total.data["samples"] == {"load_blocks": [3, 3]}
    assert first.data == second.data == sample().data


def test_report_survives_the_way_to_the_api_server() -> None:
    rebuilt = PegaKVConnector.build_kv_connector_stats(pickle.loads(pickle.dumps(sample().to_dict())))
    assert rebuilt.data == sample().data
    assert not rebuilt.is_empty()
    assert rebuilt.reduce() == {"load_success": 2, "load_blocks (mean)": 3.0}
    rebuilt.reset()
    assert rebuilt.is_empty()


def test_prometheus_shows_the_names_of_the_original() -> None:
    class Config:
        kv_transfer_config = None

    types = {kind: kind for kind in (Gauge, Counter, Histogram)}
    metrics = PegaKVConnector.build_prom_metrics(Config(), types, ["model_name", "engine"], {0: ["m", "0"]})
    metrics.observe(sample().to_dict(), 0)
    labels = {"model_name": "m", "engine": "0"}
    assert REGISTRY.get_sample_value("vllm:pega_load_success_total", labels) == 2
    assert REGISTRY.get_sample_value("vllm:pega_load_blocks_count", labels) == 1
    assert REGISTRY.get_sample_value("vllm:pega_pending_save_requests", labels) == 4
    for name in ("load_failure", "save_success", "save_failure"):
        assert REGISTRY.get_sample_value(f"vllm:pega_{name}_total", labels) == 0
    for name in ("load_duration_seconds", "save_duration_seconds", "save_blocks"):
        assert REGISTRY.get_sample_value(f"vllm:pega_{name}_count", labels) == 0


def test_engines_behind_one_api_server_are_told_apart() -> None:
    """As vLLM's logger makes the metrics for data-parallel engines."""
    vllm_plugin.register()
    registry = CollectorRegistry()

    class Logger(KVConnectorProm):
        _gauge_cls = partial(Gauge, registry=registry)
        _counter_cls = partial(Counter, registry=registry)
        _histogram_cls = partial(Histogram, registry=registry)

    class Config:
        kv_transfer_config = KVTransferConfig(kv_connector="PegaKVConnector", kv_role="kv_both")

    logger: Any = Logger(Config(), ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})  # type: ignore[arg-type]

    def said(name: str) -> list[float | None]:
        return [registry.get_sample_value(f"vllm:pega_{name}", {"model_name": "m", "engine": one}) for one in "01"]

    for key in COUNTERS:
        assert said(f"{key}_total") == [0, 0]
    logger.observe(sample().to_dict(), 1)
    assert said("load_success_total") == [0, 2]
    assert said("load_blocks_count") == [0, 1]
    assert said("pending_save_requests") == [0, 4]
    logger.observe(sample().to_dict(), 0)
    assert said("load_success_total") == [2, 2]


def test_gauges_of_several_api_servers_are_one() -> None:
    """With a file per API server, prometheus_client shows the value that was set last rather than one for each."""
    modes = []

    class Recording(Gauge):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            modes.append(more.get("multiprocess_mode"))
            super().__init__(*arguments, registry=None, **more)

    class Config:
        kv_transfer_config = None

    class UnlistedCounter(Counter):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, registry=None, **more)

    class UnlistedHistogram(Histogram):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, registry=None, **more)

    types = {Gauge: Recording, Counter: UnlistedCounter, Histogram: UnlistedHistogram}
    PegaKVConnector.build_prom_metrics(Config(), types, ["engine"], {0: ["0"], 1: ["1"]})
    assert modes[: len(GAUGES)] == ["mostrecent"] * len(GAUGES)
