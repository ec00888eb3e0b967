"""``pegaflow exporter``: metrics of the pools of this host over HTTP."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from wsgiref.simple_server import make_server

import click

from pegaflow.cli.options import shm_dir_option
from pegaflow.cli.scrape_server import Handler, Server, Server6

if TYPE_CHECKING:
    from pegaflow.exporter import PoolCollector

PORT_DEFAULT = 9091
"""That of PegaFlow with a server."""

OTLP_SECONDS_MIN = 0.1
OTLP_SECONDS_MAX = 3_600.0


@click.command(short_help="Metrics of the pools of this host for Prometheus.")
@click.option(
    "--listen",
    default=f"127.0.0.1:{PORT_DEFAULT}",
    show_default=True,
    metavar="ADDRESS:PORT",
    help="Where to answer; port 0 takes any that is free.",
)
@click.option(
    "--otlp",
    metavar="URL",
    help="Also send the metrics to an OpenTelemetry collector, as OTLP over HTTP: http://collector:4318.",
)
@click.option(
    "--otlp-interval",
    "otlp_seconds",
    default=15.0,
    show_default=True,
    type=click.FloatRange(OTLP_SECONDS_MIN, OTLP_SECONDS_MAX),
    metavar="SECONDS",
    help="Time between two sendings.",
)
@shm_dir_option
def exporter(listen: str, otlp: str | None, otlp_seconds: float, shm_dir: str) -> None:
    """Answer GET /metrics with what is in the pools below DIR, as Prometheus reads it, until it is interrupted.

    The pools are looked at when somebody asks, at most once a second; the exporter attaches to none of them, and none
    needs it. Names and labels of models and processes are among the answers: everybody who can reach the address reads
    them.

    \b
    Examples:
      pegaflow exporter
      pegaflow exporter --listen 10.0.0.5:9091
      pegaflow exporter --listen '[::1]:9091' --shm-dir /mnt/shm
      pegaflow exporter --otlp http://collector:4318
    """
    try:
        # Here, so that all other commands do without the library.
        from prometheus_client import CollectorRegistry, make_wsgi_app

        from pegaflow.exporter import PoolCollector
    except ImportError:
        raise click.ClickException("the exporter needs prometheus-client: pip install prometheus-client") from None
    registry = CollectorRegistry()
    collector = PoolCollector(shm_dir)
    registry.register(collector)
    host, port = _address(listen)
    server_class = Server6 if ":" in host else Server
    with (
        _sending(collector, otlp, otlp_seconds),
        make_server(host, port, make_wsgi_app(registry), server_class, Handler) as server,
    ):
        if otlp is not None:
            click.echo(f"Sent to {otlp} every {otlp_seconds:g} s.")
        click.echo(f"Metrics of the pools in {shm_dir}: http://{_shown(host)}:{server.server_port}/metrics")
        # Not as KeyboardInterrupt, which wsgiref takes for a failure of the request that it is at.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
        server.serve_forever()
    click.echo("Stopped.")


@contextmanager
def _sending(collector: "PoolCollector", endpoint: str | None, seconds: float) -> Iterator[None]:
    """Metrics go to a collector meanwhile, if there is one; what it does not take is said in a line and lost."""
    if endpoint is None:
        yield
        return
    try:
        from pegaflow import otlp
    except ImportError:
        raise click.ClickException(
            "--otlp needs the OpenTelemetry SDK: pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        ) from None
    try:
        provider = otlp.start(collector, endpoint, seconds)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--otlp") from None
    try:
        yield
    finally:
        provider.shutdown(timeout_millis=1000 * otlp.SEND_SECONDS_MAX)


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.strip().rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not port.isdecimal() or int(port) > 65535:
        raise click.BadParameter(
            f"{listen!r} is not an address and a port such as 127.0.0.1:{PORT_DEFAULT} or [::1]:{PORT_DEFAULT}",
            param_hint="--listen",
        )
    return host, int(port)


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
