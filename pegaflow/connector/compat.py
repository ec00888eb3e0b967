"""The one file that knows how versions of vLLM differ. Features are probed, versions are never compared.

``pegaflow.versions`` says which are supported. Where an older or newer vLLM lacks something, the answer here is the
safe one: no hit, no save, or a wait.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base as kv_base

from pegaflow import _native
from pegaflow.connector.adapters import Adapters
from pegaflow.connector.layout import LayerTensor
from pegaflow.connector.metadata import Rank, RankReport, StepPlan, WorkerShape
from pegaflow.connector.request_state import RequestState, RequestTable
from pegaflow.connector.tails import HashTokens

CALLERS_MAX = 16
"""So many callers up from a hook vLLM's engine is found."""


@dataclass(frozen=True)
class Features:
    """What this vLLM has."""

    failed_requests: bool
    """A failed load is reported per request (0.30). Without it, several KV cache groups cannot recover."""
    block_state: bool
    """vLLM hands out exact block tables in every step (0.29). Without it they are reconstructed from increments."""
    steps_for_saves: bool
    """vLLM keeps stepping while saves are in flight (0.24)."""
    boundary_states: bool = False
    """vLLM says which blocks hold states of recurrent layers (0.32)."""


@cache
def features() -> Features:
    """What the installed vLLM has."""
    from vllm.v1.core.sched import output

    recent = hasattr(kv_base, "KVConnectorTransferResults")
    return Features(
        failed_requests=recent,
        block_state="kv_connector_block_state" in getattr(output.SchedulerOutput, "__dataclass_fields__", {}),
        steps_for_saves=hasattr(kv_base.KVConnectorBase_V1, "has_pending_push_work"),
        boundary_states="boundary_state_offloads" in _fields(getattr(output, "KVConnectorBlockState", None)),
    )


def _fields(kind: Any) -> Any:
    return getattr(kind, "__dataclass_fields__", {}) or getattr(kind, "__annotations__", {})


def register_wire_types() -> None:
    """Let vLLM take our plain dataclasses for its own kinds of metadata."""
    kv_base.KVConnectorMetadata.register(StepPlan)
    kv_base.KVConnectorWorkerMetadata.register(RankReport)
    handshake = getattr(kv_base, "KVConnectorHandshakeMetadata", None)
    if handshake is not None:
        handshake.register(WorkerShape)


def host_hit_source() -> Any:
    """vLLM's name for hits in host memory, where it has one."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.HOST


def transfer_results(received: set[str], failed: set[str]) -> Any:
    """vLLM's report of ended loads; failed ones are among ``received`` too."""
    return kv_base.KVConnectorTransferResults(finished_recving=received, failed_recving=failed)


def nobody_steps_when_idle() -> bool:
    """Whether the engine lives in the caller's own process, which stops stepping it when all outputs are there."""
    import vllm.envs as envs

    in_process = not envs.VLLM_ENABLE_V1_MULTIPROCESSING or multiprocessing.parent_process() is None
    return in_process or not features().steps_for_saves


def none_hash() -> bytes | None:
    """Root of vLLM's block hashes; ``None`` until vLLM has seeded it, which is after the connector was made."""
    from vllm.v1.core import kv_cache_utils

    value = getattr(kv_cache_utils, "NONE_HASH", None)
    return value if isinstance(value, bytes) and value else None


def hashes_differ_per_process(vllm_config: Any) -> bool:
    """Whether another process would hash the same tokens differently, so that nothing can be shared."""
    if os.environ.get("PYTHONHASHSEED"):
        return False
    from vllm.v1.core import kv_cache_utils

    seeded = hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")
    return not seeded or "xxhash" in str(vllm_config.cache_config.prefix_caching_hash_algo)


