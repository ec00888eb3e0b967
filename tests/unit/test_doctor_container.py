"""What ``pegaflow doctor`` says about containers, on hosts made of files."""

import errno
import os
from pathlib import Path

import pytest

from pegaflow.cli import checks_container, checks_memory
from pegaflow.cli.finding import INFO, OK, WARNING
from pegaflow.cli.host import Host
from pegaflow.cli.memory_policy import probe_memory_policy
from pegaflow.shm.report import PoolListing
from tests.unit.fake_native import listing, refused
from tests.unit.made_up_host import GIB, MadeUpHost, made_up_host

SHM = "/dev/shm"


def pool(**fields: object) -> PoolListing:
    return PoolListing(**listing(**fields))  # type: ignore[arg-type]


def in_namespaces(root: Path, pid: int, ipc: int, user: int) -> MadeUpHost:
    host = made_up_host(root)
    directory = root / "proc/self/ns"
    directory.mkdir(parents=True)
    for kind, number in (("pid", pid), ("ipc", ipc), ("user", user)):
        (directory / kind).symlink_to(f"{kind}:[{number}]")
    return host


def test_namespaces_of_the_host_are_ok(tmp_path: Path) -> None:
    finding = checks_container.namespaces(in_namespaces(tmp_path, 4026531836, 4026531839, 4026531837))
    assert (finding.level, finding.value) == (OK, "pid, ipc, user: the host's")


def test_namespaces_of_a_container_need_one_directory(tmp_path: Path) -> None:
    finding = checks_container.namespaces(in_namespaces(tmp_path, 4026532500, 4026532501, 4026531837))
    assert (finding.level, finding.value) == (INFO, "own: pid, ipc")
    assert "mount one directory" in finding.advice
    assert "user" not in finding.advice


@pytest.mark.parametrize(
    ("uid_map", "outside"),
    [
        ("         0     100000      65536", "101000"),
        ("0 5000 1\n1000 7 1", "7"),
        ("0 5000 1", "nobody"),
        ("not a map", "nobody"),
        ("", "nobody"),
    ],
)
def test_user_namespaces_tell_who_one_is_outside(tmp_path: Path, uid_map: str, outside: str) -> None:
    host = in_namespaces(tmp_path, 4026532500, 4026531839, 4026532502)
    host.put("/proc/self/uid_map", uid_map + "\n")
    finding = checks_container.namespaces(host)
    assert (finding.level, finding.value) == (INFO, f"own: pid, user; user 1000 here is {outside} outside")
    assert "one user" in finding.advice


def test_namespaces_that_cannot_be_told_are_taken_for_the_hosts(tmp_path: Path) -> None:
    assert checks_container.namespaces(made_up_host(tmp_path)).level == OK


def test_namespaces_of_this_process_are_read() -> None:
    assert Host().link("/proc/self/ns/pid")


def test_pools_that_cannot_grow_are_a_warning(tmp_path: Path) -> None:
    host = made_up_host(tmp_path, free_bytes=6 * GIB)
    assert checks_container.room_to_grow(host, SHM, []).level == OK
    one = pool(name="one", pool_bytes=8 * GIB, bytes_used=2 * GIB)
    finding = checks_container.room_to_grow(host, SHM, [one])
    assert (finding.level, finding.value) == (OK, "pools may take 6 GiB more, 6 GiB is free")
    two = pool(name="two", pool_bytes=2 * GIB, bytes_used=GIB)
    finding = checks_container.room_to_grow(host, SHM, [one, two])
    assert (finding.level, finding.value) == (WARNING, "pools may take 7 GiB more, 6 GiB is free")
    assert "one, two" in finding.advice
    assert "--shm-size" in finding.advice


def test_refused_pools_are_not_expected_to_grow(tmp_path: Path) -> None:
    strange = PoolListing(**refused("strange", "another user's"))
    assert checks_container.room_to_grow(made_up_host(tmp_path), SHM, [strange]).value == "no pools yet"


def test_room_in_a_directory_that_is_gone_is_a_warning(tmp_path: Path) -> None:
    assert checks_container.room_to_grow(made_up_host(tmp_path), "/mnt/none", [pool()]).level == WARNING


