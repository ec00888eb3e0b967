"""What ``doctor`` asks about the kernel and the devices: io_uring, NUMA, files, GPUs."""

import resource

from pegaflow.cli.cuda_probe import CudaDriver, probe_cuda
from pegaflow.cli.finding import INFO, OK, WARNING, Finding
from pegaflow.cli.host import UNLIMITED, Host
from pegaflow.cli.output import format_bytes

OPEN_FILES_WARNED_BELOW = 1024


def io_uring(answer: str) -> Finding:
    """Whether the kernel lets us use io_uring; ``answer`` is the native engine's."""
    if answer == "ok":
        return Finding("io_uring", OK, "available")
    advice = "Optional: the SSD tier then uses a thread pool. Containers need a seccomp profile that allows io_uring."
    return Finding("io_uring", INFO, f"refused: {answer}", advice)


def numa(host: Host, cpus: int) -> Finding:
    """NUMA nodes with their processors and memory."""
    base = "/sys/devices/system/node"
    nodes = [one for one in host.names(base) if one.startswith("node") and one[4:].isdecimal()]
    nodes.sort(key=lambda one: int(one[4:]))
    usable = f"{cpus} CPU{'s' if cpus != 1 else ''} usable"
    if len(nodes) <= 1:
        return Finding("numa", OK, f"one node, {usable}")
    described = [f"{one[4:]}: CPUs {host.text(f'{base}/{one}/cpulist') or 'none'}" for one in nodes]
    return Finding("numa", OK, f"{len(nodes)} nodes ({'; '.join(described)}), {usable}")


def open_files(host: Host) -> Finding:
    """RLIMIT_NOFILE."""
    limit = host.limit(resource.RLIMIT_NOFILE)
    if limit == UNLIMITED:
        return Finding("open files", OK, "no limit")
    if limit < OPEN_FILES_WARNED_BELOW:
        advice = "Few for vLLM, a pool and its peers: ulimit -n 65536, systemd: LimitNOFILE=65536."
        return Finding("open files", WARNING, f"limit {limit}", advice)
    return Finding("open files", OK, f"limit {limit}")


def cuda(host: Host) -> Finding:
    """The CUDA driver and its devices."""
    module = host.text("/proc/driver/nvidia/version")
    driver = probe_cuda()
    if isinstance(driver, CudaDriver):
        devices = ", ".join(f"{one.name} ({format_bytes(one.memory_bytes)})" for one in driver.devices)
        value = f"driver for CUDA {driver.version}: {devices or 'no devices'}"
        if driver.devices:
            return Finding("cuda", OK, value)
        return Finding("cuda", WARNING, value, "Is CUDA_VISIBLE_DEVICES empty, or the container without --gpus all?")
    if module is None:
        return Finding("cuda", INFO, "no NVIDIA driver", "Nothing to do: vLLM's CPU build is served without it.")
    value = f"kernel driver without usable libcuda ({driver})"
    advice = "Start the container with --gpus all, or install the user-space part of the same driver version."
    return Finding("cuda", WARNING, value, advice)
