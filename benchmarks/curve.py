"""How far is the pool's sampled miss-ratio curve from exact simulation? ``python -m benchmarks.curve TRACE...``;
without a trace, over conversations that are made up.

Each trace is counted in a pool of its own several times, with other keys and so other samples each time; what the pool
says of nine sizes is compared with what an LRU of that size finds of the trace. Errors are in points (per cent of the
blocks).
"""

import argparse
import hashlib
from pathlib import Path

from benchmarks._common import Result, finish, note, pool_place
from benchmarks.replay import conversations
from pegaflow import _native
from pegaflow.replay.policies import hits_of
from pegaflow.replay.trace import Prompt, distinct_blocks, read_trace
from pegaflow.shm.pool import inspect_pool

BLOCK_BYTES = 64 << 10
POOL_BYTES_MIN = 1 << 20
SEGMENT_BYTES = 64 << 10
DISTINCT_PER_POOL = 8
"""The pool has room for one in so many of the trace's blocks, so that sizes from an eighth to eight times matter."""
PLACE_BYTES = 64 << 20
ROUNDS = 5
AIM_POINTS = 2.0


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*", type=Path)
    traces = {trace.name: read_trace(trace) for trace in parser.parse_args().traces}
    results = []
    for name, prompts in (traces or {"conversations": conversations(1)}).items():
        worst = [largest_error(prompts, name, number) for number in range(ROUNDS)]
        results.append(Result(f"{name}: largest error, median of rounds", sorted(worst)[ROUNDS // 2], "points"))
        results.append(Result(f"{name}: largest error of all rounds", max(worst), "points", "aim", AIM_POINTS))
    finish("curve", results)


def largest_error(prompts: list[Prompt], name: str, number: int) -> float:
    """Over all sizes that the pool tells of."""
    asked = sum(map(len, prompts))
    pool_bytes = max(POOL_BYTES_MIN, distinct_blocks(prompts) // DISTINCT_PER_POOL * BLOCK_BYTES)
    with pool_place(PLACE_BYTES) as place:
        pool = _native.Pool.open(
            "curve", shm_dir=str(place), pool_bytes=pool_bytes // SEGMENT_BYTES * SEGMENT_BYTES, slots_max=4096
        )
        namespace = pool.namespace(bytes(32), 0, [BLOCK_BYTES])
        for prompt in prompts:
            keys = [hashlib.sha256(f"{number} {block}".encode()).digest() for block in prompt]
            namespace.note_prompt(keys, start=0, ram=0, ssd=0, peer=0, late=0)
        report = inspect_pool(pool.path).traffic
        pool.close()
    assert report is not None
    errors = []
    for point in report.curve.points:
        exact = hits_of("lru", prompts, max(1, point.bytes // BLOCK_BYTES)) / asked
        told = (point.hit_ppm or 0) / 1e6
        errors.append(100 * abs(told - exact))
    note(f"{name}, round {number}: " + ", ".join(f"{error:.2f}" for error in errors))
    return max(errors)


if __name__ == "__main__":
    main()
