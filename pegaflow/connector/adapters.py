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
from pegaflow.weights import Stamps, local_snapshot, stamped_since_start, stamps, weights_digest

ADAPTERS_MAX = 1_024
"""Adapters remembered; the one that was not used for the longest time is forgotten first, and sampled again."""

READY_WAIT_SECONDS_MAX = 3.0
"""How long requests may be put off until an adapter's weights have been sampled."""

CHECK_SECONDS = 1.0
"""For so long files that were as expected are not looked at again."""

CHECK_SECONDS_MAX = 3.0
"""For so long a look at files may take; until it ends after that, the adapter is left alone."""

THREADS_MAX = 4
"""Threads that look at files: a path that hangs takes one away."""

CONFIG_FILE = "adapter_config.json"
CONFIG_BYTES_MAX = 1 << 20
_DOMAIN = b"pegaflow adapter 1\n"


class Adapter:
    """One adapter. ``identity`` is written once, by the thread that looks at its files."""

    def __init__(self, name: str, path: str, traits: str) -> None:
        self.name, self.path, self.traits = name, path, traits
        self.identity: bytes | None = None
        """What stands for its weights in keys; ``None`` while it is not known."""
        self.problem: str | None = None
        """Why its requests have to be left alone."""
        self.stamps: Stamps = ()
        self.checked = 0.0
        self.first_seen = time.monotonic()
        self.asked = self.answered = 0
        """How often a look at its files was asked for, and up to which of these looks all have ended."""
        self.waits_since = 0.0
        """When the oldest look that has not ended was asked for."""
        self.queued = False

    @property
    def usable(self) -> bool:
        """Whether its requests may load and save."""
        return self.identity is not None and self.problem is None and not self._hangs

    @property
    def worth_waiting(self) -> bool:
        """Whether a request should ask again in the next step. Bounded in time."""
        waited = time.monotonic() - self.first_seen
        return self.identity is None and self.problem is None and waited < READY_WAIT_SECONDS_MAX

    def confirms(self, look: int) -> bool | None:
        """Whether files were as expected in the look of this number (``Adapters.ask``); ``None``: not known yet."""
        answered = self.answered  # first: a problem is there before its answer
        if not self.usable:
            return False
        return True if answered >= look else None

    @property
    def _hangs(self) -> bool:
        return self.asked > self.answered and time.monotonic() - self.waits_since > CHECK_SECONDS_MAX


class Adapters:
    """All adapters of one engine."""

    def __init__(self, traits: str = "") -> None:
        """``traits``: whatever else of the configuration changes what an adapter computes."""
        self._traits = traits
        self._known: OrderedDict[tuple[Any, ...], Adapter] = OrderedDict()
        self._jobs: queue.SimpleQueue[Adapter | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        """Of ``asked``, ``answered``, ``queued`` and the number of those. Never held while files are looked at."""
        self._queued = 0

    def of(self, lora_request: Any) -> Adapter | None:
        """The adapter of a request, being sampled if it is new; ``None`` without one. Never waits."""
        if lora_request is None:
            return None
        flat = bool(getattr(lora_request, "is_3d_lora_weight", False))
        in_place = bool(getattr(lora_request, "load_inplace", False))
        key = (int(lora_request.lora_int_id), str(lora_request.lora_name), str(lora_request.lora_path), flat)
        adapter = self._known.get(key)
        if adapter is None or in_place:
            adapter = adapter or Adapter(key[1], key[2], f"{self._traits} {flat}")
            self._set_apart(key[0], adapter, in_place)
            self._known[key] = adapter
            while len(self._known) > ADAPTERS_MAX:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        now = time.monotonic()
        if adapter.problem is None and now - adapter.checked >= CHECK_SECONDS:
            adapter.checked = now
            self._look(adapter)
        return adapter

    def ask(self, adapter: Adapter) -> int:
        """Have the files looked at from now on. Returns the number of that look, for ``Adapter.confirms``."""
        self._look(adapter)
        return adapter.asked

    def close(self) -> None:
        """Stop looking at files. Idempotent."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)

    def _set_apart(self, number: int, adapter: Adapter, in_place: bool) -> None:
        """Workers go by the number alone: nobody can tell which weights they have of several that share one."""
        if in_place:
            self._refuse(adapter, "its weights are replaced in place")
        for (taken, *_), other in self._known.items():
            if taken == number and other is not adapter:
                for one, rival in ((other, adapter), (adapter, other)):
                    self._refuse(one, f"its number {number} also stands for {rival.name} ({rival.path})")

    def _refuse(self, adapter: Adapter, problem: str) -> None:
        """Leave an adapter alone for good, and say so once."""
        with self._lock:
            known, adapter.problem = adapter.problem, adapter.problem or problem
        if known is None:
            logger.warning(
                "PegaFlow: requests with the adapter %s (%s) are not cached: %s.", adapter.name, adapter.path, problem
            )

    def _look(self, adapter: Adapter) -> None:
        with self._lock:
            if adapter.asked == adapter.answered:
                adapter.waits_since = time.monotonic()
            adapter.asked += 1
            if adapter.queued or self._queued >= ADAPTERS_MAX:
                return
            adapter.queued = True
            self._queued += 1
            if len(self._threads) < min(self._queued, THREADS_MAX):
                thread = threading.Thread(target=self._run, name="pegaflow-adapters", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._jobs.put(adapter)

    def _run(self) -> None:
        while (adapter := self._jobs.get()) is not None:
            look = adapter.asked
            if adapter.problem is None:
                try:
                    self._examine(adapter)
                except Exception as error:  # a thread has nobody to raise to
                    self._refuse(adapter, f"its weights cannot be read ({error})")
            with self._lock:
                adapter.answered, adapter.waits_since = look, time.monotonic()
                adapter.queued = adapter.asked > look
                self._queued -= not adapter.queued
                if adapter.queued:
                    self._jobs.put(adapter)

    def _examine(self, adapter: Adapter) -> None:
        # Workers look for adapters in the hub's own cache, wherever the model's weights are kept.
        path = local_snapshot(os.path.expanduser(adapter.path), None, None, CONFIG_FILE)
        if path is None:
            self._refuse(adapter, "its weights are not on this host")
            return
        identity = adapter.identity
        if identity is None:
            adapter.stamps = stamps(path)
            identity = self._sample(adapter, path)
        if stamps(path) != adapter.stamps:
            # A worker that drops the adapter from memory reads it anew, and nobody knows when.
            self._refuse(adapter, "its files have changed since it was first used; load it under another name")
        adapter.identity = identity

    def _sample(self, adapter: Adapter, path: str) -> bytes | None:
        digest = weights_digest(path)
        if digest is None:
            self._refuse(adapter, f"there are no weights in {path}")
            return None
        with (Path(path) / CONFIG_FILE).open("rb") as opened:
            config = opened.read(CONFIG_BYTES_MAX)
        parts = [digest.encode(), hashlib.sha256(config).hexdigest().encode(), adapter.traits.encode()]
        if stamped_since_start(adapter.stamps):
            # A worker may have loaded what was there before: among this engine's requests that makes no difference.
            parts.append(uuid.uuid4().bytes)
            logger.info(
                "PegaFlow: the adapter %s is newer than this process, so its blocks are not shared with others.",
                adapter.name,
            )
        return hashlib.sha256(_DOMAIN + b"\n".join(parts)).digest()
