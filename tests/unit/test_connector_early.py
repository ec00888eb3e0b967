"""Getting ready before the first request: what is guessed, what is kept, and that nothing is left behind."""

import json
import threading
from typing import Any

from pegaflow.config import ConnectorConfig
from pegaflow.connector import device, early
from pegaflow.connector.copies import NativeTypes
from pegaflow.connector.device import MOVED
from pegaflow.connector.device_report import DeviceReport
from pegaflow.connector.early import EarlyStart, likely_namespaces
from pegaflow.metrics import Recorder
from tests.fakes import FakeCopier, FakeLayout, FakePool
from tests.unit.mini_engine import PART_BYTES, MiniEngine

PROMPT = list(range(100, 140))


def entry(
    fingerprint: int, part_bytes: list[int], *, group: int = 0, sealed: int = 1, slots: int = 1
) -> dict[str, Any]:
    return {
        "fingerprint": bytes([fingerprint] * 32).hex(),
        "group": group,
        "part_bytes": part_bytes,
        "bytes_sealed": sealed,
        "slots": slots,
    }


def guess(*namespaces: dict[str, Any], part: int = 0, part_bytes: dict[int, int] | None = None) -> list[Any]:
    return likely_namespaces(json.dumps({"namespaces": namespaces}), part, part_bytes or {0: 64})


class Readying(FakeCopier):
    """A copier that is told what to expect."""

    def __init__(self, pool: Any) -> None:
        super().__init__(pool)
        self.events: list[tuple[str, Any]] = []
        self.closed = False

    def expect(self, namespace: Any, part: int) -> None:
        self.events.append(("expect", part))

    def register(self, namespace: Any, part: int) -> None:
        self.events.append(("register", part))

    def forget_expected(self) -> None:
        self.events.append(("forget", None))

    def set_stepping(self, stepping: bool) -> None:
        self.events.append(("stepping", stepping))

    def progress(self) -> dict[str, int]:
        return {"bytes_registered": 5, "bytes_total": 7, **dict.fromkeys(MOVED, 2)}

    def close(self) -> None:
        self.closed = True


class Native:
    """The engine's constructors, and what they made."""

    def __init__(self, pool: FakePool) -> None:
        self.pool, self.opened, self.copiers = pool, 0, list[Readying]()
        self.problem: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def types(self) -> NativeTypes:
        native: Any = NativeTypes(self._attach, self._copier, FakeLayout, self._create)  # type: ignore[arg-type]
        return native

    def _attach(self, name: str, shm_dir: str) -> Any:
        self.opened += 1
        return self.pool

    def _create(self) -> Any:
        self.gate.wait(240)
        if self.problem is not None:
            raise self.problem
        return self.pool

    def _copier(self, pool: Any, device: str) -> Any:
        self.copiers.append(Readying(pool))
        return self.copiers[-1]


def engine_with_early_start(monkeypatch: Any, **fields: Any) -> tuple[MiniEngine, Native]:
    native = Native(FakePool())
    native.problem = fields.get("problem")
    report = json.dumps({"namespaces": [entry(1, [PART_BYTES])]})
    monkeypatch.setattr(early._native, "inspect", lambda path: report)
    engine = MiniEngine(pool=native.pool, native=native.types())
    engine.workers[0].prepare(EarlyStart(native.types(), "cuda:0", 0, {0: PART_BYTES}))
    return engine, native


def test_the_fullest_namespace_in_which_the_part_has_its_length_is_likely() -> None:
    found = guess(
        entry(1, [64], sealed=5), entry(2, [64], sealed=9), entry(3, [80], sealed=99), entry(4, [64], sealed=7)
    )
    assert found == [(0, bytes([2] * 32), (64,))]


def test_parts_and_groups_are_told_apart() -> None:
    first, second = entry(1, [64, 32]), entry(1, [16, 16], group=3)
    assert guess(first, second, part=1, part_bytes={0: 32, 3: 16}) == [
        (0, bytes([1] * 32), (64, 32)),
        (3, bytes([1] * 32), (16, 16)),
    ]
    assert guess(first, second, part=1, part_bytes={0: 64}) == []
    assert guess(first, part=2) == []


def test_namespaces_without_slots_and_reports_without_end_are_left_alone() -> None:
    assert guess(entry(1, [64], slots=0)) == []
    assert likely_namespaces(" " * (early.REPORT_BYTES_MAX + 1), 0, {0: 64}) == []


def test_what_was_made_early_is_used_and_told_the_truth_with_the_first_plan(monkeypatch: Any) -> None:
    engine, native = engine_with_early_start(monkeypatch)
    engine.add(PROMPT)
    engine.step()
    assert len(native.copiers) == 1
    assert native.opened == 0
    told = [event for event in native.copiers[0].events if event[0] != "stepping"]
    assert told[:3] == [("expect", 0), ("register", 0), ("forget", None)]
    engine.run()


