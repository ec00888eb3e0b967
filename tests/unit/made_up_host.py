"""A host made of files below a directory, with limits and file systems of the test's choosing."""

from dataclasses import dataclass, field
from pathlib import Path

from pegaflow.cli.host import Host

GIB = 1 << 30
TMPFS_LINE = "30 24 0:26 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,size=33554432k"


@dataclass(frozen=True)
class MadeUpHost(Host):
    """Files come from ``root``, everything else from the fields."""

    total_bytes: int = 32 * GIB
    free_bytes: int = 30 * GIB
    may_write: bool = True
    limits: dict[int, int] = field(default_factory=dict)
    uid: int = 1000

    def space(self, path: str) -> tuple[int, int]:
        """The fields, if the directory exists."""
        if not self.exists(path):
            raise FileNotFoundError(2, "No such file or directory")
        return self.total_bytes, self.free_bytes

    def writable(self, path: str) -> bool:
        """The field."""
        return self.may_write

    def limit(self, which: int) -> int:
        """The limit that was set, or plenty."""
        return self.limits.get(which, 65536)

    def user_id(self) -> int:
        """The field."""
        return self.uid

    def put(self, path: str, text: str = "") -> None:
        """Write one file."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def made_up_host(root: Path, **fields: object) -> MadeUpHost:
    """A host with a tmpfs of 32 GiB at /dev/shm and nothing else."""
    host = MadeUpHost(root=root, environ={}, **fields)  # type: ignore[arg-type]
    (root / "dev/shm").mkdir(parents=True)
    host.put("/proc/self/mountinfo", f"24 1 0:22 / / rw - ext4 /dev/sda1 rw\n{TMPFS_LINE}\n")
    return host
