"""Reports about pools, as the native engine writes them and as ``pegaflow ... --json`` prints them.

Every type mirrors one JSON object of the engine, field by field. Times are seconds, ``*_unix_s`` are seconds since
1970 in UTC, sizes are bytes, counts are plain integers. Fields that a later release adds are ignored by this one;
fields that are missing or of another type mean that the native module and this package are of different versions.
"""

import dataclasses
import json
import types
import typing
from dataclasses import dataclass
from typing import Any, TypeVar

from pegaflow.errors import PegaFlowError
from pegaflow.shm.traffic import TrafficReport

T = TypeVar("T")


@dataclass(frozen=True)
class PoolListing:
    """One entry of ``list_pools``. What cannot be known without mapping a pool that is refused is ``None``."""

    name: str
    path: str
    segments_path: str | None
    """Directory of its blocks: that of the pool, or one of a hugetlbfs."""
    state: str
    """``"ok"``; ``"refused"``: not ours to map, see ``error``; ``"creating"``: its control file is not complete."""
    error: str | None
    pool_bytes: int | None
    bytes_used: int | None
    processes_alive: int | None
    """Processes that hold their liveness lock; for a pool being created: 1 while its creator lives, else 0."""
    processes_dead: int | None
    """Rows of the process table whose owner is dead and which nobody has reaped yet."""
    idle_seconds: int | None
    """Since the pool was last used; for a pool being created: since its newest file was changed."""
    processes_max: int | None
    """Processes that may be attached at a time."""
    namespaces: int | None
    """Of ``namespaces_max``: those that were ever opened; none is given back."""
    namespaces_max: int | None
    slots: int | None
    """Of ``slots_max``: those that its segments have, whatever their state."""
    slots_max: int | None

    @property
    def in_huge_pages(self) -> bool:
        """Whether its blocks are on a hugetlbfs, and so no part of the file system of ``path``."""
        return self.segments_path not in (None, self.path)


@dataclass(frozen=True)
class GeometryReport:
    """What the creator of a pool fixed for its whole life, and how far the slot table is filled."""

    layout_version: int
    pool_bytes: int
    segment_bytes: int
    slots_max: int
    slots_used: int
    """Slots that belong to some segment, whatever their state."""


@dataclass(frozen=True)
class SegmentsReport:
    """Entries of the segment table by state."""

    ready: int
    creating: int
    free: int


@dataclass(frozen=True)
class NamespaceReport:
    """Blocks of one model, layout and KV cache group."""

    id: int
    fingerprint: str
    """64 hexadecimal digits."""
    group: int
    label: str
    epoch: int
    """Counts resets: blocks of an earlier epoch are absent."""
    parts: int
    part_bytes: list[int]
    segments: int
    slots: int
    blocks_sealed: int
    blocks_reserved: int
    blocks_quarantined: int
    bytes_sealed: int
    """Sum of the lengths of all parts of all sealed blocks."""
    leases: int
    """Leases on blocks of this namespace, of living and dead processes."""


@dataclass(frozen=True)
class ProcessReport:
    """One row of the process table."""

    row: int
    epoch: int
    pid: int
    """As the process saw itself; in another PID namespace it means nothing here."""
    label: str
    alive: bool
    leader_row: int | None
    """Row of the process whose reservations this one writes, if it joined one."""
    weight_milli: int
    """Thousandths of the instance's weight; 0: the process has no share, since it is dead, uses no blocks, or copies
    for another."""
    share_bytes: int
    """What others do not take from it, of the slots that the pool has now."""
    used_bytes: int
    """Blocks that it used last."""
    leases: int
    reserved: int
    """Blocks that this process has reserved and neither published nor given up."""
    started_unix_s: int


