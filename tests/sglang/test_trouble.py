"""What the backend says and holds when a step in the middle does not do what it usually does."""

import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolHitPolicy, PoolName, PoolTransfer

from pegaflow import _native
from pegaflow.keys import PRIVATE_MARK
from pegaflow.sglang import storage as backend
from pegaflow.sglang.page_store import Batch, Copying, PageStore
from pegaflow.shm import find_pool, inspect_pool, unlink_pool
from pegaflow.shm.traffic import sum_of
from tests.sglang.test_storage import serving, spilled, wait_until
from tests.sglang.world import (
    Setup,
    engine,
    fill,
    host_pool,
    in_child,
    indices,
    page_bytes,
    page_hashes,
    publish_model,
    start_with,
)
from tests.vllm.tiny_models import llama_config, make_adapter

PAGES = 6
HASHES = page_hashes(PAGES)


@pytest.fixture
def setup(models: dict[str, Path], shm_dir: Path) -> Setup:
    """An engine of the first model."""
    made = Setup(models["one"], shm_dir)
    publish_model(made)
    return made


def write(setup: Setup, seed: int = 0) -> tuple[list[bool], list[bytes]]:
    """Store pages. Returns which are said to be stored, and what they held."""
    with engine(setup) as (storage, pool):
        held = fill(pool, PAGES, seed)
        return storage.batch_set_v1(HASHES, indices(pool, list(range(PAGES)))), held


def read(setup: Setup) -> tuple[int, list[bytes]]:
    """``(pages that are said to be there, what those that came hold)``."""
    with engine(setup) as (storage, pool):
        there = storage.batch_exists(HASHES)
        came = storage.batch_get_v1(HASHES, indices(pool, list(range(PAGES))))
        return there, [page_bytes(pool, page) for page in range(PAGES) if came[page]]