def token_hasher(vllm_config: Any) -> HashTokens:
    """vLLM's hash of a part of a request's tokens, with everything else that it would put in, for parts that it does
    not hash itself."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    def hash_tokens(request: Any, start: int, stop: int, parent: bytes | None) -> bytes:
        algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
        extra_keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, stop, 0)
        tokens = request.all_token_ids[start:stop]
        if algorithm.endswith("_cbor"):
            return _native.block_hash(algorithm, parent or kv_cache_utils.NONE_HASH, tokens, extra_keys)
        function = get_hash_fn_by_name(algorithm)
        before = kv_cache_utils.BlockHash(parent) if parent else None
        return bytes(kv_cache_utils.hash_block_tokens(function, before, tokens, extra_keys))

    return hash_tokens


def context_ranks(vllm_config: Any) -> int:
    """Ranks over which the tokens of a block are spread (decode context parallelism)."""
    return int(getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1))


def prefill_ranks(vllm_config: Any) -> int:
    """Ranks that share the work on a prompt (prefill context parallelism). All of them get all that they compute,
    unless tokens are spread over them."""
    return int(getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1))


def rank_count(vllm_config: Any) -> int:
    """Workers of one engine: TP x PP x PCP."""
    parallel = vllm_config.parallel_config
    tensor_ranks = int(parallel.tensor_parallel_size) * prefill_ranks(vllm_config)
    return tensor_ranks * int(parallel.pipeline_parallel_size)


def replica_count(vllm_config: Any, kv_cache_config: Any) -> int:
    """How many consecutive ranks, in the order of ``worker_rank``, hold identical KV caches."""
    spread, prefill = context_ranks(vllm_config) > 1, prefill_ranks(vllm_config)
    if spread and prefill > 1:
        return 1
    replicas = getattr(kv_cache_config, "kv_tp_replicas", None)
    if replicas is not None:
        return max(1, int(replicas)) * prefill
    same = bool(getattr(vllm_config.model_config, "use_mla", False)) and not spread
    return (int(vllm_config.parallel_config.tensor_parallel_size) if same else 1) * prefill


def part_of(rank: Rank, vllm_config: Any, kv_cache_config: Any) -> int:
    """Which part of each block a rank holds, if all ranks hold layers of all groups."""
    replicas = replica_count(vllm_config, kv_cache_config)
    tensor_ranks = int(vllm_config.parallel_config.tensor_parallel_size) * prefill_ranks(vllm_config)
    return rank[0] * (tensor_ranks // replicas) + rank[1] // replicas


def numbers_media(vllm_config: Any) -> bool:
    """Whether vLLM numbers images and the like instead of hashing them. Other processes, and this one after a restart,
    then give the same numbers to others."""
    media = getattr(vllm_config.model_config, "multimodal_config", None)
    cached = media is None or float(getattr(media, "mm_processor_cache_gb", 0)) > 0
    return not cached and not vllm_config.cache_config.enable_prefix_caching


def wants_events(vllm_config: Any) -> bool:
    """Whether vLLM publishes which blocks are cached where."""
    return bool(getattr(getattr(vllm_config, "kv_events_config", None), "enable_kv_cache_events", False))


def group_facts(kv_cache_manager: Any, group: int) -> tuple[str | None, int | None]:
    """Kind and sliding window of a group, as vLLM's own events say it (0.32)."""
    facts = getattr(kv_cache_manager, "kv_cache_event_metadata", ())
    return facts[group] if group < len(facts) else (None, None)


def is_pausing() -> bool:
    """Whether the reset that is being asked for is part of a pause or of going to sleep: vLLM's hook does not say, but
    the function that asks is another (0.32) than for resets that somebody asked for."""
    frame = sys._getframe(1)
    for _ in range(CALLERS_MAX):
        if frame.f_code.co_name == "_reset_caches":
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def bypasses_cache(request: Any, media_numbered: bool = False) -> bool:
    """Whether a request must neither load nor save. ``media_numbered``: see ``numbers_media``.

    Streaming sessions rewrite blocks that were hashed.
    """
    if media_numbered and getattr(request, "mm_features", None):
        return True
    return bool(getattr(request, "resumable", False))


def adapters(vllm_config: Any) -> Adapters:
    """LoRA adapters of this engine, with what of vLLM's configuration changes the bytes that one computes."""
    lora = getattr(vllm_config, "lora_config", None)
    names = ("lora_dtype", "fully_sharded_loras", "target_modules", "enable_tower_connector_lora")
    traits = " ".join(f"{name}={getattr(lora, name, None)}" for name in names)
    return Adapters(traits)


