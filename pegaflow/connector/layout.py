"""vLLM's KV cache tensors as byte regions. Pure: works on addresses, shapes and strides, touches no memory.

Everything is taken from the tensors themselves (strides, storage addresses) and from the page size of their spec;
nothing is guessed from the model's configuration.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

Region = tuple[int, int, int]
"""``(address, stride_bytes, length_bytes)``: block *b* has ``[address + b * stride_bytes, + length_bytes)``."""


class LayoutError(ValueError):
    """The tensors are laid out in a way that cannot be described as regions."""


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


@dataclass(frozen=True)
class GroupLayout:
    """Regions of one KV cache group on one rank, and what their bytes mean."""

    regions: tuple[Region, ...]
    digest: str

    @property
    def part_bytes(self) -> int:
        """Bytes of one block."""
        return sum(length for _, _, length in self.regions)


def group_layout(layers: Sequence[LayerTensor], blocks: int, meaning: Sequence[str] = ()) -> GroupLayout:
    """Regions of a group of ``layers`` with ``blocks`` blocks each, in the order of ``layers``.

    Layers that share their bytes count once. ``meaning`` names what tensors do not show but bytes depend on (the
    attention backend, say). Raises ``LayoutError``.
    """
    regions: list[Region] = []
    description: list[object] = list(meaning)
    seen: set[tuple[Region, ...]] = set()
    for layer in layers:
        fragments = tuple(layer_regions(layer, blocks))
        if fragments in seen:
            continue
        seen.add(fragments)
        regions.extend(fragments)
        inner_shape, inner_order = _block_form(layer, blocks)
        lengths = [length for _, _, length in fragments]
        description.append([layer.name, layer.dtype, layer.item_bytes, inner_shape, inner_order, lengths])
    digest = hashlib.sha256(json.dumps(description).encode()).hexdigest()
    return GroupLayout(tuple(merge_regions(regions)), digest)


def layer_regions(layer: LayerTensor, blocks: int) -> list[Region]:
    """Regions of one layer: one if a block is contiguous, else one per contiguous piece."""
    block_dim, ratio = _block_dim(layer, blocks)
    stride_bytes = layer.strides[block_dim] * layer.item_bytes * ratio
    sizes = list(zip(layer.shape, layer.strides, strict=True))
    dims = sizes[:block_dim] + sizes[block_dim + 1 :]
    if ratio > 1:
        dims.append((ratio, layer.strides[block_dim]))
    offsets, run_items = _contiguous_pieces(dims)
    length_bytes = run_items * layer.item_bytes
    if len(offsets) == 1 and layer.page_bytes is not None and length_bytes < layer.page_bytes <= stride_bytes:
        length_bytes = layer.page_bytes  # some formats keep scales in what looks like padding
    if blocks > 1 and length_bytes > stride_bytes:
        raise LayoutError(f"blocks of layer {layer.name} overlap: {layer.shape} with strides {layer.strides}")
    return [(layer.address + offset * layer.item_bytes, stride_bytes, length_bytes) for offset in offsets]


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
    """``(dimension of blocks, kernel blocks per block)``. Backends may cut a block into several of their own."""
    for dim in (0, 1):
        if dim < len(layer.shape) and layer.shape[dim] and layer.shape[dim] % blocks == 0:
            outer = prod(layer.shape[:dim])
            if dim == 0 or outer <= 2:
                return dim, layer.shape[dim] // blocks
    raise LayoutError(f"layer {layer.name} has no dimension of {blocks} blocks: shape {layer.shape}")


def _contiguous_pieces(dims: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """``(offsets of the pieces, items of each)`` of a strided block, in memory order."""
    ordered = sorted(((size, stride) for size, stride in dims if size != 1), key=lambda dim: dim[1])
    run_items = 1
    while ordered and ordered[0][1] == run_items:
        run_items *= ordered.pop(0)[0]
    offsets = [0]
    for size, stride in reversed(ordered):
        if stride < run_items:
            raise LayoutError(f"overlapping strides {list(dims)}")
        offsets = [offset + index * stride for offset in offsets for index in range(size)]
    return offsets, run_items


def _block_form(layer: LayerTensor, blocks: int) -> tuple[list[int], list[int]]:
    """Shape of one block and the order of its dimensions in memory: what tells equal layouts from others."""
    block_dim, ratio = _block_dim(layer, blocks)
    inner = [d for d in range(len(layer.shape)) if d != block_dim]
    shape = [layer.shape[d] for d in inner]
    order = sorted((d for d in inner if layer.shape[d] != 1), key=lambda d: -layer.strides[d])
    return [ratio, *shape], order
