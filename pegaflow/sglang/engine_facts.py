"""What the backend asks of SGLang beyond the interface of storage backends: all knowledge of its versions is here."""

from typing import Any

import sglang


def version() -> str:
    """SGLang's version."""
    return str(getattr(sglang, "__version__", "unknown"))


def server_args() -> Any:
    """Options that this engine was started with; ``None`` if SGLang does not tell."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except (ImportError, RuntimeError, ValueError, AssertionError):
        return None


def weight_version() -> str | None:
    """Changes when weights are replaced in a running engine and whoever does it names the new version."""
    try:
        from sglang.srt.runtime_context import get_serving

        return str(get_serving().weight_version)
    except (ImportError, RuntimeError, ValueError, AssertionError, AttributeError):
        return None


def storage_metrics() -> Any:
    """An empty report of SGLang's for pages and bandwidths; ``None`` if it has none."""
    try:
        from sglang.srt.observability.metrics_collector import StorageMetrics
    except ImportError:
        return None
    return StorageMetrics()


def is_latent(pool: Any) -> bool:
    """Whether a host pool holds latent KV (MLA), of which each tensor rank has the same copy."""
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    return isinstance(pool, MLATokenToKVPoolHost)
