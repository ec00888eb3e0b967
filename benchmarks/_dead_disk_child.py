"""One process that saves and loads blocks, a round for each line that it reads: ``SHM_DIR [SSD_DIR]``."""

import sys
import time

import numpy

from pegaflow import _native

BLOCK_BYTES = 256 << 10
POOL_BYTES = 192 << 20
BLOCKS = 128
"""Of one round: all are saved, evict older ones, and are loaded again."""

PIECE = 32
"""Blocks that are saved and loaded at a time."""

LOOKED_UP = 512
"""Blocks of earlier rounds that are looked up, as a scheduler does for a prompt."""

SSD_BYTES = 1 << 30
WAIT_MS_MAX = 60_000
FINGERPRINT = b"dead_disk benchmark".ljust(32, b"\0")


def key(number: int) -> bytes:
    """Of the block that is saved as the ``number``-th."""
    return number.to_bytes(16, "big")


class Child:
    """A pool, with an SSD tier if there is a directory."""

    def __init__(self, shm_dir: str, ssd_dir: str | None) -> None:
        self.pool = _native.Pool.open("bench", shm_dir=shm_dir, pool_bytes=POOL_BYTES)
        self.ssd = ssd_dir is not None
        if ssd_dir is not None:
            self.pool.serve_ssd([ssd_dir], capacity_bytes=SSD_BYTES, admission="all", backend="threads")
        self.namespace = self.pool.namespace(FINGERPRINT, 0, [BLOCK_BYTES], label="dead_disk")
        if self.ssd and not self.namespace.use_ssd():
            raise SystemExit("The pool has no SSD tier.")
        self.memory = numpy.random.default_rng(1).integers(0, 256, BLOCKS * BLOCK_BYTES, dtype=numpy.uint8)
        layout = (self.memory.ctypes.data, BLOCK_BYTES, BLOCK_BYTES)
        self.layout = _native.KVLayout([layout], BLOCKS)
        self.copier = _native.HostCopier(self.pool, threads=1)
        self.saved = 0
        self.held: list[int] = []
        self._fill()

    def _fill(self) -> None:
        """Wait until the pool has grown to its full size: it does so in the background, when it is asked."""
        deadline = time.monotonic() + WAIT_MS_MAX / 1_000
        while self.namespace.stats()["slots"] * BLOCK_BYTES < POOL_BYTES * 3 // 4:
            if time.monotonic() > deadline:
                raise SystemExit("The pool did not grow.")
            number = self.namespace.stats()["slots"].to_bytes(20, "big")
            reserved = self.namespace.reserve(
                [number + bytes([step]) for step in range(BLOCKS)], parents=[None] * BLOCKS
            )
            self.pool.grow_ahead(self.namespace)
            time.sleep(0.05)
            self.held += [ref for _, ref in reserved]
        self.pool.abort(self.held)

    def round(self) -> float:
        """Seconds for one round."""
        started, left = time.perf_counter(), BLOCKS
        while left > 0:
            left -= self._piece(min(left, PIECE))
            if time.perf_counter() - started > WAIT_MS_MAX / 1_000:
                raise SystemExit("The pool has no room.")
        self._look_up()
        return time.perf_counter() - started

    def _piece(self, count: int) -> int:
        """Save and load so many blocks, or as many as there is room for now."""
        keys = [key(number) for number in range(self.saved, self.saved + count)]
        refs = [ref for _, ref in self.namespace.reserve(keys, parents=[None] * count)]
        if not refs:
            time.sleep(0.0002)
            return 0
        self.copier.save(0, self.layout, refs, list(range(len(refs))))
        (saved,) = self.copier.wait(WAIT_MS_MAX)
        visible = self.pool.publish(refs)
        leased = self.namespace.lease(keys[: len(refs)])
        self.copier.load(0, self.layout, leased, list(range(len(leased))))
        (loaded,) = self.copier.wait(WAIT_MS_MAX)
        self.pool.release(leased)
        self.saved += len(refs)
        if not saved.ok or not loaded.ok or not visible == len(leased) == len(refs):
            raise SystemExit(f"{len(refs)} blocks were saved, {visible} are visible, {len(leased)} were loaded.")
        return len(refs)

    def _look_up(self) -> None:
        """What is not in memory is looked for on SSD and asked for, if anybody there says that it would come."""
        earlier = [key(number) for number in range(max(0, self.saved - LOOKED_UP), self.saved)]
        if self.ssd and 2 in self.namespace.tiers(earlier) and self.pool.ssd_read_seconds(BLOCK_BYTES) is not None:
            request = self.namespace.prefetch(earlier[:8], chained=False)
            if request is not None:
                request.close()
        elif not self.ssd:
            self.namespace.contains(earlier)

    def state(self) -> str:
        """Of the tier."""
        tier = self.pool.ssd()
        return "none" if tier is None else str(tier["state"])


def main() -> None:
    """Serve until end of input."""
    child = Child(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
    for line in sys.stdin:
        print(child.state() if line.strip() == "state" else child.round(), flush=True)


if __name__ == "__main__":
    main()