def skips_reading(request: Any) -> bool:
    """Whether vLLM needs every prompt token computed (prompt logprobs, some pooling)."""
    flag = getattr(request, "skip_reading_prefix_cache", None)
    if flag is not None:
        return bool(flag)
    return getattr(request.sampling_params, "prompt_logprobs", None) is not None


def wiped_by_first_pass(vllm_config: Any) -> bool:
    """Whether the first forward pass writes to blocks that it does not compute, so that nothing may be loaded before.

    Triton attention sets the scales of all tokens and heads, which lie inside the blocks, when it first sees them.
    """
    return "per_token_head" in str(vllm_config.cache_config.cache_dtype)


def names_layers(vllm_config: Any) -> bool:
    """Whether vLLM names each attention layer before it runs and begins each step with a call that brings our plan, on
    one stream of one pipeline rank."""
    import inspect

    base = inspect.signature(kv_base.KVConnectorBase_V1.handle_preemptions).parameters
    parallel = vllm_config.parallel_config
    micro_batches = getattr(parallel, "enable_dbo", False) or getattr(parallel, "use_ubatching", False)
    return "kv_connector_metadata" in base and int(parallel.pipeline_parallel_size) == 1 and not micro_batches


def reads_unasked(scheduler_output: Any, vllm_config: Any, landing: Collection[str]) -> bool:
    """Whether a step may read blocks without naming layers: in a graph of the whole model, or while it gets the blocks
    of a request ready that is not one of ``landing``."""
    begin = {new.req_id for new in scheduler_output.scheduled_new_reqs}
    begin |= set(getattr(scheduler_output.scheduled_cached_reqs, "resumed_req_ids", ()))
    graph_mode = getattr(vllm_config.compilation_config, "cudagraph_mode", None)
    if begin - set(landing) or graph_mode is None:
        return True
    if graph_mode == type(graph_mode).NONE:
        return False
    full = type(graph_mode).FULL
    if graph_mode.mixed_mode() == full or not _splits_at_attention(vllm_config.compilation_config):
        return True
    # The configuration's own number counts the canvas of models that denoise several tokens at once, too.
    owners = (vllm_config, getattr(vllm_config, "speculative_config", None))
    drafts = max(int(getattr(owner, "num_speculative_tokens", 0) or 0) for owner in owners)
    longest = max(scheduler_output.num_scheduled_tokens.values(), default=0)
    return graph_mode.decode_mode() == full and longest <= 1 + drafts  # what may look like a step of decoding


def _splits_at_attention(compilation_config: Any) -> bool:
    """Whether graphs of pieces of the model leave attention out, so that it runs by itself: a list of ``splitting_ops``
    that somebody wrote by hand may lack some of it."""
    ask = getattr(compilation_config, "splitting_ops_contain_attention", None)
    return bool(ask()) if ask is not None else False


def ended_in_error(request: Any) -> bool:
    """Whether vLLM gave the request up, so that its blocks may hold anything."""
    return getattr(request.status, "name", "") in ("FINISHED_ERROR", "FINISHED_IGNORED")


def scheduled_requests(
    scheduler_output: Any, table: RequestTable
) -> Iterator[tuple[RequestState, Callable[[RequestState], Sequence[Sequence[int]] | None], int]]:
    """``(state, function of it for its block table by group, tokens computed after this step)`` of each request in a
    step.

    Tables are long and few requests fill a block in a step, so tables are only made for those. Tokens include drafts
    and placeholders, which may be taken back: ``request.num_tokens`` does not count them.
    """
    block_state = getattr(scheduler_output, "kv_connector_block_state", None)
    snapshots = getattr(block_state, "boundary_state_offloads", None) or {}
    if block_state is None:
        _follow_tables(scheduler_output, table)

    def tables(state: RequestState) -> Sequence[Sequence[int]] | None:
        found: Sequence[Sequence[int]] | None = state.tables
        if block_state is not None:
            found = block_state.get_block_ids(state.request.request_id)
        return found

    for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
        state = table.get(request_id)
        if state is None or state.left_alone:
            continue
        state.snapshots = snapshots.get(request_id, ()) if snapshots else ()
        yield state, tables, state.request.num_computed_tokens + scheduled


