"""What a pool is too small for: counted over all processes, also those that were killed, and shown to operators."""

import json
import os
import signal
from pathlib import Path

from click.testing import CliRunner

from pegaflow.cli.main import cli
from pegaflow.exporter import PoolCollector
from pegaflow.shm.pool import inspect_pool, list_pools
from pegaflow.shm.report import InspectReport
from pegaflow.shm.traffic import PRESSURE, counts_of
from tests.unit.pool_processes import PART_BYTES, open_namespace, python

COLUMNS = 80
SUPERBLOCK_BYTES = 128
EACH = 1500
"""Blocks that each process stores: more than the pool has room for."""

# Stores blocks one by one, says what the pool let go for it, and waits for end of input or to be killed.
_FILLER = """
import sys, time
from tests.unit.pool_processes import open_namespace
pool, namespace = open_namespace("default", sys.argv[1])
deadline = time.monotonic() + 120
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    key, refs = number.to_bytes(16, "big"), []
    while not refs:
        assert time.monotonic() < deadline, pool.last_grow_error()
        refs = [ref for _, ref in namespace.reserve([key])]
        if not refs:
            time.sleep(0.001)
    pool.mark_written(0, refs)
    assert pool.publish(refs) == 1
stats = pool.stats()
print(stats["blocks_evicted"], stats["blocks_refused"], flush=True)
sys.stdin.read()
"""


def inspected(shm_dir: Path) -> InspectReport:
    [listing] = list_pools(str(shm_dir))
    return inspect_pool(listing.path)


def exported(shm_dir: Path) -> dict[str, float]:
    """The sum of each metric that tells of pressure, by name without prefix."""
    metrics = {metric.name.removeprefix("pegaflow_"): metric for metric in PoolCollector(str(shm_dir)).collect()}
    return {name: sum(one.value for one in metrics[name].samples) for name in (*PRESSURE, "lock_wait_seconds_max")}


def fill(shm_dir: Path) -> tuple[int, int]:
    """Two processes store more than there is room for, and one of them is killed. Blocks evicted and refused, as they
    counted them."""
    fillers = [python(_FILLER, str(shm_dir), str(first), str(first + EACH)) for first in (0, EACH)]
    try:
        counted = []
        for filler in fillers:
            assert filler.stdout is not None
            counted.append([int(word) for word in filler.stdout.readline().split()])
        fillers[0].send_signal(signal.SIGKILL)
        fillers[1].communicate(timeout=60)
        assert [filler.wait(60) for filler in fillers] == [-signal.SIGKILL, 0]
    finally:
        for filler in fillers:
            filler.kill()
            filler.communicate()
    evicted, refused = (sum(column) for column in zip(*counted, strict=True))
    return evicted, refused


def test_what_two_processes_had_no_room_for_is_counted_once_and_outlives_a_kill(tmp_path: Path) -> None:
    evicted, refused = fill(tmp_path)
    report = inspected(tmp_path)
    assert report.traffic is not None
    [space], [counts] = report.namespaces, report.traffic.namespaces
    assert evicted > EACH
    assert counts.stored_blocks == 2 * EACH
    assert counts.stored_bytes - space.bytes_sealed == counts.evicted_blocks * PART_BYTES, "what is gone was evicted"
    assert (counts.evicted_blocks, counts.refused_blocks) == (evicted, refused)
    ever = counts_of(report.traffic)
    assert exported(tmp_path) == {**{name: ever[name] for name in PRESSURE}, "lock_wait_seconds_max": 0}
    shown = CliRunner().invoke(cli, ["top", "--once", "--interval", "0.1", "--shm-dir", str(tmp_path)]).output
    row = ["default", "start", *(f"{ever[name]:,}" for name in PRESSURE), "0.0", "ms"]
    assert row in [line.split() for line in shown.splitlines()], shown
    assert max(map(len, shown.splitlines())) <= COLUMNS


def test_a_rebuild_of_the_index_is_counted_and_top_says_what_came_lately(tmp_path: Path) -> None:
    pool, _ = open_namespace("default", str(tmp_path))
    pool.rebuild_index()
    assert exported(tmp_path)["index_rebuilds"] == 1
    pool.close()
    arguments = ["top", "--once", "--json", "--interval", "0.1", "--shm-dir", str(tmp_path)]
    [one] = json.loads(CliRunner().invoke(cli, arguments).output)["pools"]
    assert one["report"]["traffic"]["pressure"]["index_rebuilds"] == 1
    assert {name: one["lately"][name] for name in PRESSURE} == dict.fromkeys(PRESSURE, 0)


def test_words_that_nobody_would_write_are_numbers_within_bounds(tmp_path: Path) -> None:
    pool, _ = open_namespace("default", str(tmp_path))
    [file] = Path(pool.path).glob("traffic-v*")
    for byte in (b"\xff", b"\x01", b"\x80"):
        with file.open("r+b") as damaged:
            damaged.seek(SUPERBLOCK_BYTES)
            damaged.write(byte * (os.path.getsize(file) - SUPERBLOCK_BYTES))
        found = exported(tmp_path)
        assert all(0 <= found[name] <= 2**64 for name in PRESSURE)
        assert 0 <= found["lock_wait_seconds_max"] <= 2**32 / 1e6
        shown = CliRunner().invoke(cli, ["top", "--once", "--interval", "0.1", "--shm-dir", str(tmp_path)])
        assert shown.exit_code == 0, shown.output
        assert max(map(len, shown.output.splitlines())) <= COLUMNS
    pool.close()
