"""vLLM's KV cache groups, as far as they concern a cache of blocks by their hashes: which take part, of what kind each
is, and how its blocks lie among the tokens."""

from typing import Any

from pegaflow.connector.compat import context_ranks, features
from pegaflow.connector.geometry import Geometry, Group, GroupKind

KINDS = {
    "FullAttentionSpec": GroupKind.FULL,
    "MLAAttentionSpec": GroupKind.FULL,
    "TQFullAttentionSpec": GroupKind.FULL,
    "SlidingWindowSpec": GroupKind.WINDOW,
    "SlidingWindowMLASpec": GroupKind.WINDOW,
    "ChunkedLocalAttentionSpec": GroupKind.CHUNK,
    "MambaSpec": GroupKind.STATE,
}
"""By the name of vLLM's specification. What is not here is not cached."""

NEEDS_NEWER = "models whose layers do not all have full attention need vLLM 0.30 or newer"
NEEDS_STATES = (
    "recurrent layers (MambaSpec) keep no states that a prompt could go on from: start vLLM with "
    "--enable-prefix-caching, and without another --mamba-cache-mode than align"
)

NEEDS_ONE_STAGE = (
    "recurrent layers (MambaSpec) are not cached with pipeline parallelism and speculative decoding together: ranks "
    "before the last may not have the state of the accepted tokens when it is copied; use one of the two"
)


def taking_part(kv_cache_config: Any) -> list[tuple[int, Any]]:
    """Groups whose blocks are saved and loaded, with their numbers. vLLM rebuilds the others after a hit itself: what
    it never transfers, and what it never finds by a hash (scratch of one request)."""
    groups = enumerate(kv_cache_config.kv_cache_groups)
    kept = [(index, group) for index, group in groups if getattr(group, "enable_kv_transfer", True)]
    if hasattr(kv_cache_config, "prefix_cacheable_group_ids"):
        cacheable = set(kv_cache_config.prefix_cacheable_group_ids)
        return [(index, group) for index, group in kept if index in cacheable]
    return kept


def fails_by_block(kv_cache_config: Any) -> bool:
    """Whether failed loads are reported by their blocks, so that vLLM keeps what is before them. With other attention
    than full one what is before them is not enough to go on from. Before vLLM 0.30 there is no other way."""
    groups = kv_cache_config.kv_cache_groups
    plain = len(groups) == 1 and _kind(_layers_of(groups[0].kv_cache_spec)) is GroupKind.FULL
    return plain or not features().failed_requests


def geometry(vllm_config: Any, kv_cache_config: Any) -> Geometry:
    """Groups of the KV cache as vLLM planned them."""
    chosen = taking_part(kv_cache_config)
    hash_tokens = _hash_tokens(vllm_config, kv_cache_config)
    ahead_tokens = _ahead_tokens(vllm_config)
    marked = any(getattr(group, "is_eagle_group", False) for _, group in chosen)
    groups = []
    why = None
    for index, group in chosen:
        # vLLM takes all groups for a drafter's where it marks none.
        drafts = not marked or getattr(group, "is_eagle_group", False)
        made = _group(vllm_config, index, group, hash_tokens, ahead_tokens if drafts else 0)
        recurrent = _kind(_layers_of(group.kv_cache_spec)) is GroupKind.STATE
        if recurrent and not _keeps_states(group.kv_cache_spec):
            made, why = _refused(made), NEEDS_STATES
        elif recurrent and _drafts_in_stages(vllm_config):
            made, why = _refused(made), NEEDS_ONE_STAGE
        groups.append(made)
    plain = len(groups) == 1 and groups[0].kind is GroupKind.FULL
    if not plain and not (features().failed_requests and features().block_state):
        groups, why = [_refused(group) for group in groups], NEEDS_NEWER
    whole_prompt = all(group.kind is GroupKind.FULL and not group.drafts for group in groups)
    return Geometry(tuple(groups), whole_prompt, why)


