"""Block hashes of the native module against Python's cbor2 and xxhash, which are what vLLM calls."""

import hashlib
from typing import Any

import cbor2
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pegaflow import _native
from pegaflow.errors import InvalidArgument

DIGESTS = {
    "xxhash_cbor": lambda data: xxhash.xxh3_128_digest(data),
    "sha256_cbor": lambda data: hashlib.sha256(data).digest(),
}

tokens = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 300_000), max_size=40)
leaves = st.none() | st.booleans() | st.integers(-(2**64), 2**64 - 1) | st.text(max_size=300) | st.binary(max_size=300)
trees = st.recursive(leaves, lambda inner: st.lists(inner, max_size=30).map(tuple), max_leaves=60)


def reference(algorithm: str, parent: bytes, block: list[int], extra: tuple[Any, ...] | None) -> bytes:
    return DIGESTS[algorithm](cbor2.dumps((parent, tuple(block), extra), canonical=True))


@given(
    algorithm=st.sampled_from(sorted(DIGESTS)),
    parent=st.binary(max_size=40),
    block=tokens,
    extra=st.none() | st.lists(trees, max_size=5).map(tuple),
)
def test_hash_equals_that_of_cbor2(
    algorithm: str, parent: bytes, block: list[int], extra: tuple[Any, ...] | None
) -> None:
    assert _native.block_hash(algorithm, parent, block, extra) == reference(algorithm, parent, block, extra)


@pytest.mark.parametrize("edge", [0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**64 - 1])
def test_every_length_of_integer_is_encoded_alike(edge: int) -> None:
    extra = (edge, -edge - 1, "x" * min(edge, 70_000), b"y" * min(edge, 70_000), (None,) * min(edge, 70_000))
    expected = reference("sha256_cbor", b"parent", [edge], extra)
    assert _native.block_hash("sha256_cbor", b"parent", [edge], extra) == expected


def test_chain_of_a_long_prompt_equals_that_of_cbor2() -> None:
    native = expected = b"\x01" * 16
    for start in range(0, 4096, 16):
        block = list(range(start, start + 16))
        native = _native.block_hash("xxhash_cbor", native, block)
        expected = reference("xxhash_cbor", expected, block, None)
    assert native == expected


def test_any_sequence_of_tokens_will_do() -> None:
    expected = reference("xxhash_cbor", b"", [1, 2, 3], None)
    for sequence in ([1, 2, 3], (1, 2, 3), range(1, 4)):
        assert _native.block_hash("xxhash_cbor", b"", sequence) == expected


def test_lists_within_extra_keys_count_as_tuples() -> None:
    assert _native.block_hash("xxhash_cbor", b"", [], (["a", 1],)) == reference("xxhash_cbor", b"", [], (("a", 1),))


@pytest.mark.parametrize("name", ["sha256", "xxhash", "", "SHA256_CBOR"])
def test_algorithms_that_pickle_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="xxhash_cbor or sha256_cbor"):
        _native.block_hash(name, b"", [])


@pytest.mark.parametrize("extra", [2**64, -(2**64) - 1, 2**200, 1.5, {"a": 1}, {1}, object()])
def test_extra_keys_that_cannot_be_hashed_alike_are_refused(extra: object) -> None:
    with pytest.raises(InvalidArgument, match="extra key"):
        _native.block_hash("xxhash_cbor", b"", [], (extra,))


def test_endless_nesting_is_refused() -> None:
    nested: list[Any] = []
    nested.append(nested)
    with pytest.raises(InvalidArgument, match="nested deeper"):
        _native.block_hash("xxhash_cbor", b"", [], (nested,))


@pytest.mark.parametrize("token", [-1, 2**64, "1", None, 1.0])
def test_tokens_that_are_no_whole_numbers_are_refused_by_place(token: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"tokens\[2\]"):
        _native.block_hash("xxhash_cbor", b"", [1, 2, token])
