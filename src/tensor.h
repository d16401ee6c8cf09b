/*
 * Access to the elements of a csa_tensor whose strides have been filled in.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TENSOR_H
#define CSA_TENSOR_H

#include <csa/csa.h>

/* Small functions that the .cu files compile for the device too. */
#if defined(__CUDACC__)
#define CSA_INLINE static inline __host__ __device__
#else
#define CSA_INLINE static inline
#endif

CSA_INLINE bool csa_present(const csa_tensor *t)
{
    return t->ndim != 0;
}

CSA_INLINE int64_t csa_itemsize(csa_dtype dtype)
{
    return (int64_t)(dtype >> 8 & 0xFF) / 8;
}

/* The element at indices (i, j, k), the rest 0. */
CSA_INLINE void *csa_at(const csa_tensor *t, int64_t i, int64_t j, int64_t k)
{
    int64_t element = i * t->stride[0] + j * t->stride[1] + k * t->stride[2];
    return (char *)t->data + element * csa_itemsize(t->dtype);
}

CSA_INLINE int64_t csa_i64(const csa_tensor *t, int64_t i)
{
    return *(const int64_t *)csa_at(t, i, 0, 0);
}

CSA_INLINE int32_t csa_i32(const csa_tensor *t, int64_t i)
{
    return *(const int32_t *)csa_at(t, i, 0, 0);
}

/* Bytes need not be 0 or 1: they come from the caller. */
CSA_INLINE bool csa_bool(const csa_tensor *t, int64_t i)
{
    return *(const uint8_t *)csa_at(t, i, 0, 0) != 0;
}

/* Elements [first, first + count) of the first extent; an absent tensor stays absent. */
CSA_INLINE csa_tensor csa_slice(csa_tensor t, int64_t first, int64_t count)
{
    if (csa_present(&t)) {
        t.data = t.data ? csa_at(&t, first, 0, 0) : NULL;
        t.shape[0] = count;
    }
    return t;
}

#endif
