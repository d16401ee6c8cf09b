/*
 * Section 3 for one warp: the tail ring, and the softmax that makes a closed region's rows one summary.
 *
 * Each lane owns the same 8 of a row's 256 channels everywhere (pairs.cuh): it writes them to the ring and
 * reads them back, so that a warp which stores rows and then summarises them needs no barrier. All order is
 * that of positions; only the largest z is taken across lanes, which has no order. exp is taken in double and
 * rounded once, at most one float in hundreds off the nearest; with an exp of 1 ulp some bytes of a long run
 * would differ. SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CUDA_SUMMARY_CUH
#define CSA_CUDA_SUMMARY_CUH

#include "../../runs.h"
#include "pairs.cuh"

enum { CSA_SUMMARY_PAIRS = CSA_SUMMARY_SIZE / 64, CSA_SUMMARY_VALUES = CSA_SUMMARY_SIZE / 32 };

/* What a summarise call works on: its descriptors, which live on the host, by value. */
struct csa_summarize_call {
    csa_tokens tokens;
    csa_cache cache;
    csa_tensor key, z;
};

/* ---- Arithmetic --------------------------------------------------------------------------------- */

/* exp of x <= 0 or NaN, within 2^-37 before it is rounded. n = round(x / ln 2) stands in the low bits of
 * `shifted`; the rest's series runs to the ninth power. */
CSA_INLINE float csa_exp_of_negative(float x)
{
    const double shift = 0x1.8p52, log2_e = 0x1.71547652b82fep0, ln_2 = 0x1.62e42fefa39efp-1;
    if (x < -110.0F) /* less than half of the smallest float */
        return 0;
    double shifted = fma((double)x, log2_e, shift), r = fma(shifted - shift, -ln_2, (double)x);
    double sum = 1.0 / 362880;
    sum = fma(sum, r, 1.0 / 40320);
    sum = fma(sum, r, 1.0 / 5040);
    sum = fma(sum, r, 1.0 / 720);
    sum = fma(sum, r, 1.0 / 120);
    sum = fma(sum, r, 1.0 / 24);
    sum = fma(sum, r, 1.0 / 6);
    sum = fma(sum, r, 0.5);
    sum = fma(sum, r, 1.0);
    sum = fma(sum, r, 1.0);
    uint64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 1023) << 52; /* 2^n */
    double power;
    memcpy(&power, &bits, sizeof power);
    return (float)(sum * power);
}

/* The larger one, NaN if either is. */
CSA_INLINE float csa_max_or_nan(float a, float b)
{
    return isnan(a) || a > b ? a : b;
}

struct csa_softmax {
    float num[CSA_SUMMARY_VALUES], den[CSA_SUMMARY_VALUES], max;
};

__device__ inline float csa_warp_max_or_nan(float x)
{
    for (int distance = CSA_LANES / 2; distance > 0; distance /= 2)
        x = csa_max_or_nan(x, __shfl_xor_sync((unsigned)CSA_ALL_LANES, x, distance));
    return x;
}

__device__ inline void csa_add_row(csa_softmax *s, const uint32_t (&key)[CSA_SUMMARY_PAIRS],
                                   const uint32_t (&z)[CSA_SUMMARY_PAIRS])
{
    float keys[CSA_SUMMARY_VALUES], zs[CSA_SUMMARY_VALUES], largest = s->max;
    csa_unpack_pairs<CSA_SUMMARY_SIZE>(key, keys);
    csa_unpack_pairs<CSA_SUMMARY_SIZE>(z, zs);
    for (int i = 0; i < CSA_SUMMARY_VALUES; i++)
        largest = csa_max_or_nan(largest, zs[i]);
    largest = csa_warp_max_or_nan(largest);
    float rescale = csa_exp_of_negative(s->max - largest);
    for (int i = 0; i < CSA_SUMMARY_VALUES; i++) {
        float scale = s->den[i] > 0 ? rescale : 0, weight = csa_exp_of_negative(zs[i] - largest);
        s->num[i] = s->num[i] * scale + weight * keys[i];
        s->den[i] = s->den[i] * scale + weight;
    }
    s->max = largest;
}

__device__ inline void csa_finish_summary(const csa_softmax *s, uint8_t *summary)
{
    float x[CSA_SUMMARY_VALUES];
    for (int i = 0; i < CSA_SUMMARY_VALUES; i++)
        x[i] = csa_round_bf16(s->num[i] / fmaxf(s->den[i], 1e-20F));
    csa_store_codes<CSA_SUMMARY_SIZE>(summary, x);
}

/* ---- A region's rows ---------------------------------------------------------------------------- */

/* Where the rows of a closed region are. */
struct csa_region_rows {
    int64_t base, first; /* ring of the request, position of the region's first token */
    int64_t ring;        /* so many of the first rows must have a place in the ring */
    const int64_t *run;  /* prefill: rows from `ring` on are these tokens, by offset. NULL: */
    int64_t since, last; /* tokens of the call that stand for their ring rows: they may not be stored yet */
};

/* Rows of prefill: numbers of a run come from memory, outside the call they count as absent. */
__device__ inline int64_t csa_run_token(const csa_summarize_call &call, const csa_region_rows &rows, int i)
{
    int64_t token = rows.run[i];
    return token < call.key.shape[0] ? token : -1;
}

/* Rows of decode and verify: -1 where the ring has the row. */
__device__ inline int64_t csa_late_token(const csa_summarize_call &call, const csa_region_rows &rows, int i)
{
    for (int64_t token = rows.last; token >= rows.since; token--)
        if (csa_token_active(&call.tokens, token) && csa_token_position(&call.tokens, token) == rows.first + i)
            return token;
    return -1;
}

