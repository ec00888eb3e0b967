/* A libcuda.so.1 without a device, for tests of the path from Python to the driver's interface: device memory is host
 * memory and every call does its work at once. Answers CUDA_ERROR_INVALID_DEVICE for all devices but 0.
 * FAKE_CUDA_FAILURE="700 20 1000000" in the environment: of the calls that queue work or ask for it, those with numbers
 * from 20 on and below 1000000 answer 700 and do nothing. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Status;
typedef void *Handle;
enum { OK = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101 };

struct region { uint64_t address, stride, length, offset; };
struct block { uint64_t packed; uint32_t id, unused; };
struct params {
    const struct region *regions;
    const uint32_t *first_tile;
    uint64_t from, to;
    uint32_t region_count, tiles_per_region, tiles_per_block, block_count, access_bytes, unused;
    struct block blocks[240];
};

static int handles;
static char gather, scatter;

static int failure;
static long calls, first_failing, end_of_failing;
__attribute__((constructor)) static void read_failure(void) {
    const char *text = getenv("FAKE_CUDA_FAILURE");
    if (text && sscanf(text, "%d %ld %ld", &failure, &first_failing, &end_of_failing) != 3) abort();
}
static Status due(void) {
    long call = __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED);
    return call >= first_failing && call < end_of_failing ? failure : OK;
}
static Status make(Handle *handle) {
    *handle = (Handle)(uintptr_t)++handles;
    return OK;
}

Status cuInit(unsigned flags) { return flags ? INVALID_VALUE : OK; }
Status cuGetErrorName(Status status, const char **text) {
    *text = status == INVALID_DEVICE ? "CUDA_ERROR_INVALID_DEVICE" : "CUDA_ERROR_OF_SOME_KIND";
    return OK;
}
Status cuGetErrorString(Status status, const char **text) {
    *text = status == INVALID_DEVICE ? "invalid device ordinal" : "some error";
    return OK;
}
Status cuDeviceGet(int *device, int ordinal) { return ordinal ? INVALID_DEVICE : (*device = 0, OK); }
Status cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)attribute, (void)device;
    return *value = 1, OK;
}
Status cuDevicePrimaryCtxRetain(Handle *context, int device) { return (void)device, make(context); }
Status cuDevicePrimaryCtxRelease_v2(int device) { return (void)device, OK; }
Status cuCtxPushCurrent_v2(Handle context) { return context ? OK : INVALID_VALUE; }
Status cuCtxPopCurrent_v2(Handle *context) { return *context = 0, OK; }
Status cuThreadExchangeStreamCaptureMode(int *mode) { return *mode == 2 || *mode == 0 ? (*mode = 2 - *mode, OK) : 1; }
Status cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, OK; }
Status cuStreamCreateWithPriority(Handle *stream, unsigned flags, int priority) {
    return flags == 1 && priority == 0 ? make(stream) : INVALID_VALUE;
}
Status cuStreamDestroy_v2(Handle stream) { return stream ? OK : INVALID_VALUE; }
Status cuStreamWaitEvent(Handle stream, Handle event, unsigned flags) {
    return stream && event && !flags ? OK : INVALID_VALUE;
}
Status cuEventCreate(Handle *event, unsigned flags) { return flags == 2 ? make(event) : INVALID_VALUE; }
Status cuEventDestroy_v2(Handle event) { return event ? OK : INVALID_VALUE; }
Status cuEventRecord(Handle event, Handle stream) { return (void)stream, event ? due() : INVALID_VALUE; }
Status cuEventQuery(Handle event) { return event ? due() : INVALID_VALUE; }
Status cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    return *address = (uintptr_t)aligned_alloc(256, (bytes + 255) / 256 * 256), *address ? OK : 2;
}
Status cuMemFree_v2(uint64_t address) { return free((void *)(uintptr_t)address), OK; }
Status cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
    (void)flags;
    return *address = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096), *address ? OK : 2;
}
Status cuMemFreeHost(void *address) { return free(address), OK; }
Status cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) {
    return flags == 3 && (uintptr_t)address % 4096 == 0 && bytes % 4096 == 0 ? OK : INVALID_VALUE;
}
Status cuMemHostUnregister(void *address) { return address ? OK : INVALID_VALUE; }
Status cuMemcpyHtoDAsync_v2(uint64_t target, const void *source, size_t bytes, Handle stream) {
    Status now = due();
    if (now) return now;
    return stream ? (memcpy((void *)(uintptr_t)target, source, bytes), OK) : INVALID_VALUE;
}
Status cuMemcpyDtoHAsync_v2(void *target, uint64_t source, size_t bytes, Handle stream) {
    Status now = due();
    if (now) return now;
    return stream ? (memcpy(target, (void *)(uintptr_t)source, bytes), OK) : INVALID_VALUE;
}
struct attributes { int order, source[2], target[2]; unsigned flags; };
Status cuMemcpyBatchAsync_v2(const uint64_t *targets, const uint64_t *sources, const size_t *sizes, size_t count,
                             const struct attributes *attributes, const size_t *first, size_t groups, Handle stream) {
    Status now = due();
    if (now) return now;
    if (!stream || groups != 1 || *first || attributes->order != 1 || attributes->flags) return INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        memcpy((void *)(uintptr_t)targets[i], (void *)(uintptr_t)sources[i], sizes[i]);
    return OK;
}
Status cuModuleLoadData(Handle *module, const char *text) {
    return strstr(text, ".entry pegaflow_gather(") ? make(module) : INVALID_VALUE;
}
Status cuModuleUnload(Handle module) { return module ? OK : INVALID_VALUE; }
Status cuModuleGetFunction(Handle *function, Handle module, const char *name) {
    if (!module) return INVALID_VALUE;
    *function = strcmp(name, "pegaflow_gather") ? strcmp(name, "pegaflow_scatter") ? 0 : &scatter : &gather;
    return *function ? OK : INVALID_VALUE;
}
Status cuLaunchKernel(Handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared_bytes, Handle stream, void **arguments,
                      void **extra) {
    const struct params *p = arguments[0];
    if (!grid_x || grid_y * grid_z * block_y * block_z != 1 || block_x != 512 || shared_bytes || !stream || extra)
        return INVALID_VALUE;
    Status now = due();
    if (now) return now;
    for (uint32_t i = 0; i < p->block_count; i++)
        for (uint32_t r = 0; r < p->region_count; r++) {
            const struct region region = p->regions[r];
            uint64_t begin = region.offset > p->from ? region.offset : p->from;
            uint64_t end = region.offset + region.length < p->to ? region.offset + region.length : p->to;
            if (begin >= end) continue;
            char *packed = (char *)(uintptr_t)(p->blocks[i].packed + begin);
            char *spread = (char *)(uintptr_t)(region.address + p->blocks[i].id * region.stride + begin - region.offset);
            int gathers = function == &gather;
            memcpy(gathers ? packed : spread, gathers ? spread : packed, end - begin);
        }
    return OK;
}
