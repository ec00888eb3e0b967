"""LoRA adapters: what tells the blocks of one from those of another, whatever they are called.

vLLM's block hashes name an adapter and the directory that it came from. Blocks in the pool outlive both, so the keys of
its requests also hold a digest of its weights. Sampling them takes a thread of its own some milliseconds; until then
requests with that adapter are put off for a moment, and then left alone.
"""

import hashlib
import os
import queue
import threading
import time
import uuid
from collections import OrderedDict
from pathlib import Path
from typing import Any

from pegaflow.connector.log import logger
from pegaflow.weights import changed_since_start, local_snapshot, stamps, weights_digest

ADAPTERS_MAX = 1_024
"""Adapters remembered; the one that was not used for the longest time is forgotten first, and sampled again."""

READY_WAIT_SECONDS_MAX = 3.0
"""How long requests may be put off until an adapter's weights have been sampled."""

CHECK_SECONDS = 1.0
"""For so long files that were as expected are not looked at again."""

CONFIG_FILE = "adapter_config.json"
CONFIG_BYTES_MAX = 1 << 20
_DOMAIN = b"pegaflow adapter 1\n"


class Adapter:
    """One adapter. ``identity`` and ``problem`` are written by the sampling thread alone, ``identity`` once."""

    def __init__(self, name: str, path: str, traits: str) -> None:
        self.name, self.path, self.traits = name, path, traits
        self.identity: bytes | None = None
        """What stands for its weights in keys; ``None`` while it is not known."""
        self.problem: str | None = None
        """Why its requests have to be left alone."""
        self.stamps: tuple[Any, ...] = ()
        self.checked = 0.0
        self.first_seen = time.monotonic()

    @property
    def usable(self) -> bool:
        """Whether its requests may load and save."""
        return self.identity is not None and self.problem is None

    @property
    def worth_waiting(self) -> bool:
        """Whether a request should ask again in the next step. Bounded in time."""
        waited = time.monotonic() - self.first_seen
        return self.identity is None and self.problem is None and waited < READY_WAIT_SECONDS_MAX


class Adapters:
    """All adapters of one engine."""

    def __init__(self, traits: str = "", download_dir: str | None = None) -> None:
        """``traits``: whatever else of the configuration changes what an adapter computes."""
        self._traits = traits
        self._download_dir = download_dir
        self._known: OrderedDict[tuple[Any, ...], Adapter] = OrderedDict()
        self._jobs: queue.SimpleQueue[Adapter | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def of(self, lora_request: Any) -> Adapter | None:
        """The adapter of a request, being sampled if it is new; ``None`` without one. Never waits."""
        if lora_request is None:
            return None
        flat = bool(getattr(lora_request, "is_3d_lora_weight", False))
        key = (int(lora_request.lora_int_id), str(lora_request.lora_name), str(lora_request.lora_path), flat)
        adapter = self._known.get(key)
        if adapter is None:
            adapter = self._known[key] = Adapter(key[1], key[2], f"{self._traits} {flat}")
            while len(self._known) > ADAPTERS_MAX:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        if getattr(lora_request, "load_inplace", False):
            adapter.problem = adapter.problem or "its weights are replaced in place"
        now = time.monotonic()
        if adapter.problem is None and now - adapter.checked >= CHECK_SECONDS:
            adapter.checked = now
            self._look(adapter)
        return adapter

    def close(self) -> None:
        """Stop sampling. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)

    def _look(self, adapter: Adapter) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pegaflow-adapters", daemon=True)
            self._thread.start()
        self._jobs.put(adapter)

    def _run(self) -> None:
        while (adapter := self._jobs.get()) is not None:
            if adapter.problem is not None:
                continue  # was asked for more than once
            try:
                self._examine(adapter)
            except Exception as error:  # a thread has nobody to raise to
                adapter.problem = f"its weights cannot be read ({error})"
            if adapter.problem is not None:
                logger.warning(
                    "PegaFlow: requests with the adapter %s (%s) are not cached: %s.",
                    adapter.name, adapter.path, adapter.problem,
                )  # fmt: skip

    def _examine(self, adapter: Adapter) -> None:
        path = local_snapshot(os.path.expanduser(adapter.path), None, self._download_dir, CONFIG_FILE)
        if path is None:
            adapter.problem = "its weights are not on this host"
            return
        identity = adapter.identity
        if identity is None:
            adapter.stamps = stamps(path)
            identity = self._sample(adapter, path)
        if stamps(path) != adapter.stamps:
            # A worker that drops the adapter from memory reads it anew, and nobody knows when.
            adapter.problem = "its files have changed since it was first used; load it under another name"
        adapter.identity = identity

    @staticmethod
    def _sample(adapter: Adapter, path: str) -> bytes | None:
        digest = weights_digest(path)
        if digest is None:
            adapter.problem = f"there are no weights in {path}"
            return None
        with (Path(path) / CONFIG_FILE).open("rb") as opened:
            config = opened.read(CONFIG_BYTES_MAX)
        parts = [digest.encode(), hashlib.sha256(config).hexdigest().encode(), adapter.traits.encode()]
        if changed_since_start(path):
            # A worker may have loaded what was there before: among this engine's requests that makes no difference.
            parts.append(uuid.uuid4().bytes)
            logger.info(
                "PegaFlow: the adapter %s is newer than this process, so its blocks are not shared with others.",
                adapter.name,
            )
        return hashlib.sha256(_DOMAIN + b"\n".join(parts)).digest()
