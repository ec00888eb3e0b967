"""Requests with LoRA adapters: their blocks are found by requests with the same weights, whatever these are called."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pegaflow import weights
from pegaflow.connector import adapters, compat
from pegaflow.connector.adapters import Adapter, Adapters
from pegaflow.connector.loads import ASK_AGAIN, MISS
from pegaflow.keys import adapter_key
from tests.patience import WAIT_SECONDS_MAX, await_
from tests.unit.mini_engine import MiniEngine

PROMPT = list(range(40))
BEFORE = 1_000_000_000
"""A time before any process started, in seconds."""


@pytest.fixture(autouse=True)
def process_that_is_younger_than_files(monkeypatch: pytest.MonkeyPatch) -> None:
    start_after_files(monkeypatch)


def start_after_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is on disk by now was there before this process started."""
    now = time.time()
    monkeypatch.setattr(weights, "process_started", lambda: now - weights.START_SECONDS_MIN + 60.0)


def start_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is changed from now on, and only that, is changed after this process started."""
    time.sleep(0.02)  # file times are as coarse as the kernel's ticks
    now = time.time()
    monkeypatch.setattr(weights, "process_started", lambda: now - weights.START_SECONDS_MIN)
    time.sleep(0.02)


def make_adapter(path: Path, weights: bytes = b"weights", rank: int = 8, time_written: int = BEFORE) -> Path:
    path.mkdir(exist_ok=True)
    for name, content in (
        ("adapter_model.bin", weights),
        ("adapter_config.json", json.dumps({"r": rank}).encode()),
    ):
        (path / name).write_bytes(content)
        os.utime(path / name, (time_written, time_written))
    return path


def asks_for(path: Path, number: int = 1, name: str = "adapter", **more: Any) -> Any:
    return SimpleNamespace(lora_int_id=number, lora_name=name, lora_path=str(path), **more)


def known(known_adapters: Adapters, lora_request: Any) -> Adapter:
    """The adapter once its files have been looked at."""
    adapter = known_adapters.of(lora_request)
    assert adapter is not None
    await_(lambda: adapter.usable or adapter.problem)
    return adapter


def hit(engine: MiniEngine, lora_request: Any) -> int:
    known(engine.scheduler._adapters, lora_request)
    request = engine.add(PROMPT, lora_request=lora_request)
    engine.run()
    engine.assert_nothing_held()
    return request.hit_tokens


def test_blocks_of_an_adapter_are_found_with_the_same_adapter_alone(tmp_path: Path) -> None:
    first, other = make_adapter(tmp_path / "a"), make_adapter(tmp_path / "b", b"other weights")
    engine = MiniEngine()
    assert hit(engine, asks_for(first)) == 0
    assert hit(engine, asks_for(first)) == 40
    plain = engine.add(PROMPT)
    engine.run()
    assert plain.hit_tokens == 0, "the base model met blocks of an adapter"
    assert hit(engine, asks_for(other, number=2)) == 0, "an adapter of the same name met the blocks of another"
    assert hit(engine, asks_for(other, number=2)) == 40
    again = engine.add(PROMPT)
    engine.run()
    assert again.hit_tokens == 40


def test_another_engine_finds_the_blocks_of_the_same_weights(tmp_path: Path) -> None:
    engine = MiniEngine()
    hit(engine, asks_for(make_adapter(tmp_path / "a")))
    sibling = MiniEngine(pool=engine.pool)
    assert hit(sibling, asks_for(make_adapter(tmp_path / "copy"), number=7, name="same weights")) == 40


@pytest.mark.parametrize("changed", [{"weights": b"weighty"}, {"rank": 16}])
def test_weights_and_settings_tell_adapters_apart(tmp_path: Path, changed: dict[str, Any]) -> None:
    ours = Adapters()
    one = known(ours, asks_for(make_adapter(tmp_path / "a")))
    two = known(ours, asks_for(make_adapter(tmp_path / "b", **changed), number=2))
    same = known(Adapters(), asks_for(make_adapter(tmp_path / "c")))
    traits = known(Adapters("lora_dtype=float32"), asks_for(tmp_path / "a"))
    format_3d = known(ours, asks_for(tmp_path / "a", is_3d_lora_weight=True))
    assert one.identity == same.identity
    assert len({one.identity, two.identity, traits.identity, format_3d.identity}) == 4


def shared_with_others(path: Path) -> bool:
    """Whether two engines that start with these files find each other's blocks."""
    engine = MiniEngine()
    assert hit(engine, asks_for(path)) == 0
    assert hit(engine, asks_for(path)) == 40
    return hit(MiniEngine(pool=engine.pool), asks_for(path)) == 40


