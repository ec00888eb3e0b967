"""Python processes hammer one pool through the native module while one after the other is killed (-9).

``PEGAFLOW_TEST_SEED`` repeats the seeds of a run, ``PEGAFLOW_TEST_KILLS`` changes how many are killed.
"""

import json
import logging
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pegaflow import _native
from tests.multiprocess.hammer_process import LENGTH, PART_BYTES, open_namespaces, open_pool

logger = logging.getLogger(__name__)
pytestmark = pytest.mark.kill

PROCESSES = 4
KILLS = 40
WAIT_S_MAX = 0.05
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

    def kill_all(self) -> None:
        while self.running:
            self.kill_one()


def refill(pool: _native.Pool, namespace: _native.Namespace) -> None:
    """Store a fresh block in every slot: one that was lost, or is still leased by the dead, would be missed."""
    stored = 0
    while stored < namespace.stats()["slots"] or namespace.stats()["slots_free"]:
        keys = [f"fresh {stored + i}".encode().ljust(32) for i in range(16)]
        reserved = namespace.reserve(keys, parents=[None] * len(keys))
        refs = [ref for _, ref in reserved]
        for part in range(len(PART_BYTES)):
            assert pool.mark_written(part, refs) == len(refs)
        assert pool.publish(refs) == len(refs)
        stored += len(refs)
    slots = namespace.stats()["slots"]
    newest = [f"fresh {i}".encode().ljust(32) for i in range(stored - slots, stored)]
    assert namespace.contains(newest) == b"\1" * slots
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
    """Enough was done, and no operation waited long for anything but a CPU."""
    longest: dict[str, float] = {}
    for report in reports:
        for name, seconds in report["longest_s"].items():  # type: ignore[attr-defined]
            longest[name] = max(seconds, longest.get(name, 0.0))
    checked = sum(int(report["checked"]) for report in reports)  # type: ignore[call-overload]
    in_ms = {name: round(seconds * 1e3, 2) for name, seconds in longest.items()}
    logger.info("%d reports, %d blocks checked, longest in ms: %s", len(reports), checked, in_ms)
    assert checked > 1000
    assert max(longest.values()) <= WAIT_S_MAX, longest
