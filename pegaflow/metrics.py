"""What the connector counts, and under which names Prometheus shows it.

The recorders are plain data: they cross from workers to the scheduler and on to the API server.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SAMPLES_MAX = 4_096
"""Samples kept per histogram between two reports; more are dropped, so that nothing grows without bound."""

COUNTERS = {
    "load_success": "Requests whose blocks were all loaded from the pool.",
    "load_followed": "Requests that went on before their load was over, layer by layer behind it.",
    "load_failure": "Requests for which at least one block could not be loaded and is recomputed.",
    "load_overdue": "Loads that take longer than PEGA_LOAD_TIMEOUT_SECONDS, whether they succeed or fail then.",
    "full_prefix_incomplete": "Requests that waited for their whole prompt in the pool and took a part of it.",
    "save_success": "Save jobs whose blocks all became visible in the pool.",
    "save_failure": "Save jobs of which at least one block did not become visible in the pool.",
    "save_blocks_deferred": "Times that a full block found no room and was left for a later step.",
    "hit_tokens_ram": "Tokens of prompts that were in the pool's memory.",
    "hit_tokens_ssd": "Tokens of prompts that were brought from SSD.",
    "hit_tokens_peer": "Tokens of prompts that were brought from other hosts.",
    "miss_tokens": "Tokens of prompts that were nowhere, and are computed.",
    "off_tokens": "Tokens of prompts that were not looked for, since the pool is off.",
    "miss_blocks_never_stored": "Blocks of prompts that nobody has stored, as far as is remembered.",
    "miss_blocks_evicted": "Blocks of prompts that were stored, and they or blocks before them have gone since.",
    "miss_blocks_reset": "Blocks of prompts that were stored under another fingerprint or before a reset.",
    "miss_blocks_late": "Blocks of prompts that were on SSD or other hosts, and not here when the wait was over.",
    "miss_blocks_tier_off": "As evicted, and the SSD tier that may have them does not serve.",
    "prefetch_requests": "Requests that were put off to bring blocks from SSD.",
    "prefetch_incomplete": "Such requests that went on before all of it was there.",
    "peer_questions": "Requests for which other hosts were asked.",
    "peer_requests": "Requests that were put off to bring blocks from other hosts.",
    "peer_incomplete": "Requests that went on before all of it was there, or before all had answered.",
    "shard_crowded": "Requests that went on before the ranks could be asked, since too many others waited.",
    "shard_late": "Requests that went on before the ranks of all hosts had said what is there.",
    "registration_bytes": "Bytes of the pool that were page-locked for devices.",
    "loaded_bytes": "Bytes that devices got from the pool.",
    "saved_bytes": "Bytes that the pool got from devices.",
    "load_moving_us": "Microseconds for which bytes were on their way to devices.",
    "save_moving_us": "As load_moving_us, from devices; the time for which they were still being computed is left out.",
    "bounced_bytes": "Bytes copied between a device and memory that was not page-locked, with the CPU's help.",
    "hook_errors": "Exceptions that were turned into a miss instead of reaching vLLM.",
}
HISTOGRAMS = {
    "load_duration_seconds": "Seconds from the start of a load to its last byte.",
    "load_blocks": "Blocks per load.",
    "full_prefix_wait_seconds": "Seconds that requests waited for their whole prompt in the pool, if they had to.",
    "prefetch_wait_seconds": "Seconds that requests were put off for blocks on SSD.",
    "peer_wait_seconds": "Seconds that requests were put off for other hosts: for their answers, and for blocks.",
    "save_duration_seconds": "Seconds from the start of a save to its last byte.",
    "save_blocks": "Blocks per save job.",
}
GAUGES = {
    "pending_save_requests": "Save jobs that are not finished yet.",
    "pinned_blocks": "Blocks of vLLM's block pool that are held until they are saved.",
    "registered_bytes": "Bytes of the pool that are page-locked now, on the worker that reported last.",
    "peers_up": "Other hosts that answer.",
    "peers_failing": "Other hosts that are left alone for a while, since they failed.",
    "peer_serving": "Whether this process answers other hosts for the pool.",
    "peer_sessions": "Processes of other hosts that this one answers.",
    "peer_leased_bytes": "Bytes of the pool that are held for other hosts.",
    "peer_sent_bytes": "Bytes that this process has sent to other hosts by TCP since it began to serve.",
    "peer_read_bytes": "Bytes of blocks that came from other hosts.",
    "peer_queued_bytes": "Bytes that other hosts were asked for and that are not there yet.",
    "peer_corrupt_blocks": "Blocks from other hosts whose bytes were wrong; none of them was used.",
    "ssd_serving": "Whether the pool's SSD tier serves; the gauges of the tier are those of the whole pool.",
    "ssd_recovery_percent": "How much of the files on SSD was looked at since they were opened.",
    "ssd_records": "Blocks on SSD.",
    "ssd_spilled_bytes": "Bytes written to SSD since the pool was made.",
    "ssd_read_bytes": "Bytes read from SSD since the pool was made.",
    "ssd_joined_blocks": "Blocks that were asked for while they were being read for somebody else.",
    "ssd_bad_records": "Blocks on SSD that were damaged or could not be read.",
    "ssd_dropped_blocks": "Blocks that were evicted from memory and were not on SSD.",
    "ssd_read_wait_ms_max": "Longest time from asking for blocks on SSD to having them.",
    "ssd_read_bytes_per_second": "Bandwidth of reads from SSD, of late.",
    "ssd_queued_bytes": "Bytes that were asked for from SSD and are not in memory yet.",
}
WINDOW_NAMES = ("5m", "1h", "24h")
"""Windows of the estimates of a cache without bounds, in the order of ``Pool.windows``."""

_HLL_GAUGES = {
    "hll_cardinality": "About how many distinct blocks were missed, by all processes of the pool, in the last {}.",
    "hll_total_requests": "Blocks that were asked for, by all processes of the pool, in the last {}.",
    "hll_estimated_hit_rate": "What a cache without bounds would have found of them, 0 to 1, in the last {}.",
}
GAUGES |= {f"{key}_{name}": text.format(name) for key, text in _HLL_GAUGES.items() for name in WINDOW_NAMES}

SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
BLOCK_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def prometheus_name(key: str) -> str:
    """Name of a metric as it is registered; Prometheus adds ``_total`` to counters."""
    return f"vllm:pega_{key}"


def buckets(key: str) -> tuple[float, ...]:
    """Upper bounds of a histogram's buckets."""
    return SECONDS_BUCKETS if key.endswith("_seconds") else BLOCK_BUCKETS


