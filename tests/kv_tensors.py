"""KV caches as vLLM's attention backends lay them out: real tensors, small, on any device, without vLLM.

Shapes and orders are those of vLLM 0.24 to 0.33; ``tests/unit/test_kv_layouts.py`` compares the newer ones with what
the installed vLLM makes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from pegaflow.connector.layout import GroupLayout, LayerTensor, group_layout

BLOCKS, LAYERS, HEADS, TOKENS, WIDTH = 24, 3, 4, 16, 32
"""Sizes of most caches; none of the others is a multiple of ``BLOCKS``."""

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Layer:
    """One layer's tensor and what vLLM's spec says of it."""

    name: str
    tensor: torch.Tensor
    page_bytes: int
    block_dim: int = 0
    padding: torch.Tensor | None = None
    """``(blocks, bytes)`` behind each block that are part of its page."""

    def described(self) -> LayerTensor:
        """What the connector takes of it."""
        tensor, storage = self.tensor, self.tensor.untyped_storage()
        return LayerTensor(
            self.name,
            tensor.data_ptr(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.element_size(),
            str(tensor.dtype),
            self.page_bytes,
            str(tensor.device),
            (storage.data_ptr(), storage.nbytes()),
        )

    def by_block(self, blocks: int) -> list[torch.Tensor]:
        """Views of integers whose first dimension is the block: all that a block holds."""
        whole = self.tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[self.tensor.element_size()])
        views = [whole.unflatten(self.block_dim, (blocks, -1)).movedim(self.block_dim, 0)]
        return views + ([self.padding] if self.padding is not None else [])


@dataclass(frozen=True)
class Cache:
    """All groups of one worker, and everything that was allocated for them."""

    blocks: int
    groups: tuple[tuple[Layer, ...], ...]
    backings: tuple[torch.Tensor, ...]

    def layouts(self) -> list[GroupLayout]:
        """What the connector makes of each group."""
        return [group_layout([layer.described() for layer in layers], self.blocks) for layers in self.groups]

    def fill(self, seed: int) -> None:
        """Random bytes everywhere."""
        generator = torch.Generator(device=self.backings[0].device).manual_seed(seed)
        for backing in self.backings:
            backing.random_(0, 256, generator=generator)

    def assign(self, group: int, ids: Sequence[int], source: "Cache", source_ids: Sequence[int]) -> None:
        """Copy blocks by plain indexing: what a save and a load have to amount to."""
        for target, origin in zip(self.groups[group], source.groups[group], strict=True):
            views = zip(target.by_block(self.blocks), origin.by_block(source.blocks), strict=True)
            for to, of in views:
                to[list(ids)] = of[list(source_ids)]


Maker = Callable[[str], Cache]
"""Allocates a cache on a device."""


def raw(size: int, device: str) -> torch.Tensor:
    """So many bytes."""
    return torch.zeros(size, dtype=torch.uint8, device=device)


def ordered(flat: torch.Tensor, shape: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """``flat`` as a tensor of ``shape`` whose dimensions lie in memory in this ``order``."""
    inverse = [list(order).index(dim) for dim in range(len(order))]
    return flat.view([shape[dim] for dim in order]).permute(inverse)


def apart(
    shape: Sequence[int],
    order: Sequence[int] | None = None,
    dtype: torch.dtype = BF16,
    *,
    blocks: int = BLOCKS,
    block_dim: int = 0,
) -> Maker:
    """An allocation for each layer (before 0.32)."""

    def make(device: str) -> Cache:
        size = prod(shape) * dtype.itemsize
        backings = tuple(raw(size, device) for _ in range(LAYERS))
        tensors = [ordered(backing.view(dtype), shape, order or range(len(shape))) for backing in backings]
        layers = tuple(Layer(f"{place}", one, size // blocks, block_dim) for place, one in enumerate(tensors))
        return Cache(blocks, (layers,), backings)

    return make


def together(shape: Sequence[int], order: Sequence[int], dtype: torch.dtype = BF16) -> Maker:
    """One allocation in which the layers are a dimension (before 0.32); ``order`` counts that one as the first."""

    def make(device: str) -> Cache:
        size = prod(shape) * dtype.itemsize
        backing = raw(LAYERS * size, device)
        by_layer = ordered(backing.view(dtype), (LAYERS, *shape), order)
        layers = tuple(Layer(f"{place}", one, size // BLOCKS) for place, one in enumerate(by_layer))
        return Cache(BLOCKS, (layers,), (backing,))

    return make


def padded(shape: Sequence[int], page_bytes: int) -> Maker:
    """Pages with padding behind the block (before 0.32): a sliding window beside wider layers, say."""

    def make(device: str) -> Cache:
        content = prod(shape[1:]) * BF16.itemsize
        backings = tuple(raw(BLOCKS * page_bytes, device) for _ in range(LAYERS))
        layers = []
        for place, backing in enumerate(backings):
            strides = (page_bytes // BF16.itemsize, *torch.empty(tuple(shape), device="meta").stride()[1:])
            tensor = backing.view(BF16).as_strided(tuple(shape), strides)
            layers.append(Layer(f"{place}", tensor, page_bytes, padding=backing.view(BLOCKS, page_bytes)[:, content:]))
        return Cache(BLOCKS, (tuple(layers),), backings)

    return make


def packed(*pages: tuple[Sequence[int], torch.dtype, int]) -> Maker:
    """One allocation with the unequal pages of all layers of a block in a row (0.25): ``(shape, dtype, page)``."""

    def make(device: str) -> Cache:
        block_bytes = sum(page for _, _, page in pages)
        backing = raw(BLOCKS * block_bytes, device)
        rows, layers, offset = backing.view(BLOCKS, block_bytes), [], 0
        for place, (shape, dtype, page) in enumerate(pages):
            end = offset + prod(shape) * dtype.itemsize
            tensor = rows[:, offset:end].view(dtype).view(BLOCKS, *shape)
            padding = rows[:, end : offset + page] if end < offset + page else None
            layers.append(Layer(f"{place}", tensor, page, padding=padding))
            offset += page
        return Cache(BLOCKS, (tuple(layers),), (backing,))

    return make


def shared_by_groups(shape: Sequence[int]) -> Maker:
    """Allocations that hold a layer of each of two groups, whose blocks have different numbers (before 0.32)."""

    def make(device: str) -> Cache:
        size = prod(shape) * BF16.itemsize
        backings = tuple(raw(size, device) for _ in range(LAYERS))
        tensors = [backing.view(BF16).view(tuple(shape)) for backing in backings]
        full = tuple(Layer(f"full {place}", one, size // BLOCKS) for place, one in enumerate(tensors))
        window = tuple(Layer(f"window {place}", one, size // BLOCKS) for place, one in enumerate(tensors[:-1]))
        return Cache(BLOCKS, (full, window), backings)

    return make


@dataclass(frozen=True)
class Pages:
    """Layers of one kind in the one allocation of vLLM 0.32 and later: logical ``[B, H, N, C]``, ``C`` in bytes."""

    heads: int = HEADS
    tokens: int = TOKENS
    content: int = 2 * WIDTH * 2
    dtype: torch.dtype = BF16
    layers: int = LAYERS
    kernel_blocks: int = 1
    """Blocks of the kernel in one of vLLM's."""
    page_bytes: int = 0
    """With padding; 0: there is none."""

    @property
    def real_bytes(self) -> int:
        """Bytes of a page without padding."""
        return self.heads * self.tokens * self.content * self.kernel_blocks

    @property
    def bytes(self) -> int:
        """Bytes of a page."""
        return self.page_bytes or self.real_bytes


