/*
 * Vectors of bf16 spread over a warp: of N values, lane l holds the pairs (2 l + 64 j, 2 l + 64 j + 1), so that
 * a warp reads 128 bytes at a time. A pair is a 32-bit word, the earlier value in its low half. Views need no
 * more alignment than their type: what is not aligned to a pair is read and written by values.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CUDA_PAIRS_CUH
#define CSA_CUDA_PAIRS_CUH

#include "../../numeric.h"
#include "items.cuh"

/* The index of a lane's pair j. */
__device__ inline int csa_pair_at(int j)
{
    return 2 * csa_lane() + 2 * CSA_LANES * j;
}

__device__ inline float csa_pair_low(uint32_t pair)
{
    return csa_float_from_bits(pair << 16);
}

__device__ inline float csa_pair_high(uint32_t pair)
{
    return csa_float_from_bits(pair & 0xFFFF0000);
}

__device__ inline uint32_t csa_make_pair(float low, float high)
{
#if defined(__CUDA_ARCH__)
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return csa_float_to_bf16(low) | (uint32_t)csa_float_to_bf16(high) << 16;
#endif
}

/* Rounds both to the nearest bf16. */
__device__ inline void csa_round_pair(float *low, float *high)
{
    uint32_t pair = csa_make_pair(*low, *high);
    *low = csa_pair_low(pair);
    *high = csa_pair_high(pair);
}

template <int N> __device__ inline void csa_load_pairs(const uint16_t *from, uint32_t (&pairs)[N / 64])
{
    bool aligned = (uintptr_t)from % sizeof(uint32_t) == 0;
    for (int j = 0; j < N / 64; j++) {
        const uint16_t *at = from + csa_pair_at(j);
        pairs[j] = aligned ? *(const uint32_t *)at : at[0] | (uint32_t)at[1] << 16;
    }
}

template <int N> __device__ inline void csa_store_pairs(uint16_t *to, const uint32_t (&pairs)[N / 64])
{
    bool aligned = (uintptr_t)to % sizeof(uint32_t) == 0;
    for (int j = 0; j < N / 64; j++) {
        uint16_t *at = to + csa_pair_at(j);
        if (aligned) {
            *(uint32_t *)at = pairs[j];
        } else {
            at[0] = (uint16_t)pairs[j];
            at[1] = (uint16_t)(pairs[j] >> 16);
        }
    }
}

/* Lane l's values: x[2 j] and x[2 j + 1] are pair j. */
template <int N> __device__ inline void csa_unpack_pairs(const uint32_t (&pairs)[N / 64], float (&x)[N / 32])
{
    for (int j = 0; j < N / 64; j++) {
        x[2 * j] = csa_pair_low(pairs[j]);
        x[2 * j + 1] = csa_pair_high(pairs[j]);
    }
}

template <int N> __device__ inline void csa_pack_pairs(const float (&x)[N / 32], uint32_t (&pairs)[N / 64])
{
    for (int j = 0; j < N / 64; j++)
        pairs[j] = csa_make_pair(x[2 * j], x[2 * j + 1]);
}

/* Two values as e4m3, the first in the low byte. The instruction leaves a NaN's sign open. */
__device__ inline uint16_t csa_make_codes(float low, float high)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    codes = isnan(low) ? (uint16_t)((codes & 0xFF00) | 0x7F) : codes;
    return isnan(high) ? (uint16_t)((codes & 0x00FF) | 0x7F00) : codes;
#else
    return (uint16_t)(csa_float_to_e4m3(low) | csa_float_to_e4m3(high) << 8);
#endif
}

/* Values as e4m3, two bytes at a time. */
template <int N> __device__ inline void csa_store_codes(uint8_t *to, const float (&x)[N / 32])
{
    bool aligned = (uintptr_t)to % sizeof(uint16_t) == 0;
    for (int j = 0; j < N / 64; j++) {
        uint8_t *at = to + csa_pair_at(j);
        uint16_t codes = csa_make_codes(x[2 * j], x[2 * j + 1]);
        if (aligned) {
            *(uint16_t *)at = codes;
        } else {
            at[0] = (uint8_t)codes;
            at[1] = (uint8_t)(codes >> 8);
        }
    }
}

#endif
