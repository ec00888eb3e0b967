"""What was asked of a pool and found, as the native engine reports it. Counters are of all processes, living and dead,
since the pool was made; ``docs/traffic.md`` says what they mean. Rates are millionths: all numbers are integers.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class NamespaceTraffic:
    """Counters of the namespace of the same number."""

    id: int
    prompts: int
    blocks_asked: int
    hit_ram: int
    hit_ssd: int
    hit_peer: int
    miss_never_stored: int
    miss_evicted: int
    miss_reset: int
    miss_late: int
    miss_tier_off: int
    stored_blocks: int
    stored_bytes: int
    loaded_blocks: int
    loaded_bytes: int
    evicted_blocks: int
    """Blocks that were evicted from memory."""
    refused_blocks: int
    """Blocks that were to be stored and got no slot."""
    grow_failures: int
    """Segments that could not be made."""


TIERS = ("ram", "ssd", "peer")
"""Where blocks were found: ``hit_*`` of ``NamespaceTraffic``."""

REASONS = ("never_stored", "evicted", "reset", "late", "tier_off")
"""Why blocks were not found: ``miss_*`` of ``NamespaceTraffic``."""


@dataclass(frozen=True)
class WindowReport:
    """What a cache without bounds would have found of late."""

    seconds: int
    asked: int
    """Blocks."""
    distinct: int
    """About so many distinct ones were missed."""
    hit_ppm: int | None
    """``None``: nothing was asked for."""


@dataclass(frozen=True)
class PointReport:
    """What a pool of so many bytes would have found."""

    bytes: int
    hit_ppm: int | None


@dataclass(frozen=True)
class CurveReport:
    """What the pool would have found had it another size."""

    references: int
    """Blocks that it is about."""
    samples: int
    """Blocks that are followed."""
    sampled_ppm: int
    """How many of a million blocks are."""
    skipped: int
    """Prompts that it does not know, since somebody else was at it."""
    points: list[PointReport]


@dataclass(frozen=True)
class PressureReport:
    """What belongs to no namespace."""

    lock_timeouts: int
    """Waits for locks that ran out."""
    index_rebuilds: int
    lock_wait_us_max: int
    """Longest wait of a process that lives, since it began."""


PRESSURE = ("evicted_blocks", "refused_blocks", "grow_failures", "index_rebuilds", "lock_timeouts")
"""Counters that rise when a pool, or its host, is too small: names in ``counts_of``."""


@dataclass(frozen=True)
class TrafficReport:
    """Statistics of a pool."""

    namespaces: list[NamespaceTraffic]
    windows: list[WindowReport]
    curve: CurveReport
    pressure: PressureReport


def window_name(window: WindowReport) -> str:
    """Such as ``5m``, ``1h``, ``24h``."""
    return f"{window.seconds // 3600}h" if window.seconds >= 3600 else f"{window.seconds // 60}m"


def size_name(point: PointReport, pool_bytes: int) -> str:
    """Such as ``0.5x`` for half of the pool."""
    return f"{point.bytes / max(1, pool_bytes):.4g}x"


def sum_of(namespaces: Sequence[NamespaceTraffic]) -> dict[str, int]:
    """Counters over all namespaces, by name, without ``id``."""
    names = [name for name in NamespaceTraffic.__dataclass_fields__ if name != "id"]
    return {name: sum(getattr(space, name) for space in namespaces) for name in names}


def counts_of(traffic: TrafficReport) -> dict[str, int]:
    """All counters of a pool, by name."""
    pressure = traffic.pressure
    whole = {"lock_timeouts": pressure.lock_timeouts, "index_rebuilds": pressure.index_rebuilds}
    return sum_of(traffic.namespaces) | whole
