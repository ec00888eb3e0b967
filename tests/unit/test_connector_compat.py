"""What is read from vLLM's objects, with the objects of the installed vLLM and with what older ones lack."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.v1 import base as kv_base
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from pegaflow.connector import compat
from pegaflow.connector.compat import Features
from pegaflow.connector.metadata import RankReport, StepPlan, WorkerShape
from pegaflow.connector.request_state import RequestTable

OLD = Features(failed_requests=False, block_state=False, steps_for_saves=True)
HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=32, **HEADS)
WINDOW = SlidingWindowSpec(block_size=32, sliding_window=64, **HEADS)
CHUNKED = ChunkedLocalAttentionSpec(block_size=32, attention_chunk_size=64, **HEADS)
LATENT = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


def config(**parallel: int) -> Any:
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "decode_context_parallel_size": 1}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**(sizes | parallel)),
        cache_config=SimpleNamespace(block_size=32, prefix_caching_hash_algo="sha256"),
        model_config=SimpleNamespace(use_mla=False),
        speculative_config=None,
    )


def caches(*specs: Any, hash_block_size: int | None = 32, **more: Any) -> Any:
    groups = [KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups, hash_block_size=hash_block_size, **more)


def test_replicas_come_from_vllm_or_from_latent_attention() -> None:
    assert compat.replica_count(config(), SimpleNamespace(kv_tp_replicas=4)) == 4
    latent = config(tensor_parallel_size=8)
    assert compat.replica_count(latent, SimpleNamespace()) == 1
    latent.model_config.use_mla = True
    assert compat.replica_count(latent, SimpleNamespace()) == 8


def test_ranks_that_share_prompts_hold_the_same_bytes_unless_tokens_are_spread_over_them() -> None:
    sharing = config(tensor_parallel_size=4, pipeline_parallel_size=2, prefill_context_parallel_size=2)
    assert compat.rank_count(sharing) == 16
    assert compat.replica_count(sharing, SimpleNamespace(kv_tp_replicas=1)) == 2
    assert compat.replica_count(sharing, SimpleNamespace(kv_tp_replicas=4)) == 8
    assert compat.replica_count(sharing, SimpleNamespace()) == 2
    parts = {rank: compat.part_of((0, rank), sharing, SimpleNamespace(kv_tp_replicas=1)) for rank in range(8)}
    assert [*parts.values()] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert compat.part_of((1, 0), sharing, SimpleNamespace(kv_tp_replicas=1)) == 4
    sharing.parallel_config.decode_context_parallel_size = 2
    assert compat.replica_count(sharing, SimpleNamespace(kv_tp_replicas=4)) == 1


def test_rank_counts_those_that_share_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {"get_tp_group": 3, "get_pp_group": 1, "get_pcp_group": 1}
    for name, rank in groups.items():
        group = SimpleNamespace(rank_in_group=rank)
        monkeypatch.setattr(parallel_state, name, lambda group=group: group)
    assert compat.worker_rank(config()) == (1, 3)
    assert compat.worker_rank(config(prefill_context_parallel_size=2)) == (1, 7)


def test_wire_types_are_accepted_by_vllm() -> None:
    compat.register_wire_types()
    assert isinstance(StepPlan(), kv_base.KVConnectorMetadata)
    assert isinstance(RankReport(), kv_base.KVConnectorWorkerMetadata)
    assert isinstance(WorkerShape((0, 0), "host"), kv_base.KVConnectorHandshakeMetadata)


def test_root_of_hashes_is_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)
    assert compat.none_hash() is None
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"root", raising=False)
    assert compat.none_hash() == b"root"
    monkeypatch.delattr(kv_cache_utils, "NONE_HASH")
    assert compat.none_hash() is None


@pytest.mark.parametrize(
    ("seed", "algorithm", "constant_seed", "differ"),
    [
        ("0", "xxhash_cbor", True, False),
        ("", "xxhash_cbor", True, True),
        ("", "sha256", True, False),
        ("", "sha256", False, True),
        ("7", "sha256", False, False),
    ],
)
def test_processes_that_would_hash_differently_are_recognised(
    monkeypatch: pytest.MonkeyPatch, seed: str, algorithm: str, constant_seed: bool, differ: bool
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    made = config()
    made.cache_config.prefix_caching_hash_algo = algorithm
    if not constant_seed:
        monkeypatch.delattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")
    assert compat.hashes_differ_per_process(made) is differ


@pytest.mark.parametrize(
    ("fields", "bypassed"),
    [({}, False), ({"lora_request": object()}, False), ({"resumable": True}, True)],
    ids=["plain", "adapter", "streaming session"],
)
def test_requests_that_are_left_alone(fields: dict[str, Any], bypassed: bool) -> None:
    assert compat.bypasses_cache(SimpleNamespace(**({"lora_request": None, "resumable": False} | fields))) is bypassed


@pytest.mark.parametrize(
    ("media", "cache_gb", "prefix_caching", "numbered"),
    [(True, 0, False, True), (True, 4, False, False), (True, 0, True, False), (False, 0, False, False)],
)
def test_media_without_hashes_are_recognised(media: bool, cache_gb: int, prefix_caching: bool, numbered: bool) -> None:
    made = config()
    made.model_config.multimodal_config = SimpleNamespace(mm_processor_cache_gb=cache_gb) if media else None
    made.cache_config.enable_prefix_caching = prefix_caching
    assert compat.numbers_media(made) is numbered


@pytest.mark.parametrize(("features", "numbered"), [(["image"], True), ([], True), (["image"], False)])
def test_requests_with_numbered_media_are_left_alone(features: list[str], numbered: bool) -> None:
    made = SimpleNamespace(lora_request=None, resumable=False, mm_features=features)
    assert compat.bypasses_cache(made, media_numbered=numbered) is (bool(features) and numbered)


def test_prompt_logprobs_are_recognised_in_older_requests() -> None:
    wanted = SimpleNamespace(prompt_logprobs=1)
    assert compat.skips_reading(SimpleNamespace(sampling_params=wanted))
    assert not compat.skips_reading(SimpleNamespace(sampling_params=SimpleNamespace(prompt_logprobs=None)))
    assert not compat.skips_reading(SimpleNamespace(sampling_params=wanted, skip_reading_prefix_cache=False))


class Request(SimpleNamespace):
    """As vLLM's."""


