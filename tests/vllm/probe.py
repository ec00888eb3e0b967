"""Runs inside workers: digests of every block at the moment that its copy has ended, by the block's ref."""

import ctypes
import hashlib
from typing import Any

from pegaflow.connector.copies import Copies

_saved: dict[str, str] = {}
_loaded: dict[str, str] = {}
_book = Copies._book


def install(worker: Any) -> None:
    """Look at every block that this worker copies from now on. ``worker``: vLLM's; unused."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    half = get_kv_transfer_group()._worker

    def digest(group: int, block: int) -> str:
        regions = half._group_layouts[group].regions
        data = [ctypes.string_at(address + block * stride, length) for address, stride, length in regions]
        return hashlib.sha256(b"".join(data)).hexdigest()

    def recording(self: Copies, done: Any) -> None:
        task, (group, refs, block_ids) = self._in_flight[done.job]
        kind = _saved if task.save is not None else _loaded
        kind.update({str(ref): digest(group, block) for ref, block in zip(refs, block_ids, strict=True)})
        _book(self, done)

    _saved.clear()
    _loaded.clear()
    Copies._book = recording  # type: ignore[method-assign]


def recorded(worker: Any) -> dict[str, dict[str, str]]:
    """Digests of what was saved and what was loaded. ``worker``: vLLM's; unused."""
    return {"saved": dict(_saved), "loaded": dict(_loaded)}
