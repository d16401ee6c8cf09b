/*
 * 16 floats: AVX-512 with BW, DQ and VL. With CSA_VEC_BF16 also VBMI's byte permutes and BF16's dot product.
 * SPDX-License-Identifier: Apache-2.0
 */
enum { LANES = 16 };
typedef float vf __attribute__((vector_size(64)));
typedef uint32_t vi __attribute__((vector_size(64)));

typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

static inline vi vi_widen(vh codes)
{
    return (vi)_mm512_cvtepu16_epi32((__m256i)codes);
}

static inline vf vf_set1(float x)
{
    return (vf)_mm512_set1_ps(x);
}

static inline vi vi_set1(uint32_t x)
{
    return (vi)_mm512_set1_epi32((int)x);
}

static inline vf vf_fma(vf a, vf b, vf c)
{
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

static inline vf vf_max(vf a, vf b)
{
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
}

/* Within each 128 bits. */
static inline void vi_interleave(vi even, vi odd, vi *first, vi *second)
{
    *first = (vi)_mm512_unpacklo_epi16((__m512i)even, (__m512i)odd);
    *second = (vi)_mm512_unpackhi_epi16((__m512i)even, (__m512i)odd);
}

/* ---- Lane sums: four halvings; each adds what one shuffle brings from x and y to what the other brings --- */

static inline vf fold_pairs(vf a, vf b)
{
    __m512 x = (__m512)a, y = (__m512)b;
    return (vf)_mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
}

static inline vf fold_quads(vf a, vf b)
{
    __m512 x = (__m512)a, y = (__m512)b;
    return (vf)_mm512_add_ps(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xEE));
}

static inline vf fold_halves(vf a, vf b)
{
    __m512 x = (__m512)a, y = (__m512)b;
    return (vf)_mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xDD));
}

static inline vf fold_four(const vf *a)
{
    return fold_quads(fold_pairs(a[0], a[1]), fold_pairs(a[2], a[3]));
}

static inline vf vf_sums(const vf *a)
{
    return fold_halves(fold_halves(fold_four(a), fold_four(a + 4)),
                       fold_halves(fold_four(a + 8), fold_four(a + 12)));
}

/* A 4 x 4 transpose within each quarter brings the four chains apart; the last permute puts regions in order.
 */
static inline vf vf_chains(const vf *c)
{
    __m512 a = _mm512_unpacklo_ps((__m512)c[0], (__m512)c[1]),
           b = _mm512_unpackhi_ps((__m512)c[0], (__m512)c[1]);
    __m512 d = _mm512_unpacklo_ps((__m512)c[2], (__m512)c[3]),
           e = _mm512_unpackhi_ps((__m512)c[2], (__m512)c[3]);
    __m512 sum = _mm512_add_ps(_mm512_shuffle_ps(a, d, 0x44), _mm512_shuffle_ps(a, d, 0xEE));
    sum = _mm512_add_ps(sum, _mm512_shuffle_ps(b, e, 0x44));
    sum = _mm512_add_ps(sum, _mm512_shuffle_ps(b, e, 0xEE));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return (vf)_mm512_permutexvar_ps(order, sum);
}

/* ---- What VBMI and BF16 do better --------------------------------------------------------------- */

#if CSA_VEC_BF16

typedef vi vp;

static inline vp vp_of(vi pairs)
{
    return pairs;
}

static inline vf vf_dot(vf acc, vp a, vp b)
{
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
}

/* As in vec.h, but subnormals become zero. */
#define VI_BF16_PAIRS
static inline vi vi_bf16_pairs(vf even, vf odd)
{
    const __m512i zip = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                         22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (vi)_mm512_permutexvar_epi16(zip, (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
}

/* The low and the high byte of the bf16 of each e4m3 magnitude. */
#define BF16_OF(m)                         \
    ((m) == 0x7F ? 0x7FC0                  \
     : (m) >= 8  ? ((m) << 4) + (120 << 7) \
     : (m) >= 4  ? 0x3C00 + ((m)-4) * 32   \
     : (m) >= 2  ? 0x3B80 + ((m)-2) * 64   \
     : (m)       ? 0x3B00                  \
                 : 0)
#define LOW(m)        BF16_OF(m) & 0xFF
#define HIGH(m)       BF16_OF(m) >> 8
#define FOUR(f, m)    f(m), f((m) + 1), f((m) + 2), f((m) + 3)
#define SIXTEEN(f, m) FOUR(f, m), FOUR(f, (m) + 4), FOUR(f, (m) + 8), FOUR(f, (m) + 12)
#define ALL(f)                                                                                     \
    SIXTEEN(f, 0), SIXTEEN(f, 16), SIXTEEN(f, 32), SIXTEEN(f, 48), SIXTEEN(f, 64), SIXTEEN(f, 80), \
        SIXTEEN(f, 96), SIXTEEN(f, 112)
static const uint8_t e4m3_low[128] __attribute__((aligned(64))) = {ALL(LOW)};
static const uint8_t e4m3_high[128] __attribute__((aligned(64))) = {ALL(HIGH)};
#undef BF16_OF
#undef LOW
#undef HIGH
#undef FOUR
#undef SIXTEEN
#undef ALL

/* Low and high byte of a magnitude's bf16, looked up by the code's seven low bits; then the sign. */
static inline void vp_decode(const uint8_t *codes, vp *first, vp *second)
{
    __m512i x = _mm512_loadu_si512(codes), sign = _mm512_and_si512(x, _mm512_set1_epi8((char)0x80));
    __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(e4m3_low), x, _mm512_load_si512(e4m3_low + 64));
    __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(e4m3_high), x, _mm512_load_si512(e4m3_high + 64));
    high = _mm512_or_si512(high, sign);
    *first = (vi)_mm512_unpacklo_epi8(low, high);
    *second = (vi)_mm512_unpackhi_epi8(low, high);
}

/* The same in the codes' order: eight-byte chunks are moved to where the unpacking puts them right. */
static inline void vp_decode_in_order(const uint8_t *codes, vi *first, vi *second)
{
    uint8_t moved[64] __attribute__((aligned(64)));
    const __m512i chunks = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    _mm512_store_si512(moved, _mm512_permutexvar_epi64(chunks, _mm512_loadu_si512(codes)));
    vp_decode(moved, first, second);
}

#else
#define VF_MULTIPLY_ADD(a, b, c) vf_fma(a, b, c)
#define VW_BYTES                 (4 * LANES)
#include "vec_pairs.h"
#endif

static inline int vi_compress(uint32_t *to, vi mask, vi x)
{
    __mmask16 kept = _mm512_movepi32_mask((__m512i)mask);
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(kept, (__m512i)x));
    return __builtin_popcount(kept);
}
