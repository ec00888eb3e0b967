// Moves blocks of a KV cache between their fragments and packed form. tools/build_ptx.py makes blocks.ptx of this file.
//
// A block is scattered over regions: the fragment of block `id` in a region is [address + id * stride, + length).
// Packed, its fragments follow each other. The layout's regions lie in device memory; which blocks to move comes with
// the launch itself, so that a launch needs no upload of its own.
//
// Every warp takes tiles: pieces of at most TILE_BYTES of one fragment.

typedef unsigned int u32;
typedef unsigned long long u64;

#define TILE_BYTES 8192u
#define BLOCKS_MAX 240
#define WARP_LANES 32u
#define UNROLL 8u

struct Region {
    u64 address;
    u64 stride;
    u64 length;
    // Where the fragment begins in the packed block.
    u64 offset;
};

struct Block {
    // Address at which byte 0 of the packed block lies or would lie.
    u64 packed;
    u32 id;
    u32 unused;
};

// kernels.rs has the same struct.
struct Params {
    const Region *regions;
    // Number of the first tile of every region, and after the last one the number of tiles of a block.
    const u32 *first_tile;
    // Only these bytes of every block are moved.
    u64 from;
    u64 to;
    u32 region_count;
    // Tiles of a region if all have equally many, else 0.
    u32 tiles_per_region;
    u32 tiles_per_block;
    u32 block_count;
    // Bytes moved by one access: 16, 8, 4 or 1. Divides all addresses, strides, lengths and offsets.
    u32 access_bytes;
    u32 unused;
    Block blocks[BLOCKS_MAX];
};

// What is moved is not read again by this kernel: evict it first, so that less of others' data leaves the cache.
template <typename T>
static __device__ __forceinline__ void move(char *target, const char *source, u32 bytes, u32 lane) {
    T *to = reinterpret_cast<T *>(target);
    const T *from = reinterpret_cast<const T *>(source);
    const u32 count = bytes / sizeof(T);
    u32 i = lane;
    for (; i + (UNROLL - 1) * WARP_LANES < count; i += UNROLL * WARP_LANES) {
        T held[UNROLL];
#pragma unroll
        for (u32 k = 0; k < UNROLL; k++) held[k] = __ldcs(from + i + k * WARP_LANES);
#pragma unroll
        for (u32 k = 0; k < UNROLL; k++) __stcs(to + i + k * WARP_LANES, held[k]);
    }
#pragma unroll 1
    for (; i < count; i += WARP_LANES) __stcs(to + i, __ldcs(from + i));
}

// The region that tile `tile` of a block belongs to: the last one that begins at or before it.
static __device__ __forceinline__ u32 region_of(const Params &p, u32 tile) {
    if (p.tiles_per_region) return tile / p.tiles_per_region;
    u32 low = 0, high = p.region_count;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (p.first_tile[middle] <= tile) low = middle; else high = middle;
    }
    return low;
}

template <bool SCATTER> static __device__ __forceinline__ void run(const Params &p) {
    const u32 lane = threadIdx.x % WARP_LANES;
    const u32 warps = gridDim.x * (blockDim.x / WARP_LANES);
    const u32 warp = blockIdx.x * (blockDim.x / WARP_LANES) + threadIdx.x / WARP_LANES;
    const u32 tiles = p.block_count * p.tiles_per_block;
    for (u32 t = warp; t < tiles; t += warps) {
        const u32 index = t / p.tiles_per_block;
        const u32 tile = t - index * p.tiles_per_block;
        const u32 number = region_of(p, tile);
        const Region region = p.regions[number];
        const u32 first = p.tiles_per_region ? number * p.tiles_per_region : p.first_tile[number];
        u64 begin = static_cast<u64>(tile - first) * TILE_BYTES;
        u64 end = begin + TILE_BYTES < region.length ? begin + TILE_BYTES : region.length;
        begin += region.offset;
        end += region.offset;
        if (begin < p.from) begin = p.from;
        if (end > p.to) end = p.to;
        if (begin >= end) continue;
        char *packed = reinterpret_cast<char *>(p.blocks[index].packed + begin);
        char *spread = reinterpret_cast<char *>(region.address + p.blocks[index].id * region.stride
                                                + (begin - region.offset));
        char *target = SCATTER ? spread : packed;
        const char *source = SCATTER ? packed : spread;
        const u32 bytes = static_cast<u32>(end - begin);
        if (p.access_bytes == 16) move<uint4>(target, source, bytes, lane);
        else if (p.access_bytes == 8) move<uint2>(target, source, bytes, lane);
        else if (p.access_bytes == 4) move<u32>(target, source, bytes, lane);
        else move<unsigned char>(target, source, bytes, lane);
    }
}

// Fragments to packed form.
extern "C" __global__ void pegaflow_gather(const __grid_constant__ Params p) { run<false>(p); }

// Packed form to fragments.
extern "C" __global__ void pegaflow_scatter(const __grid_constant__ Params p) { run<true>(p); }
