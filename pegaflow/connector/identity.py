"""What a model's KV bytes depend on, read from vLLM's configuration: the factors of a namespace's fingerprint.

Two engines get the same fingerprint only if their blocks are interchangeable. Directories, tokenizers, limits of the
scheduler and the like are left out on purpose, so that they do not cost a warm cache.
"""

import dataclasses
import os
import uuid
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from pegaflow.connector.geometry import Geometry
from pegaflow.connector.log import logger
from pegaflow.keys import PRIVATE
from pegaflow.weights import changed_since_start, local_snapshot, processors_digest, weights_digest

# What a Hugging Face configuration says that no KV byte depends on.
IRRELEVANT = frozenset(
    {
        "_name_or_path",
        "_commit_hash",
        "_attn_implementation",
        "_attn_implementation_internal",
        "_attn_implementation_autoset",
        "_experts_implementation_internal",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "label2id",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "return_dict",
        "sep_token_id",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)

QUANTIZATION = "quantization_config"
"""What is below it counts whatever it is called: a ``dtype`` there is that of activations, say."""

FORMATS_OF_FILES = (
    "auto",
    "bitsandbytes",
    "fastsafetensors",
    "gguf",
    "hf",
    "instanttensor",
    "mistral",
    "npcache",
    "pt",
    "runai_streamer",
    "runai_streamer_sharded",
    "safetensors",
    "sharded_state",
)
"""Load formats with which the weights are those in the files of the model; others come from elsewhere."""

# Position encodings that change with the longest sequence allowed.
LENGTH_DEPENDENT_ROPE = ("longrope", "su", "dynamic")

# Options that change what an image, a sound or a video becomes before the model sees it.
MEDIA_OPTIONS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
    "video_pruning_method",
)

SHARE_DUMMY_VARIABLE = "PEGAFLOW_SHARE_DUMMY_WEIGHTS"
"""Set to 1, weights that vLLM made up (``load_format="dummy"``) count as known by their seed."""


class ModelIdentity:
    """Factors of one engine's fingerprint. Sampling the weights takes time, so it is a step of its own."""

    def __init__(
        self, vllm_config: Any, geometry: Geometry, version: str, none_hash: Callable[[], bytes | None]
    ) -> None:
        """``version``: vLLM's; ``none_hash`` returns the root of its block hashes once there is one."""
        self.label = label_of(vllm_config)
        self._none_hash = none_hash
        self._fixed = fixed_factors(vllm_config, geometry, version)
        self._weights: list[Any] | None = None
        self._vllm_config = vllm_config

    def factors(self) -> Mapping[str, Any] | None:
        """All factors except layouts; ``None`` while the weights are being sampled or hashes have no root."""
        root = self._none_hash()
        if root is None or self._weights is None:
            return None
        return {**self._fixed, "weights": self._weights, "none_hash": root}

    def sample(self) -> None:
        """Read what identifies the weights. Takes up to seconds; once."""
        self._weights = weights_of(self._vllm_config)


def weights_of(vllm_config: Any) -> list[Any]:
    """What identifies the weights of all models, as this host has them. Takes up to seconds."""
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        # Whoever keeps the cache over an update (clear_cache false) says nothing that we could hear.
        return [_private("weights may be replaced while the engine runs (weight_transfer_config)")]
    try:
        return [weights_identity(*model) for model in _models(vllm_config)]
    except (OSError, ValueError) as error:  # without a digest nothing may be shared
        return [_private(f"the weights cannot be read ({error})")]


def weights_identity(
    model: str, revision: str | None, download_dir: str | None, load_format: str, seed: int
) -> list[Any]:
    """What tells these weights from others: a digest of samples, or the seed of random ones."""
    if load_format == "dummy":
        if os.environ.get(SHARE_DUMMY_VARIABLE) == "1":
            return ["dummy", seed]
        # Training frameworks start like this and then push real weights, which we do not hear of.
        return _private("the weights are made up (load_format dummy)")
    if load_format not in FORMATS_OF_FILES:
        return _private(f"the weights do not come from files of the model (load_format {load_format})")
    path = local_snapshot(model, revision, download_dir)
    digest = weights_digest(path) if path else None
    if path is None or digest is None:
        return _private(f"there are no weights of {model} on this host")
    if changed_since_start(path):
        return _private(f"the weights in {path} are newer than this process, which may have loaded older ones")
    return ["sampled", digest, processors_digest(path)]


