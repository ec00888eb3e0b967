"""What ``pegaflow doctor`` says about memory, on hosts made of files."""

from dataclasses import replace
from pathlib import Path

import pytest

from pegaflow.cli import checks_memory
from pegaflow.cli.finding import ERROR, INFO, OK, WARNING
from tests.unit.made_up_host import GIB, TMPFS_LINE, made_up_host

SHM = "/dev/shm"


def test_large_tmpfs_is_ok(tmp_path: Path) -> None:
    finding = checks_memory.shared_memory(made_up_host(tmp_path), SHM)
    assert (finding.level, finding.value) == (OK, "/dev/shm: tmpfs, 30 GiB free of 32 GiB")


def test_container_default_names_the_option_that_helps(tmp_path: Path) -> None:
    host = made_up_host(tmp_path, total_bytes=64 << 20, free_bytes=64 << 20)
    finding = checks_memory.shared_memory(host, SHM)
    assert finding.level == WARNING
    assert "--shm-size" in finding.advice


def test_full_tmpfs_asks_for_a_clean_up(tmp_path: Path) -> None:
    finding = checks_memory.shared_memory(made_up_host(tmp_path, free_bytes=1 << 20), SHM)
    assert finding.level == WARNING
    assert "pegaflow gc" in finding.advice


def test_missing_directory_is_an_error(tmp_path: Path) -> None:
    finding = checks_memory.shared_memory(made_up_host(tmp_path), "/mnt/none")
    assert finding.level == ERROR
    assert "No such file" in finding.value


def test_directory_that_may_not_be_written_is_an_error(tmp_path: Path) -> None:
    assert checks_memory.shared_memory(made_up_host(tmp_path, may_write=False), SHM).level == ERROR


def test_directory_on_a_disk_is_a_warning(tmp_path: Path) -> None:
    host = made_up_host(tmp_path)
    host.put("/data/pools/keep")
    finding = checks_memory.shared_memory(host, "/data/pools")
    assert finding.level == WARNING
    assert "ext4" in finding.value


def test_mount_with_a_blank_in_its_path_is_found(tmp_path: Path) -> None:
    host = made_up_host(tmp_path)
    host.put("/proc/self/mountinfo", "24 1 0:22 / / rw - ext4 a rw\n31 24 0:27 / /mnt/my\\040shm rw - tmpfs tmpfs rw\n")
    mount = host.mount_of("/mnt/my shm/pools")
    assert mount is not None
    assert (mount.path, mount.kind) == ("/mnt/my shm", "tmpfs")


def test_mount_with_a_similar_name_is_not_taken(tmp_path: Path) -> None:
    mount = made_up_host(tmp_path).mount_of("/dev/shm2/pools")
    assert mount is not None
    assert mount.path == "/"


