"""The connector's numbers in vLLM's own metrics: statistics that travel with outputs, and their Prometheus metrics."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import metrics as kv_metrics

from pegaflow.metrics import COUNTERS, GAUGES, HISTOGRAMS, buckets, merge, prometheus_name


class PegaStats(kv_metrics.KVConnectorStats):
    """What happened since the last report, as plain data (see ``metrics.Recorder.take``)."""

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: Any) -> "PegaStats":
        """Sum of both, as a new object: vLLM may be sending either one on another thread."""
        data: dict[str, Any] = {}
        merge(data, self.data)
        merge(data, other.data)
        return PegaStats(data=data)

    def reduce(self) -> dict[str, int | float]:
        """Few numbers for vLLM's log line."""
        summary: dict[str, int | float] = dict(self.data.get("counters", {}))
        for key, values in self.data.get("samples", {}).items():
            if values:
                summary[f"{key} (mean)"] = round(sum(values) / len(values), 6)
        return summary

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not any(self.data.get(part) for part in ("counters", "samples", "gauges"))


class PegaPromMetrics(kv_metrics.KVConnectorPromMetrics):
    """``vllm:pega_*`` on vLLM's metrics endpoint."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {key: self._make(self._counter_cls, key, text) for key, text in COUNTERS.items()}
        # With several API servers each of them hears something of an engine; only what came last is true.
        self._gauges = {
            key: self._make(self._gauge_cls, key, text, multiprocess_mode="mostrecent") for key, text in GAUGES.items()
        }
        self._histograms = {
            key: self._make(self._histogram_cls, key, text, buckets=buckets(key)) for key, text in HISTOGRAMS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report to the metrics of an engine."""
        for key, value in transfer_stats_data.get("counters", {}).items():
            if key in self._counters:
                self._counters[key][engine_idx].inc(value)
        for key, value in transfer_stats_data.get("gauges", {}).items():
            if key in self._gauges:
                self._gauges[key][engine_idx].set(value)
        for key, values in transfer_stats_data.get("samples", {}).items():
            for value in values if key in self._histograms else ():
                self._histograms[key][engine_idx].observe(value)

    def _make(self, metric_class: Any, key: str, text: str, **more: Any) -> dict[int, Any]:
        metric = metric_class(name=prometheus_name(key), documentation=text, labelnames=self._labelnames, **more)
        return {engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()}
