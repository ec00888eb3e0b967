"""Pools in shared memory, seen from Python: open, list, inspect, verify, remove, and views of their bytes."""

from pegaflow.shm.pool import find_pool, inspect_pool, list_pools, open_pool, reap_pool, unlink_pool, verify_pool
from pegaflow.shm.report import InspectReport, NamespaceReport, PoolListing, ProcessReport, VerifyReport
from pegaflow.shm.views import BlockView, block_view, view_block, view_prefix

__all__ = [
    "BlockView",
    "InspectReport",
    "NamespaceReport",
    "PoolListing",
    "ProcessReport",
    "VerifyReport",
    "block_view",
    "find_pool",
    "inspect_pool",
    "list_pools",
    "open_pool",
    "reap_pool",
    "unlink_pool",
    "verify_pool",
    "view_block",
    "view_prefix",
]
