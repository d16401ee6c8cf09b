/*
 * Running sums over a block of CSA_BLOCK_THREADS threads.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CUDA_SCAN_CUH
#define CSA_CUDA_SCAN_CUH

#include "items.cuh"
#include "lanes.cuh"

/* The sum of x over the threads before this one, and in *total over all. All threads call; two barriers. */
__device__ inline int64_t csa_block_scan(int64_t x, int64_t *total)
{
    __shared__ int64_t sums[CSA_BLOCK_WARPS];
    int64_t sum = sum_lanes(x);
    if (csa_lane() == CSA_LANES - 1)
        sums[csa_warp()] = sum;
    __syncthreads();
    int64_t before = 0;
    *total = 0;
    for (int warp = 0; warp < CSA_BLOCK_WARPS; warp++) {
        before += warp < csa_warp() ? sums[warp] : 0;
        *total += sums[warp];
    }
    __syncthreads(); /* sums may be written again */
    return before + sum - x;
}

/* The sum over the block, the same in every thread. */
__device__ inline int64_t csa_block_sum(int64_t x)
{
    int64_t total;
    csa_block_scan(x, &total);
    return total;
}

/* The largest over the block, the same in every thread. */
__device__ inline int64_t csa_block_max(int64_t x)
{
    __shared__ int64_t largest[CSA_BLOCK_WARPS];
    for (int distance = CSA_LANES / 2; distance > 0; distance /= 2) {
        int64_t other = __shfl_xor_sync((unsigned)CSA_ALL_LANES, x, distance);
        x = other > x ? other : x;
    }
    if (csa_lane() == 0)
        largest[csa_warp()] = x;
    __syncthreads();
    for (int warp = 0; warp < CSA_BLOCK_WARPS; warp++)
        x = largest[warp] > x ? largest[warp] : x;
    __syncthreads();
    return x;
}

#endif
