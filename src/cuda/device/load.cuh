/*
 * Reading 16 bytes at a time, where the caller's strides allow it.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CUDA_LOAD_CUH
#define CSA_CUDA_LOAD_CUH

#include "../../tensor.h"

/* Base and strides are multiples of 16 bytes, so that every row of the last extent starts at one. */
static inline bool csa_aligned(const csa_tensor *t)
{
    bool aligned = (uintptr_t)t->data % 16 == 0;
    for (int i = 0; i + 1 < t->ndim; i++)
        aligned = aligned && (t->shape[i] <= 1 || t->stride[i] * csa_itemsize(t->dtype) % 16 == 0);
    return aligned;
}

/* Out of line: it is rare and long. */
static __device__ __noinline__ uint4 load_16_bytes(const uint8_t *p)
{
    uint32_t words[4] = {};
    for (int i = 0; i < 16; i++)
        words[i / 4] |= (uint32_t)p[i] << i % 4 * 8;
    return make_uint4(words[0], words[1], words[2], words[3]);
}

static __device__ __forceinline__ uint4 load_16(const uint8_t *p, bool aligned)
{
    return aligned ? __ldg((const uint4 *)p) : load_16_bytes(p);
}

#endif