def _private(reason: str) -> list[Any]:
    logger.warning("PegaFlow: %s, so blocks are not shared with other processes.", reason)
    return [PRIVATE, uuid.uuid4().hex]


def _models(vllm_config: Any) -> list[tuple[str, str | None, str | None, str, int]]:
    load = vllm_config.load_config
    load_format = getattr(load.load_format, "value", load.load_format)
    configs = [vllm_config.model_config]
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    if draft is not None and draft.model != vllm_config.model_config.model:
        configs.append(draft)
    return [
        (str(config.model), config.revision, load.download_dir, str(load_format), int(config.seed or 0))
        for config in configs
    ]


def fixed_factors(vllm_config: Any, geometry: Geometry, version: str) -> dict[str, Any]:
    """Factors that are known when the engine is configured."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    config = plain(model.hf_config.to_dict())
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    return {
        "vllm": ".".join(version.split(".")[:2]),
        "config": config,
        "dtype": str(model.dtype),
        "quantization": plain(model.quantization),
        QUANTIZATION: plain(getattr(model, QUANTIZATION, None), frozenset()),
        "classes": plain(getattr(model, "model_class_overrides", None) or {}),
        "max_model_len": int(model.max_model_len) if _depends_on_length(config) else None,
        "kv_dtype": str(cache.cache_dtype),
        "hash": str(cache.prefix_caching_hash_algo),
        "groups": [[group.kind.value, group.spec_name, *_numbers(group)] for group in geometry.groups],
        "tensor_ranks": int(parallel.tensor_parallel_size),
        "pipeline_ranks": int(parallel.pipeline_parallel_size),
        "prefill_ranks": int(getattr(parallel, "prefill_context_parallel_size", 1)),
        "context_ranks": int(getattr(parallel, "decode_context_parallel_size", 1)),
        "context_interleave": [
            int(getattr(parallel, f"{kind}_kv_cache_interleave_size", 1) or 1) for kind in ("cp", "dcp")
        ],
        "media": _media(model),
        "draft": plain(draft.hf_config.to_dict()) if draft is not None else None,
        "draft_method": str(getattr(speculative, "method", None)),
    }


def config_problem(vllm_config: Any) -> str | None:
    """Why this configuration cannot be cached, as one sentence."""
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "KV cache scales that are computed at run time (calculate_kv_scales) differ from process to process."
    whole = not getattr(vllm_config.scheduler_config, "enable_chunked_prefill", True)
    if whole and vllm_config.model_config.use_mla and not vllm_config.cache_config.enable_prefix_caching:
        # As vLLM itself sees to on CPUs without AMX: the attention of such a prompt does not look at what is before it.
        return "latent attention (MLA) computes prompts from their beginning only, since chunked prefill is off."
    return None


def _media(model_config: Any) -> Any:
    config = getattr(model_config, "multimodal_config", None)
    if config is None:
        return None
    return {name: plain(getattr(config, name, None)) for name in MEDIA_OPTIONS}


def label_of(vllm_config: Any) -> str:
    """Name of the model for people."""
    model_config = vllm_config.model_config
    name = getattr(model_config, "served_model_name", None) or model_config.model
    return str(name[0] if isinstance(name, list | tuple) else name)


def _numbers(group: Any) -> list[int]:
    return [
        group.index,
        group.block_tokens,
        group.hashes_per_block,
        group.window_blocks,
        group.chunk_tokens,
        group.extra_blocks,
    ]


def _depends_on_length(config: Any) -> bool:
    if isinstance(config, dict):
        kinds = (config.get("rope_type"), config.get("type"))
        return any(kind in LENGTH_DEPENDENT_ROPE for kind in kinds) or any(map(_depends_on_length, config.values()))
    return isinstance(config, list) and any(map(_depends_on_length, config))


def plain(value: Any, dropped: frozenset[str] = IRRELEVANT) -> Any:
    """``value`` as JSON types, without what is irrelevant. Objects of unknown kinds count by their type only."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        items = ((str(key), item) for key, item in value.items())
        return {key: plain(item, _dropped_below(key, dropped)) for key, item in items if key not in dropped}
    if isinstance(value, list | tuple):
        return [plain(item, dropped) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, Enum):
        return plain(value.value)
    if type(value).__name__ == "dtype":
        return str(value)
    if hasattr(value, "to_dict"):
        return plain(value.to_dict(), dropped)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, dropped)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _dropped_below(key: str, dropped: frozenset[str]) -> frozenset[str]:
    return frozenset() if key == QUANTIZATION else dropped
