"""Metrics of the pools of a host for Prometheus, read from the pools themselves whenever they are asked for.

The names are those of PegaFlow with a server where they mean the same. Whoever asks attaches to no pool and changes
nothing; what one process counts for itself is in vLLM's own metrics (``vllm:pega_*``).
"""

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pegaflow.errors import PegaFlowError
from pegaflow.shm.pool import SHM_DIR_DEFAULT, inspect_if_ok, list_pools
from pegaflow.shm.report import InspectReport, NamespaceReport, PoolListing, TierReport
from pegaflow.shm.traffic import REASONS, TIERS, TrafficReport, size_name, window_name

FRESH_SECONDS = 1.0
"""Answers younger than this are given again: a look at a large pool reads all of its slot headers."""

logger = logging.getLogger("pegaflow.exporter")

Value = tuple[tuple[str, ...], float]

_POOL = ("pool",)
_SPACE = ("pool", "namespace", "group", "model")
_PROCESS = ("pool", "row", "label")
_WINDOW = ("pool", "window")
_STATES = ("ok", "creating", "refused")
"""Of listings; of pools with one name the first has it."""

_GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "exporter_up": ("1 if the directory of the pools can be looked at, else 0.", ()),
    "pool_readable": ("1 if the pool can be looked at, 0 if it is refused or not complete yet.", _POOL),
    "pool_capacity_bytes": ("Bytes of all segments that may exist.", _POOL),
    "pool_used_bytes": ("Bytes of all segments that exist.", _POOL),
    "pool_slots": ("Slots that belong to a segment, whatever their state.", _POOL),
    "pool_processes": ("Processes that hold the pool open, by whether they are alive.", ("pool", "state")),
    "pool_idle_seconds": ("Time since the pool was last used.", _POOL),
    "cache_resident_blocks": ("Blocks that can be found in memory.", _SPACE),
    "cache_resident_bytes": ("Bytes of these blocks.", _SPACE),
    "cache_slots": ("Slots for blocks of this kind, free ones included.", _SPACE),
    "inflight_blocks": ("Blocks that are being written.", _SPACE),
    "quarantined_blocks": ("Slots that wait until nothing can write them any more.", _SPACE),
    "leases": ("Leases on blocks, of living and dead processes.", _SPACE),
    "lock_wait_seconds_max": ("Longest wait of a living process for a lock, since it began.", _POOL),
    "namespace_resets": ("How often blocks of this model were invalidated.", _SPACE),
    "process_share_bytes": ("What others do not take from an instance.", _PROCESS),
    "process_used_bytes": ("Blocks that an instance used last.", _PROCESS),
    "process_leases": ("Leases of a process.", _PROCESS),
    "process_reserved_blocks": ("Blocks that a process is writing.", _PROCESS),
    "ssd_serving": ("1 while a process reads and writes the SSD cache for all.", _POOL),
    "ssd_resident_blocks": ("Blocks that can be found on SSD.", _POOL),
    "ssd_recovery_zones": ("Zones of the files that were looked at since they were opened.", _POOL),
    "ssd_zones": ("Zones of the files.", _POOL),
    "ssd_prefetch_inflight_bytes": ("Bytes that were asked for and are not in memory yet.", _POOL),
    "ssd_prefetch_throughput_bytes_per_second": ("Bandwidth of reads of late.", _POOL),
    "ssd_read_wait_seconds_max": ("Longest time from a request to its answer.", _POOL),
    "hll_cardinality": ("About how many distinct blocks were missed of late.", _WINDOW),
    "hll_total_requests": ("Blocks that were asked for of late.", _WINDOW),
    "hll_estimated_hit_rate": ("What a cache without bounds would have found of them, 0 to 1.", _WINDOW),
    "curve_hit_rate": ("What the pool would have found had it another size, 0 to 1.", ("pool", "size")),
    "curve_sampling_rate": ("The part of the blocks that are followed for the curve.", _POOL),
}
_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cache_prompts": ("Prompts that were looked for.", _SPACE),
    "cache_tier_block_requests": ("Blocks of prompts by where they were found, or miss.", (*_SPACE, "tier")),
    "cache_block_misses": ("Blocks of prompts that were not found, by reason.", (*_SPACE, "reason")),
    "cache_block_insertions": ("Blocks that became visible in memory, whoever brought them.", _SPACE),
    "cache_insertion_bytes": ("Bytes of these blocks.", _SPACE),
    "evicted_blocks": ("Blocks that were evicted from memory.", _SPACE),
    "refused_blocks": ("Blocks that were to be stored and got no slot.", _SPACE),
    "grow_failures": ("Segments that could not be made.", _SPACE),
    "index_rebuilds": ("Rebuilds of the index after damage or by hand.", _POOL),
    "lock_timeouts": ("Waits for a lock that ran out: a miss, or a save that was left out.", _POOL),
    "load_blocks": ("Blocks that were loaded into engines.", _SPACE),
    "load_bytes": ("Bytes of these blocks.", _SPACE),
    "curve_references": ("Blocks that the curve is about.", _POOL),
    "curve_skipped_prompts": ("Prompts that the curve does not know, since somebody else was at it.", _POOL),
    "ssd_write_blocks": ("Blocks that were written to SSD.", _POOL),
    "ssd_write_bytes": ("Bytes that were written to SSD.", _POOL),
    "ssd_prefetch_success": ("Blocks that were read from SSD.", _POOL),
    "ssd_prefetch_bytes": ("Bytes that were read from SSD.", _POOL),
    "ssd_prefetch_joined": ("Blocks that were asked for while they were being read for somebody else.", _POOL),
    "ssd_prefetch_failures": ("Blocks that could not be read, by reason.", ("pool", "reason")),
    "ssd_dropped_blocks": ("Blocks that were evicted from memory and were not on SSD.", _POOL),
    "ssd_turned_off": ("Directories that were turned off since their disks failed.", _POOL),
}


