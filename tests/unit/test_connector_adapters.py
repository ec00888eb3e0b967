"""Requests with LoRA adapters: their blocks are found by requests with the same weights, whatever these are called."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pegaflow.connector import adapters
from pegaflow.connector.adapters import Adapter, Adapters
from pegaflow.keys import adapter_key
from tests.unit.mini_engine import MiniEngine

PROMPT = list(range(40))
BEFORE = 1_000_000_000
"""A time before any process started, in seconds."""


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
    deadline = time.monotonic() + 10.0
    adapter = known_adapters.of(lora_request)
    assert adapter is not None
    while not (adapter.usable or adapter.problem) and time.monotonic() < deadline:
        time.sleep(0.005)
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
    assert hit(engine, asks_for(other)) == 0, "an adapter of the same name met the blocks of another"
    assert hit(engine, asks_for(other)) == 40
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


def test_adapter_that_is_younger_than_the_process_is_shared_with_nobody(tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a", time_written=int(time.time()) + 10)
    engine = MiniEngine()
    assert hit(engine, asks_for(path)) == 0
    assert hit(engine, asks_for(path)) == 40
    assert hit(MiniEngine(pool=engine.pool), asks_for(path)) == 0


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
    deadline = time.monotonic() + 10.0
    with caplog.at_level("WARNING", "vllm.pegaflow"):
        while adapter.problem is None and time.monotonic() < deadline:
            time.sleep(0.005)
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
    thread = ours._thread
    ours.close()
    ours.close()
    assert thread is not None
    thread.join(10.0)
    assert not thread.is_alive()


def test_keys_of_adapters_follow_from_weights_and_hash() -> None:
    keys = {adapter_key(identity, block) for identity in (b"1" * 32, b"2" * 32) for block in (b"a" * 32, b"b" * 16)}
    assert len(keys) == 4
    assert {len(key) for key in keys} == {32}
