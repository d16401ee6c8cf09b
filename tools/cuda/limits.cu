/*
 * What a GPU can do at most: reading memory in one stream, again and again from L2, in regions from all over
 * it, and products of matrices.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "device.h"

namespace
{

enum {
    PASSES = 10,   /* the best one counts */
    REPEATS = 200, /* of a read that stays within L2 */
    THREADS = 512,
    REGIONS = 262144 /* of a gather */
};

/* What is read is summed, and the sum is written if it is a number that no sum is likely to be. */
__device__ void keep(uint32_t sum, uint32_t *out)
{
    if (sum == 0x5EED5EEDU)
        *out = sum;
}

/* Past L1 (__ldcg), which would hold what is read again. */
__global__ void read_stream(const uint4 *from, size_t count, int repeats, uint32_t *out)
{
    enum { AHEAD = 4 };
    size_t step = (size_t)gridDim.x * blockDim.x, first = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    uint32_t sum = 0;
    for (; repeats > 0; repeats--)
        for (size_t i = first; i < count; i += AHEAD * step) {
            uint4 v[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; k++)
                v[k] = i + k * step < count ? __ldcg(from + i + k * step) : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int k = 0; k < AHEAD; k++)
                sum += v[k].x ^ v[k].w;
        }
    keep(sum, out);
}

/* A scattered region of `of` for each n: multiplied by an odd number, a power of two of them stay apart. */
__device__ size_t scattered(size_t n, size_t of)
{
    return n * 0x9E3779B1U & (of - 1);
}

/* A warp reads a region of BYTES at once. */
template <int BYTES> __global__ void read_regions(const uint4 *from, size_t of, uint32_t *out)
{
    enum { VECTORS = BYTES / 16, EACH = VECTORS / 32 };
    int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, warps = gridDim.x * blockDim.x / 32;
    uint32_t sum = 0;
    for (int n = warp; n < REGIONS; n += warps) {
        const uint4 *region = from + scattered(n, of) * VECTORS + threadIdx.x % 32;
        uint4 v[EACH];
#pragma unroll
        for (int k = 0; k < EACH; k++)
            v[k] = __ldcg(region + k * 32);
#pragma unroll
        for (int k = 0; k < EACH; k++)
            sum += v[k].x ^ v[k].w;
    }
    keep(sum, out);
}

enum { TILES = 4, STEPS = 2000, PRODUCT = 2 * 16 * 8 * 16 };

/* TILES independent bf16 products of 16x16 by 16x8 matrices, STEPS times, by each warp. */
__global__ void multiply(uint32_t *out)
{
    float sum[TILES][4] = {};
    uint32_t a = 0x3F803F80U + threadIdx.x, b = 0x3F003F00U + threadIdx.x;
    for (int step = 0; step < STEPS; step++)
#pragma unroll
        for (int t = 0; t < TILES; t++)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                         "{%0, %1, %2, %3}, {%4, %4, %4, %4}, {%5, %5}, {%0, %1, %2, %3};"
                         : "+f"(sum[t][0]), "+f"(sum[t][1]), "+f"(sum[t][2]), "+f"(sum[t][3])
                         : "r"(a), "r"(b));
    float all = 0;
    for (int t = 0; t < TILES; t++)
        all += sum[t][0] + sum[t][1] + sum[t][2] + sum[t][3];
    keep(__float_as_uint(all), out);
}

/* Seconds of the shortest of some passes. */
template <typename Pass> double best(Pass pass)
{
    cudaEvent_t first, last;
    cudaStream_t stream = device_stream();
    double least = 1e9;
    device_check(cudaEventCreate(&first), "cudaEventCreate");
    if (!device_check(cudaEventCreate(&last), "cudaEventCreate"))
        return least;
    for (int i = 0; i < PASSES; i++) {
        float milliseconds = 0;
        cudaEventRecord(first, stream);
        pass(stream);
        device_check(cudaGetLastError(), "measuring limits");
        cudaEventRecord(last, stream);
        device_check(cudaStreamSynchronize(stream), "measuring limits");
        device_check(cudaEventElapsedTime(&milliseconds, first, last), "cudaEventElapsedTime");
        least = milliseconds * 1e-3 < least ? milliseconds * 1e-3 : least;
    }
    cudaEventDestroy(first);
    cudaEventDestroy(last);
    return least;
}

struct device {
    const uint4 *memory;
    size_t bytes;
    uint32_t *out;
    int multiprocessors;
};

double stream_rate(const device &d, size_t bytes, int repeats)
{
    double rate = 0;
    for (int blocks = 2; blocks <= 4; blocks *= 2) {
        double seconds = best([&](cudaStream_t s) {
            read_stream<<<d.multiprocessors * blocks, THREADS, 0, s>>>(d.memory, bytes / 16, repeats, d.out);
        });
        rate = (double)bytes * repeats / seconds > rate ? (double)bytes * repeats / seconds : rate;
    }
    return rate;
}

template <int BYTES> double gather_rate(const device &d)
{
    size_t of = 1;
    while (2 * of * BYTES <= d.bytes)
        of *= 2;
    double seconds = 1e9;
    for (int blocks = 1; blocks <= 4; blocks *= 2) {
        double some = best([&](cudaStream_t s) {
            read_regions<BYTES><<<d.multiprocessors * blocks, THREADS, 0, s>>>(d.memory, of, d.out);
        });
        seconds = some < seconds ? some : seconds;
    }
    return (double)REGIONS * BYTES / seconds;
}

double product_rate(const device &d)
{
    int blocks = d.multiprocessors * 2;
    double seconds = best([&](cudaStream_t s) { multiply<<<blocks, THREADS, 0, s>>>(d.out); });
    return (double)blocks * (THREADS / 32) * STEPS * TILES * PRODUCT / seconds;
}

} // namespace

bench_limits device_limits()
{
    bench_limits limits = {};
    cudaDeviceProp p = {};
    void *memory = nullptr;
    device d = {};
    d.bytes = (size_t)4 << 30;
    if (!device_check(cudaGetDeviceProperties(&p, 0), "cudaGetDeviceProperties") ||
        !device_check(cudaMalloc(&memory, d.bytes + sizeof *d.out), "memory to measure limits on"))
        return limits;
    device_fill(memory, d.bytes, BENCH_BF16, 0, 0);
    d.memory = (const uint4 *)memory;
    d.out = (uint32_t *)((char *)memory + d.bytes);
    d.multiprocessors = p.multiProcessorCount;
    limits.stream = stream_rate(d, d.bytes, 1);
    limits.cache = stream_rate(d, (size_t)p.l2CacheSize / 4, REPEATS);
    limits.gather[0] = gather_rate<6144>(d);
    limits.gather[1] = gather_rate<3072>(d);
    limits.bf16 = product_rate(d);
    cudaFree(memory);
    return limits;
}