def request(name: str, computed: int, tokens: int) -> Any:
    return Request(request_id=name, num_computed_tokens=computed, num_tokens=tokens, lora_request=None)


def output(**fields: Any) -> Any:
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
    return SimpleNamespace(
        **({"scheduled_new_reqs": [], "scheduled_cached_reqs": cached, "num_scheduled_tokens": {}} | fields)
    )


def test_tables_come_from_vllm_where_it_hands_them_out() -> None:
    table = RequestTable()
    table.ensure(request("a", 10, 100))
    state = SimpleNamespace(get_block_ids=lambda name: ([4, 5],) if name == "a" else None)
    step = output(num_scheduled_tokens={"a": 20, "unknown": 1}, kv_connector_block_state=state)
    assert [(tables(state), after) for state, tables, after in compat.scheduled_requests(step, table)] == [
        (([4, 5],), 30)
    ]


def test_tokens_after_a_step_include_drafts() -> None:
    table = RequestTable()
    table.ensure(request("a", 98, 100))
    state = SimpleNamespace(get_block_ids=lambda name: ([4],))
    step = output(num_scheduled_tokens={"a": 6}, kv_connector_block_state=state)
    assert [after for _, _, after in compat.scheduled_requests(step, table)] == [104]


def test_tables_of_older_vllm_are_put_together_from_increments() -> None:
    table = RequestTable()
    table.ensure(request("a", 0, 100))
    first = output(
        scheduled_new_reqs=[SimpleNamespace(req_id="a", block_ids=([1, 2],))], num_scheduled_tokens={"a": 50}
    )
    assert [tables(state) for state, tables, _ in compat.scheduled_requests(first, table)] == [([1, 2],)]

    def later(ids: Any, resumed: set[str]) -> Any:
        cached = SimpleNamespace(req_ids=["a"], new_block_ids=[ids], resumed_req_ids=resumed)
        return output(scheduled_cached_reqs=cached, num_scheduled_tokens={"a": 1})

    assert [t(s) for s, t, _ in compat.scheduled_requests(later(([3],), set()), table)] == [([1, 2, 3],)]
    assert [t(s) for s, t, _ in compat.scheduled_requests(later(None, set()), table)] == [([1, 2, 3],)]
    assert [t(s) for s, t, _ in compat.scheduled_requests(later(([7],), {"a"}), table)] == [([7],)]


def test_cache_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="layer a is a list"):
        compat.layer_tensors({"a": [torch.zeros(2)]}, ["a"], FULL)