def states_meaning(group_spec: Any) -> list[str]:
    """What the bytes of a recurrent layer's state are, which its tensor does not show."""
    facts = set()
    for layer in _layers_of(group_spec):
        if type(layer).__name__ == "MambaSpec":
            shapes = [list(shape) for shape in layer.shapes]
            facts.add(f"{layer.mamba_type}:{shapes}:{[str(dtype) for dtype in layer.dtypes]}")
    return sorted(facts)


def _layers_of(spec: Any) -> list[Any]:
    """Specifications of the layers: a group of layers that differ in their page sizes only is as good as its layers."""
    return list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]


def _kind(layers: list[Any]) -> GroupKind:
    kinds = {KINDS.get(type(layer).__name__, GroupKind.UNSUPPORTED) for layer in layers}
    return kinds.pop() if len(kinds) == 1 else GroupKind.UNSUPPORTED


def _group(vllm_config: Any, index: int, group: Any, hash_tokens: int, ahead_tokens: int) -> Group:
    spec = group.kv_cache_spec
    layers = _layers_of(spec)
    scale = context_ranks(vllm_config) if getattr(spec, "dcp_sharded", True) else 1
    block_tokens = int(spec.block_size) * scale
    name = "/".join(sorted({type(layer).__name__ for layer in layers}))
    kind = _kind(layers)
    windows = {int(getattr(layer, "sliding_window", None) or 0) for layer in layers}
    chunks = {int(getattr(layer, "attention_chunk_size", None) or 0) for layer in layers}
    window_blocks = chunk_tokens = 0
    if kind is GroupKind.WINDOW and len(windows) == 1:
        kept = max(int(getattr(layer, "extra_retained_tokens", 0)) for layer in layers)
        window_blocks = -(-(windows.pop() - 1 + kept) // block_tokens)
    elif kind is GroupKind.CHUNK and len(chunks) == 1 and 0 not in chunks:
        chunk_tokens = chunks.pop()
    elif kind in (GroupKind.WINDOW, GroupKind.CHUNK):
        kind = GroupKind.UNSUPPORTED
    refused = any(getattr(layer, "non_causal", False) for layer in layers) or getattr(group, "host_resident", False)
    if refused or block_tokens % hash_tokens or not getattr(spec, "prefix_cacheable", True):
        kind = GroupKind.UNSUPPORTED
    drafts = ahead_tokens > 0 and kind is not GroupKind.STATE  # no drafter has such layers
    hashes = max(1, block_tokens // hash_tokens)
    lag_tokens = ahead_tokens - 1 if drafts else 0
    return Group(index, kind, block_tokens, hashes, window_blocks, name, chunk_tokens, drafts, lag_tokens)


def _refused(group: Group) -> Group:
    return Group(group.index, GroupKind.UNSUPPORTED, group.block_tokens, 1, 0, group.spec_name)


def _keeps_states(spec: Any) -> bool:
    """Whether vLLM keeps states at the ends of blocks and says in which blocks they are."""
    return features().boundary_states and all(layer.mamba_cache_mode == "align" for layer in _layers_of(spec))


def _drafts_in_stages(vllm_config: Any) -> bool:
    """Whether the ranks of a pipeline compute tokens that may be taken back."""
    drafts = int(getattr(getattr(vllm_config, "speculative_config", None), "num_speculative_tokens", 0) or 0)
    return drafts > 0 and int(vllm_config.parallel_config.pipeline_parallel_size) > 1


def _ahead_tokens(vllm_config: Any) -> int:
    """How many tokens behind those that are being computed a drafter looks at; 0: there is none with layers."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None or not speculative.use_eagle():
        return 0
    return max(1, int(getattr(vllm_config, "num_prefill_lookahead_tokens", 1)))


def _hash_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    known = getattr(kv_cache_config, "hash_block_size", None)
    if known is None:
        from vllm.v1.core import kv_cache_utils

        resolve = getattr(kv_cache_utils, "resolve_kv_cache_block_sizes", None)
        if resolve is not None:
            known = resolve(kv_cache_config, vllm_config)[1]
        else:
            known = vllm_config.cache_config.block_size * context_ranks(vllm_config)
    return int(known)
