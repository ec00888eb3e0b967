"""A pool and its SSD tier, as a configuration says."""

from typing import TYPE_CHECKING

from pegaflow import _native

if TYPE_CHECKING:
    from pegaflow._native import Pool
    from pegaflow.config import ConnectorConfig


def open_pool(config: "ConnectorConfig", label: str) -> "Pool":
    """The pool that ``config`` names, made if there is none. ``label`` says who this process is.

    Raises as ``Pool.open`` does."""
    return _native.Pool.open(
        config.pool_name,
        shm_dir=config.shm_dir,
        pool_bytes=config.pool_bytes,
        segment_bytes=config.segment_bytes,
        label=label,
        huge_pages=config.use_hugepages,
        huge_pages_dir=config.hugepages_dir,
        weight=config.weight,
        policy=config.eviction_policy,
    )


def size_note(pool: "Pool", config: "ConnectorConfig") -> str | None:
    """What to say of a pool that was there already with another size than ``config`` asks for; ``None``: nothing."""
    wanted = config.pool_bytes
    # A pool is so many whole segments.
    if wanted is None or wanted - pool.segment_bytes < pool.pool_bytes <= wanted:
        return None
    return (
        f"pool {pool.name} is there already and keeps its size of {pool.pool_bytes / 1e9:.2f} GB, so "
        f"pegaflow.pool_size ({wanted / 1e9:.2f} GB) is ignored: to change it, stop all that use it and run "
        f"'pegaflow rm {pool.path}'."
    )


def serve_ssd(pool: "Pool", config: "ConnectorConfig") -> None:
    """From now on this process may be the one that reads and writes the pool's files on SSD.

    Raises as ``Pool.serve_ssd`` does."""
    pool.serve_ssd(
        config.ssd_directories,
        capacity_bytes=config.ssd_capacity_bytes,
        admission=config.ssd_admission,
        write_bytes_per_second_max=config.ssd_write_bytes_per_second_max,
        read_depth=config.ssd_read_depth,
        write_depth=config.ssd_write_depth,
        backend=config.ssd_backend,
    )
