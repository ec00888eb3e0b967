"""Options: what is taken, what is refused, and what the refusal says."""

from dataclasses import replace
from pathlib import Path

import pytest

from pegaflow import _native
from pegaflow.config import _OPTIONS, EVICTION_POLICIES, ConnectorConfig, parse_config, parse_size
from pegaflow.errors import InvalidArgument


def test_nothing_given_means_defaults() -> None:
    assert parse_config({}, {}) == ConnectorConfig()


def test_all_options_are_taken() -> None:
    config = parse_config(
        {
            "pegaflow.mode": "save_only",
            "pegaflow.pool_name": "team-7",
            "pegaflow.pool_size": "30gb",
            "pegaflow.shm_dir": "/dev/hugepages",
            "pegaflow.segment_size": "512mib",
            "pegaflow.weight": 2.5,
        },
        {},
    )
    assert config.weight == 2.5
    assert config.mode == "save_only"
    assert not config.reads
    assert config.pool_name == "team-7"
    assert config.pool_bytes == 30 * 10**9
    assert config.shm_dir == "/dev/hugepages"
    assert config.segment_bytes == 512 << 20


def test_environment_fills_in_what_is_not_given() -> None:
    environ = {"PEGAFLOW_POOL_NAME": "env", "PEGAFLOW_POOL_SIZE": "1gib", "PEGAFLOW_MODE": "save_only"}
    config = parse_config({"pegaflow.pool_name": "given"}, environ)
    assert (config.pool_name, config.pool_bytes, config.mode) == ("given", 1 << 30, "save_only")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("10 kb", 10_000),
        ("1.5gb", 1_500_000_000),
        ("2GiB", 2 << 30),
        ("3tb", 3 * 10**12),
        (4096, 4096),
        ("7b", 7),
    ],
)
def test_size_in_bytes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("value", ["", "gb", "12 parsec", "-1gb", "1e9", 0, -5, True, None, 1.5, [1], "0"])
def test_what_is_not_a_size_is_refused(value: object) -> None:
    with pytest.raises(InvalidArgument, match="pool_size"):
        parse_size(value, "pegaflow.pool_size")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("pegaflow.pool_nmae", "pegaflow.pool_name"),
        ("pegaflow.poolsize", "pegaflow.pool_size"),
        ("pool_size", "pegaflow.pool_size"),
        ("pegaflow.segment", "pegaflow.segment_size"),
        ("pegaflow.shmdir", "pegaflow.shm_dir"),
        ("pegaflow.pd_tail_laod", "pegaflow.pd_tail_load"),
    ],
)
def test_unknown_option_names_the_nearest(key: str, nearest: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{key}.*did you mean '{nearest}"):
        parse_config({key: "x"}, {})


@pytest.mark.parametrize(
    "key", ["something.else", "cpu_bytes_to_use", "lmcache.mp.host", "pegaflow.http_addr", "pegaflow.log_level"]
)
def test_unknown_option_that_is_like_none_proposes_none(key: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{key}' is not an option of PegaFlow: remove it; docs/vllm.md lists"):
        parse_config({key: "x"}, {})


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("metaserver_addr", "pegaflow.peers or pegaflow.directory"),
        ("enable_lfu_admission", "pegaflow.eviction_policy"),
        ("max_prefetch_blocks", "pegaflow.prefetch_wait_ms_max"),
        ("pd.rdma.rank_map", "MultiConnector"),
        ("nixl.rdma_v1.nics", "MultiConnector"),
    ],
)
def test_option_of_a_missing_feature_is_refused_by_name_and_says_what_instead(key: str, instead: str) -> None:
    with pytest.raises(InvalidArgument, match=f"pegaflow.{key} is not supported by this version .*{instead}"):
        parse_config({f"pegaflow.{key}": True}, {})