@dataclass(frozen=True)
class TierReport:
    """The SSD tier of a pool. Counters are those of all its leaders since the pool was made."""

    state: str
    """``"none"``: nobody leads it; ``"recovering"``, ``"serving"``, or ``"off"``: its disks failed."""
    leader_row: int | None
    """Row of the process that reads and writes the files."""
    zones_done: int
    """Of ``zones``: what was looked at since the files were opened."""
    zones: int
    records: int
    """Blocks that lookups find on SSD."""
    read_bytes_per_second: int
    """Bandwidth of late; 0: nothing was read yet."""
    queued_bytes: int
    """Asked for, and not in memory yet."""
    spilled_blocks: int
    spilled_bytes: int
    read_blocks: int
    read_bytes: int
    read_joined: int
    """Blocks that were asked for while they were being read for somebody else."""
    read_damaged: int
    read_failed: int
    read_wait_ms_max: int
    """Longest time from a request to its answer."""
    ssd_dropped: int
    """Blocks that were evicted from memory and are not on SSD."""
    turned_off: int
    """Directories that were turned off since they failed."""


@dataclass(frozen=True)
class InspectReport:
    """One pool, as ``pegaflow inspect POOL --json`` prints it."""

    name: str
    path: str
    geometry: GeometryReport
    created_unix_s: int
    last_used_unix_s: int
    bytes_used: int
    """Bytes of all segments that exist."""
    bytes_max: int
    """Bytes of all segments that may exist."""
    segments: SegmentsReport
    locks_held: int
    """Locks of the control file that some process holds at this moment, dead or alive."""
    namespaces: list[NamespaceReport]
    processes: list[ProcessReport]
    ssd: TierReport | None
    """``None``: the pool keeps nothing on SSD."""
    traffic: TrafficReport | None
    """``None``: nobody has used a namespace yet, or its statistics cannot be read."""


@dataclass(frozen=True)
class VerifyReport:
    """Outcome of checking every invariant of a pool and, if asked for, every checksum."""

    ok: bool
    blocks_checked: int
    checksums_checked: int
    problems: list[str]


@dataclass(frozen=True)
class SystemReport:
    """Facts about this host that only the native engine can find out."""

    page_bytes: int
    cpus: int
    """Processors that this process may run on."""
    memlock_bytes: int | None
    """Soft limit of locked memory; ``None``: no limit."""
    io_uring: str
    """``"ok"``, or the reason why the kernel refuses it."""


def decode(kind: type[T], text: str) -> T:
    """Read one JSON object as ``kind``. Raises ``PegaFlowError`` if a field is missing or of another type."""
    return _object(kind, json.loads(text), kind.__name__)


def decode_list(kind: type[T], text: str) -> list[T]:
    """Read a JSON list of objects of ``kind``. Raises ``PegaFlowError`` as ``decode`` does."""
    items = json.loads(text)
    if not isinstance(items, list):
        raise _mismatch(f"{kind.__name__} list")
    return [_object(kind, item, f"{kind.__name__}[{index}]") for index, item in enumerate(items)]


def _object(kind: type[T], value: Any, where: str) -> T:
    if not isinstance(value, dict):
        raise _mismatch(where)
    hints = typing.get_type_hints(kind)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(typing.cast(Any, kind)):
        if field.name not in value:
            raise _mismatch(f"{where}.{field.name}")
        fields[field.name] = _value(hints[field.name], value[field.name], f"{where}.{field.name}")
    return kind(**fields)


def _value(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        (hint,) = (option for option in typing.get_args(hint) if option is not types.NoneType)
    if typing.get_origin(hint) is list:
        if not isinstance(value, list):
            raise _mismatch(where)
        (item_hint,) = typing.get_args(hint)
        return [_value(item_hint, item, f"{where}[{index}]") for index, item in enumerate(value)]
    if dataclasses.is_dataclass(hint):
        return _object(typing.cast(type[Any], hint), value, where)
    # bool is an int in Python; a flag where a count belongs is still a mismatch.
    if type(value) is not hint:
        raise _mismatch(where)
    return value


def _mismatch(where: str) -> PegaFlowError:
    return PegaFlowError(
        f"The native engine's report has no valid {where}; reinstall pegaflow so that both halves are of one version."
    )
