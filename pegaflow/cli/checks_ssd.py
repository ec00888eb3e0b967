"""What ``doctor`` asks about the directories of an SSD cache."""

import os
from collections.abc import Sequence

from pegaflow.cli.finding import ERROR, INFO, OK, WARNING, Finding
from pegaflow.cli.host import Host
from pegaflow.cli.output import format_bytes, printable
from pegaflow.config import parse_size
from pegaflow.errors import InvalidArgument

NAME = "ssd cache"
MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "glusterfs", "virtiofs")
PATH_VARIABLE = "PEGAFLOW_SSD_CACHE_PATH"
CAPACITY_VARIABLE = "PEGAFLOW_SSD_CACHE_CAPACITY"


def ssd_caches(host: Host, given: Sequence[str]) -> list[Finding]:
    """A finding for each directory: those given, else those in the environment."""
    directories = [*given] or [path for path in host.environ.get(PATH_VARIABLE, "").split(os.pathsep) if path]
    if not directories:
        advice = (
            f"Optional: 'pegaflow doctor --ssd DIR' looks at a directory for pegaflow.ssd_cache_path ({PATH_VARIABLE})."
        )
        return [Finding(NAME, INFO, "no directory given", advice)]
    text = host.environ.get(CAPACITY_VARIABLE)
    try:
        share = parse_size(text) // len(directories) if text else None
    except InvalidArgument:
        return [Finding(NAME, ERROR, f"{CAPACITY_VARIABLE}={printable(text or '')}", 'Write a size such as "512gb".')]
    paths = [os.path.abspath(directory) for directory in directories]
    return [_directory(host, path, share, paths[:number]) for number, path in enumerate(paths)]


def _directory(host: Host, path: str, share: int | None, before: Sequence[str]) -> Finding:
    shown = printable(path)
    try:
        total, free = host.space(path)
    except OSError as error:
        reason = error.strerror or str(error)
        return Finding(NAME, ERROR, f"{shown}: {reason}", "Mount the disk there, or create the directory.")
    mount = host.mount_of(path)
    kind = mount.kind if mount else "unknown file system"
    own = sum(host.file_bytes(f"{path}/{one}") for one in host.names(path) if one.startswith("pegaflow-ssd-"))
    value = f"{shown}: {kind}, {format_bytes(free)} free of {format_bytes(total)}"
    if own:
        value += f", caches take {format_bytes(own)}"
    if not host.writable(path):
        return Finding(NAME, ERROR, value, "This user may not create files there: change its owner or mode.")
    if kind in MEMORY:
        return Finding(NAME, WARNING, value, "This is memory and no disk: it takes from what the pool could have.")
    if kind in REMOTE or kind.startswith("fuse"):
        advice = "A network or user-space file system: reads may take longer than computing, and locks may not be kept."
        return Finding(NAME, WARNING, value, advice)
    if kind == "overlay":
        return Finding(NAME, WARNING, value, "A container's own layer is lost with it: mount a directory of the host.")
    if share is not None and share > free + own:
        advice = (
            f"It is to have {format_bytes(share)}, which is claimed at the start: free some, or lower the capacity."
        )
        return Finding(NAME, ERROR, value, advice)
    if mount is not None and any(host.mount_of(other) == mount for other in before):
        return Finding(NAME, WARNING, value, "On the same file system as another one: give one directory per device.")
    return Finding(NAME, OK, value)