def test_slip_in_the_environment_is_a_note_that_names_the_variable_that_was_meant() -> None:
    for slip, meant in (("POOL_SIEZ", "POOL_SIZE"), ("SHMDIR", "SHM_DIR"), ("PD_TAIL_LAOD", "PD_TAIL_LOAD")):
        (note,) = parse_config({}, {f"PEGAFLOW_{slip}": "1", "PEGAFLOW_PEER_TOKEN": "x"}).notes
        assert f"PEGAFLOW_{slip} " in note
        assert note.endswith(f"did you mean PEGAFLOW_{meant}?")


@pytest.mark.parametrize("variable", ["PEGAFLOW_PD_DEVICE", "PEGAFLOW_METASERVER_ADDR"])
def test_missing_feature_is_refused_in_the_environment_too(variable: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{variable} is not supported by this version"):
        parse_config({}, {variable: "1"})
    assert parse_config({}, {variable: ""}) == ConnectorConfig()


@pytest.mark.parametrize(
    "variable",
    ["PEGAFLOW_CRASH_POINT", "PEGAFLOW_SHARE_DUMMY_WEIGHTS", "PEGAFLOW_CROSS_LAYER_BLOCKS", "PEGAFLOW_LOG"],
)
def test_other_variables_are_left_alone(variable: str) -> None:
    assert parse_config({}, {variable: "1"}) == ConnectorConfig()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mode", "readwrite"),
        ("mode", 1),
        ("pool_name", ""),
        ("pool_name", "a/b"),
        ("pool_name", ".."),
        ("pool_name", 3),
        ("pool_name", "x" * 65),
        ("shm_dir", "relative"),
        ("shm_dir", None),
        ("pool_size", "big"),
        ("pool_size", [1]),
        ("segment_size", True),
    ],
)
def test_wrong_value_is_refused_and_named(key: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=f"pegaflow.{key}"):
        parse_config({f"pegaflow.{key}": value}, {})


def test_wrong_value_in_the_environment_names_the_variable() -> None:
    with pytest.raises(InvalidArgument, match="PEGAFLOW_POOL_SIZE"):
        parse_config({}, {"PEGAFLOW_POOL_SIZE": "huge"})


def test_segment_larger_than_the_pool_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="segment_size"):
        parse_config({"pegaflow.pool_size": "1mb", "pegaflow.segment_size": "1gb"}, {})


def test_server_options_are_ignored_with_one_note() -> None:
    config = parse_config({"pegaflow.host": "http://127.0.0.1", "pegaflow.port": 50055}, {"PEGAFLOW_PORT": "1"})
    assert len(config.notes) == 1
    assert "pegaflow.host and pegaflow.port and PEGAFLOW_PORT" in config.notes[0]


SSD = {"pegaflow.ssd_cache_path": "/mnt/nvme0", "pegaflow.ssd_cache_capacity": "512gb"}


def test_ssd_options_are_taken() -> None:
    config = parse_config(
        {
            "pegaflow.ssd_cache_path": ["/mnt/nvme0", "/mnt/nvme1/"],
            "pegaflow.ssd_cache_capacity": "512gb",
            "pegaflow.ssd_admission": "all",
            "pegaflow.ssd_write_max": "500mb",
            "pegaflow.ssd_write_inflight": 4,
            "pegaflow.ssd_prefetch_inflight": "32",
            "pegaflow.ssd_backend": "threads",
            "pegaflow.prefetch_wait_ms_max": 0,
        },
        {},
    )
    assert config.ssd_directories == ("/mnt/nvme0", "/mnt/nvme1")
    assert (config.ssd_capacity_bytes, config.ssd_admission) == (512 * 10**9, "all")
    assert (config.ssd_write_bytes_per_second_max, config.ssd_write_depth, config.ssd_read_depth) == (
        500_000_000,
        4,
        32,
    )
    assert (config.ssd_backend, config.prefetch_wait_ms_max, config.notes) == ("threads", 0, ())


