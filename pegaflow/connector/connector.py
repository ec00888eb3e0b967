"""``PegaKVConnector``: vLLM's hooks, passed on to the half of this process's role.

vLLM makes one object of this class in the scheduler's process and one in every worker. Nothing is decided here; but no
exception gets out of here either, except for options that are wrong, and those are refused before anything is loaded.
"""

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base as kv_base

from pegaflow import _native, versions
from pegaflow.config import PREFIX, ConnectorConfig, parse_config
from pegaflow.connector import compat, groups
from pegaflow.connector.copies import Copier, NativeTypes
from pegaflow.connector.device import DeviceCopier
from pegaflow.connector.device_report import DeviceReport
from pegaflow.connector.early import EarlyStart
from pegaflow.connector.event_maker import KVEventMaker
from pegaflow.connector.geometry import Geometry
from pegaflow.connector.guard import Guard
from pegaflow.connector.identity import ModelIdentity, config_problem, label_of, weights_of
from pegaflow.connector.layout import LayoutError, common_device, group_layout
from pegaflow.connector.loads import MISS
from pegaflow.connector.log import logger
from pegaflow.connector.metadata import Rank, StepPlan, WorkerShape
from pegaflow.connector.namespaces import Store
from pegaflow.connector.peer_link import PeerLink, PeerTypes
from pegaflow.connector.prometheus import PegaPromMetrics, PegaStats
from pegaflow.connector.scheduler import SchedulerHalf, log_notes
from pegaflow.connector.shard_pool import ShardPool
from pegaflow.connector.shard_worker import Shard, ShardWorkerHalf
from pegaflow.connector.worker import WorkerHalf
from pegaflow.errors import InvalidArgument, PegaFlowError, PoolBusy
from pegaflow.metrics import Recorder
from pegaflow.opening import open_pool, serve_ssd, size_note
from pegaflow.p2p.shards import check_ranks, shards_beside