@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        ("0::/", {"/sys/fs/cgroup/memory.max": "max"}, None),
        ("0::/", {"/sys/fs/cgroup/memory.max": str(4 * GIB)}, 4 * GIB),
        (
            "0::/a.slice/b.scope",
            {
                "/sys/fs/cgroup/a.slice/b.scope/memory.max": "max",
                "/sys/fs/cgroup/a.slice/memory.max": str(8 * GIB),
            },
            8 * GIB,
        ),
        ("5:cpu,memory:/job", {"/sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(2 * GIB)}, 2 * GIB),
        ("5:memory:/", {"/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("7:memory:/docker/host-only-path", {"/sys/fs/cgroup/memory/memory.limit_in_bytes": str(GIB)}, GIB),
        ("", {}, None),
    ],
)
def test_tightest_limit_of_the_control_groups_counts(
    tmp_path: Path, cgroup: str, files: dict[str, str], limit: int | None
) -> None:
    host = made_up_host(tmp_path)
    host.put("/proc/self/cgroup", cgroup + "\n")
    for path, text in files.items():
        host.put(path, text + "\n")
    assert checks_memory.cgroup_memory_bytes(host) == limit


def test_limit_that_leaves_no_room_beside_a_default_pool_is_a_warning(tmp_path: Path) -> None:
    host = made_up_host(tmp_path)
    host.put("/proc/self/cgroup", "0::/\n")
    host.put("/sys/fs/cgroup/memory.max", str(16 * GIB))
    finding = checks_memory.memory_limit(host, SHM)
    assert finding.level == WARNING
    assert "pegaflow.pool_size" in finding.advice
    host.put("/sys/fs/cgroup/memory.max", str(256 * GIB))
    assert checks_memory.memory_limit(host, SHM).level == OK


def test_locked_memory_matters_where_there_is_rdma(tmp_path: Path) -> None:
    host = made_up_host(tmp_path)
    assert checks_memory.locked_memory(host, None).level == OK
    assert checks_memory.locked_memory(host, 65536).level == INFO
    host.put("/sys/class/infiniband/mlx5_0/node_type")
    finding = checks_memory.locked_memory(host, 65536)
    assert finding.level == WARNING
    assert "memlock" in finding.advice


def test_a_hugetlbfs_holds_blocks_but_no_pool(tmp_path: Path) -> None:
    host = made_up_host(tmp_path)
    host.put("/mnt/huge/.keep")
    mount = "40 24 0:31 / /mnt/huge rw,relatime shared:9 - hugetlbfs hugetlbfs rw,pagesize=2M\n"
    host.put("/proc/self/mountinfo", f"{TMPFS_LINE}\n{mount}")
    finding = checks_memory.shared_memory(host, "/mnt/huge")
    assert (finding.level, "pegaflow.use_hugepages" in finding.advice) == (ERROR, True)


def test_huge_pages_are_counted_in_bytes(tmp_path: Path) -> None:
    host = made_up_host(tmp_path)
    assert checks_memory.huge_pages(host).level == INFO
    host.put(
        "/proc/meminfo", "MemTotal: 1 kB\nHugePages_Total:     512\nHugePages_Free:      500\nHugepagesize:  2048 kB\n"
    )
    host.put("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size [advise] never deny force\n")
    finding = checks_memory.huge_pages(host)
    assert (finding.level, "Mount a hugetlbfs" in finding.advice) == (INFO, True)
    assert finding.value == "500 of 512 x 2 MiB free; transparent for shared memory: advise"


def test_huge_pages_need_a_hugetlbfs_that_this_user_may_write(tmp_path: Path) -> None:
    host = made_up_host(tmp_path)
    host.put("/proc/meminfo", "HugePages_Total: 512\nHugePages_Free: 500\nHugepagesize: 2048 kB\n")
    mount = "40 24 0:31 / /dev/hugepages rw,relatime shared:9 - hugetlbfs hugetlbfs rw,pagesize=2M\n"
    host.put("/proc/self/mountinfo", f"{TMPFS_LINE}\n{mount}")
    finding = checks_memory.huge_pages(host)
    assert finding.level == OK
    assert finding.value.endswith("hugetlbfs at /dev/hugepages")
    finding = checks_memory.huge_pages(replace(host, may_write=False))
    assert (finding.level, "uid=" in finding.advice) == (INFO, True)


def test_logout_of_the_last_session_deletes_pools_unless_told_not_to(tmp_path: Path) -> None:
    host = made_up_host(tmp_path)
    assert checks_memory.removal_at_logout(host, SHM).level == OK
    host.put("/run/systemd/system/keep")
    finding = checks_memory.removal_at_logout(host, SHM)
    assert finding.level == WARNING
    assert "enable-linger" in finding.advice
    host.put("/etc/systemd/logind.conf.d/10-pools.conf", "[Login]\nRemoveIPC = no\n")
    assert checks_memory.removal_at_logout(host, SHM).level == OK


def test_lingering_and_system_users_keep_their_pools(tmp_path: Path) -> None:
    host = made_up_host(tmp_path)
    host.put("/run/systemd/system/keep")
    host.put("/etc/passwd", "root:x:0:0::/root:/bin/sh\nllm:x:1000:1000::/home/llm:/bin/sh\n")
    host.put("/etc/systemd/logind.conf", "#RemoveIPC=no\n")
    assert checks_memory.removal_at_logout(host, SHM).level == WARNING
    host.put("/var/lib/systemd/linger/llm")
    assert checks_memory.removal_at_logout(host, SHM).level == OK
    (tmp_path / "system").mkdir()
    daemon = made_up_host(tmp_path / "system", uid=998)
    daemon.put("/run/systemd/system/keep")
    assert checks_memory.removal_at_logout(daemon, SHM).level == OK
