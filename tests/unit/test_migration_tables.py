"""The tables of ``docs/migration.md`` say of each name what the code does with it."""

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from pegaflow import config, exporter
from pegaflow.config import PREFIX, parse_config
from pegaflow.errors import InvalidArgument
from pegaflow.metrics import COUNTERS, GAUGES, HISTOGRAMS, prometheus_name

TEXT = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
ROW = re.compile(
    r"^\| `(?P<name>[^`]+)` \| (?P<here>same|no effect|not supported|gone)\b[^|]*\|(?P<more>.*)$", re.MULTILINE
)
OPTION = re.compile(r"`(pegaflow\.[a-z_]+)`")
METRIC = re.compile(r"`((?:vllm:pega_|pegaflow_)[a-z_]+)`")
VALUES: dict[str, Any] = {
    "pegaflow.mode": "save_only",
    "pegaflow.transfer_backend": "kernel",
    "pegaflow.wait_for_full_prefix": True,
    "pegaflow.pd_tail_save": True,
    "pegaflow.pd_tail_load": True,
    "pegaflow.host": "http://127.0.0.1",
    "pegaflow.port": 50055,
    "pegaflow.tp_shard_endpoints": ["10.0.0.1:50055", "10.0.0.2:50055"],
    "pegaflow.pool_size": "30gb",
    "pegaflow.use_hugepages": True,
    "pegaflow.ssd_cache_path": "/mnt/nvme0",
    "pegaflow.ssd_cache_capacity": "512gb",
    "pegaflow.nics": "mlx5_0",
}
"""What users of the original have written; numbers where nothing is said here."""
COMPANIONS: dict[str, dict[str, Any]] = {
    "ssd_": {"pegaflow.ssd_cache_path": "/mnt/nvme0", "pegaflow.ssd_cache_capacity": "512gb"},
    "nics": {"pegaflow.peers": "10.0.0.2:7441"},
    "qps_": {"pegaflow.peers": "10.0.0.2:7441"},
}
"""Options that are only accepted beside others."""
VLLM_SOURCES = {
    "config/cache.py": ("kv_offloading_size", "kv_offloading_backend"),
    "distributed/kv_transfer/kv_connector/factory.py": ("OffloadingConnector", "SimpleCPUOffloadConnector"),
    "v1/kv_offload/cpu/spec.py": ("cpu_bytes_to_use",),
    "v1/kv_offload/tiering/spec.py": ("secondary_tiers",),
}
"""Where vLLM has what its users are to replace."""
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PEGAFLOW_PEER_TOKEN": "0123456789abcdef0123456789abcdef"}


def rows(heading: str) -> list[tuple[str, str, str]]:
    """``(name, what becomes of it, what else the row says)`` below a heading."""
    section = TEXT.split(f"\n### {heading}\n", 1)[1].split("\n#", 1)[0]
    found = [(row["name"], row["here"], row["more"]) for row in ROW.finditer(section)]
    assert found, f"no table below {heading}"
    assert len({name for name, *_ in found}) == len(found), f"a name is twice below {heading}"
    assert len(found) == sum(line.startswith("| `") for line in section.splitlines()), f"a row of {heading} is not read"
    return found


def fate(option: str) -> str:
    """What the code does with an option, in the words of the tables."""
    given = {option: VALUES.get(option, 2)}
    for start, companions in COMPANIONS.items():
        if option.startswith(PREFIX + start):
            given = companions | given
    try:
        parsed = parse_config(given, ENVIRONMENT)
    except InvalidArgument as error:
        return "not supported" if "not supported" in str(error) else "gone"
    return "no effect" if any(option in note for note in parsed.notes) else "same"


@pytest.mark.parametrize(("name", "here", "more"), rows("Options of the connector"))
def test_options_of_the_connector_are_treated_as_said(name: str, here: str, more: str) -> None:
    assert fate(name) == here
    assert all(option.removeprefix(PREFIX) in config._OPTIONS for option in OPTION.findall(more))


@pytest.mark.parametrize(("name", "here", "more"), rows("Flags of `pegaflow-server`"))
def test_flags_of_the_server_are_options_as_said(name: str, here: str, more: str) -> None:
    option = PREFIX + name.removeprefix("--").replace("-", "_")
    assert fate(option) == here
    named = OPTION.findall(more)
    assert here != "same" or named[0] == option
    assert all(one.removeprefix(PREFIX) in config._OPTIONS for one in named)


@pytest.mark.parametrize(("name", "here", "more"), rows("Environment"))
def test_variables_are_treated_as_said(name: str, here: str, more: str) -> None:
    parsed = parse_config({}, {name: "77"})
    noted = any(name in note for note in parsed.notes)
    changed = parsed != parse_config({}, {})
    assert {"same": changed and not noted, "no effect": noted, "gone": not changed}[here], name


def exported() -> set[str]:
    """Names of all series, with Prometheus' endings of counters."""
    vllm = {f"{prometheus_name(key)}_total" for key in COUNTERS}
    vllm |= {prometheus_name(key) for key in (*GAUGES, *HISTOGRAMS)}
    pool = {f"pegaflow_{name}" for name in exporter._GAUGES} | {f"pegaflow_{name}_total" for name in exporter._COUNTERS}
    return vllm | pool


@pytest.mark.parametrize(("name", "here", "more"), rows("Metrics"))
def test_metrics_exist_as_said(name: str, here: str, more: str) -> None:
    assert (name in exported()) == (here == "same")
    assert exported().issuperset(METRIC.findall(more))


@pytest.mark.parametrize(("name", "here", "more"), rows("Names in Python"))
def test_names_in_python_exist_as_said(name: str, here: str, more: str) -> None:
    module, _, attribute = name.rpartition(".")
    # Not loaded for this: the connector needs vLLM.
    there = attribute in vars(importlib.import_module(module)) or attribute in getattr(
        importlib.import_module(module), "__all__", ()
    )
    assert there == (here == "same")


def test_options_named_for_others_exist() -> None:
    rest = TEXT.split("\n## From LMCache\n", 1)[1]
    named = set(OPTION.findall(rest)) | set(re.findall(r'"(pegaflow\.[a-z_]+)"', rest))
    assert named
    assert all(option.removeprefix(PREFIX) in config._OPTIONS for option in named)


def test_commands_that_are_gone_are_not_installed() -> None:
    scripts = (
        (Path(__file__).parents[2] / "pyproject.toml").read_text().split("[project.scripts]", 1)[1].split("\n[", 1)[0]
    )
    for command, here, _ in rows("Commands"):
        assert here == "gone"
        assert f"{command} =" not in scripts


def test_options_of_vllm_that_are_named_exist() -> None:
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    sources = {name: (Path(found.origin).parent / name).read_text() for name in VLLM_SOURCES}
    for name, words in VLLM_SOURCES.items():
        for word in words:
            assert word in sources[name], (name, word)
            assert word.replace("kv_offloading_", "--kv-offloading-") in TEXT
