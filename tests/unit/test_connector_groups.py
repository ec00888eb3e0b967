"""Kinds and numbers of vLLM's KV cache groups, with the specifications of the installed vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from pegaflow.connector import compat, groups
from pegaflow.connector.compat import Features
from pegaflow.connector.geometry import GroupKind

OLD = Features(failed_requests=False, block_state=False, steps_for_saves=True)
HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=32, **HEADS)
WINDOW = SlidingWindowSpec(block_size=32, sliding_window=64, **HEADS)
CHUNKED = ChunkedLocalAttentionSpec(block_size=32, attention_chunk_size=64, **HEADS)
LATENT_HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
LATENT = MLAAttentionSpec(block_size=32, **LATENT_HEADS)


def states(mode: str = "align", block_size: int = 32, conv: int = 3) -> MambaSpec:
    """As of recurrent layers."""
    return MambaSpec(block_size, ((conv, 8), (2, 16, 16)), (torch.bfloat16, torch.float32), mamba_cache_mode=mode)


def same(*specs: KVCacheSpec) -> UniformTypeKVCacheSpecs:
    """A group of layers that differ."""
    return UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={str(i): spec for i, spec in enumerate(specs)})


def config(drafts: int = 0, **parallel: int) -> Any:
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "decode_context_parallel_size": 1}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**(sizes | parallel)),
        cache_config=SimpleNamespace(block_size=32, prefix_caching_hash_algo="sha256"),
        model_config=SimpleNamespace(use_mla=False),
        speculative_config=SimpleNamespace(use_eagle=lambda: True) if drafts else None,
        num_prefill_lookahead_tokens=drafts,
    )


def caches(*specs: Any, hash_block_size: int | None = 32, drafter: int | None = None) -> KVCacheConfig:
    """As vLLM plans them; ``drafter``: the group that it marks as one."""
    made = [
        KVCacheGroupSpec([f"layer{index}"], spec, is_eagle_group=index == drafter) for index, spec in enumerate(specs)
    ]
    return KVCacheConfig(8, [], made, hash_block_size=hash_block_size)


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (FULL, GroupKind.FULL),
        (LATENT, GroupKind.FULL),
        (WINDOW, GroupKind.WINDOW),
        (SlidingWindowMLASpec(block_size=32, sliding_window=64, **LATENT_HEADS), GroupKind.WINDOW),
        (CHUNKED, GroupKind.CHUNK),
        (states(), GroupKind.STATE),
        (same(states(), states(conv=5)), GroupKind.STATE),
        (same(FULL, LATENT), GroupKind.FULL),
        (same(FULL, CHUNKED), GroupKind.UNSUPPORTED),
        (same(WINDOW, SlidingWindowSpec(block_size=32, sliding_window=96, **HEADS)), GroupKind.UNSUPPORTED),
        (FullAttentionSpec(block_size=32, non_causal=True, **HEADS), GroupKind.UNSUPPORTED),
        (SinkFullAttentionSpec(block_size=32, sink_len=32, **HEADS), GroupKind.UNSUPPORTED),
        (RSWASpec(block_size=32, rswa_window=64, **HEADS), GroupKind.UNSUPPORTED),
    ],
    ids=[
        "full", "latent", "window", "latent window", "chunked", "recurrent", "recurrent layers that differ",
        "mixed pages", "mixed kinds", "mixed windows", "not causal", "sink", "reference window",
    ],
)  # fmt: skip
def test_kind_of_a_group_comes_from_its_spec(spec: Any, kind: GroupKind) -> None:
    geometry = groups.geometry(config(), caches(spec))
    assert geometry.groups[0].kind is kind
    assert (geometry.problem is None) is (kind is not GroupKind.UNSUPPORTED)


@pytest.mark.parametrize(("window", "blocks"), [(1, 0), (2, 1), (33, 1), (34, 2), (64, 2), (65, 2), (66, 3)])
def test_window_needs_the_blocks_that_the_next_token_sees(window: int, blocks: int) -> None:
    spec = SlidingWindowSpec(block_size=32, sliding_window=window, **HEADS)
    assert groups.geometry(config(), caches(FULL, spec)).groups[1].window_blocks == blocks


def test_groups_of_larger_blocks_take_every_kth_hash() -> None:
    large = SlidingWindowSpec(block_size=96, sliding_window=64, **HEADS)
    geometry = groups.geometry(config(), caches(FULL, large))
    assert [group.hashes_per_block for group in geometry.groups] == [1, 3]
    assert geometry.align_tokens == 96
    assert not geometry.whole_prompt


def test_only_full_attention_may_claim_a_whole_prompt() -> None:
    assert groups.geometry(config(), caches(FULL)).whole_prompt
    assert not groups.geometry(config(), caches(WINDOW)).whole_prompt
    assert not groups.geometry(config(), caches(FULL, states())).whole_prompt
    assert not groups.geometry(config(drafts=1), caches(FULL)).whole_prompt


@pytest.mark.parametrize("mode", ["none", "all"])
def test_recurrent_layers_without_states_at_blocks_are_refused_and_it_is_said_what_to_do(mode: str) -> None:
    for made in (caches(states(mode), FULL), caches(states(mode, 1024), FULL, hash_block_size=3072)):
        geometry = groups.geometry(config(), made)
        assert "--enable-prefix-caching" in (geometry.problem or "")
        assert "MambaSpec" in (geometry.problem or "")


def test_recurrent_layers_are_refused_where_vllm_does_not_hand_out_states(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compat.features().boundary_states
    mute = Features(failed_requests=True, block_state=True, steps_for_saves=True, boundary_states=False)
    monkeypatch.setattr(groups, "features", lambda: mute)
    assert groups.geometry(config(), caches(FULL, states())).problem
    assert groups.geometry(config(), caches(FULL, CHUNKED)).problem is None


@pytest.mark.parametrize(("stages", "drafts", "cached"), [(1, 2, True), (2, 0, True), (2, 2, False)])
def test_recurrent_layers_are_refused_where_a_pipeline_computes_drafts(stages: int, drafts: int, cached: bool) -> None:
    made = config(pipeline_parallel_size=stages)
    if drafts:
        made.speculative_config = SimpleNamespace(use_eagle=lambda: False, num_speculative_tokens=drafts)
    geometry = groups.geometry(made, caches(FULL, states()))
    assert (geometry.problem is None) is cached
    assert cached or "pipeline" in str(geometry.problem)
    assert groups.geometry(made, caches(FULL, WINDOW)).problem is None


def test_drafter_costs_the_last_block_of_its_own_group() -> None:
    geometry = groups.geometry(config(drafts=1), caches(FULL, WINDOW, states(), drafter=0))
    assert [group.extra_blocks for group in geometry.groups] == [1, 0, 0]
    assert [group.lag_tokens for group in geometry.groups] == [0, 0, 0]
    assert geometry.drafts


def test_drafter_of_several_tokens_may_compute_the_last_ones_anew() -> None:
    [group] = groups.geometry(config(drafts=3), caches(FULL, drafter=0)).groups
    assert (group.extra_blocks, group.lag_tokens) == (1, 2)


def test_every_group_with_attention_counts_as_a_drafters_where_vllm_marks_none() -> None:
    geometry = groups.geometry(config(drafts=1), caches(FULL, states()))
    assert [group.drafts for group in geometry.groups] == [True, False]
    assert not groups.geometry(config(), caches(FULL, states())).drafts


def test_group_that_is_not_transferred_is_left_out() -> None:
    made = caches(FULL, WINDOW)
    made.kv_cache_groups[0].enable_kv_transfer = False
    assert [group.index for group in groups.geometry(config(), made).groups] == [1]


def test_scratch_of_single_requests_is_left_out() -> None:
    ring = CircularBufferSpec(block_size=32, **HEADS)
    made = caches(FULL, ring, CHUNKED)
    assert [index for index, _ in groups.taking_part(made)] == [0, 2]
    assert groups.geometry(config(), made).problem is None


def test_failed_blocks_are_named_only_where_those_before_them_are_enough_to_go_on_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert groups.fails_by_block(caches(FULL))
    assert groups.fails_by_block(caches(same(FULL, LATENT)))
    for made in (caches(WINDOW), caches(states()), caches(FULL, FULL), caches(FULL, CircularBufferSpec(32, **HEADS))):
        assert not groups.fails_by_block(made)
    monkeypatch.setattr(groups, "features", lambda: OLD)
    assert groups.fails_by_block(caches(FULL, FULL))


def test_older_vllm_gets_hybrid_models_refused_and_plain_ones_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "features", lambda: OLD)
    assert groups.geometry(config(), caches(FULL)).problem is None
    assert "0.30" in (groups.geometry(config(), caches(FULL, WINDOW)).problem or "")
    assert groups.geometry(config(), caches(WINDOW)).problem


def test_hash_block_of_older_vllm_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_utils, "resolve_kv_cache_block_sizes", lambda caches, config: (64, 16))
    made = groups.geometry(config(), caches(FULL, hash_block_size=None))
    assert made.groups[0].hashes_per_block == 2
    monkeypatch.delattr(kv_cache_utils, "resolve_kv_cache_block_sizes")
    assert groups.geometry(config(), caches(FULL, hash_block_size=None)).groups[0].hashes_per_block == 1


def test_context_parallel_blocks_are_larger_but_states_are_not() -> None:
    parallel = config(decode_context_parallel_size=2)
    made = groups.geometry(parallel, caches(FULL, states(block_size=64), hash_block_size=64))
    assert [group.block_tokens for group in made.groups] == [64, 64]


def test_what_a_state_consists_of_is_part_of_its_meaning() -> None:
    assert groups.states_meaning(FULL) == []
    assert groups.states_meaning(states()) == groups.states_meaning(states())
    assert groups.states_meaning(states()) != groups.states_meaning(states(conv=4))
    assert len(groups.states_meaning(same(states(), states(conv=4)))) == 2
