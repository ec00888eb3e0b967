"""KV caches as vLLM lays them out, written and read back through the copier: every byte, and no other."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from pegaflow import _native
from pegaflow.connector import compat
from tests.kv_round_trip import round_trip
from tests.kv_tensors import BLOCKS, CACHES, HEADS, LAYERS, SINCE_0_32, TOKENS, WIDTH, Cache, Layer
from tests.unit.native_pools import open_pool

BF16 = torch.bfloat16
PLAIN = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": WIDTH, "dtype": BF16}


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[_native.Pool]:
    opened = open_pool(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def copier(pool: _native.Pool) -> Iterator[_native.HostCopier]:
    made = _native.HostCopier(pool)
    yield made
    made.close()


@pytest.mark.parametrize("name", CACHES)
def test_blocks_come_back_equal_and_nothing_else_changes(
    pool: _native.Pool, copier: _native.HostCopier, name: str
) -> None:
    round_trip(pool, copier, CACHES[name], "cpu", 7)


@pytest.mark.parametrize("name", CACHES)
def test_part_is_as_long_as_the_pages_of_the_group(name: str) -> None:
    cache = CACHES[name]("cpu")
    for layout, layers in zip(cache.layouts(), cache.groups, strict=True):
        assert layout.part_bytes == sum(layer.page_bytes for layer in layers)


@pytest.mark.parametrize(
    "name", ["cross_layer_nhd", "cross_layer_hnd", "cross_layer_flex", "cross_layer_mla", "packed", "BLHNC", "BHLNC"]
)
def test_block_whose_layers_lie_together_is_one_run(name: str) -> None:
    (layout,) = CACHES[name]("cpu").layouts()
    assert len(layout.regions) == 1


def test_layers_together_or_apart_share_their_blocks() -> None:
    def digest(name: str) -> str:
        return CACHES[name]("cpu").layouts()[0].digest

    assert digest("cross_layer_nhd") == digest("flash_attention_nhd")
    assert digest("cross_layer_mla") == digest("mla")
    assert digest("BLHNC") == digest("LBHNC")
    assert len({digest(name) for name in ("cross_layer_hnd", "flash_attention_hnd", "cross_layer_flashinfer_hnd")}) == 3


# -- the installed vLLM's own allocation ------------------------------------------------------------------------------


def spec(kind: type[AttentionSpec] = FullAttentionSpec, **changes: Any) -> AttentionSpec:
    return kind(**{**PLAIN, **changes})


def mla(tokens: int, head_size: int, **changes: Any) -> AttentionSpec:
    return MLAAttentionSpec(block_size=tokens, num_kv_heads=1, head_size=head_size, **{"dtype": BF16, **changes})


UINT8: dict[str, Any] = {"dtype": torch.uint8}
OF_VLLM: dict[str, list[list[AttentionSpec]]] = {
    **{layout.name: [[spec()] * LAYERS] for layout in KVCacheLayout},
    "LBHNC_fp8": [[spec(dtype=torch.float8_e4m3fn)] * LAYERS],
    "LBNHC_per_token_head": [[spec(dtype=torch.int8, state_content_bytes=2 * WIDTH + 8)] * LAYERS],
    "BLHNC_per_token_head": [[spec(dtype=torch.float8_e4m3fn, state_content_bytes=2 * WIDTH + 8)] * LAYERS],
    "LBHNC_nvfp4": [[spec(num_head_slots=2 * HEADS, state_content_bytes=18, **UINT8)] * LAYERS],
    "LHBNC_keys_and_values_as_heads": [[spec(num_head_slots=2, state_content_bytes=HEADS * WIDTH * 2)] * LAYERS],
    "LBNHC_turboquant": [[spec(state_content_bytes=50, **UINT8)] * LAYERS],
    "LBHNC_kernel_blocks": [[spec(block_size=4 * TOKENS)] * LAYERS],
    "LBNHC_kernel_blocks": [[spec(block_size=2 * TOKENS)] * LAYERS],
    "LBHNC_padded": [[spec(page_size_padded=3 * HEADS * TOKENS * 2 * WIDTH * 2)] * LAYERS],
    "LBHNC_mla": [[mla(TOKENS, 576)] * LAYERS],
    "BLHNC_mla": [[mla(TOKENS, 576)] * LAYERS],
    "LBNHC_mla_fp8_with_scales": [[mla(64, 576, state_content_bytes=656, **UINT8)] * LAYERS],
    "BLHNC_mla_and_indexer": [
        [mla(64, 512, state_content_bytes=584, alignment=576, **UINT8)] * LAYERS + [mla(64, 132, **UINT8)] * 2
    ],
    "LBHNC_unequal_pages": [[spec()] * LAYERS + [mla(TOKENS, 576)] * 2],
    "LBHNC_groups_from_one_byte": [[spec()] * LAYERS, [spec(SlidingWindowSpec, sliding_window=64)] * 2],
    "BLNHC_groups_from_one_byte": [
        [spec()] * LAYERS,
        [spec(SlidingWindowSpec, sliding_window=64, num_kv_heads=2, state_content_bytes=4 * WIDTH)] * 4,
    ],
}
"""The caches of ``SINCE_0_32`` by the specs that make vLLM allocate them: groups of layers."""


def allocated(name: str) -> tuple[Any, Cache]:
    """A cache that the installed vLLM allocates: its configuration, and its tensors."""
    layout = KVCacheLayout[name[:5]]
    groups = []
    for number, specs in enumerate(OF_VLLM[name]):
        names = [f"{number}.{place}" for place in range(len(specs))]
        by_layer: dict[str, KVCacheSpec] = dict(zip(names, specs, strict=True))
        mixed = UniformTypeKVCacheSpecs(block_size=specs[0].block_size, kv_cache_specs=by_layer)
        groups.append(KVCacheGroupSpec(names, specs[0] if len(set(specs)) == 1 else mixed))
    cache_config = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout,
        prefix_cache_retention_interval=None,
        num_gpu_blocks_override=BLOCKS,
    )
    config: Any = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None), cache_config=cache_config, kv_transfer_config=None
    )
    planned = get_kv_cache_config_from_groups(config, groups, 1 << 30)
    kernel_tokens = [TOKENS if "kernel_blocks" in name else specs[0].block_size for specs in OF_VLLM[name]]
    tensors = allocate_kv_cache(planned, torch.device("cpu"), layout, kernel_tokens)
    layers = []
    for specs, group in zip(OF_VLLM[name], groups, strict=True):
        named = zip(specs, group.layer_names, strict=True)
        layers.append(tuple(Layer(one, tensors[one], kind.page_size_bytes) for kind, one in named))
    return planned, Cache(planned.num_blocks, tuple(layers), ())


@pytest.mark.parametrize("name", OF_VLLM)
def test_caches_of_these_tests_are_those_of_vllm(name: str) -> None:
    planned, cache = allocated(name)
    assert planned.num_blocks == BLOCKS
    ours = SINCE_0_32[name]("cpu")
    for theirs, mine in zip(cache.groups, ours.groups, strict=True):
        start_of_theirs, start_of_mine = theirs[0].tensor.data_ptr(), mine[0].tensor.data_ptr()
        for a, b in zip(theirs, mine, strict=True):
            assert (a.tensor.shape, a.tensor.stride()) == (b.tensor.shape, b.tensor.stride())
            assert a.tensor.data_ptr() - start_of_theirs == b.tensor.data_ptr() - start_of_mine
            assert (a.tensor.dtype, a.page_bytes) == (b.tensor.dtype, b.page_bytes)


@pytest.mark.parametrize("name", OF_VLLM)
def test_connector_sees_of_vllms_tensors_what_there_is(name: str) -> None:
    planned, cache = allocated(name)
    for group, layers in zip(planned.kv_cache_groups, cache.groups, strict=True):
        tensors = {layer.name: layer.tensor for layer in layers}
        described = compat.layer_tensors(tensors, group.layer_names, group.kv_cache_spec)
        assert described == [layer.described() for layer in layers]


def test_every_order_of_vllm_is_among_the_cases() -> None:
    assert {layout.name for layout in KVCacheLayout} <= set(SINCE_0_32)