@pytest.mark.parametrize(
    ("limit", "pool_bytes", "level", "part"),
    [
        (64 * GIB, 8 * GIB, OK, ""),
        (12 * GIB, 8 * GIB, WARNING, "pool default may grow to 8 GiB"),
        (6 * GIB, 8 * GIB, WARNING, "the pool alone can have this container killed"),
    ],
)
def test_memory_limit_is_held_against_the_largest_pool(
    tmp_path: Path, limit: int, pool_bytes: int, level: str, part: str
) -> None:
    host = made_up_host(tmp_path)
    host.put("/proc/self/cgroup", "0::/\n")
    host.put("/sys/fs/cgroup/memory.max", str(limit))
    pools = [pool(name="small", pool_bytes=GIB), pool(pool_bytes=pool_bytes), PoolListing(**refused("x", "y"))]
    finding = checks_memory.memory_limit(host, SHM, pools)
    assert finding.level == level
    assert part in finding.advice


def test_pools_in_huge_pages_are_held_against_huge_pages_and_nothing_else(tmp_path: Path) -> None:
    host = made_up_host(tmp_path, free_bytes=7 * GIB)
    host.put("/proc/self/cgroup", "0::/\n")
    host.put("/sys/fs/cgroup/memory.max", str(32 * GIB))
    host.put("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", str(30 * 512))
    host.put("/sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages", "2")
    huge = pool(name="huge", segments_path="/hugepages/x", pool_bytes=32 * GIB, bytes_used=0)
    assert checks_memory.memory_limit(host, SHM, [huge]).level == OK
    finding = checks_container.room_to_grow(host, SHM, [huge])
    assert (finding.level, finding.value) == (OK, "pools may take 32 GiB huge pages more, 32 GiB is free")
    small = pool(name="small", pool_bytes=8 * GIB, bytes_used=GIB)
    assert checks_memory.memory_limit(host, SHM, [huge, small]).level == OK
    assert checks_container.room_to_grow(host, SHM, [huge, small]).level == OK
    large = pool(name="large", pool_bytes=24 * GIB, bytes_used=17 * GIB)
    assert "pool large may grow" in checks_memory.memory_limit(host, SHM, [huge, large]).advice
    host.put("/sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages", "0")
    finding = checks_container.room_to_grow(host, SHM, [huge, small])
    assert finding.level == WARNING
    assert finding.value.startswith("pools may take 7 GiB more, 7 GiB is free; pools may take 32 GiB huge pages more")
    assert "(huge): reserve more" in finding.advice
    assert "docker" not in finding.advice


@pytest.mark.parametrize(
    ("status", "io_uring", "policy", "level", "value", "advice"),
    [
        ("Seccomp:\t0\n", "ok", "ok", OK, "no profile, nothing refused", ""),
        ("Seccomp:\t2\n", "ok", "ok", OK, "a profile is in force, nothing refused", ""),
        ("Seccomp:\t2\n", "EPERM", "ok", INFO, "a profile is in force, io_uring refused", "threads"),
        (
            "Seccomp:\t2\n", "EPERM", "Operation not permitted", INFO,
            "a profile is in force, io_uring and memory policy refused", "SYS_NICE",
        ),
        ("", "EPERM", "ok", INFO, "no profile, io_uring refused", "threads"),
    ],
)  # fmt: skip
def test_calls_that_a_profile_refuses_are_named(
    tmp_path: Path, status: str, io_uring: str, policy: str, level: str, value: str, advice: str
) -> None:
    host = made_up_host(tmp_path)
    host.put("/proc/self/status", f"Name:\tvllm\n{status}")
    finding = checks_container.system_calls(host, io_uring, policy)
    assert (finding.level, finding.value) == (level, value)
    assert advice in finding.advice


def test_kernel_is_asked_for_its_memory_policy() -> None:
    assert probe_memory_policy("pdp11") == "not known on this machine"
    assert probe_memory_policy() in ("ok", os.strerror(errno.EPERM), os.strerror(errno.ENOSYS))
