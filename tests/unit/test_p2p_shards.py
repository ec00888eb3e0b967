"""``pegaflow.tp_shard_endpoints``: what is taken, what is refused, and that it changes no name of a block."""

from types import SimpleNamespace
from typing import Any

import pytest

from pegaflow.config import parse_config
from pegaflow.connector.connector import PegaKVConnector
from pegaflow.errors import InvalidArgument
from pegaflow.p2p.shards import SHARDS_MAX, parse_shards

NAME = "pegaflow.tp_shard_endpoints"


@pytest.mark.parametrize(
    ("value", "endpoints"),
    [
        ("10.0.0.1:7441", ("10.0.0.1:7441",)),
        (["10.0.0.1:7441", "10.0.0.1:7442"], ("10.0.0.1:7441", "10.0.0.1:7442")),
        ("http://127.0.0.1:50055, http://localhost:50056/", ("127.0.0.1:50055", "localhost:50056")),
        (["[::1]:1", "127.0.0.2:2"], ("[::1]:1", "127.0.0.2:2")),
        (["KV.example:1", "kv.example:2"], ("KV.example:1", "kv.example:2")),
    ],
)
def test_endpoints_of_one_host_are_taken_in_their_order(value: Any, endpoints: tuple[str, ...]) -> None:
    assert parse_shards(value, NAME) == endpoints


@pytest.mark.parametrize(
    "value", [True, 7441, "", [], ["10.0.0.1"], ["https://10.0.0.1:1"], ["10.0.0.1:1"] * (SHARDS_MAX + 1), {"a": 1}]
)
def test_what_is_no_list_of_endpoints_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=NAME):
        parse_shards(value, NAME)


def test_an_endpoint_that_is_named_twice_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="twice"):
        parse_shards("10.0.0.1:7441,http://10.0.0.1:7441", NAME)


@pytest.mark.parametrize("value", [["10.0.0.1:1", "10.0.0.2:1"], "127.0.0.1:1,10.0.0.1:2", "a:1,b:1"])
def test_several_hosts_are_refused_with_what_to_do(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"several hosts .*pegaflow\.peers"):
        parse_shards(value, NAME)


def test_that_nobody_is_asked_is_said_once() -> None:
    config = parse_config({NAME: "10.0.0.1:1,10.0.0.1:2"}, {})
    assert config.peers == ()
    assert [note for note in config.notes if NAME in note]
    environment = parse_config({}, {"PEGAFLOW_TP_SHARD_ENDPOINTS": "10.0.0.1:1"})
    assert any("PEGAFLOW_TP_SHARD_ENDPOINTS" in note for note in environment.notes)
    assert not parse_config({}, {}).notes


def start(shards: int, **parallel: int) -> None:
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1} | parallel
    extra = {NAME: [f"10.0.0.1:{port}" for port in range(1, shards + 1)]}
    PegaKVConnector.get_required_kvcache_layout(
        SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
            parallel_config=SimpleNamespace(**sizes),
        )
    )


def test_equal_shards_of_tensor_parallel_ranks_start() -> None:
    for shards, ranks in ((1, 1), (1, 4), (2, 4), (4, 4)):
        start(shards, tensor_parallel_size=ranks)


@pytest.mark.parametrize(("shards", "ranks"), [(2, 1), (3, 4), (4, 2)])
def test_ranks_that_cannot_be_divided_equally_are_refused_before_a_model_is_loaded(shards: int, ranks: int) -> None:
    with pytest.raises(InvalidArgument, match="cannot be divided equally"):
        start(shards, tensor_parallel_size=ranks)


@pytest.mark.parametrize(
    "size", ["pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"]
)
def test_other_parallelism_is_refused_before_a_model_is_loaded(size: str) -> None:
    with pytest.raises(InvalidArgument, match="tensor parallelism alone"):
        start(2, tensor_parallel_size=4, **{size: 2})
