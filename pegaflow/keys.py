"""Block keys and namespaces: which bytes may stand for which.

Keys are vLLM's own block hashes, verbatim, except for requests with adapters. This module picks the right ones for a
group of larger blocks and makes the fingerprint of a namespace. Hashes that vLLM does not hand out are computed by
``pegaflow._native.block_hash``.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

FINGERPRINT_BYTES = 32
PRIVATE = "private"
"""What the identity of weights begins with that only one process has."""

PRIVATE_MARK = b"private\n"
"""How the fingerprints of private namespaces end; that another one does happens once in 2^64."""

_FINGERPRINT_DOMAIN = b"pegaflow namespace 1\n"
_SHARD_DOMAIN = b"pegaflow shard 1\n"
_ADAPTER_DOMAIN = b"pegaflow adapter key 1\n"


def group_keys(block_hashes: Sequence[bytes], hashes_per_block: int) -> Sequence[bytes]:
    """Keys of one KV cache group whose blocks span ``hashes_per_block`` of vLLM's hash blocks.

    Every hash covers the whole prefix before it, so a larger block is named by the hash of its last hash block.
    """
    if hashes_per_block == 1:
        return block_hashes
    return block_hashes[hashes_per_block - 1 :: hashes_per_block]


def adapter_key(identity: bytes, block_hash: bytes) -> bytes:
    """Key of a block that was computed with an adapter: vLLM's hash, and what stands for the adapter's weights."""
    return hashlib.sha256(_ADAPTER_DOMAIN + identity + block_hash).digest()


def fingerprint(factors: Mapping[str, Any]) -> bytes:
    """32 bytes that change whenever any of ``factors`` does.

    ``factors`` holds plain JSON values and ``bytes``; the order of keys does not matter. Anything else is a
    ``TypeError``: an object whose text changed from run to run would silently never match.
    """
    text = json.dumps(factors, sort_keys=True, separators=(",", ":"), allow_nan=True, default=_encode_bytes)
    return hashlib.sha256(_FINGERPRINT_DOMAIN + text.encode()).digest()


def shard_fingerprint(replica: bytes, shard: int, shards: int, part: int, weights: Sequence[Any]) -> bytes:
    """Name of the blocks that one rank keeps by itself: those of ``part`` in a replica whose ranks are divided into
    ``shards``. ``weights``: what identifies them on the rank's host, which may have others than the one that made the
    fingerprint of the replica. Private if either is."""
    own = fingerprint({"part": part, "shard": f"tp-shard-{shard}-of-{shards}", "weights": list(weights)})
    key = hashlib.sha256(_SHARD_DOMAIN + replica + own).digest()
    return private(key) if replica.endswith(PRIVATE_MARK) or is_private({"weights": weights}) else key


def is_private(factors: Mapping[str, Any]) -> bool:
    """Whether some weights are only their own process's."""
    return any(identity[:1] == [PRIVATE] for identity in factors.get("weights", ()))


def private(key: bytes) -> bytes:
    """The fingerprint ``key`` marked as one that only its own engine can name: no directory is told of its blocks."""
    return key[: -len(PRIVATE_MARK)] + PRIVATE_MARK


def _encode_bytes(value: object) -> str:
    if isinstance(value, bytes):
        return "bytes:" + value.hex()
    raise TypeError(f"{type(value).__name__} has no canonical form")