def copy_that_keeps_times(path: Path) -> None:
    (path / "adapter_model.bin").write_bytes(b"Weights")
    os.utime(path / "adapter_model.bin", (BEFORE, BEFORE))


def flip(path: Path) -> None:
    link = path.parent / "new link"
    link.symlink_to(path.parent / "other")
    link.replace(path)


def move_in(path: Path) -> None:
    (path.parent / "other" / "adapter_model.bin").replace(path / "adapter_model.bin")


def new_revision(path: Path) -> None:
    """Another snapshot of a hub's cache that was there before becomes the newest."""
    (path.parent.parent / "refs" / "main").write_text("a")


@pytest.mark.parametrize("change", [copy_that_keeps_times, flip, move_in, new_revision])
def test_adapter_that_was_replaced_since_the_start_is_shared_with_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    snapshots = tmp_path / "snapshots"
    snapshots.mkdir()
    (tmp_path / "refs").mkdir()
    path = make_adapter(snapshots / "a")
    make_adapter(snapshots / "other", b"Weights")
    if change is flip:
        path = snapshots / "link"
        path.symlink_to(snapshots / "a")
    start_now(monkeypatch)
    assert shared_with_others(path)
    change(path)
    assert not shared_with_others(path)


def test_link_above_the_adapter_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        make_adapter(tmp_path / version / "a", version.encode())
    (tmp_path / "current").symlink_to("v1")
    start_now(monkeypatch)
    assert shared_with_others(tmp_path / "current" / "a")
    (tmp_path / "new").symlink_to("v2")
    (tmp_path / "new").replace(tmp_path / "current")
    assert not shared_with_others(tmp_path / "current" / "a")


def test_blob_that_came_to_a_hub_cache_after_the_start_is_shared_with_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "blobs").mkdir()
    path = make_adapter(tmp_path / "snapshots" / "a")
    start_now(monkeypatch)
    (path / "adapter_model.bin").rename(tmp_path / "blobs" / "0123")
    (path / "adapter_model.bin").symlink_to(tmp_path / "blobs" / "0123")
    assert not shared_with_others(path)


def test_adapters_are_looked_for_in_the_hubs_own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    load = SimpleNamespace(download_dir="/somewhere/else")
    asked: list[Any] = []
    monkeypatch.setattr(adapters, "local_snapshot", lambda *arguments: asked.append(arguments))
    ours = compat.adapters(SimpleNamespace(lora_config=None, load_config=load))
    assert known(ours, asks_for(Path("some/adapter"))).problem
    assert asked == [("some/adapter", None, None, adapters.CONFIG_FILE)]


@pytest.mark.parametrize("name", ["adapter", "another name"])
def test_number_that_stands_for_two_adapters_leaves_both_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    first, other = make_adapter(tmp_path / "a"), make_adapter(tmp_path / "b", b"other weights")
    engine = MiniEngine()
    assert hit(engine, asks_for(first)) == 0
    saved = len(engine.pool.slots)
    with caplog.at_level("WARNING", "vllm.pegaflow"):
        assert hit(engine, asks_for(other, name=name)) == 0
    assert hit(engine, asks_for(other, name=name)) == 0
    assert hit(engine, asks_for(first)) == 0
    assert len(engine.pool.slots) == saved
    assert len(caplog.records) == 2
    assert hit(engine, asks_for(first, number=2)) == 40, "a number of its own is all that was missing"


def test_adapter_that_is_replaced_in_place_from_elsewhere_leaves_the_one_before_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, other = make_adapter(tmp_path / "a"), make_adapter(tmp_path / "b", b"other weights")
    engine = MiniEngine()
    assert hit(engine, asks_for(first)) == 0
    with caplog.at_level("WARNING", "vllm.pegaflow"):
        assert hit(engine, asks_for(other, load_inplace=True)) == 0
    assert hit(engine, asks_for(first)) == 0
    assert sum("replaced in place" in record.getMessage() for record in caplog.records) == 1


