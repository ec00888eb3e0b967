"""vLLM's KV cache tensors as byte regions. Pure: works on addresses, shapes and strides, touches no memory.

Everything is taken from the tensors themselves (strides, storage addresses) and from the page size of their spec;
nothing is guessed from the model's configuration. What is not understood to the last byte is refused.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from pegaflow.errors import PegaFlowError

Region = tuple[int, int, int]
"""``(address, stride_bytes, length_bytes)``: block *b* has ``[address + b * stride_bytes, + length_bytes)``."""


class LayoutError(PegaFlowError, ValueError):
    """The tensors are laid out in a way that is not understood."""


@dataclass(frozen=True)
class LayerTensor:
    """What has to be known of one layer's KV cache tensor."""

    name: str
    address: int
    """Address of its first element."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements, like ``torch.Tensor.stride()``."""
    item_bytes: int
    dtype: str
    page_bytes: int | None = None
    """Bytes of one block of this layer including padding, where vLLM says so."""
    device: str = "cpu"
    storage: tuple[int, int] | None = None
    """``(address, bytes)`` of the memory that the tensor is a view of."""


@dataclass(frozen=True)
class GroupLayout:
    """Regions of one KV cache group on one rank, and what their bytes mean."""

    regions: tuple[Region, ...]
    digest: str
    layer_ends: tuple[tuple[str, int], ...] = ()
    """Each layer's name and where its bytes end in a block."""

    @property
    def part_bytes(self) -> int:
        """Bytes of one block."""
        return sum(length for _, _, length in self.regions)


def common_device(layers: Iterable[LayerTensor]) -> str:
    """The device that all tensors are on; ``"cpu"`` if there are none. Raises ``LayoutError`` for several."""
    devices = sorted({layer.device for layer in layers}) or ["cpu"]
    if len(devices) > 1 or not devices[0].startswith(("cpu", "cuda")):
        raise LayoutError(f"KV caches on {' and '.join(devices)} devices are not supported")
    return devices[0]


def group_layout(layers: Sequence[LayerTensor], blocks: int, meaning: Sequence[str] = ()) -> GroupLayout:
    """Regions of a group of ``layers`` with ``blocks`` blocks each, in the order of ``layers``, or in that of addresses
    where a block then has longer runs.

    Layers that share their bytes count once. ``meaning`` names what tensors do not show but bytes depend on (the
    attention backend, say). Raises ``LayoutError``.
    """
    regions: list[Region] = []
    description: list[object] = list(meaning)
    seen: dict[object, list[Region]] = {}
    names: list[tuple[str, list[Region]]] = []
    for layer in layers:
        view = (layer.address, layer.shape, layer.strides, layer.item_bytes)
        if view in seen:
            names.append((layer.name, seen[view]))
            continue
        fragments = seen[view] = layer_regions(layer, blocks)
        names.append((layer.name, fragments))
        regions.extend(fragments)
        inner_shape, inner_order = _block_form(layer, blocks)
        lengths = [length for _, _, length in fragments]
        description.append([layer.name, layer.dtype, layer.item_bytes, inner_shape, inner_order, lengths])
    if _overlap(regions, blocks):
        raise LayoutError(f"layers {layers[0].name} to {layers[-1].name} share some of their bytes but not all")
    merged, ordered, by_address = merge_regions(regions), regions, sorted(regions)
    if len(merge_regions(by_address)) < len(merged):
        merged, ordered = merge_regions(by_address), by_address
        places = {region: place for place, region in enumerate(regions)}
        description.append([places[region] for region in by_address])
    digest = hashlib.sha256(json.dumps(description).encode()).hexdigest()
    return GroupLayout(tuple(merged), digest, tuple(_layer_ends(names, ordered)))


def _layer_ends(names: Iterable[tuple[str, list[Region]]], ordered: Iterable[Region]) -> Iterator[tuple[str, int]]:
    """Each layer's name and where its last byte lies in a block whose regions are in this order."""
    ends: dict[Region, int] = {}
    offset = 0
    for region in ordered:
        offset += region[2]
        ends[region] = offset
    for name, fragments in names:
        yield name, max(ends[fragment] for fragment in fragments)


def layer_regions(layer: LayerTensor, blocks: int) -> list[Region]:
    """Regions of one layer: one if a block is contiguous, else one per contiguous piece. Raises ``LayoutError``."""
    block_dim, ratio = _block_dim(layer, blocks)
    extent_items = _extent_items(layer)
    stride_bytes = layer.strides[block_dim] * layer.item_bytes * ratio
    dims = [dim for place, dim in enumerate(zip(layer.shape, layer.strides, strict=True)) if place != block_dim]
    if ratio > 1:
        dims.append((ratio, layer.strides[block_dim]))
    offsets, run_items = _contiguous_pieces(dims)
    length_bytes = run_items * layer.item_bytes
    block_bytes = length_bytes * len(offsets)
    if layer.page_bytes is None:
        if len(offsets) > 1 and extent_items != prod(layer.shape):
            raise LayoutError(f"blocks of layer {layer.name} have gaps: {_form(layer)}")
    elif block_bytes != layer.page_bytes:
        # Padding behind a block may hold something (scales, say), so it goes along; anywhere else it is not understood.
        if len(offsets) > 1 or not block_bytes < layer.page_bytes <= max(stride_bytes, block_bytes):
            raise LayoutError(
                f"a block of layer {layer.name} has {block_bytes} bytes where its page has {layer.page_bytes}: "
                f"{_form(layer)}"
            )
        length_bytes = layer.page_bytes
    regions = [(layer.address + offset * layer.item_bytes, stride_bytes, length_bytes) for offset in offsets]
    _check_storage(layer, regions, blocks)
    return regions


