/*
 * 8 floats in the compiler's own vectors, for any processor.
 * SPDX-License-Identifier: Apache-2.0
 */
#define CSA_VEC_FEW 1
enum { LANES = 8 };
typedef float vf __attribute__((vector_size(32)));
typedef uint32_t vi __attribute__((vector_size(32)));

typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

static inline vi vi_widen(vh codes)
{
    return __builtin_convertvector(codes, vi);
}

static inline vf vf_set1(float x)
{
    return (vf){x, x, x, x, x, x, x, x};
}

static inline vi vi_set1(uint32_t x)
{
    return (vi){x, x, x, x, x, x, x, x};
}

static inline vf vf_fma(vf a, vf b, vf c)
{
    vf out;
    for (int i = 0; i < LANES; i++)
        out[i] = fmaf(a[i], b[i], c[i]);
    return out;
}

static inline vf vf_max(vf a, vf b)
{
    vi mask = (vi)(a > b);
    return (vf)((mask & (vi)a) | (~mask & (vi)b));
}

/* Within each 128 bits, and in vectors of so many: GCC takes wider ones apart element by element. */
static inline void vi_interleave(vi even, vi odd, vi *first, vi *second)
{
    typedef uint16_t vc __attribute__((vector_size(16)));
    vc x[2], y[2], low[2], high[2];
    memcpy(x, &even, sizeof x);
    memcpy(y, &odd, sizeof y);
    for (int i = 0; i < 2; i++) {
        low[i] = __builtin_shufflevector(x[i], y[i], 0, 8, 1, 9, 2, 10, 3, 11);
        high[i] = __builtin_shufflevector(x[i], y[i], 4, 12, 5, 13, 6, 14, 7, 15);
    }
    memcpy(first, low, sizeof low);
    memcpy(second, high, sizeof high);
}

#define VF_MULTIPLY_ADD(a, b, c) ((c) + (a) * (b))
#define VW_BYTES                 16
#include "vec_pairs.h"

static inline vf vf_sums(const vf *a)
{
    vf out;
    for (int i = 0; i < LANES; i++)
        out[i] = ((a[i][0] + a[i][1]) + (a[i][2] + a[i][3])) + ((a[i][4] + a[i][5]) + (a[i][6] + a[i][7]));
    return out;
}

static inline vf vf_chains(const vf *c)
{
    vf out;
    for (int i = 0; i < LANES; i++) {
        const vf *v = &c[i / 2];
        int first = i % 2 * 4;
        out[i] = (((*v)[first] + (*v)[first + 1]) + (*v)[first + 2]) + (*v)[first + 3];
    }
    return out;
}

static inline int vi_compress(uint32_t *to, vi mask, vi x)
{
    int count = 0;
    for (int i = 0; i < LANES; i++)
        if (mask[i])
            to[count++] = x[i];
    return count;
}
