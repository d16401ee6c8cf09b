/*
 * Vectors of LANES floats for the stages' bodies. Included once per tier, inside its target region, after one
 * of the vec_*.h headers has defined LANES and what differs between instruction sets:
 *
 *   vf_set1, vi_set1   the same value in every lane
 *   vi_widen           LANES 16-bit codes (vh) to 32 bits
 *   vf_fma(a, b, c)    a * b + c, rounded once
 *   vf_max(a, b)       the larger one, b where a is NaN
 *   vp, vp_of          pairs of bf16, two in each 32-bit lane, in the form that dot products take
 *   vf_dot(acc, a, b)  acc + low(a) * low(b) + high(a) * high(b): pairs of bf16 in 32-bit lanes, fp32 sums; the
 *                      order of the two additions is the tier's, the products are exact
 *   vf_sums(a)         for LANES vectors, the vector of their lane sums, in one fixed order
 *   vf_chains(c)       c[k], k < 4, has in lane r * 4 + h chain h of region k * LANES / 4 + r; gives for each
 *                      of these LANES regions ((chain 0 + chain 1) + chain 2) + chain 3
 *   vp_decode          4 * LANES e4m3 codes into two vectors of bf16 pairs, in an order of the tier's own:
 *                      only good for dot products of two that were decoded alike
 *   vp_decode_in_order the same in the codes' order, as bf16 in memory
 *   vi_compress        appends the lanes of a mask to an array and returns their number
 *
 * SPDX-License-Identifier: Apache-2.0
 */

static inline vf vf_load(const float *x)
{
    vf v;
    memcpy(&v, x, sizeof v);
    return v;
}

static inline void vf_store(float *to, vf x)
{
    memcpy(to, &x, sizeof x);
}

static inline vi vi_load(const void *x)
{
    vi v;
    memcpy(&v, x, sizeof v);
    return v;
}

static inline void vi_store(void *to, vi x)
{
    memcpy(to, &x, sizeof x);
}

static inline vp vp_load(const void *pairs)
{
    return vp_of(vi_load(pairs));
}

static inline vp vp_set1(uint32_t pair)
{
    return vp_of(vi_set1(pair));
}

/* a where the mask is all ones, b where it is zero. */
static inline vi vi_choose(vi mask, vi a, vi b)
{
    return (mask & a) | (~mask & b);
}

static inline vf vf_choose(vi mask, vf a, vf b)
{
    return (vf)vi_choose(mask, (vi)a, (vi)b);
}

static inline vf vf_load_bf16(const uint16_t *x)
{
    vh codes;
    memcpy(&codes, x, sizeof codes);
    return (vf)(vi_widen(codes) << 16);
}

/* To nearest even, NaN stays NaN; the code in the low half of each lane. */
static inline vi vi_bf16(vf x)
{
    vi bits = (vi)x, rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return vi_choose((vi)(x == x), rounded, bits >> 16 | 0x40);
}

#ifndef VI_BF16_PAIRS
/* The codes of even in the low halves, of odd in the high ones. */
static inline vi vi_bf16_pairs(vf even, vf odd)
{
    return vi_bf16(even) | vi_bf16(odd) << 16;
}
#endif

static inline vf vf_round_bf16(vf x)
{
    return (vf)(vi_bf16(x) << 16);
}

static inline void vf_store_bf16(uint16_t *to, vf x)
{
    vh codes = __builtin_convertvector(vi_bf16(x), vh);
    memcpy(to, &codes, sizeof codes);
}

/* As csa_float_to_e4m3. */
static inline void vf_store_e4m3(uint8_t *to, vf x)
{
    typedef uint8_t vb __attribute__((vector_size(LANES)));
    vi bits = (vi)x, magnitude = bits & 0x7FFFFFFF, sign = bits >> 24 & 0x80;
    vi normal = ((magnitude + 0x7FFFF + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
    vi small = (vi)((vf)magnitude + 0x1p14F) - 0x46800000U; /* steps of 2^-9 */
    vi code = vi_choose((vi)(magnitude < 0x3C800000U), small, normal);
    code = vi_choose((vi)(magnitude >= 0x43E00000U), vi_set1(0x7E), code) | sign;
    code = vi_choose((vi)(magnitude > 0x7F800000U), vi_set1(0x7F), code);
    vb bytes = __builtin_convertvector(code, vb);
    memcpy(to, &bytes, sizeof bytes);
}

/* 2^n for whole n in [-127, 127] (as floats); -127 gives 0. */
static inline vf vf_power_of_two(vf n)
{
    vi biased = (vi)(n + (0x1.8p23F + 127.0F)) << 23;
    return (vf)biased;
}

/* e^x, within 2 units in the last place, for x up to 88; 0 below -87.7; NaN for NaN. */
static inline vf vf_exp(vf x)
{
    vf magic = vf_set1(0x1.8p23F), low = vf_set1(-88.0F);
    vf clipped = vf_choose((vi)(x < low), low, x);
    vf n = vf_fma(clipped, vf_set1(0x1.715476p0F), magic) - magic;
    vf r = vf_fma(n, vf_set1(-0x1.62e4p-1F), clipped);
    r = vf_fma(n, vf_set1(-0x1.7f7d1cp-20F), r);
    vf p = vf_set1(0x1.6a86e0p-10F);
    p = vf_fma(p, r, vf_set1(0x1.126d5ep-7F));
    p = vf_fma(p, r, vf_set1(0x1.5558e6p-5F));
    p = vf_fma(p, r, vf_set1(0x1.55540ap-3F));
    p = vf_fma(p, r, vf_set1(0x1.fffffap-2F));
    p = vf_fma(p, r, vf_set1(1.0F));
    p = vf_fma(p, r, vf_set1(1.0F));
    return p * vf_power_of_two(n);
}

/* 2^x for x up to 127, relative error below 2^-21; 0 below -126.5; NaN for NaN. */
static inline vf vf_exp2(vf x)
{
    vf magic = vf_set1(0x1.8p23F), low = vf_set1(-127.0F);
    vf clipped = vf_choose((vi)(x < low), low, x);
    vf n = (clipped + magic) - magic, r = clipped - n;
    vf p = vf_set1(0x1.5bc922p-10F);
    p = vf_fma(p, r, vf_set1(0x1.3d0ba4p-7F));
    p = vf_fma(p, r, vf_set1(0x1.c6b782p-5F));
    p = vf_fma(p, r, vf_set1(0x1.ebf91ap-3F));
    p = vf_fma(p, r, vf_set1(0x1.62e428p-1F));
    p = vf_fma(p, r, vf_set1(1.0F));
    return p * vf_power_of_two(n);
}
