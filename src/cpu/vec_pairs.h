/*
 * Pairs of bf16 without instructions for them.
 * SPDX-License-Identifier: Apache-2.0
 */

/* The two halves of each lane as floats. */
typedef struct vp {
    vf low, high;
} vp;

static inline vp vp_of(vi pairs)
{
    return (vp){(vf)(pairs << 16), (vf)(pairs & 0xFFFF0000U)};
}

/* Products of two bf16 values are exact in fp32, so that it does not matter whether they are fused. */
static inline vf vf_dot(vf acc, vp a, vp b)
{
    return VF_MULTIPLY_ADD(a.low, b.low, VF_MULTIPLY_ADD(a.high, b.high, acc));
}

/* As many 16-bit halves as the instruction set compares at once. Signed: SSE2 and AVX2 compare nothing else. */
typedef int16_t vw __attribute__((vector_size(VW_BYTES)));

/* The bf16 code of the e4m3 code in each half: exponents differ by 120; subnormals go by their leading bit. */
static inline vw vw_widen(vw code)
{
    vw magnitude = code & 0x7F;
    vw normal = (magnitude << 4) + (120 << 7);
    vw four = (magnitude << 5) + (0x3C00 - (4 << 5)), two = (magnitude << 6) + (0x3B80 - (2 << 6));
    vw small = (vw)(magnitude > 3) & four;
    small |= (vw)(magnitude < 4) & (vw)(magnitude > 1) & two;
    small |= (vw)(magnitude == 1) & 0x3B00;
    vw out = ((vw)(magnitude > 7) & normal) | ((vw)(magnitude < 8) & small);
    out |= (vw)(magnitude == 0x7F) & 0x7FC0;
    return out | (code & 0x80) << 8;
}

static inline vi vp_widen(vi halves)
{
    vw part[sizeof halves / sizeof(vw)];
    memcpy(part, &halves, sizeof halves);
    for (size_t i = 0; i < sizeof part / sizeof *part; i++)
        part[i] = vw_widen(part[i]);
    memcpy(&halves, part, sizeof halves);
    return halves;
}

static inline void vp_decode(const uint8_t *codes, vp *first, vp *second)
{
    vi x;
    memcpy(&x, codes, sizeof x);
    *first = vp_of(vp_widen(x & 0x00FF00FFU));
    *second = vp_of(vp_widen(x >> 8 & 0x00FF00FFU));
}

/* bf16 codes of 4 * LANES e4m3 codes, in their order. */
static inline void vp_decode_in_order(const uint8_t *codes, vi *first, vi *second)
{
    typedef uint8_t vb __attribute__((vector_size(2 * LANES)));
    typedef uint16_t vc __attribute__((vector_size(4 * LANES)));
    vb x, y;
    memcpy(&x, codes, sizeof x);
    memcpy(&y, codes + 2 * LANES, sizeof y);
    *first = vp_widen((vi) __builtin_convertvector(x, vc));
    *second = vp_widen((vi) __builtin_convertvector(y, vc));
}
