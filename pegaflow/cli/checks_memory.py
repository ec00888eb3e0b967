"""What ``doctor`` asks about memory: shared memory, its limits, huge pages, and who may delete it."""

import os
from collections.abc import Sequence

from pegaflow.cli.finding import ERROR, INFO, OK, WARNING, Finding
from pegaflow.cli.host import UNLIMITED, Host, Mount
from pegaflow.cli.output import format_bytes, printable
from pegaflow.shm.report import PoolListing

MIB = 1 << 20
GIB = 1 << 30
# What a pool takes when it is not told: the smaller of this and half of what the file system has left.
POOL_BYTES_DEFAULT_MAX = 30 * 10**9
SHM_BYTES_WARNED_BELOW = GIB
DOCKER_SHM_BYTES = 64 * MIB
# Control groups of version 1 say "no limit" with a number close to 2^63.
CGROUP_UNLIMITED_BYTES = 1 << 60
SYSTEM_USER_ID_MAX = 999
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


def shared_memory(host: Host, shm_dir: str) -> Finding:
    """Where pools live: kind of file system, size, what is left."""
    name = "shared memory"
    path = os.path.abspath(shm_dir)
    try:
        total, free = host.space(path)
    except OSError as error:
        reason = error.strerror or str(error)
        return Finding(name, ERROR, f"{path}: {reason}", "Mount a tmpfs there, or choose another pegaflow.shm_dir.")
    mount = host.mount_of(path)
    kind = mount.kind if mount else "unknown file system"
    value = f"{path}: {kind}, {format_bytes(free)} free of {format_bytes(total)}"
    if not host.writable(path):
        return Finding(name, ERROR, value, f"This user may not create files in {path}; change its owner or mode.")
    if kind == "hugetlbfs":
        advice = "It cannot hold a pool's index: keep pools on a tmpfs, and set pegaflow.use_hugepages."
        return Finding(name, ERROR, value, advice)
    if kind not in MEMORY_FILE_SYSTEMS:
        return Finding(name, WARNING, value, "This is no memory: pools would be written to a disk. Mount a tmpfs.")
    if free < SHM_BYTES_WARNED_BELOW:
        return Finding(name, WARNING, value, _more_shared_memory(total))
    return Finding(name, OK, value)


def _more_shared_memory(total: int) -> str:
    if total <= DOCKER_SHM_BYTES:
        return (
            "This is a container's default: start it with --shm-size=32g or --ipc=host (Kubernetes: a Memory emptyDir)."
        )
    return "Too little for a useful pool: 'pegaflow gc', or remount it with a larger size= option."


def memory_limit(host: Host, shm_dir: str, pools: Sequence[PoolListing] = ()) -> Finding:
    """The control group's memory limit, against the largest pool: whoever touches a page of a pool first is charged."""
    name = "memory limit"
    limit = cgroup_memory_bytes(host)
    if limit is None:
        return Finding(name, OK, "none (control group)")
    value = f"{format_bytes(limit)} (control group)"
    # Huge pages do not count towards it.
    ordinary = [pool for pool in pools if not pool.in_huge_pages]
    if pools and not ordinary:
        return Finding(name, OK, f"{value}; all pools are in huge pages")
    largest = max(ordinary, key=lambda pool: pool.pool_bytes or 0, default=None)
    if largest is not None and largest.pool_bytes:
        pool_bytes, which = largest.pool_bytes, f"pool {printable(largest.name)} may grow to"
    else:
        pool_bytes, which = _default_pool_bytes(host, shm_dir), "a pool may by default grow to"
    if limit < 2 * pool_bytes:
        advice = (
            f"Pages of a pool count towards it, and {which} {format_bytes(pool_bytes)}: set pegaflow.pool_size (for "
            "new pools) or the limit so that engine and pool fit together."
        )
        if limit < pool_bytes:
            advice += " Now the pool alone can have this container killed for want of memory."
        return Finding(name, WARNING, value, advice)
    return Finding(name, OK, value)


