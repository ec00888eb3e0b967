"""A pool of a million slots, filled with chains of blocks, for ``lookup``, ``attach`` and ``reap``."""

import time
from pathlib import Path

from pegaflow import _native

SLOTS = 1_000_000
PART_BYTES = 256
# Room for the slots, the control file, and what rounding costs.
POOL_BYTES = 320 << 20
PLACE_BYTES = 1 << 30
CHAIN_BLOCKS = 10_000
CHAINS_FULL = SLOTS // CHAIN_BLOCKS
SHARE_FILLED = 0.9
CHAINS = int(CHAINS_FULL * SHARE_FILLED)
FINGERPRINT = b"a million slots".ljust(32, b"\0")
NAME = "bench"
GROW_SECONDS_MAX = 60.0
BATCH = 1000


def key(chain: int, block: int) -> bytes:
    """Key of one block; hashes of real blocks are as evenly spread, so these are hashed too."""
    import hashlib

    return hashlib.blake2b(chain.to_bytes(8, "big") + block.to_bytes(8, "big"), digest_size=16).digest()


def chain_keys(chain: int, blocks: int = CHAIN_BLOCKS) -> list[bytes]:
    """Keys of a chain from its head."""
    return [key(chain, block) for block in range(blocks)]


def open_pool(place: Path, create: bool = False) -> tuple[_native.Pool, _native.Namespace]:
    """Attach, and find the namespace."""
    pool = _native.Pool.open(
        NAME, shm_dir=str(place), pool_bytes=POOL_BYTES, slots_max=SLOTS, create=create, label="bench"
    )
    return pool, pool.namespace(FINGERPRINT, 0, [PART_BYTES], label="a million slots")


def store(pool: _native.Pool, namespace: _native.Namespace, keys: list[bytes], parent: bytes | None) -> int:
    """Reserve, mark and publish blocks as a connector does, without copying bytes. Returns how many are visible."""
    parents: list[bytes | None] = [parent, *keys[:-1]]
    refs = [ref for _, ref in namespace.reserve(keys, parents=parents)]
    pool.mark_written(0, refs)
    return pool.publish(refs)


def fill(pool: _native.Pool, namespace: _native.Namespace, chains: int = CHAINS) -> None:
    """Store so many chains; waits while the pool grows."""
    deadline = time.monotonic() + GROW_SECONDS_MAX
    for chain in range(chains):
        keys = chain_keys(chain)
        done = 0
        while done < len(keys):
            batch = keys[done : done + BATCH]
            stored = store(pool, namespace, batch, keys[done - 1] if done else None)
            done += stored
            if stored < len(batch):
                if time.monotonic() > deadline:
                    raise SystemExit(f"The pool did not grow: {pool.last_grow_error() or 'no reason given'}")
                time.sleep(0.01)