if TYPE_CHECKING:
    from pegaflow._native import Pool

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class PegaKVConnector(kv_base.KVConnectorBase_V1, kv_base.SupportsHMA):
    """A cache of KV blocks in shared memory, for every vLLM process of this user on this host."""

    _cache_hit_source = compat.host_hit_source()
    _shards = 1
    """Equal runs of ranks that have pools of their own."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        compat.register_wire_types()
        config = _config_of(vllm_config)
        self._recorder = Recorder()
        self._device_report = DeviceReport()
        self._guard = Guard(self._recorder, self._turn_off)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._store: Store | None = None
        self._link: PeerLink | None = None
        self._native = _native_types(config, str(self._kv_transfer_config.engine_id))
        self._shards, self._shard_endpoints = config.shards, config.tp_shard_endpoints
        if role is kv_base.KVConnectorRole.SCHEDULER:
            self._start_scheduler(config)
        else:
            # Caches that vLLM adds to a group later (layers that share another's) bring no bytes of their own.
            self._groups = [
                (index, list(group.layer_names), group.kv_cache_spec)
                for index, group in groups.taking_part(kv_cache_config)
            ]
            self._by_block = groups.fails_by_block(kv_cache_config)

    # -- both roles -------------------------------------------------------------------------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Any layout will do. vLLM asks early, so wrong options are refused here before a model is loaded."""
        _config_of(vllm_config)
        return None

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Caches may be unmapped while nothing is being copied."""
        return True

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Before vLLM 0.32: keep a block's layers together where attention allows it, so that it is copied as one.
        It says that it does, but looks for scales of tokens and heads where they are only if layers lie apart."""
        return not compat.wiped_by_first_pass(self._vllm_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a later miss, nothing more."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PegaStats:
        """Statistics rebuilt in the API server."""
        return PegaStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PegaPromMetrics:
        """``vllm:pega_*`` metrics."""
        return PegaPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def get_kv_connector_stats(self) -> PegaStats | None:
        """What happened in this process since the last call. vLLM asks at the end of each step, and steps no further
        once nothing is left to do."""
        if self._worker is not None:
            at_rest = self._worker.came_to_rest()
            self._device_report.observe(self._worker.progress, self._recorder, at_rest=at_rest)
        if self._scheduler is not None:
            self._guard.run("saying how things are", None, self._scheduler.note_state)
        taken = self._recorder.take()
        return PegaStats(data=taken) if taken else None

    def shutdown(self) -> None:
        """Leave the pool; other processes keep using it. Idempotent."""
        for half in (self._worker, self._scheduler):
            if half is not None:
                self._guard.run("shutdown", None, half.shutdown)

    # -- scheduler --------------------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """vLLM's block pool, in which blocks are pinned until they are saved."""
        if self._scheduler is not None:
            self._guard.run("bind_gpu_block_pool", None, partial(self._scheduler.bind_block_pool, gpu_block_pool))

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """How the workers hold the KV cache, by tensor rank."""
        self._set_shapes(metadata.values())

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """How the workers hold the KV cache, by pipeline and tensor rank."""
        self._set_shapes(metadata.values())

    def on_new_request(self, request: Any) -> None:
        """A request arrived."""
        if self._scheduler is not None:
            self._guard.run("on_new_request", None, partial(self._scheduler.add_request, request))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond ``num_computed_tokens`` the pool has."""
        if self._scheduler is None:
            return MISS
        skips = compat.skips_reading(request)
        match = partial(self._scheduler.match, request, num_computed_tokens, skips)
        return self._guard.run("get_num_new_matched_tokens", MISS, match)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM has blocks for a request."""
        if self._scheduler is not None:
            tables = blocks.get_block_ids() if num_external_tokens > 0 else ()
            allocated = partial(self._scheduler.allocated, request, tables, num_external_tokens)
            self._guard.run("update_state_after_alloc", None, allocated)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """The workers' orders for one step."""
        scheduler = self._scheduler
        if scheduler is None:
            return StepPlan()
        tokens = int(scheduler_output.total_num_scheduled_tokens)
        scheduled = partial(compat.scheduled_requests, scheduler_output, scheduler.table)
        return scheduler.plan(
            scheduled, tokens, lambda landing: compat.reads_unasked(scheduler_output, self._vllm_config, landing)
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers finished."""
        if self._scheduler is not None:
            report = getattr(connector_output, "kv_connector_worker_meta", None)
            invalid = getattr(connector_output, "invalid_block_ids", None) or ()
            update = partial(self._scheduler.update, report, connector_output.finished_recving or (), invalid)
            self._guard.run("update_connector_output", None, update)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; its blocks may be freed at once, since what is being saved is pinned."""
        return self.request_finished_all_groups(request, (block_ids,))

    def register_finished_partial_tail(
        self, request: Any, block_ids: tuple[list[int], ...], partial_tail_offloads: list[tuple[int, int, int]]
    ) -> bool:
        """Whether a state of a recurrent layer in the middle of a block is taken over: no, hits end with whole blocks.
        Tails of attention layers need no offer."""
        return False

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See ``request_finished``."""
        if self._scheduler is not None:
            sound = not compat.ended_in_error(request)
            finish = partial(self._scheduler.finish_request, request, block_ids, sound)
            self._guard.run("request_finished", None, finish)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether vLLM has to keep stepping so that saves come to an end."""
        return self._scheduler is not None and self._scheduler.has_pending_saves()

    def has_pending_block_frees(self) -> bool:
        """Whether blocks that are being saved come back soon."""
        return self._scheduler is not None and self._scheduler.frees_soon()

    def take_events(self) -> Iterable[Any]:
        """Which blocks came to the pool and went, for routers that listen to vLLM's KV events."""
        return self._guard.run("take_events", (), self._scheduler.take_events) if self._scheduler is not None else ()

    def reset_cache(self) -> bool:
        """Invalidate all blocks of this model in the pool, for every process; before a pause or sleep for this one."""
        if self._scheduler is None:
            return True
        return self._guard.run("reset_cache", False, partial(self._scheduler.reset, compat.is_pausing()))

    # -- worker -----------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the KV caches: where blocks lie, from the tensors themselves."""
        self._take_caches(lambda: kv_caches)

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        """Take the KV caches of all layers in one tensor (before vLLM 0.32)."""
        self._take_caches(partial(compat.cross_layer_views, kv_cache, attn_backend, self._kv_cache_config))

    def unregister_kv_caches(self) -> None:
        """The caches are about to be unmapped (sleep)."""
        if self._worker is not None:
            self._worker.unregister()

    def restore_kv_caches(self) -> None:
        """The caches are back (wake up)."""
        if self._worker is not None:
            self._guard.run("restore_kv_caches", None, self._worker.restore)

    def get_handshake_metadata(self) -> Any:
        """How this worker holds the KV cache. ``None`` if other connectors would be handed the answer too, or if vLLM
        would keep one worker's answer for several: then it goes with the first report."""
        several = compat.prefill_ranks(self._vllm_config) > 1
        if self._worker is None or several or not compat.is_asked_directly(self):
            return None
        return self._worker.tell_shape()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's loads."""
        if self._worker is not None:
            self._guard.run("start_load_kv", None, partial(self._worker.start_loads, self._plan()))

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """A step begins. (vLLM calls this before everything else, whether it preempts or not.)"""
        if self._worker is not None and isinstance(kv_connector_metadata, StepPlan):
            start = partial(self._worker.start_step, kv_connector_metadata)
            self._guard.run("handle_preemptions", None, start)

    def reset_capture_state(self) -> None:
        """Graphs were captured: whatever layers vLLM named meanwhile, it may not name when the graphs run."""
        if self._worker is not None:
            self._guard.run("reset_capture_state", None, self._worker.forget_named_layers)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Keep a layer behind the loads that it reads from, on the device; see ``following``."""
        if self._worker is not None and self._worker.listens:
            self._guard.run("wait_for_layer_load", None, partial(self._worker.layer_needed, layer_name))

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved as a whole after the forward pass."""

    def wait_for_save(self) -> None:
        """Start this step's saves: the forward pass has filled their blocks."""
        if self._worker is not None:
            self._guard.run("wait_for_save", None, partial(self._worker.start_saves, self._plan()))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """``(None, loads that ended)``."""
        received, _ = self._poll()
        return None, received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Loads that ended, and which of them failed as a whole."""
        received, failed = self._poll()
        return compat.transfer_results(received, set() if self._by_block else failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be loaded; vLLM recomputes them."""
        return self._worker.take_invalid_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> Any:
        """What this worker finished."""
        return self._worker.take_report() if self._worker is not None else None

    # -- inside -----------------------------------------------------------------------------------------------------

    def _start_scheduler(self, config: ConnectorConfig) -> None:
        log_notes(config)
        try:
            self._make_scheduler(config)
        except InvalidArgument:
            raise
        except Exception as error:
            self._recorder.count("hook_errors")
            logger.error("PegaFlow is off, vLLM goes on without it: %r", error, exc_info=error)
            store, self._store, self._scheduler = self._store, None, None
            link, self._link = self._link, None
            if link is not None:
                self._guard.run("leaving peers", None, link.close)
            if store is not None:
                self._guard.run("leaving the pool", None, store.close)

    def _make_scheduler(self, config: ConnectorConfig) -> None:
        vllm_config, kv_cache_config = self._vllm_config, self._kv_cache_config
        geometry = groups.geometry(vllm_config, kv_cache_config)
        ranks = compat.rank_count(vllm_config)
        identity = ModelIdentity(vllm_config, geometry, vllm.__version__, compat.none_hash)
        replicas = compat.replica_count(vllm_config, kv_cache_config)
        self._link = PeerLink(config, PeerTypes(_native.PeerServer, _native.Peers, _native.Nic, _native.Directory))
        open_pool: Callable[[], Any] = partial(_open_whole, config, str(self._kv_transfer_config.engine_id), self._link)
        if self._shards > 1:
            open_pool = ShardPool
        pool, problem = _try_to_open(open_pool)
        self._store = Store(pool, geometry, identity, ranks, replicas, open_pool, self._shards)
        problem = problem or config_problem(vllm_config)
        if problem:
            self._store.turn_off(problem)
        self._scheduler = SchedulerHalf(
            config,
            geometry,
            self._store,
            self._recorder,
            ranks=ranks,
            settle=compat.nobody_steps_when_idle(),
            names_layers=compat.names_layers(vllm_config) and len(kv_cache_config.kv_cache_groups) == 1,
            wiped_by_first_pass=compat.wiped_by_first_pass(vllm_config),
            hash_tokens=compat.token_hasher(vllm_config),
            event_maker=KVEventMaker(self._group_facts) if compat.wants_events(vllm_config) else None,
            bypasses=partial(compat.bypasses_cache, media_numbered=compat.numbers_media(vllm_config)),
            adapters=compat.adapters(vllm_config),
            link=self._link,
        )
        self._store.prepare()
        _warn(vllm_config, geometry)

    def _group_facts(self, group: int) -> tuple[str | None, int | None]:
        return compat.group_facts(getattr(self, "_kv_cache_manager", None), group)

    def _turn_off(self, reason: str) -> None:
        if self._store is not None:
            self._store.turn_off(reason)
        elif self._worker is not None:
            self._worker.refuse(reason)

    def _set_shapes(self, shapes: Iterable[Any]) -> None:
        if self._store is not None:
            by_rank = {shape.rank: shape for shape in shapes if isinstance(shape, WorkerShape)}
            if not by_rank:
                return  # another connector's
            self._guard.run("set_xfer_handshake_metadata", None, partial(self._store.set_shapes, by_rank))

    def _take_caches(self, caches: Callable[[], dict[str, Any]]) -> None:
        rank, host, problem = (0, 0), "", None
        try:
            rank, host = compat.worker_rank(self._vllm_config), BOOT_ID.read_text().strip()
        except Exception as error:
            self._guard.note("register_kv_caches", error)
            problem = f"a worker does not know its rank and host: {error}"
        self._worker = self._make_worker(rank, host)
        if problem is not None:
            self._worker.refuse(problem)
            return
        try:
            self._register(self._worker, caches())
        except LayoutError as error:
            self._worker.refuse(f"KV caches of this layout are left alone: {error}.")
        except Exception as error:
            self._guard.note("register_kv_caches", error)
            self._worker.refuse(f"the KV caches of a worker cannot be used: {error}")

    def _make_worker(self, rank: Rank, host: str) -> WorkerHalf:
        if self._shards == 1:
            return WorkerHalf(rank, host, self._native, self._guard, by_block=self._by_block)
        number = rank[1] // (compat.rank_count(self._vllm_config) // self._shards)
        sample, label = partial(weights_of, self._vllm_config), label_of(self._vllm_config)
        shard = Shard(number, self._shards, sample, label, shards_beside(self._shard_endpoints, number))
        return ShardWorkerHalf(rank, host, self._native, self._guard, by_block=self._by_block, shard=shard)

    def _register(self, worker: WorkerHalf, kv_caches: dict[str, Any]) -> None:
        blocks = int(self._kv_cache_config.num_blocks)
        tensors = {index: compat.layer_tensors(kv_caches, names, spec) for index, names, spec in self._groups}
        device = common_device(layer for layers in tensors.values() for layer in layers)
        layouts = {}
        for index, names, spec in self._groups:
            meaning = compat.attention_meaning(self._vllm_config, names, device) + groups.states_meaning(spec)
            layouts[index] = group_layout(tensors[index], blocks, meaning)
        worker.register(layouts, blocks, kv_caches, device)
        if device != "cpu" and config_problem(self._vllm_config) is None:
            part = compat.part_of(compat.worker_rank(self._vllm_config), self._vllm_config, self._kv_cache_config)
            part = part if self._shards == 1 else 0
            sizes = {index: layout.part_bytes for index, layout in layouts.items()}
            worker.prepare(EarlyStart(self._native, device, part, sizes))

    def _plan(self) -> StepPlan:
        plan: Any = self._connector_metadata
        return plan if isinstance(plan, StepPlan) else StepPlan()

    def _poll(self) -> tuple[set[str], set[str]]:
        worker, plan = self._worker, self._plan()
        if worker is None:
            return set(), set()
        if not plan.runs_model:
            # Before vLLM 0.32 wait_for_save is left out in steps without a forward pass.
            self._guard.run("starting saves", None, partial(worker.start_saves, plan))
        nothing: tuple[set[str], set[str]] = (set(), set())
        return self._guard.run("polling copies", nothing, partial(worker.poll, plan.settle))


def _config_of(vllm_config: Any) -> ConnectorConfig:
    config = parse_config(vllm_config.kv_transfer_config.kv_connector_extra_config or {}, os.environ)
    if config.tp_shard_endpoints:
        tensor_ranks = int(vllm_config.parallel_config.tensor_parallel_size)
        check_ranks(
            config.tp_shard_endpoints,
            tensor_ranks,
            compat.rank_count(vllm_config),
            compat.context_ranks(vllm_config),
            PREFIX + "tp_shard_endpoints",
        )
    return config


def _open_pool(config: ConnectorConfig, engine_id: str) -> "Pool":
    return open_pool(config, f"vllm {config.instance_id or engine_id}")


def _open_with_ssd(config: ConnectorConfig, engine_id: str) -> "Pool":
    """The pool, and from now on this process may be the one that reads and writes its files on SSD."""
    pool = _open_pool(config, engine_id)
    if not config.ssd_directories:
        return pool
    try:
        serve_ssd(pool, config)
    except InvalidArgument:
        pool.close()
        raise
    except PegaFlowError as error:
        logger.warning("PegaFlow: no SSD tier, serving goes on without it: %s", error)
    return pool


def _open_whole(config: ConnectorConfig, engine_id: str, link: PeerLink) -> "Pool":
    """The pool with its SSD tier; peers are served and asked from now on."""
    pool = _open_with_ssd(config, engine_id)
    note = size_note(pool, config)
    if note is not None:
        logger.warning("PegaFlow: %s", note)
    try:
        link.open(pool)
    except InvalidArgument:
        pool.close()
        raise
    return pool


def _try_to_open(open_pool: "Callable[[], Pool]") -> "tuple[Pool | None, str | None]":
    """The pool, or why there is none; neither if it is busy, so that it is worth trying again. Options that the engine
    refuses are the user's to mend: they are raised."""
    try:
        pool = open_pool()
    except InvalidArgument:
        raise
    except PoolBusy as error:
        logger.warning("PegaFlow: the pool is busy, trying again: %s", error)
        return None, None
    except PegaFlowError as error:
        return None, str(error)
    return pool, None


def _warn(vllm_config: Any, geometry: Geometry) -> None:
    problem = versions.problem(vllm.__version__)
    if problem is not None:
        logger.warning("PegaFlow: this is vLLM %s. %s", vllm.__version__, problem)
    if geometry.problem is None and compat.hashes_differ_per_process(vllm_config):
        logger.warning(
            "PegaFlow: PYTHONHASHSEED is not set, so other processes, and this one after a restart, hash the same "
            "tokens differently and share nothing: set it to the same number everywhere."
        )
    if getattr(vllm_config.kv_transfer_config, "kv_load_failure_policy", "recompute") == "fail":
        logger.info(
            'PegaFlow: with "kv_load_failure_policy": "recompute" in --kv-transfer-config a block that cannot be '
            "loaded is recomputed; now its request would fail."
        )


def _attach_pool(name: str, shm_dir: str) -> "Pool":
    return _native.Pool.open(name, shm_dir=shm_dir, create=False, label="vllm worker")


def _native_types(config: ConnectorConfig, engine_id: str) -> NativeTypes:
    def copier(pool: "Pool", device: str) -> Copier:
        return _native.HostCopier(pool) if device == "cpu" else DeviceCopier(pool, device, config)

    return NativeTypes(_attach_pool, copier, _native.KVLayout, partial(_open_pool, config, engine_id))
