"""Two hosts on one: network namespaces with a cable between them, and a folder of shared memory each. Needs root."""

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NETWORK = "10.77.0"
"""Addresses of both; nobody outside of the namespaces sees them."""

SHM = Path("/dev/shm")


@dataclass(frozen=True)
class MadeUpHost:
    """A network of its own and memory of its own; files are shared."""

    name: str
    address: str
    shm_dir: Path
    cores: tuple[int, ...]
    """On which its engines are to compute: none that the other host has, if there are two. Threads of vLLM that wait do
    so without rest, and on a core of two engines some kernels (seen with Linux 6.18) never let the other's run."""

    @property
    def command(self) -> tuple[str, ...]:
        """What to write before a command so that it runs on this host."""
        return ("nsenter", f"--net=/run/netns/{self.name}")


class CannotMakeHosts(Exception):
    """Network namespaces cannot be made here."""


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[MadeUpHost, MadeUpHost]]:
    """Two hosts that reach each other and nothing else, gone in the end. Raises ``CannotMakeHosts``."""
    tag = secrets.token_hex(3)
    cores = sorted(os.sched_getaffinity(0))
    half = (len(cores) + 1) // 2
    pair = [
        MadeUpHost(f"pegaflow-{tag}-{end}", f"{NETWORK}.{number}", SHM / f"pegaflow-{tag}-{end}", tuple(own or cores))
        for number, end, own in ((1, "a", cores[:half]), (2, "b", cores[half:]))
    ]
    try:
        for host in pair:
            _ip("netns", "add", host.name)
            host.shm_dir.mkdir(mode=0o700)
        ends = [f"pf{tag}{end}" for end in "ab"]
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, end in zip(pair, ends, strict=True):
            _ip("link", "set", end, "netns", host.name)
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", end)
            _ip("-n", host.name, "link", "set", end, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield pair[0], pair[1]
    finally:
        for host in pair:
            if Path(f"/run/netns/{host.name}").exists():
                _ip("netns", "del", host.name)  # and with it the cable
            shutil.rmtree(host.shm_dir, ignore_errors=True)


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise CannotMakeHosts("The program 'ip' is missing: install iproute2.") from None
    except subprocess.CalledProcessError as error:
        root = "" if os.geteuid() == 0 else " This needs root."
        raise CannotMakeHosts(f"'ip {' '.join(arguments)}' failed: {error.stderr.strip()}.{root}") from None