class PoolCollector(Collector):
    """All pools below a directory. One look serves everybody who asks within a second."""

    def __init__(self, shm_dir: str = SHM_DIR_DEFAULT) -> None:
        self._shm_dir = shm_dir
        self._trouble: str | None = None
        self._lock = threading.Lock()
        self._looked_at = float("-inf")
        self._known: list[Metric] = []

    def collect(self) -> Iterable[Metric]:
        """The metrics as they are now."""
        with self._lock:
            if time.monotonic() - self._looked_at >= FRESH_SECONDS:
                self._known = list(_metrics(self._listings()))
                self._looked_at = time.monotonic()
            return self._known

    def describe(self) -> Iterable[Metric]:
        """Their names, without a look at any pool."""
        return _families().values()

    def _listings(self) -> list[PoolListing] | None:
        """All pools; ``None`` if the directory cannot be looked at, which is said once, as is that it can again."""
        found, trouble = None, None
        try:
            found = list_pools(self._shm_dir)
        except PegaFlowError as error:
            trouble = str(error)
        if trouble != self._trouble:
            logger.warning("PegaFlow: %s", trouble or f"pools in {self._shm_dir} can be looked at again.")
        self._trouble = trouble
        return found


def _families() -> dict[str, GaugeMetricFamily | CounterMetricFamily]:
    made: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for name, (text, labels) in _GAUGES.items():
        made[name] = GaugeMetricFamily(f"pegaflow_{name}", text, labels=labels)
    for name, (text, labels) in _COUNTERS.items():
        made[name] = CounterMetricFamily(f"pegaflow_{name}", text, labels=labels)
    return made


def _metrics(listings: Sequence[PoolListing] | None) -> Iterable[Metric]:
    families = _families()
    families["exporter_up"].add_metric((), float(listings is not None))
    for pool, listing in _labelled(listings or ()):
        for name, (labels, value) in _samples(pool, listing):
            families[name].add_metric(labels, value)
    return families.values()


def _labelled(listings: Sequence[PoolListing]) -> list[tuple[str, PoolListing]]:
    """Each pool with what it is called, once in a scrape: by its name, or, if another pool that can be used better has
    that, by its directory, which says layout and user."""
    labelled: dict[str, PoolListing] = {}
    for one in sorted(listings, key=lambda one: _STATES.index(one.state) if one.state in _STATES else len(_STATES)):
        names = (one.name, os.path.basename(one.path), one.path)
        labelled[next(name for name in names if name not in labelled)] = one
    return list(labelled.items())


def _samples(pool: str, listing: PoolListing) -> Iterator[tuple[str, Value]]:
    report = inspect_if_ok(listing)
    yield "pool_readable", ((pool,), float(report is not None))
    if listing.idle_seconds is not None:
        yield "pool_idle_seconds", ((pool,), listing.idle_seconds)
    for state, count in (("alive", listing.processes_alive), ("dead", listing.processes_dead)):
        if count is not None:
            yield "pool_processes", ((pool, state), count)
    if report is not None:
        yield from _inside(pool, report)


