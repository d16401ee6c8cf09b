/*
 * Section 9: scores from packed pages.
 *
 * A block has one row and 256 regions of it: it converts the row's query once, into shared memory (16 heads of
 * 256 floats at most), and gives regions to its warps in turn. A lane holds eight bytes of the summary. A dot:
 * eight exact products added in a lane in order, then five exchanges between lanes: 13 additions. Heads join in
 * section 4's four chains. Bound by the arithmetic of the dots. SPDX-License-Identifier: Apache-2.0
 */
#include "../format.h"
#include "../numeric.h"
#include "../tokens.h"
#include "compat.h"
#include "device/items.cuh"

enum { TILE = 256, LANE_VALUES = CSA_SUMMARY_SIZE / CSA_LANES };

/* ---- Queries ------------------------------------------------------------------------------------ */

/* One value of a query, through e4m3. */
__device__ static float query_value(const csa_compat_score_args &a, const void *head, int i)
{
    if (a.query.dtype == CSA_F32)
        return csa_e4m3_to_float(csa_float_to_e4m3(((const float *)head)[i]));
    if (a.query.dtype == CSA_BF16)
        return csa_e4m3_to_float(csa_float_to_e4m3(csa_bf16_to_float(((const uint16_t *)head)[i])));
    return csa_e4m3_to_float(((const uint8_t *)head)[i]);
}

__device__ static void load_query(const csa_compat_score_args &a, int64_t row, float (*query)[CSA_SUMMARY_SIZE])
{
    int64_t next_n = a.query.shape[1];
    for (int i = (int)threadIdx.x; i < (int)a.query.shape[2] * CSA_SUMMARY_SIZE; i += CSA_BLOCK_THREADS) {
        int head = i / CSA_SUMMARY_SIZE, value = i % CSA_SUMMARY_SIZE;
        query[head][value] = query_value(a, csa_at(&a.query, row / next_n, row % next_n, head), value);
    }
}

/* ---- One region, by a warp ---------------------------------------------------------------------- */

/* Section 4's score; values l, l + 32, ... of a vector are lane l's. */
__device__ static float score_summary(const float (*query)[CSA_SUMMARY_SIZE], const float *weights, int heads,
                                      const uint8_t *summary)
{
    float values[LANE_VALUES], chain[4] = {0, 0, 0, 0};
    for (int i = 0; i < LANE_VALUES; i++)
        values[i] = csa_e4m3_to_float(summary[csa_lane() + CSA_LANES * i]);
#pragma unroll
    for (int head = 0; head < CSA_MAX_HEADS; head++) {
        if (head >= heads)
            break;
        float dot = 0;
        for (int i = 0; i < LANE_VALUES; i++)
            dot += query[head][csa_lane() + CSA_LANES * i] * values[i];
        chain[head % 4] = fmaf(weights[head], fmaxf(0, csa_warp_sum(dot)), chain[head % 4]);
    }
    return ((chain[0] + chain[1]) + chain[2]) + chain[3];
}

__device__ static float page_scale(const uint8_t *page, int64_t slot)
{
    uint32_t bits = 0; /* pages need no alignment */
    for (int i = 0; i < 4; i++)
        bits |= (uint32_t)page[CSA_PAGE_SCALES + slot * 4 + i] << 8 * i;
    return csa_float_from_bits(bits);
}

__device__ static float score_region(const csa_compat_score_args &a, int64_t entry,
                                     const float (*query)[CSA_SUMMARY_SIZE], const float *weights,
                                     int64_t region)
{
    int64_t slot = region % CSA_COMPAT_PAGE_REGIONS;
    int64_t number =
        csa_mapped_block(&a.page_table, entry, region / CSA_COMPAT_PAGE_REGIONS, a.packed.shape[0]);
    if (number < 0)
        return 0;
    const uint8_t *page = (const uint8_t *)csa_at(&a.packed, number, 0, 0);
    return score_summary(query, weights, (int)a.query.shape[2], page + slot * CSA_SUMMARY_SIZE) *
           page_scale(page, slot);
}

/* ---- The kernel --------------------------------------------------------------------------------- */

__device__ static int64_t tiles_of(const csa_compat_score_args &a)
{
    return (a.scores.shape[1] + TILE - 1) / TILE;
}

static __global__ void __launch_bounds__(CSA_BLOCK_THREADS)
    score_kernel(const __grid_constant__ csa_compat_score_args a)
{
    __shared__ float query[CSA_MAX_HEADS][CSA_SUMMARY_SIZE];
    int64_t tiles = tiles_of(a), next_n = a.query.shape[1];
    for (int64_t item = blockIdx.x; item < a.scores.shape[0] * tiles; item += gridDim.x) {
        int64_t row = item / tiles, entry = row / next_n, length = csa_i32(&a.lengths, entry);
        int64_t first = item % tiles * TILE, end = first + TILE;
        end = end < a.scores.shape[1] ? end : a.scores.shape[1];
        const float *weights = (const float *)csa_at(&a.weights, entry, row % next_n, 0);
        float *scores = (float *)csa_at(&a.scores, row, 0, 0);
        __syncthreads(); /* the row before is done with */
        if (first < length)
            load_query(a, row, query);
        __syncthreads();
        for (int64_t region = first + csa_warp(); region < end; region += CSA_BLOCK_WARPS) {
            float score = region < length ? score_region(a, entry, query, weights, region) : -INFINITY;
            if (csa_lane() == 0)
                scores[region] = score;
        }
    }
}

csa_status csa_cuda_compat_score(const csa_context *context, const csa_compat_score_args *args)
{
    (void)context;
    int64_t tiles = (args->scores.shape[1] + TILE - 1) / TILE;
    return csa_queue_items("compat: score", score_kernel, args->scores.shape[0] * tiles, 1, args->stream,
                           *args);
}

csa_status csa_cuda_load_compat_score(void)
{
    return csa_load("compat: score", score_kernel, 0);
}
