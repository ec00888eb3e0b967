"""Python processes hammer one pool through the native module while one after the other is killed (-9).

``PEGAFLOW_TEST_SEED`` repeats the seeds of a run, ``PEGAFLOW_TEST_KILLS`` changes how many are killed.
"""

import itertools
import json
import logging
import os
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from pegaflow import _native
from tests.multiprocess.hammer_process import LENGTH, PART_BYTES, open_namespaces, open_pool
from tests.patience import await_

logger = logging.getLogger(__name__)
pytestmark = pytest.mark.kill

PROCESSES = 4
KILLS = 40
CHECKED_MIN = 1000
SLEEPS_MAX = 1000
"""Of one operation: what it may wait for locks is over after 400."""
ROOT = Path(__file__).parents[2]


class Processes:
    """The hammering processes, and what they reported before they were killed."""

    def __init__(self, shm_dir: Path, seeds: random.Random) -> None:
        self.shm_dir = shm_dir
        self.seeds = seeds
        self.running: list[tuple[subprocess.Popen[str], Path]] = []
        self.reports: list[dict[str, object]] = []
        self.started = 0
        for _ in range(PROCESSES):
            self.start_one()

    def start_one(self) -> None:
        report = self.shm_dir / f"report-{self.started}"
        self.started += 1
        seed = str(self.seeds.getrandbits(48))
        command = [sys.executable, "-m", "tests.multiprocess.hammer_process", str(self.shm_dir), seed, str(report)]
        self.running.append((subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True), report))

    def kill_one(self) -> None:
        process, report = self.running.pop(self.seeds.randrange(len(self.running)))
        assert process.poll() is None, process.communicate()[1]
        process.kill()
        process.communicate()
        if report.exists():
            self.reports.append(json.loads(report.read_text()))

    def see_all_go_on(self) -> None:
        """Wait until each has done something more, and all of them enough."""
        for _, report in self.running:
            report.unlink(missing_ok=True)
        for process, report in self.running:
            await_(partial(has_gone_on, process, report))
            assert process.poll() is None, process.communicate()[1]
        await_(lambda: self.checked() > CHECKED_MIN)

    def checked(self) -> int:
        """Blocks that were loaded and compared."""
        living = [json.loads(report.read_text()) for _, report in self.running if report.exists()]
        return sum(int(report["checked"]) for report in (*self.reports, *living))  # type: ignore[call-overload]

    def kill_all(self) -> None:
        while self.running:
            self.kill_one()


def has_gone_on(process: "subprocess.Popen[str]", report: Path) -> bool:
    """Whether there is a report again, or never will be."""
    return report.exists() or process.poll() is not None


def refill(pool: _native.Pool, namespace: _native.Namespace) -> None:
    """Store a fresh block in every slot: one that was lost, or is still leased by the dead, would be missed."""
    names = (f"fresh {number}".encode().ljust(32) for number in itertools.count())
    stored: list[bytes] = []
    while len(stored) < namespace.stats()["slots"] or namespace.stats()["slots_free"]:
        keys = list(itertools.islice(names, 16))
        timeouts = pool.stats()["lock_timeouts"]
        reserved = namespace.reserve(keys, parents=[None] * len(keys))
        refs = [ref for _, ref in reserved]
        for part in range(len(PART_BYTES)):
            assert pool.mark_written(part, refs) == len(refs)
        # The pool's own thread may have a lock for longer than anybody waits for it.
        assert pool.publish(refs) == len(refs) or pool.stats()["lock_timeouts"] > timeouts
        there = namespace.contains([keys[index] for index, _ in reserved])
        stored += [keys[index] for (index, _), found in zip(reserved, there, strict=True) if found]
    slots = namespace.stats()["slots"]
    await_(lambda: namespace.contains(stored[-slots:]) == b"\1" * slots)
    assert namespace.stats()["blocks_sealed"] == slots


def test_killed_processes_cost_no_byte_no_slot_and_no_lease(tmp_path: Path) -> None:
    seed = int(os.environ.get("PEGAFLOW_TEST_SEED", str(time.time_ns())))
    kills = int(os.environ.get("PEGAFLOW_TEST_KILLS", str(KILLS)))
    logger.warning("PEGAFLOW_TEST_SEED=%d", seed)
    seeds = random.Random(seed)
    processes = Processes(tmp_path, seeds)
    try:
        for _ in range(kills):
            time.sleep(seeds.random() * 0.6)
            processes.kill_one()
            processes.start_one()
        processes.see_all_go_on()
    finally:
        processes.kill_all()
    path = str(next(path for path in tmp_path.iterdir() if path.is_dir()))
    _native.reap(path)
    report = json.loads(_native.verify(path))
    assert report["ok"], report["problems"]
    assert report["checksums_checked"] == report["blocks_checked"] > LENGTH
    # What is stored last stays, so that it has every slot in the end.
    pool = open_pool(str(tmp_path), policy="lru")
    for namespace in open_namespaces(pool):
        refill(pool, namespace)
    assert json.loads(_native.verify(path))["problems"] == []
    pool.close()
    check_reports(processes.reports)


def check_reports(reports: list[dict[str, object]]) -> None:
    """No operation waited for long, whoever was killed in the middle of what."""
    most: dict[str, int] = {}
    for report in reports:
        for name, sleeps in report["most_sleeps"].items():  # type: ignore[attr-defined]
            most[name] = max(sleeps, most.get(name, 0))
    logger.info("%d reports, most sleeps of one operation: %s", len(reports), most)
    assert max(most.values()) <= SLEEPS_MAX, most
