"""vLLM connectors. vLLM imports this in every one of its processes, so importing does nothing but define classes."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pegaflow.connector.connector import PegaKVConnector
    from pegaflow.connector.noop import NoopKVConnector

__all__ = ["NoopKVConnector", "PegaKVConnector"]


def __getattr__(name: str) -> Any:
    # Lazily, so that the parts that need no vLLM can be imported and tested without it.
    if name == "PegaKVConnector":
        from pegaflow.connector.connector import PegaKVConnector

        return PegaKVConnector
    if name == "NoopKVConnector":
        from pegaflow.connector.noop import NoopKVConnector

        return NoopKVConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
