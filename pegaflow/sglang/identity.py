"""What the bytes of a page depend on: the factors of a namespace's fingerprint.

SGLang's page hashes cover tokens, adapters and salts. Everything else that changes bytes stands here: the weights
themselves rather than their name, how they are loaded and computed with, the shape and layout of pages, and whose share
of a page it is. Two engines get the same fingerprint only if their pages are interchangeable.
"""

import hashlib
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pegaflow.sglang.log import logger
from pegaflow.weights import changed_since_start, local_snapshot, weights_digest

PAGE_KEY_DOMAIN = b"pegaflow sglang page 1\n"
HASH_CHARACTERS = 64

SERVER_FACTORS = (
    "dtype",
    "quantization",
    "quantization_param_path",
    "kv_cache_dtype",
    "json_model_override_args",
    "context_length",
    "load_format",
    "torchao_config",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "mm_attention_backend",
    "device",
    "speculative_algorithm",
    "enable_fp32_lm_head",
    "enable_deterministic_inference",
    "weight_version",
)
"""Options of SGLang that change what is in a page, or how it lies there."""

POOL_FACTORS = (
    "layout",
    "storage_format_tag",
    "page_size",
    "size_per_token",
    "layer_num",
    "target_layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "head_group_num",
    "dcp_size",
)
"""Facts of a host pool, of which each kind of pool has some."""

LAYOUT_VARIABLES = ("SGLANG_USE_HND_KVCACHE", "SGLANG_AITER_KV_CACHE_LAYOUT")
"""Environment variables by which SGLang changes the order of bytes within a page."""


def page_key(page_hash: str) -> bytes:
    """Key of a page in the pool: SGLang's own SHA-256 of it, or a hash of any other name."""
    if len(page_hash) == HASH_CHARACTERS:
        try:
            return bytes.fromhex(page_hash)
        except ValueError:
            pass  # a name of the same length
    return hashlib.sha256(PAGE_KEY_DOMAIN + page_hash.encode()).digest()


def model_factors(server_args: Any, version: str) -> dict[str, Any]:
    """Factors that all pools of an engine have in common. Samples the weights, which takes up to seconds.

    ``server_args``: SGLang's; ``None`` if it does not say what it runs, and then nothing is shared.
    """
    model, draft = (getattr(server_args, name, None) for name in ("model_path", "speculative_draft_model_path"))
    downloads = getattr(server_args, "download_dir", None)
    load_format = str(getattr(server_args, "load_format", None))
    weights = [_weights(model, getattr(server_args, "revision", None), downloads, load_format)]
    if draft:
        revision = getattr(server_args, "speculative_draft_model_revision", None)
        weights.append(_weights(draft, revision, downloads, load_format))
    return {
        "engine": "sglang",
        "version": version,
        "options": {name: _plain(getattr(server_args, name, None)) for name in SERVER_FACTORS},
        "environment": {name: os.environ.get(name) for name in LAYOUT_VARIABLES},
        "weights": weights,
    }


def pool_factors(pool: Any, name: str, config: Any, *, shared: bool, form: str, lengths: list[int]) -> dict[str, Any]:
    """Factors of one host pool.

    ``config``: SGLang's ``HiCacheStorageConfig``. ``shared``: all tensor ranks hold the same bytes and use one
    namespace. ``form``: ``"pieces"`` or ``"flat"``, the order of bytes in a slot. ``lengths``: bytes of the pieces of a
    page."""
    facts = {fact: _plain(getattr(pool, fact, None)) for fact in POOL_FACTORS}
    ranks = {
        "tensor": [None if shared else config.tp_rank, config.tp_size],
        "pipeline": [config.pp_rank, config.pp_size],
        "context": [config.attn_cp_rank, config.attn_cp_size],
        "decode_context": [config.dcp_rank, config.dcp_size],
    }
    return {
        "pool": name,
        "kind": type(pool).__name__,
        "dtype": str(getattr(pool, "dtype", None)),
        "facts": facts,
        "ranks": ranks,
        "split_heads": [bool(config.should_split_heads), config.tp_lcm_size],
        "form": form,
        "lengths": lengths,
    }


def _weights(model: str | None, revision: str | None, downloads: str | None, load_format: str) -> list[Any]:
    """What tells these weights from others, wherever they lie."""
    if not model:
        return _private("SGLang does not say which model it runs")
    if load_format == "dummy":
        return _private("the weights are made up (load format dummy)")
    try:
        path = local_snapshot(str(model), revision, downloads)
        digest = weights_digest(path) if path else None
        if path is None or digest is None:
            return _private(f"there are no weights of {model} on this host")
        if changed_since_start(path):
            return _private(f"the weights in {path} are newer than this process, which may have loaded older ones")
        config = Path(path) / "config.json"
        return ["sampled", digest, hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else None]
    except (OSError, ValueError) as error:  # without a digest nothing may be shared
        return _private(f"the weights cannot be read ({error})")


def _private(reason: str) -> list[Any]:
    logger.warning("PegaFlow: %s, so pages are not shared with other processes.", reason)
    return ["private", uuid.uuid4().hex]


def _plain(value: object) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)
