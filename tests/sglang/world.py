"""SGLang's own parts on a CPU: its host pools, its storage factory and its cache controller, each test in children.

A child is forked from a process that has imported SGLang, which takes longer than all tests. It counts as started when
it is forked, after the models were made; so their weights are known to it and its pages are shared.
"""

import functools
import gc
import hashlib
import multiprocessing
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import HostKVCache, host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.runtime_context import get_parallel, publish
from sglang.srt.server_args import ServerArgs

from pegaflow.sglang import engine_facts
from tests.sglang.stand_ins import stand_in_for_hashes

stand_in_for_hashes()
# What is there now stays: children then share its memory instead of copying it when they count references.
gc.collect()
gc.freeze()

T = TypeVar("T")

PAGE_TOKENS = 16
DEVICE_TOKENS = 256
LAYERS = 3
MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
CHILD_SECONDS_MAX = 600.0
MIB = 1 << 20

BACKEND = {"backend_name": "pegaflow", "module_path": "pegaflow.sglang", "class_name": "PegaHiCacheStorage"}
"""What a user writes to have SGLang load the backend."""


@dataclass(frozen=True)
class Setup:
    """One engine's shape."""

    model: Path
    shm_dir: Path
    layout: str = "page_first"
    latent: bool = False
    by_address: bool = True
    tensor_rank: int = 0
    tensor_ranks: int = 1
    dtype: torch.dtype = torch.bfloat16
    page_tokens: int = PAGE_TOKENS
    pool_bytes: int = 64 * MIB
    metrics: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def extra_config(self) -> dict[str, Any]:
        """As after ``--hicache-storage-backend-extra-config`` was read."""
        ours = {"pegaflow.shm_dir": str(self.shm_dir), "pegaflow.pool_size": self.pool_bytes}
        return {**BACKEND, "interface_v1": int(self.by_address), **ours, **dict(self.options)}


def host_pool(setup: Setup) -> HostKVCache:
    """SGLang's host pool of this layout, in memory that is not pinned."""
    common = {"size": DEVICE_TOKENS, "page_size": setup.page_tokens, "dtype": setup.dtype, "layer_num": LAYERS}
    common |= {"device": "cpu", "enable_memory_saver": False}
    place = {"page_size": setup.page_tokens, "layout": setup.layout, "pin_memory": False, "host_size": 0}
    place |= {"host_to_device_ratio": 2.0, "device_capacity_tokens": DEVICE_TOKENS, "start_layer": 0}
    with host_memory_budget_scope(1 << 30):
        if setup.latent:
            latent = MLATokenToKVPool(kv_lora_rank=128, qk_rope_head_dim=64, **common)
            info = latent._mla_buffer_info()
            made = MLATokenToKVPoolHost(info, end_layer=LAYERS, target_layer_num=LAYERS, **place)
        else:
            heads = MHATokenToKVPool(head_num=2, head_dim=64, **common)
            made = MHATokenToKVPoolHost(heads._mha_buffer_info(), end_layer=LAYERS, **place)
    made.kv_buffer.zero_()
    return made


def storage_config(setup: Setup) -> HiCacheStorageConfig:
    """As SGLang's cache controller makes it."""
    return HiCacheStorageConfig(
        tp_rank=setup.tensor_rank,
        tp_size=setup.tensor_ranks,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=setup.latent,
        enable_storage_metrics=setup.metrics,
        is_page_first_layout=setup.layout == "page_first",
        model_name="tiny",
        extra_config=setup.extra_config,
    )


class Options:
    """SGLang's options of this process, some of them others than it was started with."""

    def __init__(self, **changed: Any) -> None:
        self._started_with = engine_facts.server_args()
        vars(self).update(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._started_with, name)


