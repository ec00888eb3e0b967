"""NUMA nodes of GPUs over a made-up /sys, and what becomes of them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pegaflow.connector.numa import node_of_device, node_of_pci, online_nodes, pci_address
from tests.fakes import FakePool
from tests.unit.mini_engine import MiniEngine

GPU = "0000:9a:00.0"


def made_up_sysfs(place: Path, online: str | None, node: str | None) -> Path:
    if online is not None:
        (place / "devices/system/node").mkdir(parents=True)
        (place / "devices/system/node/online").write_text(online)
    if node is not None:
        (place / "bus/pci/devices" / GPU).mkdir(parents=True)
        (place / "bus/pci/devices" / GPU / "numa_node").write_text(node)
    return place


@pytest.mark.parametrize(
    ("online", "node", "expected"),
    [
        ("0-1\n", "1\n", 1),
        ("0,2\n", "2\n", 2),
        ("0-1\n", "0\n", 0),
        ("0\n", "0\n", None),
        ("0-1\n", "-1\n", None),
        ("0-1\n", "none\n", None),
        ("0-1\n", None, None),
        (None, "1\n", None),
        ("strange\n", "1\n", None),
    ],
)
def test_the_node_of_a_gpu_is_told_only_where_it_is_known_and_matters(
    tmp_path: Path, online: str | None, node: str | None, expected: int | None
) -> None:
    assert node_of_pci(GPU.upper(), made_up_sysfs(tmp_path, online, node)) == expected


def test_nodes_are_counted_with_gaps(tmp_path: Path) -> None:
    assert online_nodes(made_up_sysfs(tmp_path, "0-2,5,7-8\n", None)) == {0, 1, 2, 5, 7, 8}


def test_the_address_is_as_sysfs_writes_it() -> None:
    assert pci_address(SimpleNamespace(pci_domain_id=0, pci_bus_id=0x9A, pci_device_id=0)) == GPU
    assert pci_address(SimpleNamespace(name="an older PyTorch")) is None


def test_the_cpu_and_a_device_that_is_not_there_have_no_node(tmp_path: Path) -> None:
    sysfs = made_up_sysfs(tmp_path, "0-1\n", "1\n")
    assert node_of_device("cpu", sysfs) is None
    assert node_of_device("cuda:77", sysfs) is None


def test_memory_of_each_part_is_made_near_its_rank() -> None:
    engine = MiniEngine(pool=FakePool(), ranks=2)
    shapes: Any = {(0, rank): replace(engine.workers[rank].shape(), numa_node=(1, None)[rank]) for rank in range(2)}
    engine.store.set_shapes(shapes)
    namespaces = engine.store.namespaces()
    assert namespaces is not None
    assert engine.pool.nodes == {namespaces[0].id: [1, None]}


def test_one_node_is_left_alone() -> None:
    engine = MiniEngine(pool=FakePool(), ranks=2)
    assert engine.store.namespaces() is not None
    assert engine.pool.nodes == {}
