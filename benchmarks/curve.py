"""How far is the pool's sampled miss-ratio curve from exact simulation? ``python -m benchmarks.curve TRACE...``;
without a trace, over conversations that are made up.

Each trace is counted in a pool of its own several times, with other keys and so other samples each time; what is found
in memory is what a simulated pool of that size finds under the default policy. What the pool says of nine sizes is
compared with what an LRU of that size finds of the trace. Errors are in points (per cent of the blocks).
"""

import argparse
import hashlib
from pathlib import Path

from benchmarks._common import Result, finish, note, pool_place
from benchmarks.replay import conversations
from pegaflow import _native
from pegaflow.replay.policies import POLICIES, hits_of
from pegaflow.replay.trace import Prompt, distinct_blocks, read_trace
from pegaflow.shm.pool import inspect_pool
from pegaflow.shm.traffic import PointReport

BLOCK_BYTES = 64 << 10
POOL_BYTES_MIN = 1 << 20
SEGMENT_BYTES = 64 << 10
DISTINCT_PER_POOL = 8
"""The pool has room for one in so many of the trace's blocks, so that sizes from an eighth to eight times matter."""
PLACE_BYTES = 64 << 20
POLICY = "probation"
ROUNDS = 20
AIM_POINTS = 2.0


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*", type=Path)
    traces = {trace.name: read_trace(trace) for trace in parser.parse_args().traces}
    results = []
    for name, prompts in (traces or {"conversations": conversations(1)}).items():
        trace = Trace(name, prompts)
        worst = [trace.largest_error(number) for number in range(ROUNDS)]
        results.append(Result(f"{name}: largest error, median of rounds", sorted(worst)[ROUNDS // 2], "points"))
        results.append(Result(f"{name}: largest error of all rounds", max(worst), "points", "aim", AIM_POINTS))
    finish("curve", results)


class Trace:
    """A trace, and what is found of it."""

    def __init__(self, name: str, prompts: list[Prompt]) -> None:
        self._name, self._prompts = name, prompts
        pool_bytes = max(POOL_BYTES_MIN, distinct_blocks(prompts) // DISTINCT_PER_POOL * BLOCK_BYTES)
        self._pool_bytes = pool_bytes // SEGMENT_BYTES * SEGMENT_BYTES
        cache = POLICIES[POLICY](self._pool_bytes // BLOCK_BYTES)
        self._found = []
        for prompt in prompts:
            self._found.append(cache.find(prompt))
            cache.store(prompt)
        self._exact: dict[int, float] = {}

    def largest_error(self, number: int) -> float:
        """Over all sizes that the pool tells of."""
        errors = [100 * abs((point.hit_ppm or 0) / 1e6 - self._share(point.bytes)) for point in self._told(number)]
        note(f"{self._name}, round {number}: " + ", ".join(f"{error:.2f}" for error in errors))
        return max(errors)

    def _told(self, number: int) -> list[PointReport]:
        with pool_place(PLACE_BYTES) as place:
            pool = _native.Pool.open("curve", shm_dir=str(place), pool_bytes=self._pool_bytes, slots_max=4096)
            namespace = pool.namespace(bytes(32), 0, [BLOCK_BYTES])
            for prompt, ram in zip(self._prompts, self._found, strict=True):
                keys = [hashlib.sha256(f"{number} {block}".encode()).digest() for block in prompt]
                namespace.note_prompt(keys, start=0, ram=ram, ssd=ram, peer=ram, late=ram)
            report = inspect_pool(pool.path).traffic
            pool.close()
        assert report is not None
        return list(report.curve.points)

    def _share(self, size_bytes: int) -> float:
        """Of the blocks, those that an LRU of that size finds."""
        if size_bytes not in self._exact:
            asked = sum(map(len, self._prompts))
            self._exact[size_bytes] = hits_of("lru", self._prompts, max(1, size_bytes // BLOCK_BYTES)) / asked
        return self._exact[size_bytes]


if __name__ == "__main__":
    main()
