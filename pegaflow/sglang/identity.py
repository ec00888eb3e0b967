"""What the bytes of a page depend on: the factors of a namespace's fingerprint.

SGLang's page hashes cover tokens, adapters and salts. Everything else that changes bytes stands here: the weights
themselves rather than their name, how they are loaded and computed with, the shape and layout of pages, and whose share
of a page it is. Two engines get the same fingerprint only if their pages are interchangeable.
"""

import hashlib
import os
from collections.abc import Mapping
from typing import Any

from pegaflow.sglang.weight_identity import weight_identities

PAGE_KEY_DOMAIN = b"pegaflow sglang page 1\n"
HASH_CHARACTERS = 64

SERVER_FACTORS = (
    "dtype",
    "quantization",
    "modelopt_quant",
    "quantize_and_serve",
    "rl_quant_profile",
    "kv_cache_dtype",
    "mamba_ssm_dtype",
    "json_model_override_args",
    "context_length",
    "load_format",
    "model_loader_extra_config",
    "custom_weight_loader",
    "model_impl",
    "kt_method",
    "torchao_config",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "mm_attention_backend",
    "device",
    "speculative_algorithm",
    "speculative_draft_load_format",
    "speculative_draft_kv_cache_dtype",
    "speculative_draft_model_quantization",
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


def model_factors(server_args: Any, version: str, weight_version: str | None) -> dict[str, Any]:
    """Factors that all pools of an engine have in common. Samples the weights, which takes up to seconds.

    ``server_args``: SGLang's; ``None`` if it does not say what it runs, and then nothing is shared.
    ``weight_version``: what the engine's weights are called now.
    """
    return {
        "engine": "sglang",
        "version": version,
        "options": {name: _plain(getattr(server_args, name, None)) for name in SERVER_FACTORS},
        "environment": {name: os.environ.get(name) for name in LAYOUT_VARIABLES},
        "weights": weight_identities(server_args, weight_version),
        "weight_version": weight_version,
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


def _plain(value: object) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)