def test_several_directories_fit_in_one_variable() -> None:
    config = parse_config({}, {"PEGAFLOW_SSD_CACHE_PATH": "/a:/b", "PEGAFLOW_SSD_CACHE_CAPACITY": "1tb"})
    assert config.ssd_directories == ("/a", "/b")


def test_ssd_cache_without_its_capacity_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidArgument, match=r"pegaflow\.ssd_cache_path needs pegaflow\.ssd_cache_capacity"):
        parse_config({"pegaflow.ssd_cache_path": "/mnt/nvme0"}, {})
    with pytest.raises(InvalidArgument, match=r"PEGAFLOW_SSD_CACHE_PATH needs"):
        parse_config({}, {"PEGAFLOW_SSD_CACHE_PATH": "/mnt/nvme0"})


@pytest.mark.parametrize("name", ["cache_capacity", "admission", "write_max", "write_inflight", "backend"])
def test_ssd_option_without_a_path_is_refused(name: str) -> None:
    value = {"admission": "all", "backend": "auto", "write_inflight": 2}.get(name, "1gb")
    with pytest.raises(InvalidArgument, match=f"pegaflow.ssd_{name} has no meaning without pegaflow.ssd_cache_path"):
        parse_config({f"pegaflow.ssd_{name}": value}, {})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ssd_cache_path", "relative"),
        ("ssd_cache_path", []),
        ("ssd_cache_path", ["/a"] * 2),
        ("ssd_cache_path", ["/a", "/a/"]),
        ("ssd_cache_path", ["/a", 3]),
        ("ssd_cache_path", [f"/{number}" for number in range(65)]),
        ("ssd_cache_path", {"/a": 1}),
        ("ssd_cache_capacity", "1mb"),
        ("ssd_cache_capacity", "lots"),
        ("ssd_admission", "lfu"),
        ("ssd_write_max", 5),
        ("ssd_write_inflight", 0),
        ("ssd_write_inflight", 129),
        ("ssd_prefetch_inflight", True),
        ("ssd_backend", "spdk"),
        ("prefetch_wait_ms_max", -1),
        ("prefetch_wait_ms_max", 60_001),
        ("prefetch_wait_ms_max", 1.5),
    ],
)
def test_wrong_ssd_value_is_refused_and_named(key: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=f"pegaflow.{key}"):
        parse_config(SSD | {f"pegaflow.{key}": value}, {})


def test_ssd_options_of_the_server_that_mean_nothing_here_are_ignored_with_one_note() -> None:
    config = parse_config(SSD | {"pegaflow.ssd_cache_shards": 4, "pegaflow.ssd_write_queue_depth": 8}, {})
    (note,) = config.notes
    assert note.startswith("pegaflow.ssd_cache_shards and pegaflow.ssd_write_queue_depth ignored")


SEEDED = {"PYTHONHASHSEED": "0"}


def test_prefill_and_decode_options_are_taken() -> None:
    config = parse_config({"pegaflow.pd_tail_save": True, "pegaflow.wait_for_full_prefix": "1"}, SEEDED)
    assert (config.pd_tail_save, config.pd_tail_load, config.wait_for_full_prefix) == (True, False, True)
    assert config.wait_for_full_prefix_seconds == 30.0
    environ = {"PEGAFLOW_PD_TAIL_LOAD": "true", "PEGAFLOW_WAIT_FOR_FULL_PREFIX_SECONDS": "2.5", **SEEDED}
    config = parse_config({"pegaflow.pd_tail_save": "False"}, environ)
    assert (config.pd_tail_save, config.pd_tail_load, config.wait_for_full_prefix_seconds) == (False, True, 2.5)


