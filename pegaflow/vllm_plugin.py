"""Entry point of vLLM's general plugins: makes the connectors known by name in every process."""

CONNECTORS = ("PegaKVConnector", "NoopKVConnector")
MODULE = "pegaflow.connector"


def register() -> None:
    """Register our connectors with vLLM; vLLM may call this more than once in a process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in CONNECTORS:
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, MODULE, name)