def one_allocation(order: str, *kinds: Pages, aliased: bool = False, blocks: int = BLOCKS) -> Maker:
    """``order`` of the dimensions in memory, as vLLM names it. ``aliased``: each kind is a group of its own, and all
    begin at the first byte; else one group has all layers."""

    def make(device: str) -> Cache:
        sizes = [kind.bytes * kind.layers for kind in kinds]
        block_bytes = max(sizes) if aliased else sum(sizes)
        backing = raw(blocks * block_bytes, device)
        groups, layers, offset = [], [], 0
        for number, kind in enumerate(kinds):
            base = 0 if aliased else offset
            layers += _pages(backing, order, kind, f"{number}.", base, block_bytes, blocks)
            offset += kind.bytes * kind.layers * (1 if order.startswith("B") else blocks)
            if aliased:
                groups.append(tuple(layers))
                layers = []
        return Cache(blocks, tuple(groups) or (tuple(layers),), (backing,))

    return make


def _pages(
    backing: torch.Tensor, order: str, kind: Pages, prefix: str, base: int, block_bytes: int, blocks: int
) -> list[Layer]:
    sizes = {"L": kind.layers, "B": blocks * kind.kernel_blocks, "H": kind.heads, "N": kind.tokens, "C": kind.content}
    strides, step = {}, 1
    for axis in reversed(order):
        strides[axis] = step
        if axis == "B" and order.startswith("B"):
            strides[axis] = block_bytes
        elif axis == "L" and order.startswith("B") and not order.startswith("BH"):
            strides[axis] = kind.bytes
        elif axis == "B" and kind.page_bytes:
            strides[axis] = kind.page_bytes
        step = strides[axis] * sizes[axis]
    layers = []
    for place in range(kind.layers):
        start = base + place * strides["L"]
        tensor = backing.as_strided([sizes[axis] for axis in "BHNC"], [strides[axis] for axis in "BHNC"], start)
        padding = None
        if kind.page_bytes:
            shape = (blocks, kind.page_bytes - kind.real_bytes)
            padding = backing.as_strided(shape, (strides["B"], 1), start + kind.real_bytes)
        layers.append(Layer(f"{prefix}{place}", tensor.view(kind.dtype), kind.bytes, padding=padding))
    return layers


