"""A stand-in for the native module's functions on pools, for tests that need pools in states that are hard to make."""

import json
from typing import Any

from pegaflow.errors import PoolInUse, PoolNotFound, PoolRefused


def listing(name: str = "default", **fields: Any) -> dict[str, Any]:
    """One entry of ``list_pools``: a sound pool that nobody uses, unless ``fields`` say otherwise."""
    entry = {
        "name": name,
        "path": f"/dev/shm/{name}",
        "state": "ok",
        "error": None,
        "pool_bytes": 8 << 30,
        "bytes_used": 2 << 30,
        "processes_alive": 0,
        "processes_dead": 0,
        "idle_seconds": 120,
        "processes_max": 128,
        "namespaces": 2,
        "namespaces_max": 256,
        "slots": 2048,
        "slots_max": 524288,
    }
    entry |= fields
    return entry | {"segments_path": fields.get("segments_path", entry["path"])}


def refused(name: str, error: str) -> dict[str, Any]:
    """An entry of ``list_pools`` for files that are not ours to map."""
    unknown = (
        "segments_path", "pool_bytes", "bytes_used", "processes_alive", "processes_dead", "idle_seconds",
        "processes_max", "namespaces", "namespaces_max", "slots", "slots_max",
    )  # fmt: skip
    nothing = dict.fromkeys(unknown)
    return listing(name, state="refused", error=error) | nothing


def namespace(**fields: Any) -> dict[str, Any]:
    """One namespace of an inspection."""
    entry = {
        "id": 0,
        "fingerprint": "ab" * 32,
        "group": 0,
        "label": "gemma-3-270m",
        "epoch": 1,
        "parts": 2,
        "part_bytes": [4096, 4096],
        "segments": 2,
        "slots": 4096,
        "blocks_sealed": 1234,
        "blocks_reserved": 5,
        "blocks_quarantined": 1,
        "bytes_sealed": 1234 * 8192,
        "leases": 7,
    }
    return entry | fields


def process(**fields: Any) -> dict[str, Any]:
    """One process of an inspection."""
    entry = {
        "row": 3,
        "epoch": 9,
        "pid": 4711,
        "label": "engine",
        "alive": True,
        "leader_row": None,
        "weight_milli": 1000,
        "share_bytes": 1 << 30,
        "used_bytes": 512 << 20,
        "leases": 7,
        "reserved": 5,
        "started_unix_s": 1_700_000_000,
    }
    return entry | fields


def tier(**fields: Any) -> dict[str, Any]:
    """An SSD tier of an inspection."""
    numbers = (
        "read_joined", "read_damaged", "read_failed", "read_wait_ms_max", "ssd_dropped", "turned_off", "queued_bytes",
        "read_bytes_per_second", "read_blocks", "read_bytes", "spilled_bytes",
    )  # fmt: skip
    entry = {"state": "serving", "leader_row": 3, "zones_done": 64, "zones": 64, "records": 1234, "spilled_blocks": 56}
    return entry | dict.fromkeys(numbers, 0) | fields


def inspection(**fields: Any) -> dict[str, Any]:
    """The answer of ``inspect``."""
    entry = {
        "name": "default",
        "path": "/dev/shm/default",
        "geometry": {
            "layout_version": 1,
            "pool_bytes": 8 << 30,
            "segment_bytes": 1 << 30,
            "slots_max": 524288,
            "slots_used": 8192,
        },
        "created_unix_s": 1_700_000_000,
        "last_used_unix_s": 1_700_000_600,
        "bytes_used": 2 << 30,
        "bytes_max": 8 << 30,
        "segments": {"ready": 2, "creating": 0, "free": 6},
        "locks_held": 0,
        "namespaces": [namespace()],
        "processes": [process()],
        "ssd": None,
        "traffic": None,
    }
    return entry | fields


class FakeNative:
    """Answers what it was told to, and remembers what was asked for."""

    def __init__(self, *pools: dict[str, Any]) -> None:
        self.pools = list(pools)
        self.report = inspection()
        self.verdict: dict[str, Any] = {"ok": True, "blocks_checked": 10, "checksums_checked": 9, "problems": []}
        self.reaped: list[str] = []
        self.removed: list[tuple[str, bool]] = []
        self.verified: list[tuple[str, bool]] = []
        self.refuse_removal_of: dict[str, Exception] = {}

    def list_pools(self, shm_dir: str) -> str:
        """Pools whose path lies in ``shm_dir``."""
        return json.dumps([one for one in self.pools if one["path"].rpartition("/")[0] == shm_dir.rstrip("/")])

    def inspect(self, path: str) -> str:
        """The one report, or the error that the engine would raise."""
        self._usable(path)
        return json.dumps(self.report | {"path": path})

    def verify(self, path: str, checksums: bool) -> str:
        """The one verdict."""
        self._usable(path)
        self.verified.append((path, checksums))
        return json.dumps(self.verdict)

    def reap(self, path: str) -> int:
        """As many rows as the listing calls dead."""
        self.reaped.append(path)
        return int(self._usable(path)["processes_dead"])

    def remove(self, path: str, force: bool) -> None:
        """Forget the pool, with the engine's refusals."""
        if path in self.refuse_removal_of:
            raise self.refuse_removal_of[path]
        entry = next((one for one in self.pools if one["path"] == path), None)
        if entry is None:
            raise PoolNotFound(f"There is no pool at {path}.")
        if entry["processes_alive"] and not force:
            raise PoolInUse(f"Pool {path} is used by a living process; stop it first, or use --force.")
        self.removed.append((path, force))
        self.pools.remove(entry)

    def system_info(self) -> str:
        """A small host."""
        return json.dumps({"page_bytes": 4096, "cpus": 2, "memlock_bytes": None, "io_uring": "ok"})

    def _usable(self, path: str) -> dict[str, Any]:
        for one in self.pools:
            if one["path"] == path:
                if one["state"] != "ok":
                    raise PoolRefused(one["error"] or f"Pool {path} is not complete yet.")
                return one
        raise PoolNotFound(f"There is no pool at {path}.")