def start_with(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    """Have children find these options of SGLang. What an engine does with them is not done."""
    options = Options(**changed)
    monkeypatch.setattr(engine_facts, "server_args", lambda: options)


published: list[tuple[str, int]] = []
"""Model and page size that this process, or its parent, has published last."""


def publish_model(setup: Setup) -> None:
    """Say to SGLang which model this process runs. It takes a while, so tests do it once for all of their children."""
    wanted = (str(setup.model), setup.page_tokens)
    if published[-1:] != [wanted]:
        publish(ServerArgs(model_path=wanted[0], device="cpu", page_size=wanted[1]), role="scheduler")
        published.append(wanted)


@contextmanager
def engine(setup: Setup) -> Iterator[tuple[Any, HostKVCache]]:
    """``(storage backend, host pool)`` of an engine, made by SGLang's factory."""
    publish_model(setup)
    pool = host_pool(setup)
    storage = StorageBackendFactory.create_backend("dynamic", storage_config(setup), pool)
    storage.register_mem_pool_host(pool)
    try:
        yield storage, pool
    finally:
        storage.close()


@contextmanager
def controller(setup: Setup) -> Iterator[HiCacheController]:
    """SGLang's cache controller with its threads of storage, attached to the backend as an engine does it."""
    publish_model(setup)
    made, device = host_pool(setup), _device_pool(setup)

    class Allocator:
        def get_kvcache(self) -> Any:
            return device

    with tempfile.NamedTemporaryFile() as rendezvous:
        torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous.name}", rank=0, world_size=1)
        world = torch.distributed.group.WORLD
        with get_parallel().override(tp_rank=setup.tensor_rank, tp_size=setup.tensor_ranks, pp_rank=0, pp_size=1):
            running = HiCacheController(
                Allocator(),
                made,
                setup.page_tokens,
                world,
                threading.Event(),
                io_backend="direct",
                storage_backend="dynamic",
                prefetch_threshold=setup.page_tokens,
                model_name="tiny",
                storage_backend_extra_config=setup.extra_config,
            )
        try:
            yield running
        finally:
            running.detach_storage_backend()
            torch.distributed.destroy_process_group()


def _device_pool(setup: Setup) -> Any:
    common = {"size": DEVICE_TOKENS, "page_size": setup.page_tokens, "dtype": setup.dtype, "layer_num": LAYERS}
    return MHATokenToKVPool(head_num=2, head_dim=64, device="cpu", enable_memory_saver=False, **common)


def page_hashes(count: int, salt: str = "") -> list[str]:
    """Names of pages as SGLang makes them: a chain of SHA-256 in hex."""
    chain, digest = [], salt
    for number in range(count):
        digest = hashlib.sha256(f"{digest}/{number}".encode()).hexdigest()
        chain.append(digest)
    return chain


def page_bytes(pool: HostKVCache, page: int) -> bytes:
    """What one page holds, in the order of its layout."""
    flat = pool.get_data_page(page * pool.page_size)
    return bytes(flat.contiguous().view(torch.uint8).numpy())


def fill(pool: HostKVCache, pages: int, seed: int = 0) -> list[bytes]:
    """Put random bytes in the first pages. Returns what each of them holds."""
    raw = pool.kv_buffer.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    return [page_bytes(pool, page) for page in range(pages)]


def indices(pool: HostKVCache, pages: list[int]) -> torch.Tensor:
    """Indices of pages in a host pool, as SGLang allocates them."""
    return torch.cat([torch.arange(page * pool.page_size, (page + 1) * pool.page_size) for page in pages])


def in_child(function: Callable[..., T], *arguments: Any, signalled: int = 0) -> T:
    """``function(*arguments)``, run in a forked child. ``signalled``: the signal that has to end it, instead of a
    result."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=functools.partial(_run, sender, function), args=arguments)
    child.start()
    sender.close()
    try:
        answered = receiver.poll(CHILD_SECONDS_MAX)
        outcome = receiver.recv() if answered and not signalled else None
        child.join(CHILD_SECONDS_MAX)
        assert child.exitcode == (-signalled if signalled else 0), f"the child ended with {child.exitcode}"
    finally:
        child.kill()
        child.join()
    return outcome  # type: ignore[no-any-return]


def _run(sender: Any, function: Callable[..., Any], *arguments: Any) -> None:
    # Torch's own threads stayed behind in the parent.
    torch.set_num_threads(1)
    sender.send(function(*arguments))


KILLED = signal.SIGKILL
