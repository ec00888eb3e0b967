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
        self.close = self._engine.close

    def get(self, key: str) -> bytes | None:
        """Fetch."""
        return cast("bytes | None", self._engine.get(key))

    def remove(self, key: str) -> bytes | None:
        """Delete, and return what was there."""
        return cast("bytes | None", self._engine.remove(key))


Times = dict[str, list[float]]


def measure(stores: list[Store], size: int) -> dict[str, dict[str, float]]:
    """Microseconds of each operation of each store: medians over rounds in which the stores take turns, so that what
    else runs on the host slows all of them."""
    keys = [f"key-{index}" for index in range(max(1, min(ROUND_KEYS_MAX, ROUND_BYTES_MAX // size)))]
    values = [os.urandom(size) for _ in keys]
    samples: dict[str, Times] = {store.name: {operation: [] for operation in OPERATIONS} for store in stores}
    for store in stores:
        check(store, keys, values)
    for _ in range(ROUNDS):
        for store in stores:
            one_round(store, keys, values, samples[store.name])
    return {name: {operation: median(times[operation]) for operation in OPERATIONS} for name, times in samples.items()}


def check(store: Store, keys: list[str], values: list[bytes]) -> None:
    """Every value comes back as it went in. Also the first touch of memory that later rounds use again."""
    for key, value in zip(keys, values, strict=True):
        store.put(key, value)
    if any(store.get(key) != value for key, value in zip(keys, values, strict=True)):
        raise SystemExit(f"{store.name} returned other bytes than were stored.")
    if any(store.remove(key) != value for key, value in zip(keys, values, strict=True)):
        raise SystemExit(f"{store.name} removed other bytes than were stored.")
    if store.get(keys[0]) is not None:
        raise SystemExit(f"{store.name} still has what was removed.")


def one_round(store: Store, keys: list[str], values: list[bytes], times: Times) -> None:
    """Put, get and remove every key once."""
    start = time.perf_counter()
    for key, value in zip(keys, values, strict=True):
        store.put(key, value)
    put_done = time.perf_counter()
    for key in keys:
        store.get(key)
    get_done = time.perf_counter()
    for key in keys:
        store.remove(key)
    spans = (put_done - start, get_done - put_done, time.perf_counter() - get_done)
    for operation, seconds in zip(OPERATIONS, spans, strict=True):
        times[operation].append(seconds / len(keys) * 1e6)


def main() -> None:
    """Run, print, write."""
    results = []
    with pool_place(8 * ROUND_BYTES_MAX) as place, redis_store() as redis:
        pega = PegaStore(place)
        stores: list[Store] = [pega, DictStore(), FileStore(place / "files"), *([redis] if redis else [])]
        for size in SIZES:
            note(f"{size_name(size)} ...")
            times = measure(stores, size)
            for operation in OPERATIONS:
                ours = times[pega.name][operation]
                for store in stores[1:]:
                    label = f"{operation} {size_name(size)}"
                    results.append(Result(label, ours, "us", store.name, times[store.name][operation]))
        pega.close()
    finish("put_get", results)


def size_name(size: int) -> str:
    """``64 B``, ``16 KiB``, ``1 MiB``."""
    if size < KIB:
        return f"{size} B"
    return f"{size // KIB} KiB" if size < MIB else f"{size // MIB} MiB"


if __name__ == "__main__":
    main()
