/*
 * How work is shared out: kernels take their items in a loop over the grid, so that any number of them fits.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CUDA_ITEMS_CUH
#define CSA_CUDA_ITEMS_CUH

#include "../launch.h"

#include <stdint.h>

enum {
    CSA_LANES = 32,
    CSA_ALL_LANES = -1,
    CSA_BLOCK_WARPS = 8, /* of kernels that give an item to each warp */
    CSA_BLOCK_THREADS = CSA_BLOCK_WARPS * CSA_LANES,
    CSA_MOST_BLOCKS = 1 << 24
};

/* A launch of enough blocks for so many items; 0 items: no launch. */
static inline csa_launch csa_launch_items(int64_t items, int64_t per_block, void *stream)
{
    csa_launch l;
    int64_t blocks = (items + per_block - 1) / per_block;
    l.grid = dim3((unsigned)(blocks < CSA_MOST_BLOCKS ? blocks : CSA_MOST_BLOCKS));
    l.block = dim3(CSA_BLOCK_THREADS);
    l.stream = stream;
    return l;
}

/* Queues a kernel that gives an item to each warp, each thread or each block. */
template <typename... Params, typename... Values>
csa_status csa_queue_items(const char *name, void (*kernel)(Params...), int64_t items, int64_t per_block,
                           void *stream, Values &&...values)
{
    if (items <= 0)
        return CSA_OK;
    return csa_queue(name, kernel, csa_launch_items(items, per_block, stream), values...);
}

__device__ inline int csa_lane()
{
    return (int)threadIdx.x % CSA_LANES;
}

__device__ inline int csa_warp()
{
    return (int)threadIdx.x / CSA_LANES;
}

/* The first item of this warp or thread, and the distance to its next. */
__device__ inline int64_t csa_first_warp_item()
{
    return (int64_t)blockIdx.x * CSA_BLOCK_WARPS + csa_warp();
}

__device__ inline int64_t csa_warp_items()
{
    return (int64_t)gridDim.x * CSA_BLOCK_WARPS;
}

__device__ inline int64_t csa_first_thread_item()
{
    return (int64_t)blockIdx.x * CSA_BLOCK_THREADS + threadIdx.x;
}

__device__ inline int64_t csa_thread_items()
{
    return (int64_t)gridDim.x * CSA_BLOCK_THREADS;
}

/* The sum over a warp, the same in every lane. */
template <typename T> __device__ inline T csa_warp_sum(T x)
{
    for (int distance = CSA_LANES / 2; distance > 0; distance /= 2)
        x += __shfl_xor_sync((unsigned)CSA_ALL_LANES, x, distance);
    return x;
}

#endif
