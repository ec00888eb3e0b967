"""SGLang's scheduler with its model, radix tree, cache controller and the backend, in this process, on the CPU.

Everything that a request meets is SGLang's own but for what only a GPU can do: ``stand_in_for_gpu`` says what that is.
Requests are handed to the scheduler's loop as its socket would, and read from it, so no tokenizer process is needed.
"""

import array
import functools
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.pool_host import mha
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

# All models are imported with it, once: children find them there.
from sglang.srt.models import registry as registry
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

from tests.sglang.world import Setup

ANSWER_TOKENS = 6
DEVICE_TOKENS = 1024
CONTEXT_TOKENS = 512
HOST_BYTES_MAX = 1 << 30
SECONDS_MAX = 400.0


@dataclass(frozen=True)
class Answer:
    """What came of one request, and where its prompt was found."""

    tokens: list[int]
    from_storage: int
    from_host: int
    from_device: int
    kv: bytes
    """Keys and values of the prompt's whole pages in the device pool, layer by layer."""


def stand_in_for_gpu() -> None:
    """Have SGLang do as tensor copies what it has CUDA kernels for, and page-lock nothing."""
    pinned = mha.MHATokenToKVPoolHost.__init__
    mha.MHATokenToKVPoolHost.__init__ = functools.partialmethod(pinned, pin_memory=False)
    mha.transfer_kv_direct = _copy_layers
    mha.transfer_kv_per_layer_direct_pf_lf = _pages_to_layer
    mha.transfer_kv_all_layer_direct_lf_pf = _layers_to_pages


def _copy_layers(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def _pages_to_layer(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    pages = src_indices[::page_size] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].flatten(0, 1)


def _layers_to_pages(src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    pages = dst_indices[::page_size] // page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        target = dst_ptrs[number // layers]
        target[pages, number % layers] = source[src_indices].unflatten(0, (len(pages), page_size))


def server_args(setup: Setup) -> ServerArgs:
    """As a user would start it, for a small model on the CPU."""
    return ServerArgs(
        model_path=str(setup.model),
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        disable_overlap_schedule=True,
        skip_tokenizer_init=True,
        max_total_tokens=DEVICE_TOKENS,
        context_length=CONTEXT_TOKENS,
        max_running_requests=4,
        page_size=setup.page_tokens,
        log_level="warning",
        enable_hierarchical_cache=True,
        hicache_ratio=2.0,
        hicache_io_backend="direct",
        hicache_mem_layout=setup.layout,
        hicache_storage_backend="dynamic",
        hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_backend_extra_config=json.dumps({**setup.extra_config, "prefetch_threshold": 16}),
    )


def instance_id(setup: Setup) -> str:
    """What SGLang calls this process, in the name of a file in shared memory too that a killed engine leaves behind."""
    return f"{setup.shm_dir.name}-{os.getpid()}"


def remove_leftovers(setup: Setup) -> None:
    """Remove such files of all engines of a test."""
    for path in Path("/dev/shm").glob(f"sglang_loads_{setup.shm_dir.name}-*"):
        path.unlink(missing_ok=True)


class Engine:
    """One engine that answers one request at a time."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        options = server_args(setup)
        publish(options, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        # SGLang leaves 10 GiB of the machine's free memory alone, and a small machine may have less.
        with host_memory_budget_scope(HOST_BYTES_MAX):
            self._scheduler = Scheduler(options, replace(PortArgs.init_new(options), instance_id=instance_id(setup)))
        self._asked = 0

    def ask(self, prompt: list[int]) -> Answer:
        """Continue a prompt greedily, and go on until its pages are in storage."""
        request = self._request(prompt)
        todo, taken = [request], list[Req]()
        deadline = time.monotonic() + SECONDS_MAX

        def ingest() -> None:
            if todo:
                self._scheduler.process_input_requests([todo.pop()])
                taken.extend(self._scheduler.waiting_queue)
            assert time.monotonic() < deadline, "the request, or the write to storage, does not end"
            self._scheduler.gracefully_exit = taken[0].finished() and self._stored(prompt)

        self._scheduler.ingest_requests = ingest
        self._scheduler.gracefully_exit = False
        self._scheduler.event_loop_normal()
        (done,) = taken
        found = (done.cached_tokens_storage, done.cached_tokens_host, done.cached_tokens_device)
        return Answer(list(done.output_ids), *found, self._kv_of(prompt))

    def close(self) -> None:
        """As a server that was told to stop."""
        self._scheduler.release_host_resources()

    def _request(self, prompt: list[int]) -> TokenizedGenerateReqInput:
        self._asked += 1
        sampling = SamplingParams(max_new_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
        sampling.normalize(None)
        return TokenizedGenerateReqInput(
            rid=f"request-{self._asked}",
            input_text="",
            input_ids=array.array("q", prompt),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )

    def _stored(self, prompt: list[int]) -> bool:
        names = get_storage_hash_str(RadixKey(prompt), None, page_size=self._setup.page_tokens)
        storage = self._scheduler.tree_cache.cache_controller.storage_backend
        return bool(storage.batch_exists(names) == len(names))

    def _kv_of(self, prompt: list[int]) -> bytes:
        pages = len(prompt) // self._setup.page_tokens
        tree = self._scheduler.tree_cache
        match = tree.match_prefix(MatchPrefixParams(key=RadixKey(array.array("q", prompt))))
        at = tree.path_device_indices(match.last_device_node)[: pages * self._setup.page_tokens]
        assert len(at) == pages * self._setup.page_tokens, "a prompt that was just computed is not in the tree"
        pool = self._scheduler.token_to_kv_pool_allocator.get_kvcache()
        return b"".join(layer[at].view(torch.uint8).numpy().tobytes() for layer in (*pool.k_buffer, *pool.v_buffer))


@contextmanager
def whole_engine(setup: Setup) -> Iterator[Engine]:
    """An engine that ends in good order."""
    stand_in_for_gpu()
    running = Engine(setup)
    try:
        yield running
    finally:
        running.close()
