"""How fast is ``PegaEngine``, beside a Python dict, a file in /dev/shm, and Redis over loopback?"""

import os
import time
from pathlib import Path
from typing import cast

from benchmarks._common import Result, finish, median, note, pool_place
from benchmarks._stores import DictStore, FileStore, Store, redis_store
from pegaflow import PegaEngine

KIB = 1 << 10
MIB = 1 << 20
SIZES = (64, KIB, 16 * KIB, 256 * KIB, MIB, 16 * MIB, 64 * MIB)
# Keys of one round: enough to time, and no more bytes than this at a time in any store.
ROUND_BYTES_MAX = 128 * MIB
ROUND_KEYS_MAX = 2000
ROUNDS = 7
OPERATIONS = ("put", "get", "remove")


class PegaStore:
    """The engine under test, as others use it: a shared pool with checksums."""

    name = "pegaflow"

    def __init__(self, place: Path) -> None:
        self._engine = PegaEngine(name="bench", shm_dir=str(place), pool_size=6 * ROUND_BYTES_MAX)
        self.put = self._engine.put
        self.remove = self._engine.remove
        self.close = self._engine.close

    def get(self, key: str) -> bytes | None:
        """Fetch."""
        return cast(bytes | None, self._engine.get(key))


def measure(store: Store, size: int) -> dict[str, float]:
    """Microseconds of one operation, median over the rounds; every value that comes back is compared."""
    keys = [f"key-{index}" for index in range(max(1, min(ROUND_KEYS_MAX, ROUND_BYTES_MAX // size)))]
    value = os.urandom(size)
    samples: dict[str, list[float]] = {operation: [] for operation in OPERATIONS}
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for key in keys:
            store.put(key, value)
        put_done = time.perf_counter()
        for key in keys:
            got = store.get(key)
        get_done = time.perf_counter()
        if got != value:
            raise SystemExit(f"{store.name} returned other bytes than were stored.")
        removal = time.perf_counter()
        for key in keys:
            store.remove(key)
        removed = time.perf_counter()
        for operation, seconds in zip(
            OPERATIONS, (put_done - start, get_done - put_done, removed - removal), strict=True
        ):
            samples[operation].append(seconds / len(keys) * 1e6)
    # The first round touches fresh memory and fills caches.
    return {operation: median(times[1:]) for operation, times in samples.items()}


def main() -> None:
    """Run, print, write."""
    results = []
    with pool_place(8 * ROUND_BYTES_MAX) as place, redis_store() as redis:
        pega = PegaStore(place)
        references: list[Store] = [DictStore(), FileStore(place / "files"), *([redis] if redis else [])]
        for size in SIZES:
            note(f"{size_name(size)} ...")
            ours = measure(pega, size)
            theirs = {store.name: measure(store, size) for store in references}
            for operation in OPERATIONS:
                for name, times in theirs.items():
                    label = f"{operation} {size_name(size)}"
                    results.append(Result(label, ours[operation], "us", name, times[operation]))
        pega.close()
    finish("put_get", results)


def size_name(size: int) -> str:
    """``64 B``, ``16 KiB``, ``1 MiB``."""
    if size < KIB:
        return f"{size} B"
    return f"{size // KIB} KiB" if size < MIB else f"{size // MIB} MiB"


if __name__ == "__main__":
    main()
