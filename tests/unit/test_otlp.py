"""Metrics that are sent to a collector: what arrives, under which names, and collectors that do not take them."""

import gzip
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue

import pytest
from click.testing import CliRunner
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from pegaflow.cli.main import cli
from pegaflow.otlp import url_of
from tests.unit.pool_processes import BLOCKS, keys, open_namespace, store

ANSWER_SECONDS_MAX = 240

Points = dict[str, list[tuple[dict[str, str], float]]]


class Receiver(ThreadingHTTPServer):
    """An OTLP collector that keeps what it gets."""

    def __init__(self, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = status
        self.received: Queue[tuple[str, bytes]] = Queue()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def next(self) -> Points:
        """Points of the next message, by the names of their metrics."""
        path, body = self.received.get(timeout=ANSWER_SECONDS_MAX)
        assert path == "/v1/metrics"
        points: Points = {}
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                for point in (*metric.gauge.data_points, *metric.sum.data_points):
                    labels = {one.key: one.value.string_value for one in point.attributes}
                    number = point.as_int if point.HasField("as_int") else point.as_double
                    points.setdefault(metric.name, []).append((labels, number))
                assert not metric.HasField("sum") or metric.sum.is_monotonic
        return points


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        assert isinstance(self.server, Receiver)
        self.server.received.put((self.path, body))
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_what: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        yield server
        server.shutdown()


def exporter(shm_dir: Path, url: str) -> "subprocess.Popen[str]":
    arguments = ["--listen", "127.0.0.1:0", "--otlp", url, "--otlp-interval", "0.2", "--shm-dir", str(shm_dir)]
    process = subprocess.Popen(
        [sys.executable, "-c", "from pegaflow.cli import main; main()", "exporter", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"Sent to {url} every 0.2 s.\n"
    assert re.search(r"http://\S+/metrics", process.stdout.readline())
    return process


def test_what_prometheus_would_read_arrives_at_a_collector(tmp_path: Path, receiver: Receiver) -> None:
    pool, namespace = open_namespace("default", str(tmp_path))
    store(pool, namespace)
    namespace.note_prompt([*keys(), b"new".ljust(16)], start=0, ram=BLOCKS, ssd=BLOCKS, peer=BLOCKS, late=BLOCKS)
    process = exporter(tmp_path, receiver.url)
    try:
        points = receiver.next()
        assert ({"pool": "default"}, 1) in points["pegaflow_pool_readable"]
        found = {labels["tier"]: number for labels, number in points["pegaflow_cache_tier_block_requests"]}
        assert found == {"ram": BLOCKS, "ssd": 0, "peer": 0, "miss": 1}
        reasons = {labels["reason"]: number for labels, number in points["pegaflow_cache_block_misses"]}
        assert reasons["never_stored"] == 1
        [(labels, number)] = points["pegaflow_cache_resident_blocks"]
        assert (labels["model"], number) == ("tiny model", BLOCKS)
        again = receiver.next()
        assert set(again) == set(points)
        process.send_signal(signal.SIGTERM)
        assert process.wait(ANSWER_SECONDS_MAX) == 0
    finally:
        process.kill()
        process.communicate()
        pool.close()


def test_a_collector_that_takes_nothing_is_tried_again_and_ends_nothing(tmp_path: Path, receiver: Receiver) -> None:
    pool, _ = open_namespace("default", str(tmp_path))
    receiver.status = 400
    process = exporter(tmp_path, receiver.url)
    try:
        for _ in range(3):
            receiver.received.get(timeout=ANSWER_SECONDS_MAX)
        receiver.status = 200
        receiver.received.get(timeout=ANSWER_SECONDS_MAX)
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
        pool.close()


def test_addresses_get_the_path_of_otlp_unless_they_have_one() -> None:
    assert url_of("http://collector:4318") == url_of("http://collector:4318/") == "http://collector:4318/v1/metrics"
    assert url_of("https://collector/otlp?key=1") == "https://collector/otlp?key=1"


@pytest.mark.parametrize("url", ["collector:4318", "grpc://collector:4317", "http://"])
def test_address_that_is_none_is_refused(url: str) -> None:
    answer = CliRunner().invoke(cli, ["exporter", "--listen", "127.0.0.1:0", "--otlp", url])
    assert answer.exit_code == 2
    assert "is not an address such as" in answer.output