def test_layers_of_other_ranks_are_skipped() -> None:
    assert compat.layer_tensors({}, ["a"], FULL) == []
    [layer] = compat.layer_tensors({"a": torch.zeros(4, 2, 32, 64, dtype=torch.bfloat16)}, ["a"], FULL)
    assert (layer.shape, layer.item_bytes, layer.device) == ((4, 2, 32, 64), 2, "cpu")
    assert layer.page_bytes == FULL.page_size_bytes


def test_installed_vllm_has_all_features() -> None:
    assert compat.features() == Features(True, True, True, True)


def graphs(mode: str, drafts: int = 0, ops: list[str] | None = None) -> Any:
    """``ops``: what graphs of pieces leave out; by default all attention, as vLLM fills it in."""
    from vllm.config import CompilationConfig, CUDAGraphMode

    ops = list(CompilationConfig._attention_ops) if ops is None else ops
    chosen = config()
    chosen.compilation_config = CompilationConfig(cudagraph_mode=CUDAGraphMode[mode], splitting_ops=ops)
    chosen.speculative_config = SimpleNamespace(num_speculative_tokens=drafts) if drafts else None
    return chosen


@pytest.mark.parametrize(
    ("mode", "tokens", "unasked"),
    [
        ("NONE", 1, False),
        ("PIECEWISE", 1, False),
        ("FULL", 50, True),
        ("FULL_AND_PIECEWISE", 1, True),
        ("FULL_AND_PIECEWISE", 2, False),
        ("FULL_DECODE_ONLY", 1, True),
    ],
)
def test_graphs_of_the_whole_model_name_no_layers(mode: str, tokens: int, unasked: bool) -> None:
    step = output(scheduled_new_reqs=[SimpleNamespace(req_id="a")], num_scheduled_tokens={"a": tokens})
    assert compat.reads_unasked(step, graphs(mode), {"a"}) == unasked


@pytest.mark.parametrize("ops", [[], ["vllm::mamba_mixer"], ["vllm::unified_attention_with_output"]])
def test_graphs_of_pieces_that_hold_attention_name_no_layers(ops: list[str]) -> None:
    step = output(scheduled_new_reqs=[SimpleNamespace(req_id="a")], num_scheduled_tokens={"a": 50})
    assert compat.reads_unasked(step, graphs("PIECEWISE", ops=ops), {"a"})
    assert compat.reads_unasked(step, graphs("FULL_AND_PIECEWISE", ops=ops), {"a"})
    assert not compat.reads_unasked(step, graphs("NONE", ops=ops), {"a"})


def test_steps_as_long_as_drafts_may_be_a_graph_of_the_whole_model() -> None:
    step = output(scheduled_new_reqs=[SimpleNamespace(req_id="a")], num_scheduled_tokens={"a": 4})
    assert compat.reads_unasked(step, graphs("FULL_AND_PIECEWISE", drafts=3), {"a"})
    assert not compat.reads_unasked(step, graphs("FULL_AND_PIECEWISE", drafts=2), {"a"})


def test_steps_as_long_as_a_canvas_may_be_a_graph_of_the_whole_model() -> None:
    denoising = graphs("FULL_AND_PIECEWISE")
    denoising.num_speculative_tokens = 32
    step = output(scheduled_new_reqs=[SimpleNamespace(req_id="a")], num_scheduled_tokens={"a": 32})
    assert compat.reads_unasked(step, denoising, {"a"})


def test_step_that_begins_with_another_request_names_too_little() -> None:
    new = [SimpleNamespace(req_id="a"), SimpleNamespace(req_id="b")]
    step = output(scheduled_new_reqs=new, num_scheduled_tokens={"a": 5, "b": 5})
    assert compat.reads_unasked(step, graphs("NONE"), {"a"})
    resumed = output(num_scheduled_tokens={"b": 5})
    resumed.scheduled_cached_reqs.resumed_req_ids = {"b"}
    assert compat.reads_unasked(resumed, graphs("NONE"), {"a"})
    assert not compat.reads_unasked(output(num_scheduled_tokens={"b": 5}), graphs("NONE"), {"a"})


def test_layers_are_named_where_each_step_brings_our_plan() -> None:
    assert compat.names_layers(config())
    assert not compat.names_layers(config(pipeline_parallel_size=2))
    assert not compat.names_layers(config(enable_dbo=True))


def test_first_pass_wipes_caches_with_scales_of_tokens_and_heads() -> None:
    made = config()
    for cache_dtype, wiped in (("auto", False), ("fp8_e4m3", False), ("fp8_per_token_head", True)):
        made.cache_config.cache_dtype = cache_dtype
        assert compat.wiped_by_first_pass(made) is wiped