def merge_regions(regions: Iterable[Region]) -> list[Region]:
    """Join regions that follow each other without a gap in every block, as in block-outermost layouts."""
    merged: list[Region] = []
    for address, stride, length in regions:
        if merged:
            last_address, last_stride, last_length = merged[-1]
            fits = last_length + length <= stride
            if stride == last_stride and last_address + last_length == address and fits:
                merged[-1] = (last_address, stride, last_length + length)
                continue
        merged.append((address, stride, length))
    return merged


def _block_dim(layer: LayerTensor, blocks: int) -> tuple[int, int]:
    """``(dimension of blocks, kernel blocks per block)``. Backends may cut a block into several of their own.

    Blocks are the first dimension, but the second where keys and values are apart: ``(2, blocks, ...)``.
    """
    first, second = (*layer.shape, 1, 1)[:2]
    is_first = first > 0 and first % blocks == 0
    is_second = len(layer.shape) > 1 and second > 0 and second % blocks == 0
    if is_first and is_second and (first != blocks or first == 2):
        raise LayoutError(
            f"layer {layer.name} may have its {blocks} blocks in either of two dimensions: {_form(layer)}"
        )
    if is_first:
        return 0, first // blocks
    if is_second and first == 2:
        return 1, second // blocks
    raise LayoutError(f"layer {layer.name} has no dimension of {blocks} blocks: {_form(layer)}")


def _extent_items(layer: LayerTensor) -> int:
    """Items from the first to the last of a tensor. Each dimension has to step over all that is inside of it."""
    extent = 1
    for stride, size in sorted((stride, size) for size, stride in zip(layer.shape, layer.strides, strict=True)):
        if size > 1:
            if stride < extent:
                raise LayoutError(f"items of layer {layer.name} overlap: {_form(layer)}")
            extent += (size - 1) * stride
    return extent


def _check_storage(layer: LayerTensor, regions: Iterable[Region], blocks: int) -> None:
    if layer.storage is None:
        return
    start, size = layer.storage
    for address, stride, length in regions:
        if address < start or address + (blocks - 1) * stride + length > start + size:
            raise LayoutError(
                f"{blocks} blocks of layer {layer.name} exceed its {size} bytes of memory: {_form(layer)}"
            )


def _overlap(regions: Iterable[Region], blocks: int) -> bool:
    """Whether two regions have a byte in common."""
    clusters: list[list[Region]] = []
    end = 0
    for region in sorted(regions):
        address, stride, length = region
        if address >= end:
            clusters.append([])
        clusters[-1].append(region)
        end = max(end, address + (blocks - 1) * stride + length)
    return any(len(cluster) > 1 and _collide(cluster) for cluster in clusters)


def _collide(cluster: Sequence[Region]) -> bool:
    """Whether regions collide whose extents do. They interleave without touching only if all have one stride."""
    first, stride, _ = cluster[0]
    if stride <= 0 or any(other != stride for _, other, _ in cluster):
        return True
    spans = sorted(((address - first) % stride, length) for address, _, length in cluster)
    limits = [start for start, _ in spans[1:]] + [stride]
    return any(start + length > limit for (start, length), limit in zip(spans, limits, strict=True))


def _contiguous_pieces(dims: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """``(offsets of the pieces, items of each)`` of a strided block, in memory order."""
    ordered = sorted(((size, stride) for size, stride in dims if size != 1), key=lambda dim: dim[1])
    run_items = 1
    while ordered and ordered[0][1] == run_items:
        run_items *= ordered.pop(0)[0]
    offsets = [0]
    for size, stride in reversed(ordered):
        offsets = [offset + index * stride for offset in offsets for index in range(size)]
    return offsets, run_items


def _form(layer: LayerTensor) -> str:
    return f"shape {layer.shape}, strides {layer.strides}"


def _block_form(layer: LayerTensor, blocks: int) -> tuple[list[int], list[int]]:
    """Shape of one block and the order of its dimensions in memory: what tells equal layouts from others."""
    block_dim, ratio = _block_dim(layer, blocks)
    inner = [d for d in range(len(layer.shape)) if d != block_dim]
    shape = [layer.shape[d] for d in inner]
    order = sorted((d for d in inner if layer.shape[d] != 1), key=lambda d: -layer.strides[d])
    return [ratio, *shape], order
