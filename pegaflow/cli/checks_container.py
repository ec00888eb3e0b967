"""What ``doctor`` asks about containers: whose namespaces these are, and whether pools have room to grow."""

import os
from collections.abc import Sequence

from pegaflow.cli.finding import INFO, OK, WARNING, Finding
from pegaflow.cli.host import Host
from pegaflow.cli.output import format_bytes, printable
from pegaflow.shm.report import PoolListing

# Numbers of the namespaces that the kernel starts with; they are the same everywhere.
HOST_NAMESPACES = {"pid": "pid:[4026531836]", "ipc": "ipc:[4026531839]", "user": "user:[4026531837]"}


def namespaces(host: Host) -> Finding:
    """Which namespaces are not the host's, and what that means for sharing a pool."""
    name = "namespaces"
    seen = {kind: host.link(f"/proc/self/ns/{kind}") for kind in HOST_NAMESPACES}
    own = [kind for kind, link in seen.items() if link is not None and link != HOST_NAMESPACES[kind]]
    if not own:
        return Finding(name, OK, "pid, ipc, user: the host's")
    value = f"own: {', '.join(own)}"
    advice = (
        "To share a pool, mount one directory into all containers (docker: --ipc=host, or -v). PID and IPC namespaces "
        "do not matter: file locks tell who is alive."
    )
    if "user" in own:
        here = host.user_id()
        outside = _user_outside(host, here)
        value += f"; user {here} here is {'nobody' if outside is None else outside} outside"
        advice += " With user namespaces, all must run as one user both as seen from inside and from outside."
    return Finding(name, INFO, value, advice)


def _user_outside(host: Host, user: int) -> int | None:
    for line in (host.text("/proc/self/uid_map") or "").splitlines():
        words = line.split()
        if len(words) == 3 and all(word.isdecimal() for word in words):
            inside, outside, count = map(int, words)
            if inside <= user < inside + count:
                return outside + user - inside
    return None


def room_to_grow(host: Host, shm_dir: str, pools: Sequence[PoolListing]) -> Finding:
    """Whether the file system, and the host's huge pages, have what pools there may still take."""
    name = "room to grow"
    sound = [pool for pool in pools if pool.state == "ok"]
    if not sound:
        return Finding(name, OK, "no pools yet")
    try:
        _total, free = host.space(os.path.abspath(shm_dir))
    except OSError as error:
        return Finding(name, WARNING, error.strerror or str(error), "Pools cannot grow there: mount it again.")
    ordinary = [pool for pool in sound if not pool.in_huge_pages]
    huge = [pool for pool in sound if pool.in_huge_pages]
    values, advice = [], []
    for some, room, what, more in (
        (ordinary, free, "", "enlarge the mount (docker: --shm-size)"),
        (huge, _free_huge_pages_bytes(host), " huge pages", "reserve more of them (sysctl vm.nr_hugepages)"),
    ):
        wanted = sum(max(0, (pool.pool_bytes or 0) - (pool.bytes_used or 0)) for pool in some)
        if some:
            values.append(f"pools may take {format_bytes(wanted)}{what} more, {format_bytes(room)} is free")
        if wanted > room:
            names = ", ".join(printable(pool.name) for pool in some)
            advice.append(
                f"They stay smaller and lose blocks earlier ({names}): {more}, or remove a pool and set "
                "pegaflow.pool_size."
            )
    return Finding(name, WARNING if advice else OK, "; ".join(values), " ".join(advice))


def _free_huge_pages_bytes(host: Host) -> int:
    """Of all sizes."""
    place, free = "/sys/kernel/mm/hugepages", 0
    for directory in host.names(place):
        kilobytes = directory.removeprefix("hugepages-").removesuffix("kB")
        if kilobytes.isdecimal():
            free += int(kilobytes) * 1024 * (host.number(f"{place}/{directory}/free_hugepages") or 0)
    return free


def system_calls(host: Host, io_uring: str, memory_policy: str) -> Finding:
    """Whether a seccomp profile keeps us from calls that make things faster. ``io_uring``, ``memory_policy``: ``"ok"``,
    or why the kernel refuses it."""
    name = "seccomp"
    filtered = "Seccomp:\t2" in (host.text("/proc/self/status") or "")
    refused = [call for call, answer in (("io_uring", io_uring), ("memory policy", memory_policy)) if answer != "ok"]
    value = f"{'a profile is in force' if filtered else 'no profile'}, {' and '.join(refused) or 'nothing'} refused"
    if not refused:
        return Finding(name, OK, value)
    advice = []
    if "io_uring" in refused:
        advice.append("The SSD tier uses threads instead of io_uring (docker: a profile of your own that allows it).")
    if "memory policy" in refused:
        advice.append("New memory is not placed near its GPU (docker: --cap-add SYS_NICE).")
    return Finding(name, INFO, value, " ".join(advice))
