"""What tells the weights of an SGLang engine from those of others: of its model, draft model, adapters and scales.

Each identity is ``["sampled", digest, ...]``, the same wherever the files lie, or one that only this process has. The
latter makes all of the engine's pages its own: a page may have been computed with any of these weights.
"""

import hashlib
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pegaflow.keys import PRIVATE
from pegaflow.sglang.log import logger
from pegaflow.weights import changed_since_start, local_snapshot, stamped_since_start, stamps, weights_digest

FORMATS_OF_FILES = (
    "auto",
    "pt",
    "safetensors",
    "instanttensor",
    "npcache",
    "sharded_state",
    "presharded",
    "gguf",
    "bitsandbytes",
    "mistral",
    "layered",
    "flash_rl",
    "jax",
    "fastsafetensors",
    "runai_streamer",
)
"""Load formats with which the weights are those in the files of the model; others come from elsewhere."""

OTHER_SOURCES = ("kt_weight_path", "modelopt_checkpoint_restore_path")
"""Options that name more weights, of which no digest is made."""

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = (ADAPTER_CONFIG, "added_tokens.json")
FILE_BYTES_MAX = 16 << 20


def weight_identities(server_args: Any, named_version: str | None) -> list[list[Any]]:
    """One identity for each set of weights that an engine has loaded.

    ``server_args``: SGLang's, as they were given; ``None`` if it does not say what it runs. ``named_version``: what the
    weights are called now; another name than at the start means that the files no longer tell what they are."""
    if server_args is None:
        return [_private("SGLang does not say which model it runs")]
    model, draft, scales = (
        getattr(server_args, name, None)
        for name in ("model_path", "speculative_draft_model_path", "quantization_param_path")
    )
    downloads, load_format = (getattr(server_args, name, None) for name in ("download_dir", "load_format"))
    identities = [_model(model, getattr(server_args, "revision", None), downloads, load_format)]
    if draft:
        revision = getattr(server_args, "speculative_draft_model_revision", None)
        draft_format = getattr(server_args, "speculative_draft_load_format", None) or load_format
        identities.append(_model(draft, revision, downloads, draft_format))
    if scales:
        identities.append(_scales(str(scales)))
    identities += [_adapter(name, path, downloads) for name, path in adapters(server_args)]
    identities += [
        _private(f"the weights of {option} are not looked at")
        for option in OTHER_SOURCES
        if getattr(server_args, option, None)
    ]
    if getattr(server_args, "weight_cache_mode", None) not in (None, "off"):
        identities.append(_private("the weights come from a process that keeps them"))
    started_as = str(getattr(server_args, "weight_version", None))
    if named_version != started_as:
        identities.append(_private(f"the weights went from version {started_as} to {named_version} in place"))
    return identities


def adapters(server_args: Any) -> list[tuple[str, str]]:
    """``(name, path)`` of the adapters that an engine starts with, sorted. SGLang takes them in several forms."""
    given = getattr(server_args, "lora_paths", None) or []
    pairs = given.items() if isinstance(given, Mapping) else [_name_and_path(one) for one in given]
    found = [(str(name), str(path)) for name, path in pairs]
    uno = getattr(server_args, "uno_lora_path", None)
    return sorted([*found, ("", str(uno))] if uno else found)


def _name_and_path(one: Any) -> tuple[Any, Any]:
    if isinstance(one, str):
        name, separator, path = one.partition("=")
        return name, path if separator else name
    if isinstance(one, Mapping):
        return one.get("lora_name"), one.get("lora_path")
    return getattr(one, "lora_name", None), getattr(one, "lora_path", None)


def _model(model: Any, revision: str | None, downloads: str | None, load_format: Any) -> list[Any]:
    name = str(getattr(load_format, "value", load_format or "auto"))
    if not model:
        return _private("SGLang does not say which model it runs")
    if name == "dummy":
        return _private("the weights are made up (load format dummy)")
    if name not in FORMATS_OF_FILES:
        return _private(f"the weights do not come from files of the model (load format {name})")
    try:
        path = local_snapshot(str(model), revision, downloads)
        digest = weights_digest(path) if path else None
        if path is None or digest is None:
            return _private(f"there are no weights of {model} on this host")
        if changed_since_start(path):
            return _private(f"the weights in {path} are newer than this process, which may have loaded older ones")
        return ["sampled", digest, _content(Path(path) / "config.json")]
    except (OSError, ValueError) as error:  # without a digest nothing may be shared
        return _private(f"the weights cannot be read ({error})")


def _adapter(name: str, given: str, downloads: str | None) -> list[Any]:
    # SGLang's page hashes have the name and path of such an adapter, and nothing of its weights.
    try:
        path = local_snapshot(given, None, downloads, ADAPTER_CONFIG)
        before = stamps(path) if path else ()
        digest = weights_digest(path) if path else None
        if path is None or digest is None:
            return _private(f"there are no weights of adapter {given} on this host")
        contents = [_content(Path(path) / file) for file in ADAPTER_FILES]
        if stamped_since_start(before) or changed_since_start(path):
            return _private(f"adapter {path} is newer than this process, which may have loaded an older one")
        return ["sampled", digest, *contents, name, given]
    except (OSError, ValueError) as error:
        return _private(f"adapter {given} cannot be read ({error})")


def _scales(given: str) -> list[Any]:
    try:
        content = _content(Path(given))
        if content is None:
            return _private(f"there is no file of scales {given}")
        if changed_since_start(given):
            return _private(f"the scales in {given} are newer than this process, which may have loaded older ones")
        return ["sampled", "scales", content]
    except (OSError, ValueError) as error:
        return _private(f"the scales cannot be read ({error})")


def _content(file: Path) -> str | None:
    """SHA-256 (hex) of a small file; ``None`` if there is none."""
    if not file.is_file():
        return None
    if os.path.getsize(file) > FILE_BYTES_MAX:
        raise ValueError(f"{file} has more than {FILE_BYTES_MAX >> 20} MiB")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _private(reason: str) -> list[Any]:
    logger.warning("PegaFlow: %s, so pages are not shared with other processes.", reason)
    return [PRIVATE, uuid.uuid4().hex]
