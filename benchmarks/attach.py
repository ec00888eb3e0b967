"""How long does it take to attach a pool of a million slots, and to have its index again after a crash?"""

import multiprocessing
import signal
import time
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

from benchmarks._bigpool import CHAINS_FULL, PLACE_BYTES, chain_keys, fill, open_pool
from benchmarks._common import Result, finish, median, note, percentile, pool_place
from pegaflow import _native
from pegaflow.errors import PoolBusy

ATTACHES = 15
CRASHES = 5
ATTACH_MS_AIM = 5.0
REBUILD_MS_AIM = 2000.0
REBUILD_SECONDS_MAX = 60.0
CHILD_SECONDS_MAX = 120.0

# A process of its own each time: within one process, pools are opened once.
SPAWN = multiprocessing.get_context("spawn")


def create(place: str, answers: "SimpleQueue[Any]") -> None:
    """Make and fill the pool, and leave it."""
    pool, namespace = open_pool(Path(place), create=True)
    fill(pool, namespace, CHAINS_FULL)
    answers.put(namespace.lookup(chain_keys(CHAINS_FULL - 1)))
    pool.close()


def attach(place: str, answers: "SimpleQueue[Any]") -> None:
    """Time an attach, and an attach with its first lookup."""
    keys = chain_keys(0)
    start = time.perf_counter()
    pool, namespace = open_pool(Path(place))
    attached = time.perf_counter()
    found = namespace.lookup(keys)
    looked_up = time.perf_counter()
    if found != len(keys):
        raise SystemExit(f"Only {found} of {len(keys)} blocks were found after attaching.")
    answers.put(((attached - start) * 1000, (looked_up - start) * 1000))
    pool.close()


def crash(place: str, _answers: "SimpleQueue[Any]") -> None:
    """Die by kill -9 with the whole index cleared and nothing linked yet: the worst moment there is."""
    pool, _namespace = open_pool(Path(place))
    _native.crash_point_arm("rebuild.cleared", "kill")
    pool.rebuild_index()


def recover(place: str, answers: "SimpleQueue[Any]") -> None:
    """Time an attach after the crash until every chain is found again, as a restarted engine would see it."""
    heads, last = [chain_keys(chain, 1) for chain in range(CHAINS_FULL)], chain_keys(CHAINS_FULL - 1)
    start = time.perf_counter()
    pool, namespace = open_pool(Path(place))
    while any(namespace.lookup(keys) != 1 for keys in heads) or namespace.lookup(last) != len(last):
        if time.perf_counter() - start > REBUILD_SECONDS_MAX:
            raise SystemExit("The index did not come back.")
        time.sleep(0.001)
    waited = time.perf_counter() - start
    rebuilt, blocks = rebuild(pool)
    answers.put((waited * 1000, rebuilt * 1000, blocks))
    pool.close()


def rebuild(pool: _native.Pool) -> tuple[float, int]:
    """Seconds of one rebuild, and how many blocks it linked. The background thread may still be at its own."""
    deadline = time.monotonic() + REBUILD_SECONDS_MAX
    while True:
        begin = time.perf_counter()
        try:
            blocks = pool.rebuild_index()
        except PoolBusy:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
            continue
        return time.perf_counter() - begin, blocks


def in_child(work: Callable[[str, "SimpleQueue[Any]"], None], place: Path, *, exit_code: int = 0) -> Any:
    """Run ``work`` in a fresh process that must end with ``exit_code``; its answer, if it is to give one."""
    answers = SPAWN.SimpleQueue()
    child = SPAWN.Process(target=work, args=(str(place), answers))
    child.start()
    answer = answers.get() if exit_code == 0 and _answered(child, answers) else None
    child.join(CHILD_SECONDS_MAX)
    if child.exitcode != exit_code:
        child.kill()
        raise SystemExit(f"{work.__name__}: a child ended with {child.exitcode} instead of {exit_code}.")
    return answer


def _answered(child: Any, answers: "SimpleQueue[Any]") -> bool:
    deadline = time.monotonic() + CHILD_SECONDS_MAX
    while answers.empty() and child.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not answers.empty()


def main() -> None:
    """Run, print, write."""
    with pool_place(PLACE_BYTES) as place:
        note("filling all of 1,000,000 slots ...")
        in_child(create, place)
        note(f"attaching {ATTACHES} times ...")
        times = [in_child(attach, place) for _ in range(ATTACHES)]
        note(f"crashing and recovering {CRASHES} times ...")
        recoveries = []
        for _ in range(CRASHES):
            in_child(crash, place, exit_code=-signal.SIGKILL)
            recoveries.append(in_child(recover, place))
    attached = [one[0] for one in times]
    waited, rebuilt = [one[0] for one in recoveries], [one[1] for one in recoveries]
    finish(
        "attach",
        [
            Result("attach, p50", median(attached), "ms", "aim", ATTACH_MS_AIM),
            Result("attach, worst", percentile(attached, 100), "ms", "aim", ATTACH_MS_AIM),
            Result("attach and look up 10,000 blocks, p50", median([one[1] for one in times]), "ms"),
            Result("attach after a crash until all is found, p50", median(waited), "ms", "aim", REBUILD_MS_AIM),
            Result("rebuild the index, p50", median(rebuilt), "ms", "aim", REBUILD_MS_AIM),
            Result("blocks in the index", recoveries[-1][2], "blocks"),
        ],
    )


if __name__ == "__main__":
    main()
