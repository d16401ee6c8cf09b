/*
 * Section 2 for one vector held by a warp (pairs.cuh): norms and rotation.
 *
 * Squares and values are fp32; their sums are taken in double and rounded once, as the reference back end does,
 * so that no order shows. SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CUDA_HEADS_CUH
#define CSA_CUDA_HEADS_CUH

#include "pairs.cuh"

__device__ inline float csa_bf16_at(const csa_tensor *t, int64_t i)
{
    return csa_bf16_to_float(*(const uint16_t *)csa_at(t, i, 0, 0));
}

template <int N> __device__ inline void csa_load_head(const void *from, float (&x)[N / 32])
{
    uint32_t pairs[N / 64];
    csa_load_pairs<N>((const uint16_t *)from, pairs);
    csa_unpack_pairs<N>(pairs, x);
}

template <int N> __device__ inline void csa_store_head(void *to, const float (&x)[N / 32])
{
    uint32_t pairs[N / 64];
    csa_pack_pairs<N>(x, pairs);
    csa_store_pairs<N>((uint16_t *)to, pairs);
}

template <int N> __device__ inline float csa_inverse_rms(const float (&x)[N / 32], float eps)
{
    double sum = 0;
    for (int i = 0; i < N / 32; i++)
        sum += (double)(x[i] * x[i]);
    return 1.0F / sqrtf((float)csa_warp_sum(sum) / (float)N + eps);
}

/* bf16((x * inv) * (weight + zero_centered)); `twice`: bf16(bf16(x * inv) * weight) where not zero-centred. */
template <int N>
__device__ inline void csa_rms_norm(float (&x)[N / 32], const csa_tensor *weight, float eps, bool zero_centered,
                                    bool twice)
{
    float inv = csa_inverse_rms<N>(x, eps), centre = zero_centered ? 1.0F : 0.0F;
    for (int j = 0; j < N / 64; j++) {
        float *low = &x[2 * j], *high = &x[2 * j + 1];
        *low *= inv;
        *high *= inv;
        if (twice && !zero_centered)
            csa_round_pair(low, high);
        *low *= csa_bf16_at(weight, csa_pair_at(j)) + centre;
        *high *= csa_bf16_at(weight, csa_pair_at(j) + 1) + centre;
        csa_round_pair(low, high);
    }
}

template <int N>
__device__ inline void csa_layer_norm(float (&x)[N / 32], const csa_tensor *weight, const csa_tensor *bias,
                                      float eps)
{
    double sum = 0;
    for (int i = 0; i < N / 32; i++)
        sum += (double)x[i];
    float mean = (float)csa_warp_sum(sum) / (float)N;
    for (int i = 0; i < N / 32; i++)
        x[i] -= mean;
    float inv = csa_inverse_rms<N>(x, eps);
    for (int i = 0; i < N / 32; i++) {
        int at = csa_pair_at(i / 2) + i % 2;
        x[i] = fmaf(csa_bf16_at(weight, at), x[i] * inv, csa_bf16_at(bias, at));
    }
    for (int j = 0; j < N / 64; j++)
        csa_round_pair(&x[2 * j], &x[2 * j + 1]);
}

__device__ inline float csa_table_entry(const csa_tensor *table, int64_t position, int64_t column)
{
    const void *entry = csa_at(table, position, column, 0);
    return table->dtype == CSA_F32 ? *(const float *)entry : csa_bf16_to_float(*(const uint16_t *)entry);
}

/* One NeoX pair; native: products are rounded to bf16. */
__device__ inline void csa_rotate_pair(float *low, float *high, float cosine, float sine, bool native)
{
    float products[4] = {*low * cosine, *high * sine, *high * cosine, *low * sine};
    if (native) {
        csa_round_pair(&products[0], &products[1]);
        csa_round_pair(&products[2], &products[3]);
    }
    *low = products[0] - products[1];
    *high = products[2] + products[3];
    csa_round_pair(low, high);
}

/* Rotates the first `rotary` values. A value and its partner may be any two lanes', so they meet in `row`,
 * shared memory of N floats that is this warp's own. */
template <int N>
__device__ inline void csa_rotate(float (&x)[N / 32], const csa_tensor *table, int64_t position, int rotary,
                                  bool native, float *row)
{
    int half = rotary / 2;
    __syncwarp(); /* nobody still reads the row of the item before */
    for (int i = 0; i < N / 32; i++)
        row[csa_pair_at(i / 2) + i % 2] = x[i];
    __syncwarp();
    for (int i = csa_lane(); i < half; i += CSA_LANES)
        csa_rotate_pair(&row[i], &row[half + i], csa_table_entry(table, position, i),
                        csa_table_entry(table, position, half + i), native);
    __syncwarp();
    for (int i = 0; i < N / 32; i++)
        x[i] = row[csa_pair_at(i / 2) + i % 2];
}

#endif
