"""``PegaHiCacheStorage``: SGLang's calls, turned into those of page stores.

SGLang makes one object of this class per rank and calls it from threads of its own. Two forms of pages exist there: by
address within its host pools (the v1 and v2 calls), and as flat tensors. Nothing is raised into it but options that are
wrong; everything else that fails is a miss and a log line.
"""

import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from pegaflow import _native
from pegaflow.config import ConnectorConfig
from pegaflow.errors import InvalidArgument, PegaFlowError
from pegaflow.keys import fingerprint, is_private, private
from pegaflow.opening import open_pool, serve_ssd, size_note
from pegaflow.sglang import engine_facts
from pegaflow.sglang.identity import model_factors, page_key, pool_factors
from pegaflow.sglang.log import logger
from pegaflow.sglang.options import parse_options
from pegaflow.sglang.page_store import Batch, Copying, PageStore
from pegaflow.sglang.pages import HostPages
from pegaflow.sglang.report import Report

KV = str(PoolName.KV)
INDEXER = str(PoolName.INDEXER)


class PegaHiCacheStorage(HiCacheStorage):  # type: ignore[misc]
    """Pages of SGLang's hierarchical cache in shared memory, for every engine of this user on this host."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        """``storage_config``: SGLang's, with ``pegaflow.*`` options in its ``extra_config``. ``kwargs``: unused.

        Raises ``InvalidArgument`` for wrong options. A pool that cannot be opened is a log line, and all misses.
        """
        self._config = storage_config
        options = parse_options(storage_config.extra_config, os.environ)
        self._report = Report(bool(storage_config.enable_storage_metrics))
        self._closing = threading.Event()
        self._tier_wait_ms = options.prefetch_wait_ms_max if options.ssd_directories else None
        self._pools: dict[str, Any] = {}
        self._places: dict[str, HostPages] = {}
        self._stores: dict[tuple[str, str], PageStore] = {}
        self._lock = threading.Lock()
        self._weight_version = engine_facts.weight_version()
        self._pool: _native.Pool | None = self._report.run("no pool", None, lambda: _open_pool(options, storage_config))
        self._copying: tuple[Copying, Copying] | None = None
        self._model: dict[str, Any] | None = None
        if self._pool is not None:
            opened = self._pool
            self._copying = self._report.run("pages cannot be copied", None, lambda: _start_copying(opened))
            self._model = self._report.run("nothing is cached", None, self._identify)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """SGLang's host pool of KV."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """One more host pool, beside that of KV or the same: of an indexer, of states, of a draft model."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(str(host_pool_name), host_pool)

    # By address, for the host pool of KV.

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many pages are there, from the first on."""
        pages: int = self._run("a query failed", 0, lambda: self._prefix(KV, self._form, keys))
        return pages

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Copy pages to ``host_indices`` of the host pool. Returns which came."""
        return self._move_pages(False, KV, keys, host_indices, extra_info)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store the pages at ``host_indices`` of the host pool. Returns which are there now."""
        return self._move_pages(True, KV, keys, host_indices, extra_info)

    # By address, for several host pools.

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """How many pages can be restored, from the first on, with what their other pools have to hold."""
        nothing = PoolTransferResult.empty()
        return self._run("a query failed", nothing, lambda: self._restorable(keys, pool_transfers or []))

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """As ``batch_get_v1``, per pool."""
        return {one.name: self._move_transfer(False, one, extra_info) for one in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """As ``batch_set_v1``, per pool."""
        return {one.name: self._move_transfer(True, one, extra_info) for one in transfers}

    # As flat tensors.

    def exists(self, key: str) -> bool:
        """Whether a page is there."""

        def there() -> bool:
            store = self._store(KV, self._form)
            return store is not None and store.contains([page_key(key)])[0]

        found: bool = self._run("a query failed", False, there)
        return found

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """``target_location`` (a tensor of a page's size) with the page in it, or ``None``."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """For each page its tensor of ``target_locations``, filled, or ``None``; all ``None`` behind the first."""
        came = self._run("a read failed", [], lambda: self._move_tensors(False, keys, target_locations))
        targets = list(target_locations or [])
        return [targets[at] if at < len(came) and came[at] else None for at in range(len(keys))]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page, given as a tensor. Returns whether it is there now."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store pages, given as tensors. Returns whether all are there now."""
        stored = self._run("a write failed", [], lambda: self._move_tensors(True, keys, values))
        return len(stored) == len(keys) and all(stored)

    def clear(self) -> None:
        """Forget the pages of this model and layout, for every process at once: also before the first request, and
        after weights changed in place."""
        for name, form in self._clearable():
            self._report.run("the cache could not be cleared", None, partial(self._clear, name, form))

    def get_stats(self) -> Any:
        """SGLang's report of transfers since the last call; ``None`` if it does not want any."""
        return self._report.take()

    def close(self) -> None:
        """Leave the pool; its pages stay. Idempotent."""
        self._closing.set()
        for copying in self._copying or ():
            self._report.run("threads for copies did not end", None, copying.close, always=True)
        if self._pool is not None:
            self._report.run("the pool was not left", None, self._pool.close, always=True)
        self._pool = None

    @property
    def _by_address(self) -> bool:
        """Whether SGLang moves pages of KV by address: it says so in the extra config of a dynamic backend."""
        return bool((self._config.extra_config or {}).get("interface_v1", 0))

    @property
    def _form(self) -> str:
        return "pieces" if self._by_address else "flat"

    def _identify(self) -> dict[str, Any]:
        return model_factors(engine_facts.server_args(), engine_facts.version(), self._weight_version)

    def _clearable(self) -> list[tuple[str, str]]:
        """Host pools and forms whose pages this engine uses, opened or not."""
        with self._lock:
            used = {(name, self._form if name == KV else "pieces") for name in self._pools}
            return sorted(used | set(self._stores))

    def _clear(self, name: str, form: str) -> None:
        store = self._store(name, form) if self._pool is not None else None
        if store is not None:
            store.clear()

    def _run(self, what: str, default: Any, function: Any) -> Any:
        if self._pool is None:
            return default
        version = engine_facts.weight_version()
        if version != self._weight_version:
            changed = f"weights went from version {self._weight_version} to {version} in place"
            self._report.note("attach the storage backend anew", PegaFlowError(changed))
            return default
        return self._report.run(what, default, function)

    def _register(self, name: str, pool: Any) -> None:
        with self._lock:
            self._pools[name] = pool
            self._places.pop(name, None)
            for key in [key for key in self._stores if key[0] == name]:
                del self._stores[key]

        def place() -> None:
            self._places[name] = HostPages(pool)

        if name != KV or self._by_address:
            self._run(f"pages of host pool {name!r} are not cached", None, place)

    def _store(self, name: str, form: str) -> PageStore | None:
        """Where pages of a host pool are, by address (``"pieces"``) or as tensors (``"flat"``); ``None`` if they are
        not cached."""
        with self._lock:
            store = self._stores.get((name, form))
            if store is None:
                store = self._open_store(name, form)
                if store is not None:
                    self._stores[name, form] = store
            return store

    def _open_store(self, name: str, form: str) -> PageStore | None:
        pool, place = self._pools.get(name), self._places.get(name)
        if self._pool is None or self._copying is None or self._model is None or pool is None:
            return None
        lengths = [_flat_bytes(pool)] if form == "flat" else place.lengths.tolist() if place is not None else []
        if not lengths:
            return None
        shared = bool(self._config.is_mla_model) and (name == INDEXER or engine_facts.is_latent(pool))
        alone = is_private(self._model)
        if alone and shared and self._config.tp_size > 1:
            # Rank 0 would write what no other rank can name.
            reason = PegaFlowError("ranks that read what another one writes cannot keep them to themselves")
            self._report.note(f"pages of host pool {name!r} are not cached", reason)
            return None
        factors = pool_factors(pool, name, self._config, shared=shared, form=form, lengths=lengths)
        print_of_pages = fingerprint({**self._model, **factors})
        label = (
            f"{self._config.model_name or 'sglang'} {name} ({'all ranks' if shared else f'tp {self._config.tp_rank}'})"
        )
        namespace = self._pool.namespace(
            private(print_of_pages) if alone else print_of_pages, 0, [sum(lengths)], label=label
        )
        return PageStore(
            self._pool,
            namespace,
            self._copying,
            tier_wait_ms=None if alone else self._tier_wait_ms,
            closing=self._closing,
            counts=not shared or bool(self._config.is_storage_writer),
        )

    def _prefix(self, name: str, form: str, keys: Sequence[str]) -> int:
        store = self._store(name, form)
        return store.prefix([page_key(key) for key in keys]) if store is not None and keys else 0

    def _restorable(self, keys: list[str], transfers: Sequence[PoolTransfer]) -> PoolTransferResult:
        pages = self._prefix(KV, self._form, keys)
        hits: dict[str, int] = {KV: pages} if pages else {}
        restorable = set(range(1, pages + 1))
        for transfer in transfers:
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS or not restorable:
                continue  # a second form of the same pages, which gates nothing
            store = self._store(str(transfer.name), "pieces")
            there = store.contains([page_key(key) for key in keys[:pages]]) if store is not None else [False] * pages
            window = max(1, len(transfer.keys or [])) if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES else pages
            ends = {end for end in restorable if all(there[max(0, end - window) : end])}
            if ends:
                hits[transfer.name] = max(ends)
            restorable = ends
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def _move_pages(
        self,
        save: bool,
        name: str,
        keys: Sequence[str],
        indices: Any,
        extra_info: HiCacheStorageExtraInfo | None,
        chained: bool = True,
    ) -> list[bool]:
        def move() -> list[bool]:
            store = self._store(name, "pieces")
            if store is None or not keys:
                return nothing
            place = self._places[name]
            prefix = (extra_info.prefix_keys if extra_info is not None else None) or []
            batch = Batch(
                [page_key(key) for key in keys],
                [(place.layout, place.numbers(indices, len(keys)))],
                page_key(prefix[-1]) if prefix else None,
                chained,
            )
            return self._move(store, save, batch)

        nothing = [False] * len(keys)
        moved: list[bool] = self._run("a write failed" if save else "a read failed", nothing, move)
        return moved

    def _move_transfer(
        self, save: bool, transfer: PoolTransfer, extra_info: HiCacheStorageExtraInfo | None
    ) -> list[bool]:
        # The prefix that SGLang names is one of KV: of states and windows only those at some ends are stored.
        chained = transfer.hit_policy == PoolHitPolicy.ALL_PAGES
        name, keys = str(transfer.name), transfer.keys or []
        return self._move_pages(save, name, keys, transfer.host_indices, extra_info, chained)

    def _move_tensors(self, save: bool, keys: Sequence[str], tensors: Any) -> list[bool]:
        if not keys or tensors is None or len(tensors) != len(keys) or any(one is None for one in tensors):
            raise InvalidArgument(f"{len(keys)} pages need as many tensors of them.")
        # Kept alive, and in this order, until the copies are done.
        held = [one.contiguous() if save else one for one in tensors]
        sizes = {one.numel() * one.element_size() for one in held}
        if len(sizes) != 1 or any(not one.is_contiguous() or one.device.type != "cpu" for one in held):
            raise InvalidArgument("pages must be contiguous tensors of one size in host memory.")
        size = sizes.pop()
        store = self._store(KV, "flat")
        if store is None:
            return [False] * len(keys)
        if size != store.page_bytes:
            raise InvalidArgument(f"a page has {store.page_bytes} bytes, and a tensor of {size} came.")
        layouts = [(_native.KVLayout([(one.data_ptr(), size, size)], 1), [0]) for one in held]
        return self._move(store, save, Batch([page_key(key) for key in keys], layouts))

    def _move(self, store: PageStore, save: bool, batch: Batch) -> list[bool]:
        started = time.perf_counter()
        moved = store.save(batch) if save else store.load(batch)
        self._report.moved(save, sum(moved), store.page_bytes, started)
        return moved


def _open_pool(options: ConnectorConfig, config: HiCacheStorageConfig) -> _native.Pool:
    """The pool with its SSD tier, if there is to be one."""
    rank = f"tp {config.tp_rank} of {config.tp_size}, pp {config.pp_rank} of {config.pp_size}"
    pool = open_pool(options, f"sglang {options.instance_id or rank}")
    note = size_note(pool, options)
    if note is not None:
        logger.warning("PegaFlow: %s", note)
    if options.ssd_directories:
        try:
            serve_ssd(pool, options)
        except PegaFlowError as error:
            logger.warning("PegaFlow: no SSD tier, serving goes on without it: %s", error)
    return pool


def _start_copying(pool: _native.Pool) -> tuple[Copying, Copying]:
    """For reads and for writes: all threads or none."""
    reads = Copying(pool)
    try:
        return reads, Copying(pool)
    except Exception:
        reads.close()
        raise


def _flat_bytes(pool: Any) -> int:
    """Bytes of a page as a flat tensor. Raises ``InvalidArgument``, with the reason, if the host pool has none."""
    try:
        page = pool.get_dummy_flat_data_page()
        return int(page.numel() * page.element_size())
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgument(f"the host pool gives no flat page: {error}") from error