@pytest.mark.parametrize("option", ["pd_tail_save", "pd_tail_load"])
@pytest.mark.parametrize("seed", [{}, {"PYTHONHASHSEED": ""}], ids=["unset", "empty"])
def test_tails_without_a_seed_for_hashes_are_refused(option: str, seed: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="set PYTHONHASHSEED"):
        parse_config({f"pegaflow.{option}": True}, seed)
    with pytest.raises(InvalidArgument, match="set PYTHONHASHSEED"):
        parse_config({}, {f"PEGAFLOW_{option.upper()}": "1", **seed})
    assert parse_config({f"pegaflow.{option}": False}, seed) == ConnectorConfig()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pd_tail_save", "perhaps"),
        ("pd_tail_load", 2),
        ("wait_for_full_prefix", None),
        ("wait_for_full_prefix_seconds", 0),
        ("wait_for_full_prefix_seconds", -1),
        ("wait_for_full_prefix_seconds", 601),
        ("wait_for_full_prefix_seconds", "soon"),
        ("wait_for_full_prefix_seconds", "nan"),
        ("wait_for_full_prefix_seconds", True),
        ("wait_for_full_prefix_seconds", [30]),
    ],
)
def test_wrong_values_for_prefill_and_decode_are_refused(key: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=f"pegaflow.{key} must be"):
        parse_config({f"pegaflow.{key}": value}, SEEDED)


def test_every_option_is_documented_with_its_default() -> None:
    rows = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text().splitlines()
    for name in _OPTIONS:
        [row] = [row for row in rows if row.startswith(f"| `pegaflow.{name}` |")]
        assert len(row.split("|")) == 5
        default = getattr(ConnectorConfig(), _OPTIONS[name].field)
        if isinstance(default, str):
            assert default in row
    for name in ("pd_tail_save", "pd_tail_load", "wait_for_full_prefix"):
        assert any(row.startswith(f"| `pegaflow.{name}` | `false`") for row in rows)


def test_load_timeout_has_a_floor() -> None:
    assert parse_config({}, {"PEGA_LOAD_TIMEOUT_SECONDS": "1"}).load_timeout_seconds == 30.0
    assert parse_config({}, {"PEGA_LOAD_TIMEOUT_SECONDS": "300"}).load_timeout_seconds == 300.0
    with pytest.raises(InvalidArgument, match="PEGA_LOAD_TIMEOUT_SECONDS"):
        parse_config({}, {"PEGA_LOAD_TIMEOUT_SECONDS": "soon"})


def test_instance_id_is_kept_for_people() -> None:
    assert parse_config({}, {"PEGAFLOW_INSTANCE_ID": "blue"}).instance_id == "blue"


def test_how_a_gpu_is_used_can_be_chosen() -> None:
    extra = {"pegaflow.cuda_ctas": 16, "pegaflow.cuda_ring_size": "48mib", "pegaflow.save_rate_max": "10gb"}
    config = parse_config(extra, {})
    assert (config.cuda_ctas, config.cuda_ring_bytes, config.save_bytes_per_second_max) == (16, 48 << 20, 10**10)
    assert parse_config({"pegaflow.direct_save_min": "64kib"}, {}).direct_save_bytes_min == 64 << 10
    environ = {"PEGAFLOW_CUDA_CTAS": "8", "PEGAFLOW_CUDA_RING_SIZE": "12MiB"}
    assert (parse_config({}, environ).cuda_ctas, parse_config({}, environ).cuda_ring_bytes) == (8, 12 << 20)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("cuda_ctas", 0, "from 1 to 1024"),
        ("cuda_ctas", 1025, "from 1 to 1024"),
        ("cuda_ctas", True, "whole number"),
        ("cuda_ctas", "many", "whole number"),
        ("cuda_ctas", 1.5, "whole number"),
        ("cuda_ring_size", "1mib", "from 6291456 to"),
        ("cuda_ring_size", "100gib", "to 6442450944 bytes"),
        ("cuda_ring_size", "large", "not a size"),
        ("save_rate_max", 1, "at least 1000000 bytes"),
        ("save_rate_max", "fast", "not a size"),
        ("direct_save_min", "1kib", "at least 4096 bytes"),
    ],
)
def test_wrong_numbers_for_a_gpu_are_refused_with_their_bounds(key: str, value: object, why: str) -> None:
    with pytest.raises(InvalidArgument, match=f"pegaflow.{key}.*{why}"):
        parse_config({f"pegaflow.{key}": value}, {})


