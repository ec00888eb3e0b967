"""What a pool takes beside its blocks is what docs/shm-format.md says, to the byte."""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pegaflow import _native

FORMAT = Path(__file__).parents[2] / "docs" / "shm-format.md"
PAGE = 4096
SLOT_BYTES_DEFAULT = 16 << 10
"""``slots_max`` is one for so many bytes of the pool."""

GROW_SECONDS_MAX = 240.0
SMALLEST_TABLE = 8


@dataclass(frozen=True)
class Table:
    """A row of the table of tables in the format's description."""

    name: str
    record_bytes: int
    records: str
    at_creation: bool

    def count(self, pool_bytes: int, segment_bytes: int, slots: int) -> int:
        """How many records there are in such a pool."""
        by_text = {
            "`pool_bytes / segment_bytes`": pool_bytes // segment_bytes,
            "`slots_max`": slots,
            "`slots_max / 64`": slots // 64,
            "twice `slots_max` rounded up to a power of two": 2 << (slots - 1).bit_length(),
        }
        return by_text[self.records] if self.records in by_text else int(self.records.replace(",", ""))


def tables() -> list[Table]:
    section = FORMAT.read_text().partition("## 3. Control file")[2].partition("###")[0]
    rows = re.findall(r"^\| ([a-z ]+) \| [^|]+ \| ([\d,]+) \| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)
    return [
        Table(name, int(size.replace(",", "")), records, claimed == "at creation")
        for name, size, records, claimed in rows
    ]


def pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="pegaflow-overhead-", dir="/dev/shm"))
    yield place
    shutil.rmtree(place)


def opened(shm_dir: Path, pool_bytes: int, segment_bytes: int) -> tuple[_native.Pool, os.stat_result]:
    pool = _native.Pool.open("size", shm_dir=str(shm_dir), pool_bytes=pool_bytes, segment_bytes=segment_bytes)
    return pool, next(shm_dir.glob("*/control")).stat()


@pytest.mark.parametrize(
    ("pool_bytes", "segment_bytes"), [(64 << 20, 4 << 20), (1 << 30, 64 << 20), (30 << 30, 1 << 30)]
)
def test_control_files_have_the_size_that_the_tables_give(shm_dir: Path, pool_bytes: int, segment_bytes: int) -> None:
    pool, file = opened(shm_dir, pool_bytes, segment_bytes)
    pool.close()
    slots = pool_bytes // SLOT_BYTES_DEFAULT
    sizes = {table: pages(table.record_bytes * table.count(pool_bytes, segment_bytes, slots)) for table in tables()}
    assert len(sizes) >= SMALLEST_TABLE
    assert file.st_size == sum(sizes.values())
    # Memory is taken for what is claimed, and for nothing that is not.
    assert file.st_blocks * 512 == sum(size for table, size in sizes.items() if table.at_creation)


def test_tables_of_a_slot_take_136_bytes_when_it_is_used_and_8_to_17_before() -> None:
    per_slot = sum(table.record_bytes for table in tables() if table.records == "`slots_max`")
    assert per_slot == 136
    for slots in (1 << 20, (1 << 20) + 64, 1_966_080):
        before = sum(
            table.record_bytes * table.count(slots * SLOT_BYTES_DEFAULT, 1 << 30, slots)
            for table in tables()
            if "slots_max" in table.records and table.at_creation
        )
        assert 8 < before / slots < 17


def test_a_pool_whose_slots_are_all_in_use_takes_136_bytes_more_for_each(shm_dir: Path) -> None:
    pool_bytes = 64 << 20
    pool, before = opened(shm_dir, pool_bytes, 4 << 20)
    namespace = pool.namespace(b"overhead".ljust(32, b"\0"), 0, [SLOT_BYTES_DEFAULT], label="overhead")
    slots = pool_bytes // SLOT_BYTES_DEFAULT
    deadline = time.monotonic() + GROW_SECONDS_MAX
    number = 0
    while namespace.stats()["slots"] < slots:
        assert time.monotonic() < deadline, f"the pool has {namespace.stats()['slots']} of {slots} slots"
        number += len(namespace.reserve([number.to_bytes(16, "big")]))
    after = next(shm_dir.glob("*/control")).stat()
    pool.close()
    assert (after.st_blocks - before.st_blocks) * 512 == slots * 136
