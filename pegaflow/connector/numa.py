"""Which NUMA node a GPU hangs on: memory of that node is nearest to it."""

from pathlib import Path
from typing import Any

SYSFS = Path("/sys")


def node_of_pci(address: str, sysfs: Path = SYSFS) -> int | None:
    """Node of the PCI device at ``address`` (``"0000:18:00.0"``); ``None`` if it is unknown, or there is but one."""
    if len(online_nodes(sysfs)) < 2:
        return None
    try:
        node = int((sysfs / "bus/pci/devices" / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def online_nodes(sysfs: Path = SYSFS) -> set[int]:
    """Numbers of the nodes that are in use; empty where the kernel knows none."""
    try:
        text = (sysfs / "devices/system/node/online").read_text()
        ranges = [part.partition("-") for part in text.strip().split(",") if part]
        return {node for first, _, last in ranges for node in range(int(first), int(last or first) + 1)}
    except (OSError, ValueError):
        return set()


def node_of_device(device: str, sysfs: Path = SYSFS) -> int | None:
    """Node of a device as PyTorch names it (``"cuda:0"``); ``None`` for the CPU, and where it cannot be told."""
    if not device.startswith("cuda") or len(online_nodes(sysfs)) < 2:
        return None
    import torch

    try:
        address = pci_address(torch.cuda.get_device_properties(torch.device(device)))
    except (RuntimeError, AssertionError):  # whoever uses the device says so better
        return None
    return node_of_pci(address, sysfs) if address is not None else None


def pci_address(properties: Any) -> str | None:
    """Address of a device by what PyTorch says of it; ``None`` if that version does not say it."""
    try:
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except (AttributeError, TypeError, ValueError):
        return None