def logged(function: Any) -> tuple[Any, list[str]]:
    """Result of ``function()`` and the backend's lines in the log meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sglang.pegaflow").addHandler(handler)
    return function(), lines


def test_adapter_that_was_trained_anew_misses_the_pages_of_the_old_one(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_adapter(tmp_path / "adapter", llama_config())
    start_with(monkeypatch, lora_paths=[f"one={made}"])
    _, held = in_child(write, setup)
    assert in_child(read, setup) == (PAGES, held)
    make_adapter(made, llama_config(), seed=1)
    assert in_child(read, setup) == (0, [])
    _, anew = in_child(write, setup, 1)
    assert in_child(read, setup) == (PAGES, anew)


def test_private_pages_come_back_to_their_own_process_and_are_marked(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_with(monkeypatch, load_format="dummy")

    def write_and_read() -> int:
        with engine(setup) as (storage, pool):
            assert all(storage.batch_set_v1(HASHES, indices(pool, list(range(PAGES)))))
            return storage.batch_exists(HASHES)

    assert in_child(write_and_read) == PAGES
    assert in_child(read, setup) == (0, [])
    prints = [one.fingerprint for one in inspect_pool(find_pool("default", setup.shm_dir).path).namespaces]
    assert len(set(prints)) == 2
    assert all(bytes.fromhex(one).endswith(PRIVATE_MARK) for one in prints)
    monkeypatch.undo()
    in_child(write, setup)
    shared = {one.fingerprint for one in inspect_pool(find_pool("default", setup.shm_dir).path).namespaces} - {*prints}
    assert [bytes.fromhex(one).endswith(PRIVATE_MARK) for one in shared] == [False]


def test_ranks_that_read_what_rank_0_writes_keep_nothing_private(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    start_with(monkeypatch, load_format="dummy")
    latent = replace(setup, latent=True, tensor_ranks=2)

    def write_twice() -> list[bool]:
        return [any(write(latent)[0]), any(write(replace(latent, tensor_rank=1))[0])]

    stored, lines = in_child(logged, write_twice)
    assert stored == [False, False]
    assert sum("are not cached" in line for line in lines) == 2, lines
    assert in_child(write, replace(latent, tensor_ranks=1))[0] == [True] * PAGES
    assert in_child(write, replace(setup, tensor_ranks=2))[0] == [True] * PAGES


def test_prompts_that_all_ranks_ask_for_in_one_namespace_count_once(setup: Setup) -> None:
    ranks = [replace(setup, latent=True, tensor_ranks=2, tensor_rank=rank) for rank in range(2)]
    in_child(write, ranks[0])
    assert [in_child(read, one)[0] for one in ranks] == [PAGES, PAGES]
    traffic = inspect_pool(find_pool("default", setup.shm_dir).path).traffic
    assert traffic is not None
    counted = sum_of(traffic.namespaces)
    assert (counted["prompts"], counted["blocks_asked"]) == (1, PAGES)


@pytest.mark.parametrize("trouble", ["parent is gone", "reset meanwhile", "sibling was first"])
def test_page_counts_as_stored_if_it_is_there_and_is_copied_once(setup: Setup, trouble: str) -> None:
    names = HASHES[3:]

    def store() -> tuple[list[bool], int, list[bool]]:
        with engine(setup) as (storage, pool), engine(setup) as (sibling, _):
            copies = 0
            at = indices(pool, list(range(len(names))))
            if trouble != "parent is gone":
                assert all(sibling.batch_set_v1(HASHES[:3], at))
            writes = storage._copying[1]
            run = writes.run

            def run_late(*arguments: Any) -> Any:
                nonlocal copies
                copies += 1
                done = run(*arguments)
                if trouble == "reset meanwhile":
                    sibling.clear()
                return done

            def publish_late(refs: Any) -> int:
                # As if a sibling had stored the same pages a moment before.
                storage._pool.publish(refs)
                return 0

            writes.run = run_late
            store = storage._store("kv", "pieces")
            if trouble == "sibling was first":
                store._pool = Wrapped(storage._pool, publish=publish_late)
            stored = storage.batch_set_v1(names, at, HiCacheStorageExtraInfo(prefix_keys=HASHES[:3]))
            return stored, copies, [storage.exists(name) for name in names]

    stored, copies, there = in_child(store)
    assert stored == there == [trouble == "sibling was first"] * len(names)
    assert copies == 1


class Wrapped:
    """A native object, some of whose methods are others."""

    def __init__(self, inner: Any, **others: Any) -> None:
        self._inner, self._others = inner, others

    def __getattr__(self, name: str) -> Any:
        return self._others.get(name) or getattr(self._inner, name)


class Ledger:
    """A pool, its namespace and a request to the SSD tier, all of which note what is held. One step fails."""

    block_bytes = 1

    def __init__(self, failing: str) -> None:
        self._failing = failing
        self.held: list[int] = []
        self.opened = self.closed = self.leases = 0

    def _step(self, name: str) -> None:
        if name == self._failing:
            raise RuntimeError(name)

    def grow_ahead(self, _: Any) -> None:
        """Nothing to do."""

    def lease(self, keys: list[bytes], start: int = 0) -> list[int]:
        """Two of the pages that were asked for."""
        self.leases += 1
        self._step(f"lease {self.leases}")
        self.held += [start, start + 1]
        return [start, start + 1]

    def release(self, refs: list[int]) -> None:
        """Leases are given back."""
        for ref in refs:
            self.held.remove(ref)

    def use_ssd(self) -> bool:
        """There is a tier."""
        self._step("use_ssd")
        return True

    def prefetch(self, *_: Any, **__: Any) -> "Ledger":
        """A request."""
        self._step("prefetch")
        self.opened += 1
        return self

    def poll(self) -> int:
        """All is there."""
        self._step("poll")
        return 2

    def close(self) -> None:
        """The request's end."""
        self.closed += 1

    def run(self, *_: Any) -> list[bool]:
        """A copy."""
        self._step("copy")
        return [True] * 4

    def note_loaded(self, _: int) -> None:
        """Nothing to do."""


@pytest.mark.parametrize("failing", ["lease 1", "use_ssd", "prefetch", "poll", "lease 2", "copy", "nothing"])
def test_failed_read_holds_nothing(failing: str) -> None:
    ledger: Any = Ledger(failing)
    store = PageStore(ledger, ledger, (ledger, ledger), tier_wait_ms=60_000, closing=threading.Event())
    batch = Batch([bytes([number]) for number in range(4)], [])
    if failing == "nothing":
        assert store.load(batch) == [True] * 4
    else:
        with pytest.raises(RuntimeError, match=failing):
            store.load(batch)
    assert (ledger.held, ledger.opened - ledger.closed) == ([], 0)


