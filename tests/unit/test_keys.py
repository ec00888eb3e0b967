"""Keys of groups and fingerprints of namespaces, against vLLM's own hashing."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashListWithBlockSize

from pegaflow import _native
from pegaflow.connector import compat
from pegaflow.keys import FINGERPRINT_BYTES, PRIVATE, PRIVATE_MARK, fingerprint, group_keys, is_private, private


def media(identifier: str, offset: int, length: int) -> Any:
    """An image or the like in a prompt, as vLLM has it."""
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


HASHES = [BlockHash(bytes([index]) * 16) for index in range(11)]


@pytest.mark.parametrize("scale", [1, 2, 3, 5, 16])
def test_keys_of_larger_blocks_are_those_of_vllm(scale: int) -> None:
    assert list(group_keys(HASHES, scale)) == list(BlockHashListWithBlockSize(HASHES, 16, 16 * scale)[:])


@pytest.mark.parametrize(
    ("algorithm", "root", "blocks"),
    [
        (
            "xxhash_cbor",
            "1ebe36576dcb573f26b99533a20aaeca",
            [
                "209f5d549fc07c8e39d823615ede61ce",
                "03888914ee75b87e89df867a21beb72b",
                "bb1136747cf30f228e58f3fc25205f1e",
            ],
        ),
        (
            "sha256_cbor",
            "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e",
            [
                "d830de3d42c00f25a2949b5d12d98642664a44872c1614c5b0147556276afc9c",
                "fedd9e4abebebbe6f6cf96b682f08d316063fe2f22a5c552192dd62904fcccac",
                "5434400f3a25cc501ee4e7810bac3d3ea43224a4ea470e34bd8c7bc10710bf6c",
            ],
        ),
    ],
)
def test_chain_and_partial_tail_have_the_known_hashes(algorithm: str, root: str, blocks: list[str]) -> None:
    parent = bytes.fromhex(root)
    assert get_hash_fn_by_name(algorithm)("0") == parent
    for tokens, expected in zip([range(16), range(16, 32), range(32, 37)], blocks, strict=True):
        parent = _native.block_hash(algorithm, parent, list(tokens))
        assert parent.hex() == expected


@pytest.mark.parametrize(
    ("extra_keys", "expected"),
    [
        ((("lora", "ad", "/p"), ("cache_salt", "s")), "edf8b7f0131e6a5693f8f2396cecccdb"),
        (("ad", "s"), "d8dbd89b743a506cc59649f1da7a864f"),
    ],
    ids=["since vLLM 0.32", "before"],
)
def test_extra_keys_have_the_known_hashes(extra_keys: tuple[Any, ...], expected: str) -> None:
    root = bytes.fromhex("1ebe36576dcb573f26b99533a20aaeca")
    assert _native.block_hash("xxhash_cbor", root, list(range(16)), extra_keys).hex() == expected


def test_hash_of_a_block_is_that_of_this_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    function = get_hash_fn_by_name("sha256_cbor")
    monkeypatch.setenv("PYTHONHASHSEED", "42")
    kv_cache_utils.init_none_hash(function)
    extra = (("mm", "image", -3), ("cache_salt", "salt"))
    theirs = kv_cache_utils.hash_block_tokens(function, None, [1, 2, 70000], extra)
    assert _native.block_hash("sha256_cbor", kv_cache_utils.NONE_HASH, [1, 2, 70000], extra) == theirs


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"cache_salt": "salt"},
        {"lora_request": SimpleNamespace(lora_name="adapter", lora_path="/adapter", lora_int_id=1)},
        {"mm_features": [media("early", 3, 9), media("image", 20, 30), media("late", 55, 5)]},
        {"prompt_embeds": torch.arange(120, dtype=torch.float32).reshape(60, 2)},
    ],
    ids=["tokens", "salt", "adapter", "media", "embeddings"],
)
def test_hash_of_a_part_is_what_vllm_would_give_it(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, fields: dict[str, Any]
) -> None:
    function = get_hash_fn_by_name(algorithm)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    kv_cache_utils.init_none_hash(function)
    plain: dict[str, Any] = {"cache_salt": None, "lora_request": None, "mm_features": [], "prompt_embeds": None}
    request = SimpleNamespace(
        **(plain | fields),
        all_token_ids=list(range(60)),
        num_tokens=60,
        block_hashes=[],
        _prompt_embeds_per_block_hashes={},
    )
    config = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm))
    hash_tokens = compat.token_hasher(config)
    for block_tokens in (16, 12):
        request.block_hashes = []
        expected = kv_cache_utils.get_request_block_hasher(block_tokens, function)(request)
        parents = [None, *expected]
        found = [
            hash_tokens(request, block * block_tokens, (block + 1) * block_tokens, parents[block])
            for block in range(len(expected))
        ]
        assert found == expected
    salted = hash_tokens(request, 0, 5, None)
    assert len(salted) == 32
    assert salted != hash_tokens(request, 0, 6, None)


def test_fingerprint_does_not_depend_on_order() -> None:
    first = fingerprint({"a": 1, "b": {"x": [1, None], "y": b"\1"}})
    assert first == fingerprint({"b": {"y": b"\1", "x": [1, None]}, "a": 1})
    assert len(first) == FINGERPRINT_BYTES


def test_any_change_of_a_factor_changes_the_fingerprint() -> None:
    base: dict[str, Any] = {"dtype": "bfloat16", "tp": 2, "none_hash": b"\1", "layouts": [[4, "x"]], "draft": None}
    changes = [
        {"dtype": "float16"},
        {"tp": 1},
        {"none_hash": b"\2"},
        {"layouts": [[4, "y"]]},
        {"draft": {}},
        {"new": 0},
    ]
    prints = {fingerprint(base), *(fingerprint(base | change) for change in changes)}
    assert len(prints) == len(changes) + 1


def test_factor_without_a_canonical_form_is_refused() -> None:
    with pytest.raises(TypeError, match="SimpleNamespace"):
        fingerprint({"object": SimpleNamespace()})


def test_private_fingerprint_is_marked_and_still_another_one() -> None:
    first, second = (private(fingerprint({"private": number})) for number in range(2))
    assert first != second
    assert first.endswith(PRIVATE_MARK)
    assert len(first) == FINGERPRINT_BYTES


def test_weights_of_one_process_alone_make_private_factors() -> None:
    assert is_private({"weights": [["sampled", "a", "b"], [PRIVATE, "1234"]]})
    assert not is_private({"weights": [["sampled", "a", "b"], ["dummy", 0]]})
    assert not is_private({})
