"""PegaFlow: a KV cache for LLM serving that needs no server.

``PegaEngine`` stores values in shared memory; vLLM uses ``pegaflow.connector``. Importing this package maps no memory
and starts nothing.
"""

from typing import TYPE_CHECKING, Any

from pegaflow import errors
from pegaflow.errors import (
    ForkedProcess,
    InvalidArgument,
    PegaFlowError,
    PoolBusy,
    PoolClosed,
    PoolCorrupt,
    PoolFull,
    PoolInUse,
    PoolNotFound,
    PoolRefused,
    ShmFull,
)

if TYPE_CHECKING:
    from pegaflow.engine import PegaEngine

    __version__: str

__all__ = [
    "ForkedProcess",
    "InvalidArgument",
    "PegaEngine",
    "PegaFlowError",
    "PoolBusy",
    "PoolClosed",
    "PoolCorrupt",
    "PoolFull",
    "PoolInUse",
    "PoolNotFound",
    "PoolRefused",
    "ShmFull",
    "__version__",
    "errors",
]


def __getattr__(name: str) -> Any:
    if name == "PegaEngine":
        from pegaflow.engine import PegaEngine

        return PegaEngine
    if name == "__version__":
        from pegaflow import _native

        return _native.__version__
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
