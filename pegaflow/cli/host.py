"""The host as ``doctor`` sees it: files below a root, limits, file systems. Tests put a made-up host in its place."""

import os
import resource
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

UNLIMITED = -1


@dataclass(frozen=True)
class Mount:
    """One line of ``/proc/self/mountinfo``."""

    path: str
    kind: str
    """File system type, such as ``tmpfs``."""
    options: str
    """Options of the file system itself, comma-separated."""


@dataclass(frozen=True)
class Host:
    """Read-only access to what the kernel says about this host."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def text(self, path: str) -> str | None:
        """Contents of a file without surrounding blanks; ``None`` if it cannot be read."""
        try:
            return self._at(path).read_text(encoding="utf-8", errors="replace").strip("\0 \t\r\n")
        except OSError:
            return None

    def link(self, path: str) -> str | None:
        """What a symbolic link says; ``None`` if it cannot be read."""
        try:
            return os.readlink(self._at(path))
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        """Contents of a file as a number; ``None`` if it cannot be read or is none."""
        text = self.text(path)
        return int(text) if text is not None and text.isdecimal() else None

    def names(self, path: str) -> list[str]:
        """Sorted names in a directory; empty if there is none."""
        try:
            return sorted(entry.name for entry in os.scandir(self._at(path)))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        """Whether there is anything at ``path``."""
        return self._at(path).exists()

    def space(self, path: str) -> tuple[int, int]:
        """``(total, available)`` bytes of the file system that holds ``path``. Raises ``OSError``."""
        facts = os.statvfs(self._at(path))
        return facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize

    def file_bytes(self, path: str) -> int:
        """Bytes that the file at ``path`` takes on its disk; 0 if it cannot be looked at."""
        try:
            return os.lstat(self._at(path)).st_blocks * 512
        except OSError:
            return 0

    def writable(self, path: str) -> bool:
        """Whether this user may create files in directory ``path``."""
        return os.access(self._at(path), os.W_OK | os.X_OK)

    def accessible(self, path: str) -> bool:
        """Whether this user may read and write the file or device at ``path``."""
        return os.access(self._at(path), os.R_OK | os.W_OK)

    def limit(self, which: int) -> int:
        """Soft resource limit, ``UNLIMITED`` if there is none."""
        soft, _hard = resource.getrlimit(which)
        return UNLIMITED if soft == resource.RLIM_INFINITY else soft

    def user_id(self) -> int:
        """Effective user id."""
        return os.geteuid()

    def mount_of(self, path: str) -> Mount | None:
        """The mount that ``path`` lies in: the longest mount point above it, and the newest of equals."""
        best: Mount | None = None
        for mount in self._mounts():
            below = path == mount.path or path.startswith(mount.path.rstrip("/") + "/")
            if below and (best is None or len(mount.path) >= len(best.path)):
                best = mount
        return best

    def mounts_of_kind(self, kind: str) -> list[Mount]:
        """All mounts of a kind of file system."""
        return [mount for mount in self._mounts() if mount.kind == kind]

    def _mounts(self) -> list[Mount]:
        found = []
        for line in (self.text("/proc/self/mountinfo") or "").splitlines():
            before, dash, after = line.partition(" - ")
            fields, tail = before.split(), after.split()
            if dash and len(fields) > 4 and len(tail) >= 2:
                # The kernel writes blanks in paths as octal escapes.
                path = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
                found.append(Mount(path, tail[0], tail[2] if len(tail) > 2 else ""))
        return found

    def _at(self, path: str) -> Path:
        return self.root / path.lstrip("/")


def bind_problem(ip: str) -> str | None:
    """Why nobody can listen on an address of this host; ``None`` if somebody can."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((ip, 0))
    except OSError as error:
        return error.strerror or str(error)
    return None