@pytest.mark.parametrize("works", [0, 1])
def test_backend_without_threads_for_copies_misses(setup: Setup, works: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    copier = _native.HostCopier

    def refuse(pool: Any) -> Any:
        if len(made) == works:
            raise RuntimeError("no threads")
        made.append(copier(pool))
        return made[-1]

    monkeypatch.setattr(_native, "HostCopier", refuse)
    (stored, _), lines = in_child(logged, lambda: write(setup))
    assert stored == [False] * PAGES
    assert sum("no threads" in line for line in lines) == 1, lines


def test_pool_is_left_whatever_its_threads_do(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []

    def refuse(_: Copying) -> None:
        left.append("copier")
        raise RuntimeError("it does not end")

    def open_pool(*arguments: Any) -> Any:
        opened = opening(*arguments)
        return opened and Wrapped(opened, close=lambda: (left.append("pool"), opened.close()))

    def leave(broken: bool) -> list[str]:
        with engine(setup) as (storage, _):
            storage._report.broken = broken
        return left

    opening = backend._open_pool
    monkeypatch.setattr(Copying, "close", refuse)
    monkeypatch.setattr(backend, "_open_pool", open_pool)
    monkeypatch.setattr(backend, "_start_copying", lambda _: (Copying.__new__(Copying), Copying.__new__(Copying)))
    assert in_child(leave, False) == in_child(leave, True) == ["copier", "copier", "pool"]


def test_states_come_back_from_an_ssd_without_those_of_the_pages_before(setup: Setup, tmp_path: Path) -> None:
    ssd = (("pegaflow.ssd_cache_path", str(tmp_path)), ("pegaflow.ssd_cache_capacity", "64mib"))
    setup = replace(setup, options=(*ssd, ("pegaflow.ssd_admission", "all"), ("pegaflow.prefetch_wait_ms_max", 60_000)))
    tail = HASHES[-2:]

    def transfer(pool: Any) -> tuple[list[PoolTransfer], HiCacheStorageExtraInfo]:
        at = indices(pool, [0, 1])
        one = PoolTransfer(PoolName.SWA, host_indices=at, keys=tail, hit_policy=PoolHitPolicy.TRAILING_PAGES)
        return [one], HiCacheStorageExtraInfo(prefix_keys=HASHES[:-2])

    def write_through() -> list[bytes]:
        with engine(setup) as (storage, _):
            windows = host_pool(setup)
            storage.register_mem_host_pool_v2(windows, PoolName.SWA)
            held = fill(windows, 2)
            assert wait_until(lambda: serving(setup))
            assert storage.batch_set_v2(*transfer(windows)) == {PoolName.SWA: [True, True]}
            assert wait_until(lambda: spilled(setup) >= 2)
            return held

    def read_back() -> tuple[Any, list[bytes]]:
        with engine(setup) as (storage, _):
            windows = host_pool(setup)
            storage.register_mem_host_pool_v2(windows, PoolName.SWA)
            store = storage._store("swa", "pieces")
            assert wait_until(lambda: all(store.contains([bytes.fromhex(name) for name in tail])))
            come = {PoolName.SWA: [True, True]}  # at once, unless the tier's own threads get no processor for a while
            wait_until(lambda: storage.batch_get_v2(*transfer(windows)) == come)
            return storage.batch_get_v2(*transfer(windows)), [page_bytes(windows, page) for page in range(2)]

    held = in_child(write_through)
    unlink_pool(find_pool("default", setup.shm_dir).path)
    assert in_child(read_back) == ({PoolName.SWA: [True, True]}, held)


def test_host_pool_without_flat_pages_is_said_once_and_holds_nothing(setup: Setup) -> None:
    setup = replace(setup, by_address=False)

    def store_twice() -> list[Any]:
        class NoFlatPages:
            def get_dummy_flat_data_page(self) -> None:
                raise RuntimeError("memory that cannot be page-locked")

        with engine(setup) as (storage, pool):
            storage.register_mem_pool_host(NoFlatPages())
            page = pool.get_data_page(0)
            stored = [storage.batch_set(HASHES[:1], [page.clone()]) for _ in range(2)]
            return [*stored, storage.batch_exists(HASHES)]

    outcome, lines = in_child(logged, store_twice)
    assert outcome == [False, False, 0]
    said = [line for line in lines if "memory that cannot be page-locked" in line]
    assert len(said) == len(set(said)) >= 1
