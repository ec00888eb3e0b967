"""What ``pegaflow doctor`` says about directories of an SSD cache."""

from pathlib import Path

import pytest

from pegaflow.cli.checks_ssd import CAPACITY_VARIABLE, PATH_VARIABLE, ssd_caches
from pegaflow.cli.finding import ERROR, INFO, OK, WARNING
from tests.unit.made_up_host import GIB, TMPFS_LINE, MadeUpHost, made_up_host

DISK_LINE = "40 24 259:1 / {path} rw - {kind} /dev/nvme0n1 rw"


def host_with(tmp_path: Path, *disks: tuple[str, str], **fields: object) -> MadeUpHost:
    """A host with ``(mount point, kind)`` beside its root."""
    host = made_up_host(tmp_path, **fields)
    lines = [DISK_LINE.format(path=path, kind=kind) for path, kind in disks]
    host.put("/proc/self/mountinfo", "\n".join(["24 1 0:22 / / rw - ext4 /dev/sda1 rw", TMPFS_LINE, *lines]))
    for path, _ in disks:
        host.put(f"{path}/lost+found/nothing")
    return host


def test_nothing_configured_is_no_problem(tmp_path: Path) -> None:
    (one,) = ssd_caches(made_up_host(tmp_path), [])
    assert one.level == INFO
    assert "--ssd" in one.advice


def test_local_disk_with_room_is_fine(tmp_path: Path) -> None:
    (one,) = ssd_caches(host_with(tmp_path, ("/mnt/nvme0", "xfs")), ["/mnt/nvme0"])
    assert (one.level, one.value) == (OK, "/mnt/nvme0: xfs, 30 GiB free of 32 GiB")


def test_directories_come_from_the_environment_if_none_is_given(tmp_path: Path) -> None:
    host = host_with(tmp_path, ("/mnt/nvme0", "xfs"), ("/mnt/nvme1", "ext4"))
    host.environ[PATH_VARIABLE] = "/mnt/nvme0:/mnt/nvme1"  # type: ignore[index]
    assert [one.level for one in ssd_caches(host, [])] == [OK, OK]
    assert len(ssd_caches(host, ["/mnt/nvme1"])) == 1


def test_missing_directory_is_an_error(tmp_path: Path) -> None:
    (one,) = ssd_caches(made_up_host(tmp_path), ["/mnt/nvme7"])
    assert one.level == ERROR
    assert "Mount the disk" in one.advice


def test_directory_of_somebody_else_is_an_error(tmp_path: Path) -> None:
    host = host_with(tmp_path, ("/mnt/nvme0", "xfs"), may_write=False)
    assert ssd_caches(host, ["/mnt/nvme0"])[0].level == ERROR


@pytest.mark.parametrize(
    ("kind", "word"), [("tmpfs", "memory"), ("nfs4", "network"), ("fuse.sshfs", "network"), ("overlay", "container")]
)
def test_file_system_that_is_no_local_disk_is_a_warning(tmp_path: Path, kind: str, word: str) -> None:
    (one,) = ssd_caches(host_with(tmp_path, ("/mnt/cache", kind)), ["/mnt/cache"])
    assert one.level == WARNING
    assert word in one.advice


def test_capacity_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    host = host_with(tmp_path, ("/a", "xfs"), ("/b", "xfs"), free_bytes=8 * GIB)
    host.environ[CAPACITY_VARIABLE] = "16gib"  # type: ignore[index]
    assert [one.level for one in ssd_caches(host, ["/a", "/b"])] == [OK, OK]
    host.environ[CAPACITY_VARIABLE] = "17gib"  # type: ignore[index]
    assert [one.level for one in ssd_caches(host, ["/a", "/b"])] == [ERROR, ERROR]
    host.environ[CAPACITY_VARIABLE] = "much"  # type: ignore[index]
    assert [one.level for one in ssd_caches(host, ["/a", "/b"])] == [ERROR]


def test_cache_that_is_there_already_counts_as_room(tmp_path: Path) -> None:
    host = host_with(tmp_path, ("/a", "xfs"), free_bytes=0)
    host.put("/a/pegaflow-ssd-v1-1000-default", "x" * 200_000)
    host.environ[CAPACITY_VARIABLE] = "150kb"  # type: ignore[index]
    (one,) = ssd_caches(host, ["/a"])
    assert one.level == OK
    assert "caches take" in one.value


def test_two_directories_on_one_file_system_are_a_warning(tmp_path: Path) -> None:
    host = host_with(tmp_path, ("/mnt/nvme0", "xfs"))
    host.put("/mnt/nvme0/a/x")
    host.put("/mnt/nvme0/b/x")
    assert [one.level for one in ssd_caches(host, ["/mnt/nvme0/a", "/mnt/nvme0/b"])] == [OK, WARNING]
