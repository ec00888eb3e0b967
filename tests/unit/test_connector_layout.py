"""Byte regions of KV cache tensors, compared with what indexing the tensor gives."""

import ctypes

import pytest
import torch

from pegaflow.connector.layout import GroupLayout, LayerTensor, LayoutError, group_layout, merge_regions

BLOCKS = 6


def layer(name: str, tensor: torch.Tensor, page_bytes: int | None = None) -> LayerTensor:
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    return LayerTensor(name, tensor.data_ptr(), shape, strides, tensor.element_size(), str(tensor.dtype), page_bytes)


def read(layout: GroupLayout, block: int) -> bytes:
    return b"".join(ctypes.string_at(base + block * stride, length) for base, stride, length in layout.regions)


def content(tensor: torch.Tensor) -> list[int]:
    return sorted(tensor.contiguous().view(torch.uint8).flatten().tolist())


def filled(*shape: int) -> torch.Tensor:
    return torch.randint(-100, 100, shape, dtype=torch.int16)


@pytest.mark.parametrize(
    ("shape", "order", "pieces"),
    [
        ((BLOCKS, 2, 4, 8), (0, 1, 2, 3), 1),  # heads outside tokens
        ((BLOCKS, 2, 4, 8), (0, 2, 1, 3), 1),  # tokens outside heads
        ((BLOCKS, 2, 4, 8), (1, 0, 2, 3), 2),  # a block is not contiguous
        ((BLOCKS, 1, 16, 72), (0, 1, 2, 3), 1),  # one latent head
    ],
)
def test_regions_hold_exactly_the_block(shape: tuple[int, ...], order: tuple[int, ...], pieces: int) -> None:
    physical = filled(*(shape[dim] for dim in order))
    tensor = physical.permute(*(order.index(dim) for dim in range(len(shape))))
    layout = group_layout([layer("a", tensor)], BLOCKS)
    assert len(layout.regions) == pieces
    for block in range(BLOCKS):
        assert sorted(read(layout, block)) == content(tensor[block])


def test_keys_and_values_apart_are_two_regions() -> None:
    tensor = filled(2, BLOCKS, 4, 2, 8)
    layout = group_layout([layer("a", tensor)], BLOCKS)
    assert len(layout.regions) == 2
    assert read(layout, 3) == tensor[:, 3].contiguous().numpy().tobytes()


def test_kernel_blocks_are_joined_to_one_block() -> None:
    tensor = filled(BLOCKS * 4, 2, 4, 8)
    layout = group_layout([layer("a", tensor)], BLOCKS)
    assert len(layout.regions) == 1
    assert read(layout, 2) == tensor[8:12].numpy().tobytes()


def test_blocks_outermost_become_one_region_for_all_layers() -> None:
    storage = filled(BLOCKS, 3, 2, 4, 8)
    layout = group_layout([layer(f"l{index}", storage[:, index]) for index in range(3)], BLOCKS)
    assert len(layout.regions) == 1
    assert read(layout, 4) == storage[4].numpy().tobytes()


def test_layers_that_share_bytes_count_once() -> None:
    tensor = filled(BLOCKS, 2, 4, 8)
    once = group_layout([layer("a", tensor)], BLOCKS)
    assert group_layout([layer("a", tensor), layer("b", tensor)], BLOCKS) == once


def test_padding_belongs_to_the_page() -> None:
    storage = torch.zeros(BLOCKS, 100, dtype=torch.int8)
    tensor = storage[:, :80].unflatten(1, (2, 2, 20))
    assert group_layout([layer("a", tensor, 100)], BLOCKS).part_bytes == 100
    assert group_layout([layer("a", tensor)], BLOCKS).part_bytes == 80


def test_same_layout_at_other_addresses_has_the_same_digest() -> None:
    first, second = filled(BLOCKS, 2, 4, 8), filled(BLOCKS, 2, 4, 8)
    assert group_layout([layer("a", first)], BLOCKS).digest == group_layout([layer("a", second)], BLOCKS).digest


def test_number_and_place_of_blocks_do_not_count() -> None:
    few, many = filled(BLOCKS, 2, 4, 8), filled(9 * BLOCKS, 2, 4, 8)
    apart = filled(BLOCKS, 3, 2, 4, 8)[:, 1]
    digests = {group_layout([layer("a", few)], BLOCKS).digest, group_layout([layer("a", apart)], BLOCKS).digest}
    assert digests == {group_layout([layer("a", many)], 9 * BLOCKS).digest}


@pytest.mark.parametrize(
    "other",
    [
        layer("b", filled(BLOCKS, 2, 4, 8)),
        layer("a", filled(BLOCKS, 4, 2, 8)),
        layer("a", filled(BLOCKS, 2, 4, 16)),
        layer("a", filled(BLOCKS, 4, 2, 8).transpose(1, 2)),
        layer("a", torch.zeros(BLOCKS, 2, 4, 8, dtype=torch.float32)),
        layer("a", torch.zeros(BLOCKS, 2, 4, 8, dtype=torch.float16)),
        layer("a", filled(BLOCKS * 2, 2, 2, 8)),
    ],
    ids=["name", "shape", "width", "order", "item size", "type", "kernel blocks"],
)
def test_whatever_changes_bytes_changes_the_digest(other: LayerTensor) -> None:
    base = group_layout([layer("a", filled(BLOCKS, 2, 4, 8))], BLOCKS)
    assert group_layout([other], BLOCKS).digest != base.digest


def test_meaning_changes_the_digest() -> None:
    tensor = layer("a", filled(BLOCKS, 2, 4, 8))
    assert group_layout([tensor], BLOCKS, ["amx"]).digest != group_layout([tensor], BLOCKS, ["vec"]).digest


def test_tensor_without_blocks_is_refused() -> None:
    with pytest.raises(LayoutError, match="no dimension of 6 blocks"):
        group_layout([layer("a", filled(5, 2, 4, 8))], BLOCKS)


def test_overlapping_blocks_are_refused() -> None:
    tensor = filled(64).as_strided((BLOCKS, 8), (4, 1))
    with pytest.raises(LayoutError, match="overlap"):
        group_layout([layer("a", tensor)], BLOCKS)


def test_regions_are_joined_only_without_gap_and_inside_the_stride() -> None:
    assert merge_regions([(0, 8, 4), (4, 8, 4)]) == [(0, 8, 8)]
    assert merge_regions([(0, 8, 4), (5, 8, 3)]) == [(0, 8, 4), (5, 8, 3)]
    assert merge_regions([(0, 4, 4), (4, 4, 4)]) == [(0, 4, 4), (4, 4, 4)]
    assert merge_regions([(0, 8, 4), (4, 16, 4)]) == [(0, 8, 4), (4, 16, 4)]


def test_rank_without_layers_of_a_group_has_no_bytes() -> None:
    assert group_layout([], BLOCKS).part_bytes == 0
