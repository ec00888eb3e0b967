"""Byte regions of KV cache tensors, compared with what indexing the tensor gives."""

import ctypes
from dataclasses import replace

import pytest
import torch

from pegaflow.connector.layout import (
    GroupLayout,
    LayerTensor,
    LayoutError,
    common_device,
    group_layout,
    merge_regions,
)

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
    other_page = group_layout([layer("a", tensor), layer("b", tensor, 7)], BLOCKS)
    assert (other_page.regions, other_page.digest) == (once.regions, once.digest)
    twice = group_layout([layer("a", tensor), layer("b", tensor)], BLOCKS)
    assert (twice.regions, twice.digest) == (once.regions, once.digest)
    assert twice.layer_ends == (("a", once.part_bytes), ("b", once.part_bytes))


def test_layers_end_where_their_last_byte_lies_in_a_block() -> None:
    keys, values, apart = filled(BLOCKS, 4), filled(BLOCKS, 8), filled(2, BLOCKS, 3)
    layout = group_layout([layer("a", keys), layer("b", values), layer("c", apart)], BLOCKS)
    assert layout.layer_ends == (("a", 8), ("b", 24), ("c", 36))
    storage = filled(BLOCKS, 3, 16)
    backwards = group_layout([layer(str(index), storage[:, index]) for index in (2, 1, 0)], BLOCKS)
    assert len(backwards.regions) == 1
    assert backwards.layer_ends == (("2", 96), ("1", 64), ("0", 32))


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


@pytest.mark.parametrize("strides", [(4, 1), (0, 1), (-8, 1), (8, 0), (8, -1), (12, 2)])
def test_blocks_that_overlap_or_run_backwards_are_refused(strides: tuple[int, int]) -> None:
    tensor = LayerTensor("a", 1 << 20, (BLOCKS, 8), strides, 2, "torch.int16")
    with pytest.raises(LayoutError, match="overlap"):
        group_layout([tensor], BLOCKS)


def test_rows_of_different_blocks_that_fall_on_one_another_are_refused() -> None:
    tensor = LayerTensor("a", 1 << 20, (BLOCKS, 2, 8), (16, 32, 1), 2, "torch.int16")
    with pytest.raises(LayoutError, match="overlap"):
        group_layout([tensor], BLOCKS)


@pytest.mark.parametrize("page_bytes", [None, 4 * 2 * 10 * 2])
def test_gaps_inside_a_block_are_refused_since_they_may_hold_something(page_bytes: int | None) -> None:
    narrowed = filled(BLOCKS, 4, 2, 10)[..., :8]
    with pytest.raises(LayoutError, match=r"gaps|its page has"):
        group_layout([layer("a", narrowed, page_bytes)], BLOCKS)


@pytest.mark.parametrize(("page_bytes", "stride"), [(100, 80), (60, 80), (200, 100)])
def test_page_that_does_not_fit_the_tensor_is_refused(page_bytes: int, stride: int) -> None:
    tensor = LayerTensor("a", 1 << 20, (BLOCKS, 80), (stride, 1), 1, "torch.int8", page_bytes)
    with pytest.raises(LayoutError, match=f"80 bytes where its page has {page_bytes}"):
        group_layout([tensor], BLOCKS)


@pytest.mark.parametrize("shape", [(2, 2, 4, 8), (2, 4, 4, 8), (8, 4, 2, 8), (8, 8, 2, 8)])
def test_blocks_that_may_be_in_two_dimensions_are_refused(shape: tuple[int, ...]) -> None:
    blocks = 2 if shape[0] == 2 else 4
    with pytest.raises(LayoutError, match=f"may have its {blocks} blocks in either of two dimensions"):
        group_layout([layer("a", filled(*shape))], blocks)


@pytest.mark.parametrize("shape", [(5, 2, 4, 8), (3, BLOCKS, 4, 8), (4, 2, BLOCKS, 8), (0, 4), ()])
def test_blocks_in_no_known_dimension_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="no dimension of 6 blocks"):
        group_layout([layer("a", filled(*shape))], BLOCKS)


def test_other_dimensions_may_be_as_long_as_there_are_blocks() -> None:
    tensor = filled(8, 2, 8, 8, 8)
    layout = group_layout([layer("a", tensor)], 8)
    assert read(layout, 3) == tensor[3].contiguous().numpy().tobytes()
    tensor = filled(8, 8, 2, 8)
    layout = group_layout([layer("a", tensor)], 8)
    assert read(layout, 3) == tensor[3].contiguous().numpy().tobytes()