def test_what_cannot_be_made_early_is_made_with_the_first_plan(monkeypatch: Any) -> None:
    engine, native = engine_with_early_start(monkeypatch, problem=OSError("not yet"))
    engine.add(PROMPT)
    engine.step()
    assert (len(native.copiers), native.opened) == (1, 1)
    engine.run()


def test_another_pool_than_expected_is_given_back(monkeypatch: Any) -> None:
    monkeypatch.setattr(early._native, "inspect", lambda path: '{"namespaces": []}')
    native = Native(FakePool())
    start = EarlyStart(native.types(), "cuda:0", 0, {0: 64})
    assert start.take("other", native.pool.shm_dir) is None
    assert native.copiers[0].closed
    assert native.pool.closed


def test_what_nobody_takes_is_closed_even_if_it_is_made_late(monkeypatch: Any) -> None:
    monkeypatch.setattr(early._native, "inspect", lambda path: '{"namespaces": []}')
    monkeypatch.setattr(early, "TAKE_SECONDS_MAX", 0.0)
    native = Native(FakePool())
    native.gate.clear()
    start = EarlyStart(native.types(), "cuda:0", 0, {0: 64})
    start.close()
    native.gate.set()
    start._thread.join()
    assert native.copiers[0].closed
    assert native.pool.closed


def test_an_engine_that_stops_before_its_first_request_leaves_nothing(monkeypatch: Any) -> None:
    engine, native = engine_with_early_start(monkeypatch)
    engine.workers[0].shutdown()
    assert native.copiers[0].closed
    assert native.pool.closed


def test_the_copier_hears_of_steps_of_the_model(monkeypatch: Any) -> None:
    engine, native = engine_with_early_start(monkeypatch)
    engine.add(PROMPT)
    engine.run()
    steps = [told for kind, told in native.copiers[0].events if kind == "stepping"]
    assert steps[:2] == [True, False]
    assert steps == [True, False] * (len(steps) // 2), "told once for each change"


def test_page_locking_is_counted_as_it_goes_on(monkeypatch: Any) -> None:
    report, recorder = DeviceReport(), Recorder()
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    report.observe(lambda: None, recorder)
    assert recorder.take() is None
    for total, bounced in ((10, 1), (30, 1)):
        now[0] += 2
        moved = {name: bounced * number for number, name in enumerate(MOVED, 1)}
        counted = {"bytes_registered": 8, "bytes_total": total, **moved}
        report.observe(lambda counted=counted: counted, recorder)  # type: ignore[misc]
        report.observe(lambda: {"bytes_registered": 0, "bytes_total": 99, **dict.fromkeys(MOVED, 99)}, recorder)
    taken = recorder.take()
    assert taken is not None
    assert taken["counters"] == {
        "registration_bytes": 30,
        "bounced_bytes": 1,
        "loaded_bytes": 2,
        "saved_bytes": 3,
        "load_moving_us": 4,
        "save_moving_us": 5,
    }
    assert taken["gauges"] == {"registered_bytes": 8}


def test_a_device_copier_is_made_as_configured_and_unlocks_only_wrong_guesses(monkeypatch: Any) -> None:
    calls: list[Any] = []

    class Recording:
        def __init__(self, pool: Any, device: int, **options: Any) -> None:
            calls.append((device, options))

        def register(self, namespace: Any, part: int) -> None:
            calls.append(("register", namespace.id, part))

        def unregister(self, namespace: Any, part: int) -> None:
            calls.append(("unregister", namespace.id, part))

        def stats(self) -> dict[str, int]:
            return {"ring_bytes": 1}

    monkeypatch.setattr(device._native, "CudaCopier", Recording)
    pool: Any = FakePool()
    config = ConnectorConfig(
        cuda_ctas=8, cuda_ring_bytes=(48 << 20) + 1, save_bytes_per_second_max=10**9, direct_save_bytes_min=4096
    )
    copier = device.DeviceCopier(pool, "cuda:3", config)
    assert calls.pop() == (
        3,
        {
            "backend": "auto",
            "ctas": 8,
            "ring_buffers": 3,
            "ring_buffer_bytes": 8 << 20,
            "direct_save_bytes_min": 4096,
            "save_bytes_per_second_max": 10**9,
        },
    )
    right, wrong = (pool.namespace(bytes([number]) * 32, number, [64]) for number in (1, 2))
    for namespace in (right, wrong):
        copier.expect(namespace, 0)  # type: ignore[arg-type]
    copier.register(right, 0)  # type: ignore[arg-type]
    copier.forget_expected()
    copier.forget_expected()
    assert calls == [("register", 1, 0), ("register", 2, 0), ("register", 1, 0), ("unregister", 2, 0)]
