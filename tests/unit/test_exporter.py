"""Metrics of pools over HTTP: what is in them, what cannot be looked at, and clients that do not behave."""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from wsgiref.simple_server import make_server

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from pegaflow import _native
from pegaflow.cli.main import cli
from pegaflow.cli.scrape_server import CLIENTS_MAX, Handler, Server
from pegaflow.exporter import FRESH_SECONDS, PoolCollector
from pegaflow.shm import pool as pool_module
from tests.patience import await_
from tests.real_peers import free_port
from tests.unit.fake_native import FakeNative, listing, tier
from tests.unit.pool_processes import BLOCKS, PART_BYTES, keys, open_namespace, store

STATES = ("ok", "creating", "refused")
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@contextmanager
def started(shm_dir: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and the address at which it says that it answers."""
    program = [sys.executable, "-c", "from pegaflow.cli import main; main()"]
    process = subprocess.Popen(
        [*program, "exporter", "--listen", f"127.0.0.1:{port}", "--shm-dir", str(shm_dir)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"http://\S+", said)
        assert found, said
        yield process, found[0]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with started(tmp_path) as running:
        yield running


def samples_of(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def ask(address: str) -> Samples:
    with urllib.request.urlopen(address, timeout=240) as answer:
        return samples_of(answer.read().decode())


def value(samples: Samples, name: str, **labels: str) -> float:
    """The one sample of that name with at least these labels."""
    [found] = [number for (of, has), number in samples.items() if of == name and set(labels.items()) <= has]
    return found


def test_blocks_leases_and_processes_of_a_pool_are_among_the_metrics(
    tmp_path: Path, exporter: tuple[subprocess.Popen[str], str]
) -> None:
    pool, namespace = open_namespace("default", str(tmp_path))
    store(pool, namespace)
    leased = namespace.lease(keys()[:2])
    found = ask(exporter[1])
    here = {"pool": "default"}
    assert value(found, "pegaflow_pool_readable", **here) == 1
    assert value(found, "pegaflow_cache_resident_blocks", **here) == BLOCKS
    assert value(found, "pegaflow_cache_resident_bytes", **here) == BLOCKS * PART_BYTES
    assert value(found, "pegaflow_leases", **here) == len(leased) == 2
    assert value(found, "pegaflow_process_leases", **here) == 2
    assert value(found, "pegaflow_pool_processes", state="alive", **here) == 1
    assert value(found, "pegaflow_pool_capacity_bytes", **here) >= value(found, "pegaflow_pool_used_bytes", **here) > 0
    pool.release(leased)
    pool.close()


def test_prompts_by_tier_and_reason_windows_and_curve_are_among_the_metrics(tmp_path: Path) -> None:
    pool, namespace = open_namespace("default", str(tmp_path))
    store(pool, namespace)
    prompt = [*keys(), *(bytes([number]) * 16 for number in range(100, 112))]
    namespace.note_prompt(prompt, start=1, ram=3, ssd=5, peer=BLOCKS, late=BLOCKS + 2)
    namespace.note_loaded(7)
    found: dict[tuple[str, str], float] = {}
    for metric in PoolCollector(str(tmp_path)).collect():
        for sample in metric.samples:
            kind = next(
                (sample.labels[name] for name in ("tier", "reason", "window", "size") if name in sample.labels), ""
            )
            found[metric.name, kind] = sample.value
    tiers = [found["pegaflow_cache_tier_block_requests", tier] for tier in ("ram", "ssd", "peer", "miss")]
    assert tiers == [2, 2, 3, 12]
    reasons = ("never_stored", "evicted", "reset", "late", "tier_off")
    assert [found["pegaflow_cache_block_misses", reason] for reason in reasons] == [10, 0, 0, 2, 0]
    assert found["pegaflow_cache_block_insertions", ""] == BLOCKS
    assert found["pegaflow_load_bytes", ""] == 7 * PART_BYTES
    assert found["pegaflow_hll_total_requests", "1h"] == 19
    assert found["pegaflow_hll_cardinality", "24h"] == 12
    assert found["pegaflow_hll_estimated_hit_rate", "5m"] == pytest.approx(7 / 19, abs=1e-6)
    assert found["pegaflow_curve_hit_rate", "2x"] == pytest.approx(7 / 19, abs=1e-6), "what was stored was there"
    assert found["pegaflow_curve_sampling_rate", ""] == 1
    pool.close()


def test_pool_that_is_refused_is_told_and_hides_no_other(tmp_path: Path) -> None:
    pool, namespace = open_namespace("default", str(tmp_path))
    store(pool, namespace)
    other = tmp_path / f"pegaflow-v2-{os.geteuid()}-damaged"
    other.mkdir(mode=0o700)
    (other / "control").write_bytes(b"nothing of ours" * 1000)
    metrics = {metric.name: metric for metric in PoolCollector(str(tmp_path)).collect()}
    readable = {sample.labels["pool"]: sample.value for sample in metrics["pegaflow_pool_readable"].samples}
    assert readable == {"default": 1, "damaged": 0}
    pool.close()


@pytest.mark.parametrize(("one", "two"), list(itertools.combinations_with_replacement(STATES, 2)))
def test_no_two_samples_of_a_scrape_have_one_name_and_the_same_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one: str, two: str
) -> None:
    pool, namespace = open_namespace("default", str(tmp_path))
    store(pool, namespace)
    namespace.note_prompt(keys(), start=0, ram=BLOCKS, ssd=BLOCKS, peer=BLOCKS, late=BLOCKS)
    fake = FakeNative(
        listing(state=two, path="/dev/shm/pegaflow-v1-7-default"),
        listing(state=one, path="/dev/shm/pegaflow-v2-7-default"),
        listing(state="refused", path="/dev/shm/pegaflow-v3-7-default"),
        # A name that another pool is called by, since its own is taken.
        listing("pegaflow-v3-7-default", path="/dev/shm/pegaflow-v2-7-pegaflow-v3-7-default"),
    )
    fake.report = json.loads(_native.inspect(pool.path)) | {"ssd": tier()}
    pool.close()
    monkeypatch.setattr(pool_module, "_native", fake)
    series = [
        (sample.name, *sorted(sample.labels.items()))
        for metric in PoolCollector("/dev/shm").collect()
        for sample in metric.samples
    ]
    assert len(set(series)) == len(series)
    readable = [labels for name, *labels in series if name == "pegaflow_pool_readable"]
    assert len(readable) == 4
    assert [("pool", "default")] in readable


def test_a_pool_is_looked_at_once_however_many_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    looks = []
    monkeypatch.setattr("pegaflow.exporter.time.monotonic", lambda: now[0])
    monkeypatch.setattr("pegaflow.exporter.list_pools", lambda _directory: looks.append(1) or [])
    collector = PoolCollector(str(tmp_path))
    for _ in range(5):
        list(collector.collect())
    assert len(looks) == 1
    now[0] += FRESH_SECONDS
    list(collector.collect())
    assert len(looks) == 2
    list(collector.describe())
    assert len(looks) == 2


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_garbage_does_not_end_it_and_a_signal_does(
    ending: signal.Signals, exporter: tuple[subprocess.Popen[str], str]
) -> None:
    process, address = exporter
    host, port = address.removeprefix("http://").partition("/")[0].split(":")
    for garbage in (b"\x00\xff\r\n\r\n", b"GET", b""):
        with socket.create_connection((host, int(port))) as client:
            client.sendall(garbage)
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(urllib.request.Request(address, method="DELETE"), timeout=240)
    assert isinstance(ask(address), dict)
    process.send_signal(ending)
    assert process.wait(240) == 0


class _PatientHandler(Handler):
    timeout = None  # type: ignore[assignment]


def test_silent_clients_hinder_nobody_are_bounded_and_the_oldest_makes_room() -> None:
    def answer(_environ: object, start: Callable[..., object]) -> list[bytes]:
        start("200 OK", [])
        return [b"here"]

    server = make_server("127.0.0.1", 0, answer, Server, _PatientHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with ExitStack() as silent:
        clients = []
        for number in range(CLIENTS_MAX + 3):
            client = silent.enter_context(socket.create_connection(("127.0.0.1", server.server_port)))
            client.settimeout(240)
            clients.append(client)
            if number >= CLIENTS_MAX:
                assert clients[number - CLIENTS_MAX].recv(1) == b"", "the oldest is cut off"
        for client in clients[4:]:
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert client.makefile("rb").read().endswith(b"here")
        ending = threading.Thread(target=lambda: (server.shutdown(), server.server_close()), daemon=True)
        ending.start()
        ending.join(240)
        assert not ending.is_alive(), "one that says nothing is still there"


def test_a_directory_that_is_not_there_is_a_metric_and_one_line_until_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr("pegaflow.exporter.time.monotonic", lambda: now[0])
    place = tmp_path / "pools"
    collector = PoolCollector(str(place))

    def series() -> dict[str, float]:
        now[0] += FRESH_SECONDS
        return {one.name: one.value for metric in collector.collect() for one in metric.samples}

    for _ in range(3):
        assert series() == {"pegaflow_exporter_up": 0}
    place.mkdir()
    for _ in range(3):
        assert series() == {"pegaflow_exporter_up": 1}
    pool, _ = open_namespace("default", str(place))
    assert series()["pegaflow_pool_readable"] == 1
    pool.close()
    said = [record.getMessage() for record in caplog.records if record.name == "pegaflow.exporter"]
    assert len(said) == 2
    assert f"cannot list {place}" in said[0]
    assert "again" in said[1]


def test_scrapes_of_a_directory_that_is_not_there_are_answered(tmp_path: Path) -> None:
    with started(tmp_path / "none") as (_, address):
        assert value(ask(address), "pegaflow_exporter_up") == 0


@pytest.mark.parametrize("listen", ["9091", "localhost", "127.0.0.1:x", "127.0.0.1:70000", ":9091"])
def test_address_that_is_none_is_refused(listen: str) -> None:
    answer = CliRunner().invoke(cli, ["exporter", "--listen", listen])
    assert answer.exit_code == 2
    assert "is not an address and a port" in answer.output


def test_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        answer = CliRunner().invoke(cli, ["exporter", "--listen", f"127.0.0.1:{taken.getsockname()[1]}"])
    assert answer.exit_code == 1
    assert "The system refused" in answer.output


def test_it_starts_again_at_the_address_where_it_has_just_answered(tmp_path: Path) -> None:
    def leave_an_address() -> bool:
        nonlocal port
        port = free_port()
        # Whoever closes a connection first keeps its address for a minute: here that has to be the exporter.
        with started(tmp_path, port), socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            while client.recv(1 << 16):
                pass
        with socket.socket() as other, suppress(OSError):
            other.bind(("127.0.0.1", port))
            return False
        return True

    port = 0
    await_(leave_an_address)
    with started(tmp_path, port) as (_, again):
        assert again == f"http://127.0.0.1:{port}/metrics"
        assert isinstance(ask(again), dict)
