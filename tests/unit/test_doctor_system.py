"""What ``pegaflow doctor`` says about kernel, devices and software, and how it reports."""

import json
import resource
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from pegaflow.cli import checks_software, checks_system
from pegaflow.cli.cuda_probe import CudaDevice, CudaDriver
from pegaflow.cli.doctor import examine
from pegaflow.cli.finding import ERROR, INFO, OK, WARNING
from pegaflow.cli.host import UNLIMITED
from pegaflow.cli.main import cli
from pegaflow.shm import pool as pool_module
from tests.unit.fake_native import FakeNative
from tests.unit.made_up_host import MadeUpHost, made_up_host

CHECKS = [
    "python",
    "pegaflow",
    "vllm",
    "PYTHONHASHSEED",
    "shared memory",
    "memory limit",
    "room to grow",
    "pool tables",
    "namespaces",
    "seccomp",
    "removal at logout",
    "locked memory",
    "huge pages",
    "io_uring",
    "ssd cache",
    "numa",
    "open files",
    "cuda",
    "rdma",
    "peers",
]


@pytest.fixture
def host(tmp_path: Path) -> MadeUpHost:
    return made_up_host(tmp_path)


@pytest.mark.parametrize("other", ["pegaflow-llm", "pegaflow-llm-cu13"])
def test_the_wheel_with_a_server_beside_this_one_is_a_warning(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    def version(name: str) -> str:
        if name != other:
            raise metadata.PackageNotFoundError(name)
        return "0.25.1"

    monkeypatch.setattr(checks_software._native, "build_profile", "release")
    monkeypatch.setattr(metadata, "version", version)
    finding = checks_software.package()
    assert finding.level == WARNING
    assert f"{other} 0.25.1 is installed" in finding.advice
    assert f"pip uninstall {other}" in finding.advice


def test_io_uring_that_is_refused_says_why() -> None:
    assert checks_system.io_uring("ok").level == OK
    finding = checks_system.io_uring("seccomp: Operation not permitted")
    assert finding.level == INFO
    assert "Operation not permitted" in finding.value


def test_numa_nodes_are_in_numeric_order(host: MadeUpHost) -> None:
    assert checks_system.numa(host, 1).value == "one node, 1 CPU usable"
    for node in (0, 2, 10):
        host.put(f"/sys/devices/system/node/node{node}/cpulist", f"{node}-{node + 1}\n")
    host.put("/sys/devices/system/node/online", "0,2,10\n")
    assert checks_system.numa(host, 6).value == "3 nodes (0: CPUs 0-1; 2: CPUs 2-3; 10: CPUs 10-11), 6 CPUs usable"


@pytest.mark.parametrize(("limit", "level"), [(256, WARNING), (1024, OK), (UNLIMITED, OK)])
def test_few_open_files_are_a_warning(tmp_path: Path, limit: int, level: str) -> None:
    host = made_up_host(tmp_path, limits={resource.RLIMIT_NOFILE: limit})
    assert checks_system.open_files(host).level == level


@pytest.mark.parametrize(
    ("answer", "module", "level", "part"),
    [
        (CudaDriver("13.0", (CudaDevice("NVIDIA H200", 150 << 30),)), "NVRM 580", OK, "NVIDIA H200 (150 GiB)"),
        (CudaDriver("13.0", ()), "NVRM 580", WARNING, "no devices"),
        ("libcuda.so.1 not found", None, INFO, "no NVIDIA driver"),
        ("libcuda.so.1 not found", "NVRM 580", WARNING, "libcuda.so.1 not found"),
    ],
)
def test_cuda_is_asked_through_its_driver(
    host: MadeUpHost,
    monkeypatch: pytest.MonkeyPatch,
    answer: CudaDriver | str,
    module: str | None,
    level: str,
    part: str,
) -> None:
    monkeypatch.setattr(checks_system, "probe_cuda", lambda: answer)
    if module is not None:
        host.put("/proc/driver/nvidia/version", module)
    finding = checks_system.cuda(host)
    assert finding.level == level
    assert part in finding.value


@pytest.mark.parametrize(
    ("version", "level"),
    [
        (None, INFO),
        ("", WARNING),
        ("0.23.4", WARNING),
        ("0.24.0", OK),
        ("0.32.0+cpu", OK),
        ("0.33.1rc1", OK),
        ("0.34.0", WARNING),
        ("1.0", WARNING),
        ("dev", WARNING),
    ],
)
def test_vllm_is_supported_from_0_24_to_0_33(version: str | None, level: str) -> None:
    assert checks_software.vllm(version).level == level


def test_old_python_is_an_error() -> None:
    assert checks_software.python((3, 9)).level == ERROR
    assert checks_software.python((3, 10)).level == OK


@pytest.mark.parametrize(
    ("seed", "version", "level"),
    [("0", None, OK), (None, None, WARNING), (None, "0.25.1", WARNING), (None, "0.32.0", INFO)],
)
def test_unset_hash_seed_matters_unless_vllm_fixes_it(
    tmp_path: Path, seed: str | None, version: str | None, level: str
) -> None:
    environ = {} if seed is None else {"PYTHONHASHSEED": seed}
    host = MadeUpHost(root=tmp_path, environ=environ)
    assert checks_software.hash_seed(host, version).level == level


def test_every_warning_and_error_says_what_to_do(host: MadeUpHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_native", FakeNative())
    for shm_dir in ("/dev/shm", "/mnt/none"):
        findings = examine(host, shm_dir)
        assert [one.name for one in findings] == CHECKS
        for finding in findings:
            assert finding.value
            assert finding.advice or finding.level == OK


def test_doctor_as_json_has_every_check_on_this_host() -> None:
    result = CliRunner().invoke(cli, ["doctor", "--json"])
    answer = json.loads(result.output)
    assert [one["name"] for one in answer["findings"]] == CHECKS
    assert all(set(one) == {"name", "level", "value", "advice"} for one in answer["findings"])
    assert answer["ok"] is not any(one["level"] == ERROR for one in answer["findings"])
    assert result.exit_code == (0 if answer["ok"] else 1)


def test_doctor_exits_with_1_only_if_there_is_an_error(tmp_path: Path) -> None:
    assert CliRunner().invoke(cli, ["doctor", "--shm-dir", str(tmp_path)]).exit_code == 0
    result = CliRunner().invoke(cli, ["doctor", "--shm-dir", str(tmp_path / "none")])
    assert result.exit_code == 1
    assert "Not ready: 1 error" in result.output


def test_doctor_fits_80_columns() -> None:
    output = CliRunner().invoke(cli, ["doctor"]).output
    assert max(len(line) for line in output.splitlines()) <= 80
