/*
 * bf16 and e4m3 conversions, to nearest even (the head of SPEC.md).
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_NUMERIC_H
#define CSA_NUMERIC_H

#include "tensor.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

CSA_INLINE uint32_t csa_float_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

CSA_INLINE float csa_float_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

CSA_INLINE float csa_bf16_to_float(uint16_t code)
{
    return csa_float_from_bits((uint32_t)code << 16);
}

CSA_INLINE uint16_t csa_float_to_bf16(float x)
{
    uint32_t bits = csa_float_bits(x);
    if (isnan(x))
        return (uint16_t)(bits >> 16 | 0x40); /* rounding could carry a NaN into infinity: quieten it instead */
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* Rounds to the nearest bf16 value. */
CSA_INLINE float csa_round_bf16(float x)
{
    return csa_bf16_to_float(csa_float_to_bf16(x));
}

/* bf16(sigmoid(gate)), what the headwise gate multiplies by. */
CSA_INLINE float csa_gate_factor(uint16_t gate)
{
    return csa_round_bf16(1.0F / (1.0F + expf(-csa_bf16_to_float(gate))));
}

CSA_INLINE float csa_e4m3_to_float(uint8_t code)
{
    uint32_t sign = (uint32_t)(code & 0x80) << 24, exponent = code >> 3 & 0xF, mantissa = code & 7;
    if ((code & 0x7F) == 0x7F)
        return csa_float_from_bits(sign | 0x7FC00000);
    if (exponent == 0) {
        float magnitude = (float)mantissa * 0x1p-9F;
        return sign ? -magnitude : magnitude;
    }
    return csa_float_from_bits(sign | (exponent + 127 - 7) << 23 | mantissa << 20);
}

/* Saturates to +-448, infinities included; any NaN becomes 0x7F. */
CSA_INLINE uint8_t csa_float_to_e4m3(float x)
{
    if (isnan(x))
        return 0x7F;
    uint32_t bits = csa_float_bits(x), sign = bits >> 24 & 0x80;
    float magnitude = fabsf(x);
    if (magnitude >= 448.0F)
        return (uint8_t)(sign | 0x7E);
    if (magnitude < 0x1p-6F) /* steps of 2^-9; eight of them are the first normal code */
        return (uint8_t)(sign | (uint32_t)lrintf(magnitude * 0x1p9F));
    bits &= 0x7FFFFFFF;
    bits += 0x7FFFF + (bits >> 20 & 1); /* three mantissa bits stay */
    return (uint8_t)(sign | ((bits >> 20) - ((127 - 7) << 3)));
}

#endif