def _inside(name: str, report: InspectReport) -> Iterator[tuple[str, Value]]:
    pool = (name,)
    yield "pool_capacity_bytes", (pool, report.bytes_max)
    yield "pool_used_bytes", (pool, report.bytes_used)
    yield "pool_slots", (pool, report.geometry.slots_used)
    for space in report.namespaces:
        labels = (name, *_names(space))
        yield "cache_resident_blocks", (labels, space.blocks_sealed)
        yield "cache_resident_bytes", (labels, space.bytes_sealed)
        yield "cache_slots", (labels, space.slots)
        yield "inflight_blocks", (labels, space.blocks_reserved)
        yield "quarantined_blocks", (labels, space.blocks_quarantined)
        yield "leases", (labels, space.leases)
        yield "namespace_resets", (labels, space.epoch)
    for process in report.processes:
        row = (name, str(process.row), process.label)
        yield "process_share_bytes", (row, process.share_bytes)
        yield "process_used_bytes", (row, process.used_bytes)
        yield "process_leases", (row, process.leases)
        yield "process_reserved_blocks", (row, process.reserved)
    if report.ssd is not None:
        yield from _tier(pool, report.ssd)
    if report.traffic is not None:
        spaces = {space.id: (name, *_names(space)) for space in report.namespaces}
        yield from _asked(report.traffic, spaces)
        pressure = report.traffic.pressure
        yield "index_rebuilds", (pool, pressure.index_rebuilds)
        yield "lock_timeouts", (pool, pressure.lock_timeouts)
        yield "lock_wait_seconds_max", (pool, pressure.lock_wait_us_max / 1e6)
        yield from _estimates(name, report.traffic, report.bytes_max)


def _names(space: NamespaceReport) -> tuple[str, str, str]:
    return space.fingerprint[:16], str(space.group), space.label


def _asked(traffic: TrafficReport, spaces: Mapping[int, tuple[str, ...]]) -> Iterator[tuple[str, Value]]:
    for counts in traffic.namespaces:
        labels = spaces[counts.id]
        missed = {reason: getattr(counts, f"miss_{reason}") for reason in REASONS}
        for tier in TIERS:
            yield "cache_tier_block_requests", ((*labels, tier), getattr(counts, f"hit_{tier}"))
        yield "cache_tier_block_requests", ((*labels, "miss"), sum(missed.values()))
        for reason, blocks in missed.items():
            yield "cache_block_misses", ((*labels, reason), blocks)
        yield "cache_prompts", (labels, counts.prompts)
        yield "cache_block_insertions", (labels, counts.stored_blocks)
        yield "cache_insertion_bytes", (labels, counts.stored_bytes)
        yield "load_blocks", (labels, counts.loaded_blocks)
        yield "load_bytes", (labels, counts.loaded_bytes)
        for name in ("evicted_blocks", "refused_blocks", "grow_failures"):
            yield name, (labels, getattr(counts, name))


def _estimates(pool: str, traffic: TrafficReport, bytes_max: int) -> Iterator[tuple[str, Value]]:
    for window in traffic.windows:
        labels = (pool, window_name(window))
        yield "hll_cardinality", (labels, window.distinct)
        yield "hll_total_requests", (labels, window.asked)
        if window.hit_ppm is not None:
            yield "hll_estimated_hit_rate", (labels, window.hit_ppm / 1e6)
    for point in traffic.curve.points:
        if point.hit_ppm is not None:
            yield "curve_hit_rate", ((pool, size_name(point, bytes_max)), point.hit_ppm / 1e6)
    yield "curve_sampling_rate", ((pool,), traffic.curve.sampled_ppm / 1e6)
    yield "curve_references", ((pool,), traffic.curve.references)
    yield "curve_skipped_prompts", ((pool,), traffic.curve.skipped)


def _tier(pool: tuple[str], tier: TierReport) -> Iterator[tuple[str, Value]]:
    yield "ssd_serving", (pool, float(tier.state == "serving"))
    yield "ssd_resident_blocks", (pool, tier.records)
    yield "ssd_recovery_zones", (pool, tier.zones_done)
    yield "ssd_zones", (pool, tier.zones)
    yield "ssd_prefetch_inflight_bytes", (pool, tier.queued_bytes)
    yield "ssd_prefetch_throughput_bytes_per_second", (pool, tier.read_bytes_per_second)
    yield "ssd_read_wait_seconds_max", (pool, tier.read_wait_ms_max / 1000)
    yield "ssd_write_blocks", (pool, tier.spilled_blocks)
    yield "ssd_write_bytes", (pool, tier.spilled_bytes)
    yield "ssd_prefetch_success", (pool, tier.read_blocks)
    yield "ssd_prefetch_bytes", (pool, tier.read_bytes)
    yield "ssd_prefetch_joined", (pool, tier.read_joined)
    yield "ssd_prefetch_failures", ((*pool, "damaged"), tier.read_damaged)
    yield "ssd_prefetch_failures", ((*pool, "failed"), tier.read_failed)
    yield "ssd_dropped_blocks", (pool, tier.ssd_dropped)
    yield "ssd_turned_off", (pool, tier.turned_off)