def _follow_tables(scheduler_output: Any, table: RequestTable) -> None:
    """Keep block tables up to date from a step's increments."""
    for new in scheduler_output.scheduled_new_reqs:
        state = table.get(new.req_id)
        if state is not None:
            state.tables = tuple(list(ids) for ids in new.block_ids)
    cached = scheduler_output.scheduled_cached_reqs
    resumed = getattr(cached, "resumed_req_ids", ())
    for request_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
        state = table.get(request_id)
        if state is None or new_ids is None:
            continue
        if request_id in resumed or state.tables is None:
            state.tables = tuple(list(ids) for ids in new_ids)
        else:
            for known, ids in zip(state.tables, new_ids, strict=True):
                known.extend(ids)


def worker_rank(vllm_config: Any) -> Rank:
    """Rank of this worker process. Ranks that share prompts of one tensor rank follow each other."""
    from vllm.distributed import parallel_state

    tensor_rank = int(parallel_state.get_tp_group().rank_in_group)
    prefill = prefill_ranks(vllm_config)
    if prefill > 1:
        tensor_rank = tensor_rank * prefill + int(parallel_state.get_pcp_group().rank_in_group)
    return int(parallel_state.get_pp_group().rank_in_group), tensor_rank


def is_asked_directly(connector: Any) -> bool:
    """Whether vLLM knows this connector of a worker itself. Otherwise one that wraps several asks, and hands what the
    first of them answers to all of their scheduler halves."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return not has_kv_transfer_group() or get_kv_transfer_group() is connector


def layer_tensors(kv_caches: dict[str, Any], layer_names: Sequence[str], group_spec: Any) -> list[LayerTensor]:
    """The tensors of one group's layers. Raises ``TypeError`` for caches that are not one tensor per layer."""
    by_layer = getattr(group_spec, "kv_cache_specs", {})
    layers = []
    for name in layer_names:
        tensor = kv_caches.get(name)
        if tensor is None:
            continue  # held by another pipeline rank
        if not hasattr(tensor, "data_ptr"):
            raise TypeError(f"the KV cache of layer {name} is a {type(tensor).__name__}, not a tensor")
        page_bytes = getattr(by_layer.get(name, group_spec), "page_size_bytes", None)
        storage = tensor.untyped_storage()
        layers.append(
            LayerTensor(
                name,
                tensor.data_ptr(),
                tuple(tensor.shape),
                tuple(tensor.stride()),
                tensor.element_size(),
                str(tensor.dtype),
                page_bytes,
                str(tensor.device),
                (storage.data_ptr(), storage.nbytes()),
            )
        )
    return layers


def cross_layer_views(kv_cache: Any, attn_backend: Any, kv_cache_config: Any) -> dict[str, Any]:
    """The tensor of each layer in one that holds all layers, as vLLM before 0.32 cuts it for its own use."""
    order = attn_backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    by_layer = kv_cache.permute(*(order.index(dim) for dim in range(len(order))))
    tensors = zip(kv_cache_config.kv_cache_tensors, by_layer, strict=True)
    return {name: view for tensor, view in tensors for name in tensor.shared_by}


def attention_meaning(vllm_config: Any, layer_names: Sequence[str], device: str = "cpu") -> list[str]:
    """What decides the order of bytes inside a block and cannot be seen in the tensor: backend, and instruction set
    on CPUs, whose kernels pack keys in their own order."""
    import torch

    layers = vllm_config.compilation_config.static_forward_context
    facts = set()
    for name in layer_names:
        layer = layers.get(name)
        backend = getattr(layer, "attn_backend", None)
        backend_name = backend.get_name() if backend is not None else type(layer).__name__
        facts.add(f"{backend_name}:{getattr(layer, 'isa', '')}:{getattr(layer, 'kv_cache_dtype', '')}")
    if device == "cpu":
        facts.add(f"cpu={torch.backends.cpu.get_cpu_capability()}")
    return sorted(facts)