_NHD, _HND = (0, 1, 2, 3, 4), (0, 1, 3, 2, 4)
_KV = (BLOCKS, 2, TOKENS, HEADS, WIDTH)
_PLAIN = Pages()

BEFORE_0_32: dict[str, Maker] = {
    "flash_attention_nhd": apart(_KV, _NHD),
    "flash_attention_hnd": apart(_KV, _HND),
    "flash_attention_fp8": apart(_KV, _NHD, FP8),
    "flash_attention_float32": apart(_KV, _NHD, torch.float32),
    "flash_attention_kernel_blocks": apart((BLOCKS * 4, 2, TOKENS, HEADS, WIDTH), _NHD),
    "flash_attention_kernel_blocks_hnd": apart((BLOCKS * 4, 2, TOKENS, HEADS, WIDTH), _HND),
    "as_many_blocks_as_tokens": apart((TOKENS, 2, TOKENS, HEADS, WIDTH), _NHD, blocks=TOKENS),
    "as_many_blocks_as_numbers_in_a_head": apart((WIDTH, 2, TOKENS, HEADS, WIDTH), _HND, blocks=WIDTH),
    "different_widths_nhd": apart((BLOCKS, TOKENS, HEADS, WIDTH + 16)),
    "different_widths_hnd": apart((BLOCKS, TOKENS, HEADS, WIDTH + 16), (0, 2, 1, 3)),
    "triton_int8_per_token_head": apart((BLOCKS, 2, TOKENS, HEADS, WIDTH + 4), _NHD, torch.int8),
    "triton_fp8_per_token_head_hnd": apart((BLOCKS, 2, TOKENS, HEADS, WIDTH + 4), _HND, FP8),
    "triton_int4_per_token_head": apart((BLOCKS, 2, TOKENS, HEADS, WIDTH // 2 + 4), _NHD, torch.uint8),
    "flashinfer_nvfp4": apart((BLOCKS, 2, TOKENS, HEADS, WIDTH // 2 + WIDTH // 16), _HND, torch.uint8),
    "flex_attention": apart(_KV, (0, 2, 1, 3, 4)),
    "turboquant": apart((BLOCKS, TOKENS, HEADS, 50), None, torch.uint8),
    "cpu_attention": apart((BLOCKS, HEADS, TOKENS, 2 * WIDTH)),
    "keys_and_values_apart": apart((2, BLOCKS, TOKENS, HEADS, WIDTH), block_dim=1),
    "keys_and_values_apart_but_interleaved": apart((2, BLOCKS, TOKENS, HEADS, WIDTH), (1, 0, 2, 3, 4), block_dim=1),
    "mla": apart((BLOCKS, TOKENS, 576)),
    "mla_kernel_blocks": apart((BLOCKS * 2, TOKENS, 576)),
    "mla_fp8_with_scales": apart((BLOCKS, 64, 656), None, torch.uint8),
    "padded": padded(_KV, 3 * TOKENS * HEADS * WIDTH * 2),
    "packed": packed(
        ((64, 584), torch.uint8, 37440),
        ((2, 584), torch.uint8, 1728),
        ((64, 132), torch.uint8, 8448),
        ((64, 96), BF16, 12288),
    ),
    "cross_layer_nhd": together(_KV, (1, 0, 2, 3, 4, 5)),
    "cross_layer_hnd": together(_KV, (1, 4, 0, 2, 3, 5)),
    "cross_layer_flashinfer_hnd": together(_KV, (1, 2, 4, 0, 3, 5)),
    "cross_layer_flex": together(_KV, (1, 0, 3, 2, 4, 5)),
    "cross_layer_mla": together((BLOCKS, TOKENS, 576), (1, 0, 2, 3)),
    "two_groups_share_tensors": shared_by_groups(_KV),
}
"""vLLM 0.24 to 0.25, and the order of keys and values that some of its backends kept from before."""

SINCE_0_32: dict[str, Maker] = {
    **{order: one_allocation(order, _PLAIN) for order in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")},
    "LBHNC_as_many_blocks_as_heads": one_allocation("LBHNC", _PLAIN, blocks=HEADS),
    "LBHNC_fp8": one_allocation("LBHNC", Pages(content=2 * WIDTH, dtype=FP8)),
    "LBNHC_per_token_head": one_allocation("LBNHC", Pages(content=2 * WIDTH + 8, dtype=torch.int8)),
    "BLHNC_per_token_head": one_allocation("BLHNC", Pages(content=2 * WIDTH + 8, dtype=FP8)),
    "LBHNC_nvfp4": one_allocation("LBHNC", Pages(heads=2 * HEADS, content=18, dtype=torch.uint8)),
    "LHBNC_keys_and_values_as_heads": one_allocation("LHBNC", Pages(heads=2, content=HEADS * WIDTH * 2)),
    "LBNHC_turboquant": one_allocation("LBNHC", Pages(content=50, dtype=torch.uint8)),
    "LBHNC_kernel_blocks": one_allocation("LBHNC", Pages(kernel_blocks=4)),
    "LBNHC_kernel_blocks": one_allocation("LBNHC", Pages(kernel_blocks=2)),
    "LHBNC_kernel_blocks": one_allocation("LHBNC", Pages(kernel_blocks=2)),
    "LBHNC_padded": one_allocation("LBHNC", Pages(page_bytes=3 * HEADS * TOKENS * 2 * WIDTH * 2)),
    "LBHNC_mla": one_allocation("LBHNC", Pages(heads=1, content=1152)),
    "BLHNC_mla": one_allocation("BLHNC", Pages(heads=1, content=1152)),
    "LBNHC_mla_fp8_with_scales": one_allocation("LBNHC", Pages(1, 64, 656, torch.uint8)),
    "BLHNC_mla_and_indexer": one_allocation(
        "BLHNC", Pages(1, 64, 584, torch.uint8, page_bytes=37440), Pages(1, 64, 132, torch.uint8, layers=2)
    ),
    "LBHNC_unequal_pages": one_allocation("LBHNC", _PLAIN, Pages(heads=1, content=1152, layers=2)),
    "LBHNC_groups_from_one_byte": one_allocation("LBHNC", _PLAIN, Pages(layers=2), aliased=True),
    "BLNHC_groups_from_one_byte": one_allocation(
        "BLNHC", _PLAIN, Pages(heads=2, content=4 * WIDTH, layers=4), aliased=True
    ),
}
"""vLLM 0.32 and 0.33."""

CACHES = {**BEFORE_0_32, **SINCE_0_32}
