/*
 * Random values on a GPU: normal ones, as queries, keys and values are.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "device.h"

#include <cuda_bf16.h>
#include <cuda_fp8.h>

namespace
{

enum { TOPIC_ROWS = 64 /* neighbouring rows that share most of their query */ };

__device__ uint64_t hash(uint64_t index)
{
    uint64_t x = (index + 1) * 0x9E3779B97F4A7C15U;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9U;
    x = (x ^ x >> 27) * 0x94D049BB133111EBU;
    return x ^ x >> 31;
}

/* In (0, 1]. */
__device__ float uniform(uint32_t bits)
{
    return ((bits >> 8) + 1) * 0x1p-24F;
}

/* One normal number for each index (Box-Muller). */
__device__ float normal(uint64_t index)
{
    uint64_t bits = hash(index);
    return sqrtf(-2 * __logf(uniform((uint32_t)bits))) * __cosf(6.2831853F * uniform((uint32_t)(bits >> 32)));
}

/* Element i of a row of `row` elements each: a third of it is its own. */
__device__ float topic(uint64_t seed, uint64_t i, uint64_t row)
{
    uint64_t shared = i / (row * TOPIC_ROWS) * row + i % row;
    return normal(~(seed + shared)) + 0.5F * normal(seed + i);
}

struct values {
    void *memory;
    uint64_t count, seed, row;
    bench_fill fill;
};

__device__ void write(const values &v, uint64_t i)
{
    uint64_t at = v.seed + i;
    switch (v.fill) {
    case BENCH_BF16:
        ((__nv_bfloat16 *)v.memory)[i] = __float2bfloat16(normal(at));
        break;
    case BENCH_E4M3:
        ((__nv_fp8_e4m3 *)v.memory)[i] = __nv_fp8_e4m3(normal(at));
        break;
    case BENCH_TOPICS:
        ((__nv_fp8_e4m3 *)v.memory)[i] = __nv_fp8_e4m3(topic(v.seed, i, v.row));
        break;
    case BENCH_WEIGHTS:
        ((float *)v.memory)[i] = 0.5F + 0.5F * uniform((uint32_t)hash(at));
        break;
    case BENCH_SIGNED:
        ((float *)v.memory)[i] = normal(at);
        break;
    default:
        break;
    }
}

__global__ void fill_kernel(values v)
{
    uint64_t step = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < v.count; i += step)
        write(v, i);
}

size_t element(bench_fill fill)
{
    return fill == BENCH_BF16 ? 2 : fill == BENCH_E4M3 || fill == BENCH_TOPICS ? 1 : 4;
}

} // namespace

void device_fill(void *memory, uint64_t bytes, bench_fill fill, uint64_t seed, uint64_t row)
{
    if (!device_check(cudaSuccess, "") || bytes == 0)
        return;
    values v = {memory, bytes / element(fill), seed << 40, row / element(fill), fill};
    fill_kernel<<<2048, 256, 0, device_stream()>>>(v);
    device_check(cudaGetLastError(), "filling memory");
    device_check(cudaStreamSynchronize(device_stream()), "filling memory");
}
