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
