"""Block keys and namespaces: which bytes may stand for which.

Keys are vLLM's own block hashes, verbatim. This module only picks the right ones for a group of larger blocks,
recomputes the hashes that vLLM does not hand out, and makes the fingerprint of a namespace.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

FINGERPRINT_BYTES = 32
_FINGERPRINT_DOMAIN = b"pegaflow namespace 1\n"

HashFunction = Callable[[bytes], bytes]


def group_keys(block_hashes: Sequence[bytes], hashes_per_block: int) -> Sequence[bytes]:
    """Keys of one KV cache group whose blocks span ``hashes_per_block`` of vLLM's hash blocks.

    Every hash covers the whole prefix before it, so a larger block is named by the hash of its last hash block.
    """
    if hashes_per_block == 1:
        return block_hashes
    return block_hashes[hashes_per_block - 1 :: hashes_per_block]


def fingerprint(factors: Mapping[str, Any]) -> bytes:
    """32 bytes that change whenever any of ``factors`` does.

    ``factors`` holds plain JSON values and ``bytes``; the order of keys does not matter. Anything else is a
    ``TypeError``: an object whose text changed from run to run would silently never match.
    """
    text = json.dumps(factors, sort_keys=True, separators=(",", ":"), allow_nan=True, default=_encode_bytes)
    return hashlib.sha256(_FINGERPRINT_DOMAIN + text.encode()).digest()


def _encode_bytes(value: object) -> str:
    if isinstance(value, bytes):
        return "bytes:" + value.hex()
    raise TypeError(f"{type(value).__name__} has no canonical form")


def canonical_cbor(value: Any) -> bytes:
    """Canonical CBOR (shortest forms, definite lengths) of ``None``, ``bool``, ``int`` of 64 bits, ``bytes``, ``str``
    and tuples or lists of these: all that vLLM hashes."""
    if value is None:
        return b"\xf6"
    if isinstance(value, bool):
        return b"\xf5" if value else b"\xf4"
    if isinstance(value, int):
        return _cbor_head(0, value) if value >= 0 else _cbor_head(1, -1 - value)
    if isinstance(value, bytes):
        return _cbor_head(2, len(value)) + value
    if isinstance(value, str):
        encoded = value.encode()
        return _cbor_head(3, len(encoded)) + encoded
    if isinstance(value, tuple | list):
        return _cbor_head(4, len(value)) + b"".join(map(canonical_cbor, value))
    raise TypeError(f"{type(value).__name__} is not part of a block hash")


def _cbor_head(major: int, number: int) -> bytes:
    if number < 24:
        return bytes([major << 5 | number])
    for code, width in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 1 << 8 * width:
            return bytes([major << 5 | code]) + number.to_bytes(width, "big")
    raise OverflowError(f"{number} does not fit in 64 bits")


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _xxh3_128(data: bytes) -> bytes:
    import xxhash  # vLLM asks for it only where one of its xxhash algorithms is used

    return bytes(xxhash.xxh3_128_digest(data))


_DIGESTS: dict[str, HashFunction] = {"sha256_cbor": _sha256, "xxhash_cbor": _xxh3_128}


def is_portable(algorithm: str) -> bool:
    """Whether hashes of ``algorithm`` can be computed outside Python (the others pickle)."""
    return algorithm in _DIGESTS


def none_hash(algorithm: str, seed: str) -> bytes:
    """Parent of every first block for ``seed`` (the text of ``PYTHONHASHSEED``)."""
    return _DIGESTS[algorithm](canonical_cbor(seed))


def block_hash(algorithm: str, parent: bytes, token_ids: Sequence[int], extra_keys: Any = None) -> bytes:
    """Hash of a block, or of the partial block at the end of a prompt, as vLLM computes it.

    ``parent``: hash of the block before it, or the root (``none_hash``). ``extra_keys``: vLLM's own tuple of LoRA,
    multimodal, salt and embedding keys, or ``None``. Raises ``KeyError`` unless ``is_portable(algorithm)``.
    """
    return _DIGESTS[algorithm](canonical_cbor((parent, tuple(token_ids), extra_keys)))
