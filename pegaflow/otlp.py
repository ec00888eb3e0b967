"""The exporter's metrics sent to an OpenTelemetry collector (OTLP over HTTP), under the names that Prometheus sees."""

from collections.abc import Callable, Iterable, Iterator
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from prometheus_client.core import CounterMetricFamily

from pegaflow import _native
from pegaflow.exporter import PoolCollector

PATH_DEFAULT = "/v1/metrics"
SEND_SECONDS_MAX = 10.0
"""A collector that does not answer for so long costs what was to be sent then, and no more."""

Callback = Callable[[CallbackOptions], Iterable[Observation]]


def url_of(endpoint: str) -> str:
    """``endpoint`` with OTLP's path if it has none. Raises ``ValueError`` if it is no HTTP address."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{endpoint!r} is not an address such as http://collector:4318")
    return urlunsplit(parts._replace(path=parts.path if parts.path.strip("/") else PATH_DEFAULT))


def start(collector: PoolCollector, endpoint: str, interval_seconds: float) -> MeterProvider:
    """Send what ``collector`` has every so many seconds on a thread, until the provider is shut down."""
    exporter = OTLPMetricExporter(endpoint=url_of(endpoint), timeout=SEND_SECONDS_MAX)
    reader = PeriodicExportingMetricReader(
        exporter,
        export_interval_millis=1000 * interval_seconds,
        export_timeout_millis=1000 * SEND_SECONDS_MAX,
    )
    provider = MeterProvider([reader], Resource.create({"service.name": "pegaflow"}), shutdown_on_exit=False)
    meter = provider.get_meter("pegaflow", _native.__version__)
    for metric in collector.describe():
        callback = _callback(collector, metric.name)
        if isinstance(metric, CounterMetricFamily):
            meter.create_observable_counter(metric.name, [callback], description=metric.documentation)
        else:
            meter.create_observable_gauge(metric.name, [callback], description=metric.documentation)
    return provider


def _callback(collector: PoolCollector, name: str) -> Callback:
    def observe(_options: CallbackOptions) -> Iterator[Observation]:
        for metric in collector.collect():
            if metric.name == name:
                for sample in metric.samples:
                    yield Observation(sample.value, dict(sample.labels))

    return observe