def _default_pool_bytes(host: Host, shm_dir: str) -> int:
    try:
        _total, free = host.space(os.path.abspath(shm_dir))
    except OSError:
        return 0
    return min(POOL_BYTES_DEFAULT_MAX, free // 2)


def cgroup_memory_bytes(host: Host) -> int | None:
    """The tightest memory limit of this process's control groups, version 1 or 2; ``None`` if there is none."""
    limits = []
    for line in (host.text("/proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            limits += _limits_up("/sys/fs/cgroup", group, "memory.max", host)
        elif "memory" in controllers.split(","):
            limits += _limits_up("/sys/fs/cgroup/memory", group, "memory.limit_in_bytes", host)
    return min(limits, default=None)


def _limits_up(base: str, group: str, file: str, host: Host) -> list[int]:
    # A container may see its group's path on the host while only its own subtree is mounted: missing levels are normal.
    limits = []
    parts = [part for part in group.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        limit = host.number("/".join([base, *parts[:depth], file]))
        if limit is not None and limit < CGROUP_UNLIMITED_BYTES:
            limits.append(limit)
    return limits


def locked_memory(host: Host, memlock_bytes: int | None) -> Finding:
    """RLIMIT_MEMLOCK: network cards may only register locked memory."""
    name = "locked memory"
    if memlock_bytes is None or memlock_bytes == UNLIMITED:
        return Finding(name, OK, "no limit")
    value = f"limit {format_bytes(memlock_bytes)}"
    advice = "ulimit -l unlimited, systemd: LimitMEMLOCK=infinity, docker: --ulimit memlock=-1."
    if host.names("/sys/class/infiniband"):
        return Finding(name, WARNING, value, f"Too little to register a pool with the RDMA device: {advice}")
    return Finding(name, INFO, value, f"Only matters for RDMA and io_uring buffers: {advice}")


def huge_pages(host: Host) -> Finding:
    """Reserved huge pages, and transparent ones for shared memory."""
    name = "huge pages"
    facts = _meminfo(host)
    total, free = facts.get("HugePages_Total", 0), facts.get("HugePages_Free", 0)
    page_bytes = facts.get("Hugepagesize", 0) * 1024
    enabled = host.text("/sys/kernel/mm/transparent_hugepage/shmem_enabled") or ""
    choice = enabled.partition("[")[2].partition("]")[0] or "absent"
    transparent = f"transparent for shared memory: {choice}"
    if total:
        value = f"{free} of {total} x {format_bytes(page_bytes)} free; {transparent}"
        mounts = host.mounts_of_kind("hugetlbfs")
        if not mounts:
            return Finding(name, INFO, value, "Mount a hugetlbfs, so that pegaflow.use_hugepages can use them.")
        if not any(host.writable(mount.path) for mount in mounts):
            advice = f"This user may not write to {mounts[0].path}: mount it with uid= of vLLM's user."
            return Finding(name, INFO, value, advice)
        return Finding(name, OK, f"{value}; hugetlbfs at {', '.join(mount.path for mount in mounts)}")
    if choice in ("always", "within_size", "advise", "force"):
        return Finding(name, OK, f"none reserved; {transparent}")
    advice = (
        "Optional: they make page-locking for GPUs faster. Reserve some (sysctl vm.nr_hugepages), mount a hugetlbfs "
        "and set pegaflow.use_hugepages, or allow transparent ones (echo advise > shmem_enabled)."
    )
    return Finding(name, INFO, f"none reserved; {transparent}", advice)


def _meminfo(host: Host) -> dict[str, int]:
    facts = {}
    for line in (host.text("/proc/meminfo") or "").splitlines():
        field, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal():
            facts[field] = int(words[0])
    return facts


def removal_at_logout(host: Host, shm_dir: str) -> Finding:
    """Whether systemd deletes this user's shared memory when the last session ends."""
    name = "removal at logout"
    user = host.user_id()
    if not host.exists("/run/systemd/system"):
        return Finding(name, OK, "no systemd here")
    if user <= SYSTEM_USER_ID_MAX:
        return Finding(name, OK, "not for system users")
    if not _below_dev_shm(host.mount_of(os.path.abspath(shm_dir))):
        return Finding(name, OK, "only concerns /dev/shm")
    if _remove_ipc_off(host):
        return Finding(name, OK, "RemoveIPC=no")
    login = _login_name(host, user)
    if login is not None and host.exists(f"/var/lib/systemd/linger/{login}"):
        return Finding(name, OK, "user lingers")
    advice = "systemd deletes this user's pools when the last session ends: loginctl enable-linger, or RemoveIPC=no."
    return Finding(name, WARNING, "RemoveIPC is on", advice)


def _below_dev_shm(mount: Mount | None) -> bool:
    return mount is not None and mount.path == "/dev/shm"


def _remove_ipc_off(host: Host) -> bool:
    files = ["/etc/systemd/logind.conf"]
    files += [f"/etc/systemd/logind.conf.d/{one}" for one in host.names("/etc/systemd/logind.conf.d")]
    last = ""
    for file in files:
        for line in (host.text(file) or "").splitlines():
            option, _, value = line.partition("=")
            if option.strip() == "RemoveIPC":
                last = value.strip().lower()
    return last in ("no", "false", "off", "0", "n", "f")


def _login_name(host: Host, user: int) -> str | None:
    for line in (host.text("/etc/passwd") or "").splitlines():
        fields = line.split(":")
        if len(fields) > 2 and fields[2] == str(user):
            return fields[0]
    return None