/* Finds row i. False: it is left out of the softmax. */
__device__ inline bool csa_find_row(const csa_summarize_call &call, const csa_region_rows &rows, int i,
                                    const uint16_t **key, const uint16_t **z)
{
    int64_t token = -1;
    if (!rows.run)
        token = csa_late_token(call, rows, i);
    else if (i >= rows.ring)
        token = csa_run_token(call, rows, i);
    if (token >= 0) {
        *key = (const uint16_t *)csa_at(&call.key, token, 0, 0);
        *z = (const uint16_t *)csa_at(&call.z, token, 0, 0);
        return true;
    }
    if (i >= rows.ring)
        return false;
    *key = (const uint16_t *)csa_ring_row(&call.cache, rows.base, rows.first + i);
    *z = *key + CSA_SUMMARY_SIZE;
    return true;
}

/* Are all rows that should be in the ring there? */
__device__ inline bool csa_rows_are_there(const csa_summarize_call &call, const csa_region_rows &rows)
{
    bool there = true;
    for (int i = 0; i < rows.ring; i++) /* first + ring may lie past the last int64 */
        there = there && csa_ring_row(&call.cache, rows.base, rows.first + i);
    return there;
}

/* Writes a region's summary, if its rows are there. All rows are under way before the first is used. */
__device__ inline void csa_summarize_region(const csa_summarize_call &call, const csa_region_rows &rows,
                                            uint8_t *summary)
{
    uint32_t key[CSA_REGION][CSA_SUMMARY_PAIRS], z[CSA_REGION][CSA_SUMMARY_PAIRS];
    bool found[CSA_REGION];
    if (!summary || !csa_rows_are_there(call, rows))
        return;
#pragma unroll
    for (int i = 0; i < CSA_REGION; i++) {
        const uint16_t *keys, *zs;
        found[i] = csa_find_row(call, rows, i, &keys, &zs);
        if (found[i]) {
            csa_load_pairs<CSA_SUMMARY_SIZE>(keys, key[i]);
            csa_load_pairs<CSA_SUMMARY_SIZE>(zs, z[i]);
        }
    }
    csa_softmax s = {{0}, {0}, -INFINITY};
#pragma unroll
    for (int i = 0; i < CSA_REGION; i++)
        if (found[i])
            csa_add_row(&s, key[i], z[i]);
    csa_finish_summary(&s, summary);
}

/* ---- Decode and verify -------------------------------------------------------------------------- */

__device__ inline void csa_store_ring(const csa_summarize_call &call, int64_t base, int64_t position,
                                      int64_t token)
{
    uint16_t *row = (uint16_t *)csa_ring_row(&call.cache, base, position);
    uint32_t pairs[CSA_SUMMARY_PAIRS];
    if (!row)
        return;
    csa_load_pairs<CSA_SUMMARY_SIZE>((const uint16_t *)csa_at(&call.key, token, 0, 0), pairs);
    csa_store_pairs<CSA_SUMMARY_SIZE>(row, pairs);
    csa_load_pairs<CSA_SUMMARY_SIZE>((const uint16_t *)csa_at(&call.z, token, 0, 0), pairs);
    csa_store_pairs<CSA_SUMMARY_SIZE>(row + CSA_SUMMARY_SIZE, pairs);
}

__device__ inline bool csa_closes_region(int64_t position)
{
    return position % CSA_REGION == CSA_REGION - 1;
}

/* Summarises the region that an active token closes. The first `ring` rows need a place in the ring. */
__device__ inline void csa_close_region(const csa_summarize_call &call, int64_t base, int64_t ring,
                                        int64_t since, int64_t token)
{
    int64_t position = csa_token_position(&call.tokens, token), slot = csa_i64(&call.tokens.slots, token);
    csa_region_rows rows = {base, position - (CSA_REGION - 1), ring, NULL, since, token};
    csa_summarize_region(call, rows, csa_summary_of_slot(&call.cache, slot / CSA_REGION));
}

/* Decode, by a warp: a closing row is taken from the call and not stored. */
__device__ inline void csa_summarize_token(const csa_summarize_call &call, int64_t token)
{
    if (!csa_token_active(&call.tokens, token))
        return;
    int64_t position = csa_token_position(&call.tokens, token);
    int64_t base = csa_token_ring(&call.tokens, csa_token_owner(&call.tokens, token));
    if (csa_closes_region(position))
        csa_close_region(call, base, CSA_REGION - 1, token, token);
    else
        csa_store_ring(call, base, position, token);
}

/* Verify, by a block: tokens [first, end) of a request, at most one per warp, all of whose keys are written. In
 * the text each row is stored and a closing row then replays the ring; here the rows of this step are read
 * where they came from, before any is stored: a later one may take the place of one that is still to be read.
 */
__device__ inline void csa_verify_tokens(const csa_summarize_call &call, int64_t request, int64_t first,
                                         int64_t end)
{
    int64_t token = first + csa_warp(), base = csa_token_ring(&call.tokens, request);
    bool active = token < end && csa_token_active(&call.tokens, token);
    int64_t position = active ? csa_token_position(&call.tokens, token) : -1;
    __syncthreads(); /* keys, and rows that were stored before */
    if (active && csa_closes_region(position))
        csa_close_region(call, base, CSA_REGION, first, token);
    __syncthreads();
    if (active)
        csa_store_ring(call, base, position, token);
}

#endif
