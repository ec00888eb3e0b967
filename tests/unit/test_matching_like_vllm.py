"""Our search for the longest hit beside vLLM's own, on the same random blocks: how much of a prompt can be restored
must not depend on who restores it."""

import os
import random
from typing import Any

import torch
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from pegaflow.connector import groups
from pegaflow.connector.matching import find_match
from pegaflow.keys import group_keys
from tests.unit.test_connector_groups import HEADS, config

HASHES = 24
HASH_TOKENS = 16
BLOCKS = 100
CASES = 400

register_all_kvcache_specs(None)


def spec_of(kind: str, size: int, reach: int, place: int) -> Any:
    """A group's specification: blocks of ``size`` tokens, of which the next token sees ``reach`` back. No two are
    equal: vLLM makes one search of equal groups, and drops a block of all of them for a drafter in one."""
    heads = {**HEADS, "num_kv_heads": 1 + place}
    if kind == "window":
        return SlidingWindowSpec(block_size=size, sliding_window=reach, **heads)
    if kind == "chunk":
        return ChunkedLocalAttentionSpec(block_size=size, attention_chunk_size=reach, **heads)
    if kind == "state":
        return MambaSpec(size, ((reach, 1 + place),), (torch.float32,), mamba_cache_mode="align")
    return FullAttentionSpec(block_size=size, **heads)


def model(rng: random.Random) -> tuple[KVCacheConfig, bool]:
    """Groups as vLLM makes them, and whether one of them has a drafter's layers."""
    kinds = [rng.choice(["window", "chunk", "state", "full"]) for _ in range(rng.randrange(3))]
    kinds.insert(rng.randrange(len(kinds) + 1), "full")
    drafts = rng.random() < 0.4 and "chunk" not in kinds  # vLLM refuses both together
    # Chunks need blocks of one size in all groups, and with states of another size hits would end inside of blocks.
    # A drafter's window that begins with the prompt vLLM gives up where blocks differ in size.
    mixed = not {"chunk", "state"} & set(kinds) and not drafts
    sizes = [rng.choice([16, 32]) if mixed else HASH_TOKENS for _ in kinds]
    reaches = [rng.choice([32, 64, 80] if kind == "chunk" else [17, 40, 64, 80]) for kind in kinds]
    specs = map(spec_of, kinds, sizes, reaches, range(len(kinds)))
    made = [KVCacheGroupSpec([str(place)], spec) for place, spec in enumerate(specs)]
    if drafts:
        made[rng.choice([place for place, kind in enumerate(kinds) if kind != "state"])].is_eagle_group = True
    return KVCacheConfig(BLOCKS, [], made, hash_block_size=HASH_TOKENS if len(made) > 1 else sizes[0]), drafts


class Present:
    """An index that has some of its keys."""

    def __init__(self, keys: set[bytes]) -> None:
        self._keys = keys

    def lookup(self, keys: Any, start: int = 0) -> int:
        count = 0
        while start + count < len(keys) and keys[start + count] in self._keys:
            count += 1
        return count

    def contains(self, keys: Any) -> bytes:
        return bytes(key in self._keys for key in keys)


def test_hit_is_as_long_as_vllms_own() -> None:
    rng = random.Random(int(os.environ.get("PEGAFLOW_TEST_SEED", "1")))
    lengths = set()
    for case in range(CASES):
        caches, drafts = model(rng)
        geometry = groups.geometry(config(drafts=int(drafts)), caches)
        assert geometry.problem is None
        hash_tokens = int(caches.hash_block_size or 0)
        theirs: Any = get_kv_cache_coordinator(
            caches, 4096, 4096, drafts, True, False, 1, 1, geometry.align_tokens, hash_tokens
        )
        tokens = rng.randrange(1, HASHES * HASH_TOKENS)
        hashes = [BlockHash(bytes([number]) * 16) for number in range(tokens // hash_tokens)]
        keys = {group.index: group_keys(hashes, group.hashes_per_block) for group in geometry.groups}
        present: dict[int, Present] = {}
        blocks = iter(theirs.block_pool.blocks[1:])
        for group in geometry.groups:
            density = rng.choice([0.5, 0.9, 1.0])
            chosen = {key for key in keys[group.index] if rng.random() < density}
            present[group.index] = Present(chosen)
            for key in chosen:
                named = make_block_hash_with_group_id(BlockHash(key), group.index)
                theirs.block_pool.cached_block_hash_to_block.insert(named, next(blocks))
        # Of a single group vLLM drops a block even if it stops short of one; one look further is as safe.
        limit = tokens if drafts and len(geometry.groups) == 1 else tokens - 1
        found = theirs.find_longest_cache_hit(hashes, limit)[1]
        match = find_match(geometry, present, keys, 0, min(tokens - 1, geometry.hit_tokens_max(tokens)))
        assert (match.tokens if match else 0) == found, (case, geometry, tokens)
        lengths.add(found)
    assert len(lengths) > 10
