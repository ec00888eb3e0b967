"""Blocks of a pool go to SSD, or come back.

``spill|prefetch SSD_DIR BACKEND TOTAL_BYTES RECORD_BYTES DEPTH`` prints one line of JSON.
"""

import json
import resource
import sys
import time
from collections import deque

import numpy

from benchmarks._common import pool_place
from pegaflow import _native

CHAIN = 128
"""Blocks of one prompt."""

PROMPTS = 4
"""Prompts that are wanted at a time."""

HEADER_BYTES = 4096
WAIT_SECONDS_MAX = 120.0
FINGERPRINT = b"benchmark of SSD through a pool".ljust(32, b"\0")


def keys(kind: str, chain: int) -> list[bytes]:
    """Of the blocks of one prompt."""
    return [f"{kind}-{chain:05}-{number:05}".encode() for number in range(CHAIN)]


def cpu_seconds() -> float:
    """Of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Child:
    """A pool full of blocks."""

    def __init__(self, shm_dir: str, total_bytes: int, record_bytes: int) -> None:
        self.block_bytes = record_bytes - HEADER_BYTES
        self.chains = total_bytes // record_bytes // CHAIN
        self.gigabytes = self.chains * CHAIN * record_bytes / 1e9
        self.pool = _native.Pool.open("bench", shm_dir=shm_dir, pool_bytes=total_bytes * 5 // 4)
        self.namespace = self.pool.namespace(FINGERPRINT, 0, [self.block_bytes], label="ssd")
        self.memory = numpy.random.default_rng(1).integers(0, 256, CHAIN * self.block_bytes, dtype=numpy.uint8)
        self.copier = _native.HostCopier(self.pool, threads=2)

    def layout(self, memory: numpy.ndarray) -> _native.KVLayout:
        """Of as many blocks as a prompt has."""
        return _native.KVLayout([(memory.ctypes.data, self.block_bytes, self.block_bytes)], CHAIN)

    def fill(self, kind: str) -> None:
        """Store all prompts, as far as they are not there."""
        layout, deadline = self.layout(self.memory), time.monotonic() + WAIT_SECONDS_MAX
        for chain in range(self.chains):
            names = keys(kind, chain)
            while self.namespace.lookup(names) < CHAIN:
                if time.monotonic() > deadline:
                    raise SystemExit("The pool did not get full.")
                reserved = self.namespace.reserve(names)
                if reserved:
                    refs = [ref for _, ref in reserved]
                    self.copier.save(0, layout, refs, [position for position, _ in reserved])
                    self.copier.wait(60_000)
                    self.pool.publish(refs)
                else:
                    self.pool.grow_ahead(self.namespace)
                    time.sleep(0.01)

    def serve(self, ssd_dir: str, backend: str, depth: int, total_bytes: int, **more: object) -> None:
        """Lead the tier, and wait until it serves."""
        self.pool.serve_ssd(
            [ssd_dir],
            capacity_bytes=total_bytes * 5 // 4 + (64 << 20),
            read_depth=depth,
            write_depth=depth,
            backend=backend,
            **more,  # type: ignore[arg-type]
        )
        self.wait("state", "serving")

    def facts(self) -> dict[str, object]:
        """Of the tier."""
        facts = self.pool.ssd()
        assert facts is not None
        return facts

    def wait(self, name: str, value: object) -> None:
        """Until a fact of the tier is so."""
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while self.facts()[name] != value:
            if time.monotonic() > deadline:
                raise SystemExit(f"{name} did not get to be {value}: {self.facts()}")
            time.sleep(0.001)

    def spill(self) -> None:
        """Have all blocks written."""
        if not self.namespace.use_ssd():
            raise SystemExit("The pool has no SSD tier.")
        self.wait("spilled_blocks", self.chains * CHAIN)

    def prefetch(self) -> None:
        """Have all prompts brought into memory, some at a time."""
        waiting: deque[tuple[list[bytes], _native.Prefetch]] = deque()
        following, deadline = 0, time.monotonic() + WAIT_SECONDS_MAX
        while following < self.chains or waiting:
            while following < self.chains and len(waiting) < PROMPTS:
                names = keys("block", following)
                request = self.namespace.prefetch(names)
                if request is None:
                    break
                waiting.append((names, request))
                following += 1
            if waiting and (found := waiting[0][1].poll()) is not None:
                names, request = waiting.popleft()
                leased = self.namespace.lease(names)
                if found != CHAIN or len(leased) != CHAIN:
                    raise SystemExit(f"{found} of {CHAIN} blocks came back: {self.facts()}")
                self.pool.release(leased)
                request.close()
            elif time.monotonic() > deadline:
                raise SystemExit(f"The blocks did not come back: {self.facts()}")
            else:
                time.sleep(0.0005)

    def check(self) -> None:
        """The last prompt has its bytes."""
        found = numpy.zeros_like(self.memory)
        leased = self.namespace.lease(keys("block", self.chains - 1))
        self.copier.load(0, self.layout(found), leased, list(range(len(leased))))
        self.copier.wait(60_000)
        self.pool.release(leased)
        if not numpy.array_equal(found, self.memory):
            raise SystemExit("Blocks came back with other bytes.")


def main() -> None:
    """One measurement."""
    what, ssd_dir, backend = sys.argv[1:4]
    total_bytes, record_bytes, depth = (int(number) for number in sys.argv[4:])
    with pool_place(2 * total_bytes) as place:
        child = Child(str(place), total_bytes, record_bytes)
        if what == "spill":
            child.fill("block")
            child.serve(ssd_dir, backend, depth, total_bytes, admission="all")
        else:
            # A pool that is in use: its memory has been touched, and others make room for what comes.
            child.fill("other")
            child.serve(ssd_dir, backend, depth, total_bytes, write_bytes_per_second_max=1)
            child.namespace.use_ssd()
            while 2 not in child.namespace.tiers(keys("block", 0)):
                time.sleep(0.001)
        started, cpu = time.perf_counter(), cpu_seconds()
        (child.spill if what == "spill" else child.prefetch)()
        seconds, cpu = time.perf_counter() - started, cpu_seconds() - cpu
        if what == "prefetch":
            child.check()
        print(json.dumps({"gb_per_s": child.gigabytes / seconds, "cpu_s_per_gb": cpu / child.gigabytes}))
        child.pool.close()


if __name__ == "__main__":
    main()
