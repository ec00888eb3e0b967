"""A HiCache storage backend for SGLang on the same pool. Importing this imports neither SGLang nor torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pegaflow.sglang.storage import PegaHiCacheStorage

__all__ = ["PegaHiCacheStorage"]


def __getattr__(name: str) -> Any:
    # Lazily, so that the parts that need no SGLang can be imported without it.
    if name == "PegaHiCacheStorage":
        from pegaflow.sglang.storage import PegaHiCacheStorage

        return PegaHiCacheStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
