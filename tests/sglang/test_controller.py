"""SGLang's cache controller, with its own threads for queries, reads and writes, on the backend."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from tests.sglang.world import Setup, controller, engine, fill, host_pool, in_child, indices, page_bytes, publish_model

PAGES = 10
TOKENS = [7 + 3 * number for number in range(16 * PAGES)]
SECONDS_MAX = 240.0


@pytest.fixture
def setup(models: dict[str, Path], shm_dir: Path) -> Setup:
    """An engine that moves pages by address."""
    made = Setup(models["one"], shm_dir)
    publish_model(made)
    return made


def hashes(tokens: list[int], page_tokens: int) -> list[str]:
    """SGLang's own names of the pages of a prompt."""
    return get_storage_hash_str(RadixKey(tokens), None, page_size=page_tokens)


def write(setup: Setup, pages: int = PAGES) -> list[bytes]:
    """Let SGLang's controller write a prompt. Returns what its pages held."""
    with controller(setup) as running:
        pool, tokens = running.mem_pool_host, TOKENS[: pages * setup.page_tokens]
        held = fill(pool, pages)
        names = hashes(tokens, setup.page_tokens)
        running.write_storage(indices(pool, list(range(pages))), tokens, names, [])
        done = running.ack_backup_queue.get(timeout=SECONDS_MAX)
        assert done.completed_tokens == len(tokens)
        return held