def test_blocks_are_not_published_if_files_changed_before_they_were_computed(tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a")
    engine = MiniEngine()
    adapter = known(engine.scheduler._adapters, asks_for(path))
    adapter.checked = time.monotonic() + 1_000.0  # no new request has the files looked at
    request = engine.add(PROMPT, lora_request=asks_for(path))
    copy_that_keeps_times(path)
    engine.run()
    assert adapter.problem
    assert request.hit_tokens == 0
    assert not [slot for slot in engine.pool.slots.values() if slot.state == "sealed"]
    engine.assert_nothing_held()


class Slow:
    """Looks at the files of some adapters take until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
        self.go = threading.Event()
        self.looks = 0
        self._paths = [str(path) for path in paths]
        self._original = Adapters._examine
        slow = self

        def examine(ours: Adapters, adapter: Adapter) -> None:
            slow.looks += 1
            if adapter.path in slow._paths:
                slow.go.wait(WAIT_SECONDS_MAX)
            slow._original(ours, adapter)

        monkeypatch.setattr(Adapters, "_examine", examine)


def test_blocks_are_published_once_the_look_at_their_adapter_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_adapter(tmp_path / "a")
    engine = MiniEngine()
    adapter = known(engine.scheduler._adapters, asks_for(path))
    adapter.checked = time.monotonic() + 1_000.0
    slow = Slow(monkeypatch, path)
    monkeypatch.setattr(MiniEngine, "_wait_for_adapters", lambda engine: None)
    engine.add(PROMPT, lora_request=asks_for(path))
    for _ in range(8):
        engine.step()
    assert not engine.requests
    assert engine.scheduler.has_pending_saves()
    assert not [slot for slot in engine.pool.slots.values() if slot.state == "sealed"]
    slow.go.set()
    await_(lambda: not adapter.queued)
    engine.run()
    assert [slot for slot in engine.pool.slots.values() if slot.state == "sealed"]
    engine.assert_nothing_held()


def test_path_that_hangs_leaves_its_own_adapter_alone_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "CHECK_SECONDS", 0.0)
    path, other = make_adapter(tmp_path / "a"), make_adapter(tmp_path / "b", b"other weights")
    ours = Adapters()
    adapter = known(ours, asks_for(path))
    assert adapter.usable
    slow = Slow(monkeypatch, path)
    for _ in range(100):
        ours.of(asks_for(path))
    monkeypatch.setattr(adapters, "CHECK_SECONDS_MAX", 0.0)
    assert not adapter.usable
    assert adapter.problem is None
    assert ours._queued == 1
    await_(lambda: slow.looks == 1)
    monkeypatch.setattr(adapters, "CHECK_SECONDS_MAX", WAIT_SECONDS_MAX)
    assert known(ours, asks_for(other, number=2)).usable
    slow.go.set()
    await_(lambda: not adapter.queued)
    assert adapter.usable
    assert adapter.answered == adapter.asked
    ours.close()


def test_looks_that_are_asked_for_while_all_paths_hang_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "ADAPTERS_MAX", 8)
    path = make_adapter(tmp_path / "a")
    slow = Slow(monkeypatch, path)
    ours = Adapters()
    for number in range(50):
        ours.of(asks_for(path, number=number))
    assert ours._queued == 8
    assert len(ours._threads) == adapters.THREADS_MAX
    slow.go.set()
    await_(lambda: ours._queued == 0)
    assert known(ours, asks_for(path, number=50)).usable
    ours.close()


def test_adapter_whose_files_change_is_left_alone_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(adapters, "CHECK_SECONDS", 0.0)
    engine = MiniEngine()
    path = make_adapter(tmp_path / "a")
    hit(engine, asks_for(path))
    running = engine.add([*PROMPT, 7, 7, 7, 7, 7], more=9, lora_request=asks_for(path))
    make_adapter(path, b"Weights", time_written=BEFORE + 1)
    adapter = engine.scheduler._adapters.of(asks_for(path))
    assert adapter is not None
    with caplog.at_level("WARNING", "vllm.pegaflow"):
        await_(lambda: adapter.problem is not None)
        saved = len(engine.pool.slots)
        engine.run()
    assert running.hit_tokens == 0
    assert len(engine.pool.slots) == saved, "blocks of unknown weights were saved"
    assert hit(engine, asks_for(path)) == 0
    assert [record.getMessage().count("changed since") for record in caplog.records] == [1]
    assert hit(engine, asks_for(path, number=2)) == 0
    assert hit(engine, asks_for(path, number=2)) == 40, "a new adapter in the same directory is another one"


@pytest.mark.parametrize("missing", ["directory", "weights", "adapter_config.json"])
def test_adapter_that_cannot_be_read_is_left_alone(tmp_path: Path, missing: str) -> None:
    path = make_adapter(tmp_path / "a")
    if missing == "weights":
        (path / "adapter_model.bin").unlink()
    elif missing != "directory":
        (path / missing).unlink()
    engine = MiniEngine()
    lora_request = asks_for(path if missing != "directory" else tmp_path / "absent")
    assert hit(engine, lora_request) == 0
    assert hit(engine, lora_request) == 0
    assert engine.pool.slots == {}


def test_adapter_that_is_replaced_in_place_is_left_alone(tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a")
    engine = MiniEngine()
    assert hit(engine, asks_for(path)) == 0
    assert hit(engine, asks_for(path, load_inplace=True)) == 0
    assert hit(engine, asks_for(path)) == 0


def test_request_waits_a_bounded_time_for_its_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adapters, "_look", lambda self, adapter: None)
    engine = MiniEngine()
    request = engine.add(PROMPT, lora_request=asks_for(make_adapter(tmp_path / "a")))
    assert engine.scheduler.match(request, 0, False) == (None, False)
    monkeypatch.setattr(adapters, "READY_WAIT_SECONDS_MAX", 0.0)
    assert engine.scheduler.match(request, 0, False) == (0, False)
    engine.run()
    assert engine.pool.slots == {}
    engine.assert_nothing_held()


def test_adapters_are_forgotten_oldest_first_and_sampling_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "ADAPTERS_MAX", 2)
    ours = Adapters()
    path = make_adapter(tmp_path / "a")
    one, two = (known(ours, asks_for(path, number=number)) for number in (1, 2))
    assert ours.of(asks_for(path, number=1)) is one
    known(ours, asks_for(path, number=3))
    assert ours.of(asks_for(path, number=1)) is one
    assert ours.of(asks_for(path, number=2)) is not two
    assert ours.of(None) is None
    threads = ours._threads
    ours.close()
    ours.close()
    assert threads
    for thread in threads:
        thread.join(10.0)
        assert not thread.is_alive()


def test_keys_of_adapters_follow_from_weights_and_hash() -> None:
    keys = {adapter_key(identity, block) for identity in (b"1" * 32, b"2" * 32) for block in (b"a" * 32, b"b" * 16)}
    assert len(keys) == 4
    assert {len(key) for key in keys} == {32}


class Pauses:
    """Stands for the event that steps pause at."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def wait(self, seconds: float) -> None:
        """Pause."""
        self.seconds.append(seconds)

    def set(self) -> None:
        """No more pauses."""


def test_a_step_pauses_only_if_a_request_was_put_off_and_nothing_runs() -> None:
    """Threads that requests are put off for would get the interpreter every 5 ms only from an engine that spins."""
    engine = MiniEngine()
    scheduler: Any = engine.scheduler
    scheduler._closed = pauses = Pauses()
    request = engine.add(PROMPT)
    for answer, tokens, paused in (
        (MISS, 0, 0),
        (ASK_AGAIN, 16, 0),
        (ASK_AGAIN, 0, 1),
        (MISS, 0, 1),
        (ASK_AGAIN, 0, 2),
    ):
        scheduler._loads.match = lambda *_, answer=answer: answer
        assert scheduler.match(request, 0, False) == answer
        scheduler.plan(list, tokens)
        assert len(pauses.seconds) == paused
    scheduler.plan(list, 0)
    assert len(pauses.seconds) == 2
