"""Caches as vLLM's backends lay them out, on the device, through what the connector copies with."""

import pytest

from pegaflow import _native
from pegaflow.config import ConnectorConfig
from pegaflow.connector.device import DeviceCopier
from tests.gpu.engine import DEVICE
from tests.kv_round_trip import round_trip
from tests.kv_tensors import CACHES

BACKENDS = ("auto", "staged", "direct", "kernel")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CACHES)
def test_blocks_come_back_equal_and_nothing_else_changes(pool: _native.Pool, name: str, backend: str) -> None:
    copier = DeviceCopier(pool, DEVICE, ConnectorConfig(transfer_backend=backend))
    for seed in (3, 5):
        # The first time nothing is page-locked yet, the second time all or some of it.
        round_trip(pool, copier, CACHES[name], DEVICE, seed, lambda namespace: copier.register(namespace, 0))
    copier.close()
