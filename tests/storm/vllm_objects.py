"""What a storm needs of vLLM: configurations without weights, schedulers, requests. Any version from 0.24 on."""

import atexit
import copy
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import ModelRegistry
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

import pegaflow.weights
from tests.storm.plan import EnginePlan, GroupPlan, RequestPlan
from tests.storm.texts import Text

ARCHITECTURE = "StormForCausalLM"
HASH_ALGORITHM = "sha256_cbor"
LENGTH_MAX = 1024


class StormForCausalLM(torch.nn.Module):
    """Has the signatures that vLLM asks of a text model, and is never made."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        raise NotImplementedError

    def embed_input_ids(self, input_ids: Any) -> Any:
        raise NotImplementedError

    def forward(self, input_ids: Any, positions: Any) -> Any:
        raise NotImplementedError

    def compute_logits(self, hidden_states: Any) -> Any:
        raise NotImplementedError


@cache
def _directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="pegaflow-storm-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


@cache
def adapter(name: str) -> LoRARequest:
    """A LoRA adapter, whose weights are there and older than this process."""
    directory = _directory() / name
    directory.mkdir()
    weights = directory / "adapter_model.safetensors"
    weights.write_bytes(name.encode() * 100)
    (directory / "adapter_config.json").write_text("{}")
    pegaflow.weights.process_started = time.time
    return LoRARequest(name, 1 + ord(name), str(directory))


@cache
def _base_config() -> VllmConfig:
    ModelRegistry.register_model(ARCHITECTURE, StormForCausalLM)
    directory = _directory()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    described = {"model_type": "llama", "architectures": [ARCHITECTURE], "vocab_size": 512, "intermediate_size": 64}
    described |= {"max_position_embeddings": LENGTH_MAX, **sizes}
    (directory / "config.json").write_text(json.dumps(described))
    model = ModelConfig(
        model=str(directory),
        tokenizer=str(directory),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=LENGTH_MAX,
        seed=0,
        enforce_eager=True,
    )
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=16, prefix_caching_hash_algo=HASH_ALGORITHM),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=LENGTH_MAX, max_model_len=LENGTH_MAX, is_encoder_decoder=False
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        load_config=LoadConfig(load_format="dummy"),
    )


@contextmanager
def hash_root() -> Iterator[None]:
    """The root of vLLM's block hashes, which is that of every process with this seed."""
    before = getattr(kv_cache_utils, "NONE_HASH", None)
    kv_cache_utils.init_none_hash(get_hash_fn_by_name(HASH_ALGORITHM))
    try:
        yield
    finally:
        kv_cache_utils.NONE_HASH = before


@cache
def _structured_outputs() -> StructuredOutputManager:
    return StructuredOutputManager(_base_config())


def engine_config(plan: EnginePlan, pool: dict[str, Any]) -> VllmConfig:
    """vLLM's configuration of an engine. ``pool``: options of the pool, without prefix."""
    config = copy.copy(_base_config())
    for part in ("model_config", "cache_config", "scheduler_config", "parallel_config"):
        setattr(config, part, copy.copy(getattr(config, part)))
    options = {f"pegaflow.{name}": value for name, value in (pool | dict(plan.options)).items()}
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="PegaKVConnector",
        kv_connector_module_path="pegaflow.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute" if plan.recompute else "fail",
        kv_connector_extra_config=options,
    )
    config.model_config.seed = plan.model.seed
    config.cache_config.block_size = plan.model.groups[0].block_tokens
    config.cache_config.num_gpu_blocks = plan.blocks
    config.cache_config.enable_prefix_caching = plan.local_caching
    if any(group.state for group in plan.model.groups):
        config.cache_config.mamba_cache_mode = "align"
        config.cache_config.mamba_block_size = config.cache_config.block_size
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = plan.ranks
    scheduling = config.scheduler_config
    scheduling.max_num_seqs, scheduling.max_num_batched_tokens = plan.requests_max, plan.step_tokens_max
    scheduling.async_scheduling, scheduling.policy = plan.asynchronous, "priority" if plan.priorities else "fcfs"
    scheduling.long_prefill_token_threshold = plan.chunk_tokens
    return config


def _spec(group: GroupPlan, width: int) -> Any:
    # A key and a value of two bytes for each element.
    sizes: dict[str, Any] = {"block_size": group.block_tokens, "num_kv_heads": 1, "head_size": 2 * width}
    if group.state:
        shapes = ((4 * width * group.block_tokens,),)
        return MambaSpec(group.block_tokens, shapes, (torch.bfloat16,), mamba_cache_mode="align")
    if group.chunk:
        return ChunkedLocalAttentionSpec(**sizes, dtype=torch.bfloat16, attention_chunk_size=group.chunk)
    if group.window:
        return SlidingWindowSpec(**sizes, dtype=torch.bfloat16, sliding_window=group.window)
    return FullAttentionSpec(**sizes, dtype=torch.bfloat16)


def layer_names(plan: EnginePlan, group: int) -> list[str]:
    """Names of a group's layers, in the order in which the model runs them."""
    return [f"group{group}.layer{layer}" for layer in range(plan.model.layers)]


def cache_config(plan: EnginePlan, config: VllmConfig) -> tuple[KVCacheConfig, int, int]:
    """The groups, and the scheduler's and the hashes' block size (tokens)."""
    groups = [
        KVCacheGroupSpec(layer_names(plan, index), _spec(group, plan.model.width))
        for index, group in enumerate(plan.model.groups)
    ]
    made = KVCacheConfig(num_blocks=plan.blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    block_tokens, hash_tokens = kv_cache_utils.resolve_kv_cache_block_sizes(made, config)
    if hasattr(made, "hash_block_size"):
        made.hash_block_size = hash_tokens
    return made, block_tokens, hash_tokens


def scheduler(plan: EnginePlan, config: VllmConfig, caches: KVCacheConfig, blocks: tuple[int, int]) -> Scheduler:
    """vLLM's scheduler, with our connector."""
    made = (AsyncScheduler if plan.asynchronous else Scheduler)(
        vllm_config=config,
        kv_cache_config=caches,
        structured_output_manager=_structured_outputs(),
        block_size=blocks[0],
        hash_block_size=blocks[1],
        log_stats=True,
    )
    if hasattr(made, "use_v2_model_runner"):
        made.use_v2_model_runner = plan.second_runner
    return made


def request(plan: RequestPlan, text: Text, hash_tokens: int) -> Request:
    """vLLM's request."""
    stop = [text.tokens[text.prompt_tokens + plan.stops_after - 1]] if plan.stops_after else []
    sampling = SamplingParams(max_tokens=plan.more, ignore_eos=True, temperature=0.0, stop_token_ids=stop)
    hasher = kv_cache_utils.get_request_block_hasher(hash_tokens, get_hash_fn_by_name(HASH_ALGORITHM))
    return Request(
        request_id=plan.name,
        prompt_token_ids=list(plan.prompt),
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=float(plan.tick),
        lora_request=adapter(plan.adapter) if plan.adapter else None,
        cache_salt=plan.salt,
        priority=plan.priority,
        block_hasher=hasher,
    )


def may_wait_for_ever() -> bool:
    """Whether vLLM (0.25, any connector that loads) has requests start over or wait for ever: it preempts for blocks
    that come back a step later, and then the request that needs them, too (asynchronous scheduling); and a request that
    needs more blocks than are free stays in front of those that hold the rest, since they have loaded into them."""
    return not hasattr(Scheduler, "_request_blocks_can_be_freed")
