/*
 * 8 floats: AVX2 and FMA.
 * SPDX-License-Identifier: Apache-2.0
 */
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
    return (vf)_mm256_set1_ps(x);
}

static inline vi vi_set1(uint32_t x)
{
    return (vi)_mm256_set1_epi32((int)x);
}

static inline vf vf_fma(vf a, vf b, vf c)
{
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

static inline vf vf_max(vf a, vf b)
{
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
}

/* Within each 128 bits. */
static inline void vi_interleave(vi even, vi odd, vi *first, vi *second)
{
    *first = (vi)_mm256_unpacklo_epi16((__m256i)even, (__m256i)odd);
    *second = (vi)_mm256_unpackhi_epi16((__m256i)even, (__m256i)odd);
}

#define VF_MULTIPLY_ADD(a, b, c) vf_fma(a, b, c)
#define VW_BYTES                 (4 * LANES)
#include "vec_pairs.h"

static inline vf fold_four(const vf *a)
{
    __m256 x = _mm256_hadd_ps((__m256)a[0], (__m256)a[1]), y = _mm256_hadd_ps((__m256)a[2], (__m256)a[3]);
    return (vf)_mm256_hadd_ps(x, y);
}

static inline vf vf_sums(const vf *a)
{
    __m256 x = (__m256)fold_four(a), y = (__m256)fold_four(a + 4);
    return (vf)_mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
}

/* As for AVX-512, with two regions a vector. */
static inline vf vf_chains(const vf *c)
{
    __m256 a = _mm256_unpacklo_ps((__m256)c[0], (__m256)c[1]),
           b = _mm256_unpackhi_ps((__m256)c[0], (__m256)c[1]);
    __m256 d = _mm256_unpacklo_ps((__m256)c[2], (__m256)c[3]),
           e = _mm256_unpackhi_ps((__m256)c[2], (__m256)c[3]);
    __m256 sum = _mm256_add_ps(_mm256_shuffle_ps(a, d, 0x44), _mm256_shuffle_ps(a, d, 0xEE));
    sum = _mm256_add_ps(sum, _mm256_shuffle_ps(b, e, 0x44));
    sum = _mm256_add_ps(sum, _mm256_shuffle_ps(b, e, 0xEE));
    return (vf)_mm256_permutevar8x32_ps(sum, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

static inline int vi_compress(uint32_t *to, vi mask, vi x)
{
    unsigned kept = (unsigned)_mm256_movemask_ps((__m256)mask);
    int count = 0;
    for (; kept; kept &= kept - 1)
        to[count++] = x[__builtin_ctz(kept)];
    return count;
}
