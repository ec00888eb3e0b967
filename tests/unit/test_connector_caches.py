"""Caches as vLLM hands them to the connector: all layers in one tensor, and layouts that turn it off."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pegaflow.connector import PegaKVConnector, compat
from pegaflow.connector.copies import NativeTypes, Task
from pegaflow.connector.guard import Guard
from pegaflow.metrics import Recorder
from tests.fakes import FakeCopier, FakeLayout, FakePool
from tests.kv_tensors import BEFORE_0_32, BLOCKS, CACHES, Cache

FAKES: tuple[Any, ...] = (lambda name, shm_dir: FakePool(), lambda pool, device: FakeCopier(pool), FakeLayout)


def connector_for(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker's connector that was told of ``cache``'s groups and has no tensors yet."""
    monkeypatch.setattr(compat, "worker_rank", lambda config: (0, 0))
    connector: Any = PegaKVConnector.__new__(PegaKVConnector)
    connector._recorder = Recorder()
    connector._guard = Guard(connector._recorder, lambda reason: None)
    connector._native, connector._worker, connector._store = NativeTypes(*FAKES), None, None
    connector._connector_metadata, connector._by_block = None, len(cache.groups) == 1
    connector._groups = [
        (index, [layer.name for layer in layers], SimpleNamespace(page_size_bytes=layers[0].page_bytes))
        for index, layers in enumerate(cache.groups)
    ]
    connector._vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={}),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(),
    )
    shared = [SimpleNamespace(shared_by=[layer.name]) for layer in cache.groups[0]]
    connector._kv_cache_config = SimpleNamespace(
        num_blocks=BLOCKS, kv_cache_tensors=shared, kv_cache_groups=list(cache.groups)
    )
    return connector


def tensors_of(cache: Cache) -> dict[str, torch.Tensor]:
    return {layer.name: layer.tensor for layers in cache.groups for layer in layers}


@pytest.mark.parametrize("name", [name for name in BEFORE_0_32 if name.startswith("cross_layer")])
def test_one_tensor_of_all_layers_is_taken_as_the_layers_that_vllm_sees(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BEFORE_0_32[name]("cpu")
    by_layer, whole = connector_for(cache, monkeypatch), connector_for(cache, monkeypatch)
    by_layer.register_kv_caches(tensors_of(cache))
    first = cache.groups[0][0].tensor
    order = sorted(range(first.dim() + 1), key=lambda dim: -_strides(cache)[dim])
    shape = [(len(cache.groups[0]), *first.shape)[dim] for dim in order]
    physical = cache.backings[0].view(first.dtype).view(shape)
    backend = SimpleNamespace(get_kv_cache_stride_order=lambda include_num_layers_dimension: tuple(order))
    assert whole.prefer_cross_layer_blocks
    whole.register_cross_layers_kv_cache(physical, backend)
    assert whole.get_handshake_metadata().problem is None
    assert whole.get_handshake_metadata() == by_layer.get_handshake_metadata()
    assert [one.regions for one in whole._worker._layouts.values()] == [list(cache.layouts()[0].regions)]


def _strides(cache: Cache) -> list[int]:
    first, second = (layer.tensor for layer in cache.groups[0][:2])
    step = (second.data_ptr() - first.data_ptr()) // first.element_size()
    return [step, *first.stride()]


def test_each_group_of_shared_tensors_has_its_own_part(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = BEFORE_0_32["two_groups_share_tensors"]("cpu")
    connector = connector_for(cache, monkeypatch)
    connector.register_kv_caches(tensors_of(cache))
    shape = connector.get_handshake_metadata()
    assert [group.part_bytes for group in shape.groups] == [layout.part_bytes for layout in cache.layouts()]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensor: tensor[:-1], "no dimension of 24 blocks"),
        (lambda tensor: tensor[..., ::2], "its page has"),
        (lambda tensor: tensor[:, :, :1].expand(-1, -1, 16, -1, -1), "overlap"),
        (lambda tensor: tensor.to("meta"), "devices are not supported"),
        (lambda tensor: tensor[:1].expand(BLOCKS, -1, -1, -1, -1), "overlap"),
    ],
    ids=["blocks", "gaps", "expanded", "device", "one block"],
)
def test_layout_that_is_not_understood_turns_the_connector_off_with_one_line(
    change: Any, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = BEFORE_0_32["flash_attention_nhd"]("cpu")
    connector = connector_for(cache, monkeypatch)
    tensors = tensors_of(cache)
    tensors["1"] = change(tensors["1"])
    with caplog.at_level(logging.DEBUG):
        connector.register_kv_caches(tensors)
        problem = connector.get_handshake_metadata().problem
    assert words in problem
    assert "\n" not in problem
    assert caplog.records == []  # the scheduler says it
    assert connector.get_finished(set()) == (None, None)


def test_caches_that_are_no_tensors_turn_the_connector_off(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = BEFORE_0_32["flash_attention_nhd"]("cpu")
    connector = connector_for(cache, monkeypatch)
    connector.register_kv_caches({"0": [cache.groups[0][0].tensor]})
    assert "not a tensor" in connector.get_handshake_metadata().problem


def test_layers_stay_apart_where_attention_finds_scales_only_so(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = connector_for(BEFORE_0_32["triton_int8_per_token_head"]("cpu"), monkeypatch)
    for cache_dtype, together in (("auto", True), ("fp8", True), ("int8_per_token_head", False)):
        connector._vllm_config.cache_config.cache_dtype = cache_dtype
        assert connector.prefer_cross_layer_blocks is together


@pytest.mark.parametrize("by_block", [True, False])
def test_block_ids_of_failed_loads_are_reported_only_if_vllm_has_a_single_group(
    by_block: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's engine dies of ids that may be of several groups; see ``groups.fails_by_block``."""
    cache = next(make("cpu") for make in CACHES.values() if len(make("cpu").groups) == 1)
    connector = connector_for(cache, monkeypatch)
    connector._by_block = by_block
    connector.register_kv_caches(tensors_of(cache))
    for ask in ("get_transfer_results", "get_finished"):
        connector._worker._ended = [Task(load="request", ok=False, failed_blocks={3}, bad_refs={1})]
        answer = getattr(connector, ask)(set())
        assert connector.get_block_ids_with_load_errors() == ({3} if by_block else set())
        if ask == "get_finished":
            assert answer == (None, {"request"})
        else:
            assert answer.finished_recving == {"request"}
            assert answer.failed_recving == (set() if by_block else {"request"})
    assert (connector._worker._follower is None) is not by_block