@pytest.mark.parametrize(("value", "expected"), [(True, True), (False, False), ("true", True), ("0", False), (1, True)])
def test_huge_pages_are_wanted_or_not(value: object, expected: bool) -> None:
    assert parse_config({"pegaflow.use_hugepages": value}, {}).use_hugepages is expected
    extra = {"pegaflow.use_hugepages": True, "pegaflow.hugepages_dir": "/dev/hugepages"}
    assert parse_config(extra, {}).hugepages_dir == "/dev/hugepages"


@pytest.mark.parametrize(("key", "value"), [("use_hugepages", "yes"), ("use_hugepages", 2), ("hugepages_dir", "here")])
def test_wrong_wishes_for_huge_pages_are_refused(key: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=f"pegaflow.{key} must be"):
        parse_config({f"pegaflow.{key}": value}, {})


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_eviction_policy_is_one_that_the_engine_has(policy: str, tmp_path: Path) -> None:
    assert parse_config({"pegaflow.eviction_policy": policy}, {}).eviction_policy == policy
    assert parse_config({}, {"PEGAFLOW_EVICTION_POLICY": policy}).eviction_policy == policy
    _native.Pool.open("p", shm_dir=str(tmp_path), pool_bytes=1 << 20, policy=policy).close()
    with pytest.raises(InvalidArgument, match=", ".join(EVICTION_POLICIES)):
        _native.Pool.open("p", shm_dir=str(tmp_path), pool_bytes=1 << 20, policy=policy.upper())


@pytest.mark.parametrize(("value", "nearest"), [("LRU", "lru"), ("probate", "probation"), (None, "probation")])
def test_other_eviction_policies_are_refused_with_the_nearest(value: object, nearest: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"pegaflow\.eviction_policy must be .*did you mean '{nearest}'"):
        parse_config({"pegaflow.eviction_policy": value}, {})


@pytest.mark.parametrize(("value", "weight"), [(1, 1.0), (0.25, 0.25), ("3", 3.0), (0.001, 0.001), (1_000_000, 1e6)])
def test_weight_is_a_positive_number(value: object, weight: float) -> None:
    assert parse_config({"pegaflow.weight": value}, {}).weight == weight
    assert parse_config({}, {"PEGAFLOW_WEIGHT": str(value)}).weight == weight


@pytest.mark.parametrize("value", [0, -1, 1e7, 0.0001, 10**400, "much", "", True, None, [1], float("nan")])
def test_other_weights_are_refused_with_an_example(value: object) -> None:
    with pytest.raises(InvalidArgument, match=r"pegaflow\.weight must be a positive number"):
        parse_config({"pegaflow.weight": value}, {})


def test_variables_that_kubernetes_sets_for_a_service_of_our_name_are_no_options() -> None:
    environ = {}
    for service in ("PEGAFLOW", "PEGAFLOW_PD", "PEGAFLOW_PD_ROUTER", "PEGAFLOW_POOL_SIZES"):
        link = f"{service}_PORT_8000_TCP"
        environ |= {f"{service}_SERVICE_HOST": "10.0.0.1", f"{service}_SERVICE_PORT": "80"}
        environ |= {
            f"{service}_SERVICE_PORT_HTTP": "80",
            f"{service}_PORT": "tcp://10.0.0.1:80",
            link: "tcp://10.0.0.1:80",
        }
        environ |= {f"{link}_PROTO": "tcp", f"{link}_PORT": "80", f"{link}_ADDR": "10.0.0.1"}
    del environ["PEGAFLOW_PORT"]  # the original's server had an option of this name: a line in the log
    config = parse_config({}, environ)
    assert replace(config, notes=()) == ConnectorConfig()
    assert config.notes == ()
