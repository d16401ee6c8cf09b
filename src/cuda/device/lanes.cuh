/*
 * Sums over the lanes of a warp. SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CUDA_LANES_CUH
#define CSA_CUDA_LANES_CUH

/* The sum over the lanes up to this one. */
template <typename T> static __device__ __forceinline__ T sum_lanes(T own)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        T other = __shfl_up_sync(~0U, own, step);
        own += lane >= step ? other : 0;
    }
    return own;
}

#endif
