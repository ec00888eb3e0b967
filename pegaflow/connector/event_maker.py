"""vLLM's KV events, made from ours: only with fields that the installed vLLM has."""

from collections.abc import Callable, Sequence
from typing import Any

from pegaflow.connector.events import RemovedBlock, StoredBlock

MEDIUM = "CPU"
"""vLLM's name for host memory; blocks on devices are ``"GPU"``."""


class KVEventMaker:
    """See ``events.EventMaker``."""

    def __init__(self, group_facts: Callable[[int], tuple[str | None, int | None]]) -> None:
        """``group_facts``: kind and sliding window of a KV cache group, as vLLM's own events say it."""
        from vllm.distributed import kv_events
        from vllm.v1.core import kv_cache_utils

        self._group_facts = group_facts
        self._types = (kv_events.BlockStored, kv_events.BlockRemoved)
        self._external: Any = kv_cache_utils.maybe_convert_block_hash
        self._generate: Any = kv_cache_utils.generate_block_hash_extra_keys
        self._untag: Any = getattr(kv_cache_utils, "to_event_extra_keys", list)

    def extra_keys(self, request: Any, start: int, stop: int) -> tuple[Any, ...] | None:
        """What vLLM puts into the hash of the tokens ``start <= token < stop`` besides them."""
        keys, _ = self._generate(request, start, stop, 0)
        return tuple(keys) if keys is not None else None

    def stored(self, blocks: Sequence[StoredBlock]) -> Any:
        """Event for a run of blocks of one group, each the child of the one before it."""
        first = blocks[0]
        kind, window = self._group_facts(first.group)
        return _make(
            self._types[0],
            block_hashes=[self._external(block.block_hash) for block in blocks],
            parent_block_hash=self._external(first.parent_hash) if first.parent_hash is not None else None,
            token_ids=[token for block in blocks for token in block.tokens],
            block_size=len(first.tokens),
            lora_id=first.lora_id,
            lora_name=first.lora_name,
            medium=MEDIUM,
            extra_keys=self._untag([block.extra_keys for block in blocks]),
            group_idx=first.group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )

    def removed(self, blocks: Sequence[RemovedBlock]) -> Any:
        """Event for blocks of one group."""
        hashes = [self._external(block.block_hash) for block in blocks]
        return _make(self._types[1], block_hashes=hashes, medium=MEDIUM, group_idx=blocks[0].group)


def _make(event_type: Any, **fields: Any) -> Any:
    known = event_type.__struct_fields__
    return event_type(**{name: value for name, value in fields.items() if name in known})