def test_tensor_may_begin_anywhere_in_its_memory() -> None:
    storage = filled(100 + BLOCKS * 64)
    tensor = storage[100:].view(BLOCKS, 2, 4, 8)
    held = tensor.untyped_storage()
    described = replace(layer("a", tensor), storage=(held.data_ptr(), held.nbytes()))
    assert read(group_layout([described], BLOCKS), 5) == tensor[5].contiguous().numpy().tobytes()


@pytest.mark.parametrize(("start", "size"), [(0, BLOCKS * 128 - 1), (1, BLOCKS * 128), (-64, BLOCKS * 128)])
def test_blocks_beyond_the_memory_of_their_tensor_are_refused(start: int, size: int) -> None:
    tensor = layer("a", filled(BLOCKS, 2, 4, 8))
    with pytest.raises(LayoutError, match=f"exceed its {size} bytes"):
        group_layout([replace(tensor, storage=(tensor.address + start, size))], BLOCKS)


def test_padding_beyond_the_end_of_the_memory_is_refused() -> None:
    storage = torch.zeros(BLOCKS * 100 - 20, dtype=torch.int8)
    tensor = layer("a", storage.as_strided((BLOCKS, 80), (100, 1)), 100)
    with pytest.raises(LayoutError, match="exceed"):
        group_layout([replace(tensor, storage=(storage.data_ptr(), storage.numel()))], BLOCKS)


@pytest.mark.parametrize("shift", [2, 32, 64, 128])
def test_layers_that_share_a_part_of_their_bytes_are_refused(shift: int) -> None:
    tensor = layer("a", filled(BLOCKS, 2, 4, 8))
    other = replace(tensor, name="b", address=tensor.address + shift)
    with pytest.raises(LayoutError, match="share some of their bytes"):
        group_layout([tensor, other], BLOCKS)


def test_layers_that_interleave_with_unequal_strides_are_refused() -> None:
    wide = LayerTensor("a", 1 << 20, (BLOCKS, 8), (64, 1), 1, "torch.int8")
    other = LayerTensor("b", (1 << 20) + 8, (BLOCKS, 8), (128, 1), 1, "torch.int8")
    with pytest.raises(LayoutError, match="share some of their bytes"):
        group_layout([wide, other], BLOCKS)


def test_layers_are_joined_in_the_order_of_their_bytes_and_the_digest_says_so() -> None:
    storage = filled(BLOCKS, 2, 3, 4, 8)
    layers = [layer(f"l{index}", storage[:, :, index], 2 * 4 * 8 * 2) for index in range(3)]
    together = group_layout(layers, BLOCKS)
    assert read(together, 4) == storage[4].numpy().tobytes()
    kept = [filled(2, BLOCKS, 4, 8) for _ in range(3)]
    apart = [layer(f"l{index}", tensor.movedim(0, 1)) for index, tensor in enumerate(kept)]
    assert [len(one.regions) for one in (together, group_layout(apart, BLOCKS))] == [1, 6]
    assert together.digest != group_layout(apart, BLOCKS).digest


def test_caches_are_on_one_device_that_can_be_copied_from() -> None:
    here = layer("a", filled(BLOCKS, 4))
    first, second = replace(here, device="cuda:0"), replace(here, device="cuda:1")
    assert common_device([]) == common_device([here, here]) == "cpu"
    assert common_device([first]) == "cuda:0"
    for wrong in ([first, second], [here, first], [replace(here, device="xpu:0")]):
        with pytest.raises(LayoutError, match="not supported"):
            common_device(wrong)


def test_regions_are_joined_only_without_gap_and_inside_the_stride() -> None:
    assert merge_regions([(0, 8, 4), (4, 8, 4)]) == [(0, 8, 8)]
    assert merge_regions([(0, 8, 4), (5, 8, 3)]) == [(0, 8, 4), (5, 8, 3)]
    assert merge_regions([(0, 4, 4), (4, 4, 4)]) == [(0, 4, 4), (4, 4, 4)]
    assert merge_regions([(0, 8, 4), (4, 16, 4)]) == [(0, 8, 4), (4, 16, 4)]


def test_rank_without_layers_of_a_group_has_no_bytes() -> None:
    assert group_layout([], BLOCKS).part_bytes == 0
