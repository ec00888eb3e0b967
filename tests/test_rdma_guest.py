"""The guest with RDMA devices: what it starts from, and that a machine without it says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import count_tests, rdma_guest

ROOT = Path(__file__).resolve().parent.parent


def module(*needs: str) -> bytes:
    return b"\0license=GPL\0depends=" + ",".join(needs).encode() + b"\0name=x\0"


def test_modules_are_loaded_behind_what_they_need() -> None:
    wanted = {name: module() for name in rdma_guest.MODULES}
    modules = wanted | {
        "rdma_rxe": module("ib_core", "udp-tunnel"),
        "ib_core": module(),
        "udp_tunnel": module("absent"),
    }
    order = rdma_guest.in_order(modules | {"other": module()})
    assert sorted(order) == sorted(modules), "each once, and no others"
    assert order.index("rdma_rxe") > max(order.index("ib_core"), order.index("udp_tunnel"))


def test_kernel_without_soft_roce_cannot_be_used() -> None:
    with pytest.raises(rdma_guest.CannotRun, match="no Soft-RoCE"):
        rdma_guest.in_order({"virtio_pci": module()})


def test_entries_of_the_initramfs_are_read_by_the_system(tmp_path: Path) -> None:
    entries = [
        rdma_guest.archive_entry("bin", 0o40755),
        rdma_guest.archive_entry("bin/a", 0o100755, b"odd"),
        rdma_guest.archive_entry("b", 0o100644, bytes(4096)),
        rdma_guest.archive_entry("TRAILER!!!", 0),
    ]
    assert all(len(entry) % 4 == 0 for entry in entries)
    for entry, data in zip(entries, (b"", b"odd", bytes(4096), b""), strict=True):
        assert entry.startswith(b"070701")
        name_bytes, data_bytes = int(entry[94:102], 16), int(entry[54:62], 16)
        begin = (110 + name_bytes + 3) // 4 * 4
        assert (entry[begin : begin + data_bytes], data_bytes) == (data, len(data))


def test_machine_without_the_means_says_not_run_and_the_totals_count_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/rdma_guest.py"), "binary"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PATH": str(tmp_path)},
        check=True,
    )
    assert done.stdout.startswith("not run: tests over RDMA (")
    assert "qemu-system-x86_64" in done.stdout
    assert len(count_tests.NOT_RUN.findall(done.stdout)) == 1
    assert list(tmp_path.iterdir()) == []