@dataclass
class Recorder:
    """Counts of one process since they were last taken. Not thread-safe: one thread owns it."""

    counters: dict[str, int] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    _reported: dict[str, float] = field(default_factory=dict)

    def count(self, key: str, by: int = 1) -> None:
        """Add to a counter."""
        if by:
            self.counters[key] = self.counters.get(key, 0) + by

    def observe(self, key: str, value: float) -> None:
        """Add a sample to a histogram."""
        values = self.samples.setdefault(key, [])
        if len(values) < SAMPLES_MAX:
            values.append(value)

    def gauge(self, key: str, value: float) -> None:
        """Set a gauge; unchanged values are not reported again."""
        if self._reported.get(key) != value:
            self.gauges[key] = value
            self._reported[key] = value

    def take(self) -> dict[str, Any] | None:
        """Everything since the last call as fresh plain data, or ``None`` if nothing happened."""
        if not (self.counters or self.samples or self.gauges):
            return None
        taken = {"counters": self.counters, "samples": self.samples, "gauges": self.gauges}
        self.counters, self.samples, self.gauges = {}, {}, {}
        return taken


def merge(target: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Add the data of ``other`` (see ``Recorder.take``) to ``target``; of gauges the later one stays."""
    counters = target.setdefault("counters", {})
    for key, value in other.get("counters", {}).items():
        counters[key] = counters.get(key, 0) + value
    samples = target.setdefault("samples", {})
    for key, values in other.get("samples", {}).items():
        samples[key] = (samples.get(key, []) + list(values))[:SAMPLES_MAX]
    target.setdefault("gauges", {}).update(other.get("gauges", {}))