def read(setup: Setup) -> tuple[int, int, list[bytes]]:
    """Let SGLang's controller fetch the same prompt: ``(tokens found, tokens fetched, what came)``."""
    with controller(setup) as running:
        pool = running.mem_pool_host
        operation = running.prefetch("request", RadixKey(TOKENS), None, [])
        assert running.prefetch_hit_queue.get(timeout=SECONDS_MAX) is operation
        found = operation.storage_hit_count
        at = [PAGES + page for page in range(found // setup.page_tokens)]
        if not at:
            return 0, 0, []
        operation.host_indices = indices(pool, at)
        running.prefetch_buffer.put(operation)
        fetched, deadline = 0, time.monotonic() + SECONDS_MAX
        while time.monotonic() < deadline:
            ack = running.ack_prefetch_queue.get(timeout=SECONDS_MAX)
            fetched = max(fetched, ack.completed_tokens or 0)
            if ack.completed_req:
                break
        return found, fetched, [page_bytes(pool, page) for page in at]


@pytest.mark.parametrize("by_address", [True, False], ids=["by address", "as tensors"])
def test_prompt_comes_back_to_a_controller_in_another_process(setup: Setup, by_address: bool) -> None:
    setup = replace(setup, by_address=by_address)
    held = in_child(write, setup)
    assert in_child(read, setup) == (len(TOKENS), len(TOKENS), held)


def test_shorter_prompt_is_found_as_far_as_it_goes(setup: Setup) -> None:
    held = in_child(write, setup, 4)
    tokens = 4 * setup.page_tokens
    assert in_child(read, setup) == (tokens, tokens, held)


def test_other_model_finds_nothing(setup: Setup, models: dict[str, Path]) -> None:
    in_child(write, setup)
    assert in_child(read, replace(setup, model=models["other"])) == (0, 0, [])


def test_salt_and_adapter_are_in_sglangs_own_hashes(setup: Setup) -> None:
    plain = hashes(TOKENS, setup.page_tokens)
    for named in (RadixKey(TOKENS, extra_key="adapter"), RadixKey(TOKENS, cache_salt="tenant")):
        other = get_storage_hash_str(named, None, page_size=setup.page_tokens)
        assert set(plain).isdisjoint(other)


@pytest.mark.parametrize("asked_before", [True, False], ids=["after a request", "before the first one"])
@pytest.mark.parametrize("by_address", [True, False], ids=["by address", "as tensors"])
def test_operators_clear_reaches_the_backend(setup: Setup, by_address: bool, asked_before: bool) -> None:
    setup = replace(setup, by_address=by_address)
    in_child(write, setup)

    def clear() -> None:
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

        with controller(setup) as running:
            if asked_before:
                running.storage_backend.batch_exists(hashes(TOKENS, setup.page_tokens))
            assert HybridCacheController.clear_storage_backend(running)

    in_child(clear)
    assert in_child(read, setup) == (0, 0, [])


def test_new_weights_in_a_running_engine_end_sharing(setup: Setup) -> None:
    in_child(write, setup)

    def update() -> tuple[int, int]:
        from sglang.srt.runtime_context import get_context

        with controller(setup) as running:
            names = hashes(TOKENS, setup.page_tokens)
            before = running.storage_backend.batch_exists(names)
            get_context().override("test", weight_version="step 2")
            return before, running.storage_backend.batch_exists(names)

    assert in_child(update) == (PAGES, 0)
    assert in_child(read, setup)[0] == len(TOKENS)


def test_clear_works_after_weights_changed_in_place(setup: Setup) -> None:
    in_child(write, setup)

    def update_and_clear() -> None:
        from sglang.srt.runtime_context import get_context

        with controller(setup) as running:
            get_context().override("test", weight_version="step 2")
            running.storage_backend.clear()

    in_child(update_and_clear)
    assert in_child(read, setup) == (0, 0, [])


def test_engines_whose_weights_were_updated_to_the_same_name_do_not_share(setup: Setup) -> None:
    def attach_anew(action: Any) -> Any:
        from sglang.srt.runtime_context import get_context

        publish_model(setup)
        get_context().override("test", weight_version="step 2")
        return action(setup)

    held = in_child(attach_anew, lambda updated: (write(updated), read(updated)))
    assert held[1] == (0, 0, [])
    assert in_child(attach_anew, read) == (0, 0, [])


def transfer(name: PoolName, names: list[str], pool: Any, pages: list[int], policy: PoolHitPolicy) -> PoolTransfer:
    """What SGLang's hybrid controller hands over for one more host pool."""
    return PoolTransfer(name, host_indices=indices(pool, pages) if pages else None, keys=names, hit_policy=policy)


@pytest.mark.parametrize("prefix_named", [True, False], ids=["with prefixes", "without"])
def test_other_host_pools_come_back_and_bound_what_can_be_restored(setup: Setup, prefix_named: bool) -> None:
    names = hashes(TOKENS, setup.page_tokens)
    states, indexer = PoolName.MAMBA, PoolName.INDEXER

    def before(page: int) -> HiCacheStorageExtraInfo:
        return HiCacheStorageExtraInfo(prefix_keys=names[:page] if prefix_named else None)

    def write_all() -> list[bytes]:
        with engine(setup) as (storage, pool):
            more = {states: host_pool(setup), indexer: host_pool(replace(setup, layout="page_first_direct"))}
            for name, one in more.items():
                storage.register_mem_host_pool_v2(one, name)
            fill(pool, PAGES)
            held = fill(more[states], PAGES, seed=3)
            fill(more[indexer], PAGES, seed=4)
            assert all(storage.batch_set_v1(names, indices(pool, list(range(PAGES)))))
            for end in (3, 7):
                tail = transfer(states, [names[end]], more[states], [end], PoolHitPolicy.TRAILING_PAGES)
                assert storage.batch_set_v2([tail], before(end)) == {states: [True]}
            for start in (0, 3, 6):
                at = list(range(start, start + 3))
                every = transfer(indexer, names[start : start + 3], more[indexer], at, PoolHitPolicy.ALL_PAGES)
                assert storage.batch_set_v2([every], before(start)) == {indexer: [True] * 3}
            return [held[3], held[7]]

    def ask() -> tuple[Any, ...]:
        with engine(setup) as (storage, _):
            more = {states: host_pool(setup), indexer: host_pool(replace(setup, layout="page_first_direct"))}
            for name, one in more.items():
                storage.register_mem_host_pool_v2(one, name)
            tail = transfer(states, [names[-1]], more[states], [], PoolHitPolicy.TRAILING_PAGES)
            every = transfer(indexer, names, more[indexer], [], PoolHitPolicy.ALL_PAGES)
            both = storage.batch_exists_v2(names, [every, tail])
            one = storage.batch_exists_v2(names, [every])
            unknown = storage.batch_exists_v2(names, [transfer(PoolName.SWA, names, None, [], PoolHitPolicy.ALL_PAGES)])
            wanted = transfer(states, [names[3], names[7]], more[states], [11, 12], PoolHitPolicy.TRAILING_PAGES)
            came = storage.batch_get_v2([wanted], before(3))
            return (
                (both.kv_hit_pages, both.restorable_prefix_pages, dict(both.extra_pool_hit_pages)),
                (one.kv_hit_pages, unknown.kv_hit_pages),
                came,
                [page_bytes(more[states], 11), page_bytes(more[states], 12)],
            )

    held = in_child(write_all)
    both, others, came, bytes_read = in_child(ask)
    assert both == (8, [4, 8], {"kv": PAGES, "indexer": 9, "mamba": 8})
    assert others == (9, 0)
    assert came == {states: [True, True]}
    assert bytes_read == held


def test_host_pool_that_does_not_say_where_its_pages_are_is_left_out(setup: Setup) -> None:

    def attach() -> tuple[int, bool]:
        class Hidden:
            page_size, size, dtype = 16, 64, torch.bfloat16

            def get_page_buffer_meta(self, _: Any) -> None:
                return None

        with engine(setup) as (storage, pool):
            storage.register_mem_pool_host(Hidden())
            names = hashes(TOKENS, setup.page_tokens)
            stored = any(storage.batch_set_v1(names, indices(pool, list(range(PAGES)))))
            return storage.batch_exists(names), stored

    assert in_child(attach) == (0, False)


def test_pages_that_moved_in_memory_are_not_copied(setup: Setup) -> None:

    def move() -> list[bool]:
        with engine(setup) as (storage, pool):
            names = hashes(TOKENS, setup.page_tokens)
            stored = storage.batch_set_v1(names, indices(pool, list(range(PAGES))))
            pool.kv_buffer = torch.zeros_like(pool.kv_buffer)
            came = storage.batch_get_v1(names, indices(pool, list(range(PAGES))))
            return [all(stored), any(came), bool(pool.kv_buffer.any())]

    assert in_child(move) == [True, False, False]
