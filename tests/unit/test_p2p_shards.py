"""``pegaflow.tp_shard_endpoints``: what is taken, what is refused, and whether ranks have pools of their own."""

from types import SimpleNamespace
from typing import Any

import pytest

from pegaflow.config import parse_config
from pegaflow.connector.connector import PegaKVConnector
from pegaflow.errors import InvalidArgument
from pegaflow.p2p.shards import SHARDS_MAX, parse_shards, shards_beside

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


@pytest.mark.parametrize(
    ("value", "shards"),
    [
        ("10.0.0.1:1,10.0.0.2:1", 2),
        ("127.0.0.1:1,10.0.0.1:2", 2),
        ("a:1,b:1,a:2", 3),
        ("a:1,A:2", 1),
        ("127.0.0.1:1,localhost:2,[::1]:3", 1),
        ("a:1", 1),
    ],
)
def test_ranks_have_pools_of_their_own_where_endpoints_are_on_several_hosts(value: str, shards: int) -> None:
    assert parse_config({NAME: value}, {}).shards == shards
    assert parse_config({}, {}).shards == 1


def test_shards_of_the_same_host_know_of_each_other() -> None:
    endpoints = parse_shards("a:1,10.0.0.1:1,A:2,127.0.0.1:3,localhost:4,a:5", NAME)
    assert [shards_beside(endpoints, number) for number in range(6)] == [3, 1, 3, 2, 2, 3]


def test_that_one_host_needs_no_shards_is_said_once() -> None:
    [note] = parse_config({NAME: "10.0.0.1:1,10.0.0.1:2"}, {}).notes
    assert NAME in note
    [note] = parse_config({}, {"PEGAFLOW_TP_SHARD_ENDPOINTS": "10.0.0.1:1"}).notes
    assert "PEGAFLOW_TP_SHARD_ENDPOINTS" in note
    assert not parse_config({NAME: "10.0.0.1:1,10.0.0.2:1"}, {}).notes
    assert not parse_config({}, {}).notes


@pytest.mark.parametrize(
    "beside",
    [
        {"pegaflow.peers": "10.0.0.3:1"},
        {"pegaflow.peer_listen": "10.0.0.1:1"},
        {"pegaflow.directory": "redis://10.0.0.9:6379/0"},
        {"pegaflow.ssd_cache_path": "/ssd", "pegaflow.ssd_cache_capacity": "1gb"},
        {"pegaflow.wait_for_full_prefix": True},
    ],
    ids=lambda beside: next(iter(beside)),
)
def test_what_needs_whole_blocks_is_refused_over_several_hosts_alone(beside: dict[str, Any]) -> None:
    several, environ = {NAME: "10.0.0.1:1,10.0.0.2:1"}, {"PEGAFLOW_PEER_TOKEN": "t" * 32}
    with pytest.raises(InvalidArgument, match=rf"{next(iter(beside))} cannot .*{NAME}"):
        parse_config(beside | several, environ)
    assert parse_config(beside | {NAME: "10.0.0.1:1,10.0.0.1:2"}, environ).shards == 1
    assert parse_config({"pegaflow.wait_for_full_prefix": False} | several, environ).shards == 2


def start(shards: int, hosts: int = 1, **parallel: int) -> None:
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1} | parallel
    extra = {NAME: [f"10.0.0.{shard % hosts}:{shard}" for shard in range(1, shards + 1)]}
    PegaKVConnector.get_required_kvcache_layout(
        SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
            parallel_config=SimpleNamespace(**sizes),
        )
    )


@pytest.mark.parametrize("hosts", [1, 2])
def test_equal_shards_of_tensor_parallel_ranks_start(hosts: int) -> None:
    for shards, ranks in ((1, 1), (1, 4), (2, 4), (4, 4)):
        start(shards, hosts, tensor_parallel_size=ranks)


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize(("shards", "ranks"), [(2, 1), (3, 4), (4, 2)])
def test_ranks_that_cannot_be_divided_equally_are_refused_before_a_model_is_loaded(
    shards: int, ranks: int, hosts: int
) -> None:
    with pytest.raises(InvalidArgument, match="cannot be divided equally"):
        start(shards, hosts, tensor_parallel_size=ranks)


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize(
    "size", ["pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"]
)
def test_other_parallelism_is_refused_before_a_model_is_loaded(size: str, hosts: int) -> None:
    with pytest.raises(InvalidArgument, match="tensor parallelism alone"):
        start(2, hosts, tensor_parallel_size=4, **{size: 2})
