/*
 * The inner part of score.cu, which tells how it is laid out: rows that share a pass over a request's
 * summaries, and what a warp does with half a tile or a whole one. SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CUDA_SCORE_BATCH_CUH
#define CSA_CUDA_SCORE_BATCH_CUH

#include "../plan.h"
#include "device/instructions.cuh"
#include "device/views.cuh"

namespace
{

enum {
    WARPS = 4,
    THREADS = 32 * WARPS,
    STEPS = 16 /* of the inner index: 256 / 16 */
};

/* What is scored: summaries and queries of a span's tokens. */
struct score_source {
    token_source tokens;
    block_map map;
    const uint8_t *summaries;
    int64_t block_step, region_step; /* of the summaries */
    view query, weights;             /* of the span's tokens */
    uint32_t first, count;           /* the span */
    uint32_t groups, heads, regions;
    int width; /* a step: rows that rank at most so many are left out; -1: all, and the current region too */
    int block_shift; /* regions of a block */
};

/* How many regions of a token are scored. */
__device__ uint32_t regions_to_score(const score_source &p, const token_place &place)
{
    int current = (int)min(max(place.position, (int64_t)0) / CSA_REGION, (int64_t)p.regions - 1);
    return (uint32_t)(p.width < 0 ? current + 1 : current > p.width ? current : 0);
}

/* ---- Batches ------------------------------------------------------------------------------------ */

template <int PACKS> struct batch {
    uint4 query[PACKS][STEPS][32];               /* operand b of both products of a pack */
    float4 weight[PACKS][4];                     /* pack, row of the pack: four heads */
    float *scores[PACKS * 4], *peaks[PACKS * 4]; /* where a row's scores go; NULL: no row */
    uint32_t need[PACKS * 4];
};

/* Rows [first, first + count) of a run that starts at `token` of the span; 1 << quad_shift packs hold a row's
 * heads. */
struct batch_rows {
    uint32_t token, first, count;
    int packs, quad_shift;
};

template <bool ALIGNED> __device__ uint32_t load_word(const uint8_t *q)
{
    return ALIGNED ? *(const uint32_t *)q : q[0] | q[1] << 8 | q[2] << 16 | (uint32_t)q[3] << 24;
}

/* Which of a run's tokens a batch's row is of, and its group. */
struct row_place {
    uint32_t of, group;

    __device__ row_place(const score_source &p, uint32_t row)
        : of(quotient(row, p.groups)), group(row - of * p.groups)
    {
    }
};

/* Loads the queries and weights of a batch's rows; place(row, token, real) says
 * where a row's scores go, the token counted from the run's first. */
template <bool ALIGNED, int PACKS, typename Place>
__device__ void fill_batch(const score_source &p, batch<PACKS> &b, const batch_rows &rows, Place place)
{
    uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, quads = 1U << rows.quad_shift;
#pragma unroll 1
    for (uint32_t pack = 0; pack < (uint32_t)rows.packs; pack++) {
        uint32_t row = (pack >> rows.quad_shift) * 4 + g / 2, head = (pack & (quads - 1)) * 4 + g % 2;
        row_place at(p, rows.first + row);
        bool low = row < rows.count && head < p.heads, high = row < rows.count && head + 2 < p.heads;
        const uint8_t *query = p.query.at(rows.token + at.of, at.group, head) + t * 16;
#pragma unroll
        for (int i = 0; i < STEPS / WARPS; i++) {
            int step = threadIdx.x / 32 * (STEPS / WARPS) + i, byte = step / 4 * 64 + step % 4 * 4;
            uint32_t a = low ? load_word<ALIGNED>(query + byte) : 0;
            uint32_t c = high ? load_word<ALIGNED>(query + 2 * p.query.step[2] + byte) : 0;
            uint2 lower = e4m3x4_to_f16x4(a), higher = e4m3x4_to_f16x4(c);
            b.query[pack][step][lane] = make_uint4(lower.x, lower.y, higher.x, higher.y);
        }
    }
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < PACKS * 16; i += THREADS) {
        uint32_t row = (i / 16 >> rows.quad_shift) * 4 + i / 4 % 4, head = (i / 16 & (quads - 1)) * 4 + i % 4;
        row_place at(p, rows.first + row);
        bool real = row < rows.count;
        ((float *)b.weight)[i] =
            real && head < p.heads ? ((const float *)p.weights.at(rows.token + at.of, at.group))[head] : 0.0F;
        if (head == 0)
            place(row, at.of, real);
    }
}

template <bool ALIGNED> __device__ uint4 load_summary(const uint8_t *p)
{
    return ALIGNED ? load_streaming_16(p) : load_16<false>(p);
}

/* What a lane has of 16 * HALVES summaries: its rows are regions g + 8 i. */
template <bool ALIGNED, int HALVES> struct tile_data {
    uint4 raw[2 * HALVES][4]; /* 64 bytes apart */
    int block[2 * HALVES];    /* as the table says; -1 where none is needed */

    __device__ void find(const score_source &p, const int32_t *row, uint32_t region, uint32_t regions)
    {
#pragma unroll
        for (int i = 0; i < 2 * HALVES; i++) {
            uint32_t own = region + i * 8 + threadIdx.x % 32 / 4;
            block[i] = own < regions ? p.map.entry(row, own >> p.block_shift) : -1;
        }
    }

    __device__ void load(const score_source &p, const int (&found)[2 * HALVES], uint32_t region)
    {
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < 2 * HALVES; i++) {
            uint32_t within = (region + i * 8 + g) & ((1U << p.block_shift) - 1);
            const uint8_t *summary = p.summaries + found[i] * p.block_step + within * p.region_step + t * 16;
            block[i] = found[i];
#pragma unroll
            for (int j = 0; j < 4; j++)
                raw[i][j] =
                    p.map.valid(found[i]) ? load_summary<ALIGNED>(summary + j * 64) : make_uint4(0, 0, 0, 0);
        }
    }
};

/* The largest of each eight regions, which lie in lanes of a row, to its peaks; NaN only where all are. */
template <int HALVES>
__device__ void write_peaks(float (&peaks)[2 * HALVES], float *to, uint32_t region, uint32_t need)
{
    static_assert(CSA_PEAK == 8, "lanes of a row");
    uint32_t g = threadIdx.x % 32 / 4, first = region - g;
    float own = NAN;
#pragma unroll
    for (int i = 0; i < 2 * HALVES; i++) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
            peaks[i] = fmaxf(peaks[i], __shfl_xor_sync(~0U, peaks[i], step));
        own = (int)g == i ? peaks[i] : own;
    }
    if (g < 2 * HALVES && first + g * CSA_PEAK < need)
        to[first / CSA_PEAK + g] = own;
}

/* Scores 16 * HALVES regions for the rows of the first PACKS packs of a batch; leaves their peaks, too, if it
 * shall. */
template <int PACKS, bool ALIGNED, int HALVES, typename Batch>
__device__ void score_regions(const score_source &p, const Batch &b, const tile_data<ALIGNED, HALVES> &tile,
                              uint32_t region, int quad_shift, bool peaks_too)
{
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, quads = 1 << quad_shift;
    float sums[PACKS][HALVES][2][4] = {}; /* pack, half, heads 0-1 or 2-3 */
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        uint32_t a[HALVES][4];
#pragma unroll
        for (int i = 0; i < 2 * HALVES; i++) {
            uint4 v = tile.raw[i][step / 4];
            uint32_t word = step % 4 == 0 ? v.x : step % 4 == 1 ? v.y : step % 4 == 2 ? v.z : v.w;
            uint2 keys = e4m3x4_to_f16x4(word);
            a[i / 2][i % 2] = keys.x;
            a[i / 2][i % 2 + 2] = keys.y;
        }
#pragma unroll
        for (int pack = 0; pack < PACKS; pack++) {
            uint4 q = b.query[pack][step][lane];
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                uint4 keys = make_uint4(a[half][0], a[half][1], a[half][2], a[half][3]);
                mma_f16(sums[pack][half][0], keys, q.x, q.y);
                mma_f16(sums[pack][half][1], keys, q.z, q.w);
            }
        }
    }
    float chain[2 * HALVES][4] = {}; /* region, head % 4 */
    region += g;
#pragma unroll
    for (int pack = 0; pack < PACKS; pack++) {
        float4 w = b.weight[pack][t];
        int quad = pack & (quads - 1), row = (pack >> quad_shift) * 4 + t;
        uint32_t need = b.need[row];
        float *scores = b.scores[row] + region, peaks[2 * HALVES];
#pragma unroll
        for (int i = 0; i < 2 * HALVES; i++) {
            float weights[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int head = 0; head < 4; head++) {
                float dot = sums[pack][i / 2][head / 2][i % 2 * 2 + head % 2];
                chain[i][head] = fmaf(weights[head], fmaxf(dot, 0.0F), quad ? chain[i][head] : 0.0F);
            }
            float score = ((chain[i][0] + chain[i][1]) + chain[i][2]) + chain[i][3];
            score = p.map.valid(tile.block[i]) ? score + 0.0F : 0.0F; /* never -0: it would tell of padding */
            peaks[i] = region + i * 8 < need ? score : NAN;
            if (quad == quads - 1 && region + i * 8 < need)
                scores[i * 8] = score;
        }
        if (peaks_too && quad == quads - 1)
            write_peaks<HALVES>(peaks, b.peaks[row], region, need);
    }
}

/* Scores regions [from, to) of a run for the rows of a batch, which fill() brings to shared memory, warps in
 * turn: one pack or two leave registers to load the next summaries meanwhile, more share each load of a query
 * between 32 regions. */
template <int PACKS, bool ALIGNED, typename Batch, typename Fill>
__device__ void score_range(const score_source &p, const Batch &b, const int32_t *row, uint32_t from,
                            uint32_t to, int quad_shift, bool peaks_too, Fill fill)
{
    constexpr int HALVES = PACKS > 2 ? 2 : 1, AT_ONCE = 16 * HALVES, STRIDE = AT_ONCE * WARPS;
    tile_data<ALIGNED, HALVES> tile, next;
    uint32_t region = from + threadIdx.x / 32 * AT_ONCE;
    next.find(p, row, region, to);
    if (PACKS > 2) {
        fill();
        for (; region < to; region += STRIDE) {
            tile.load(p, next.block, region);
            next.find(p, row, region + STRIDE, to);
            score_regions<PACKS>(p, b, tile, region, quad_shift, peaks_too);
        }
        return;
    }
    tile.load(p, next.block, region);
    next.find(p, row, region + STRIDE, to);
    fill(); /* the first summaries are on their way */
    for (; region < to; region += STRIDE) {
        tile_data<ALIGNED, HALVES> after;
        after.find(p, row, region + 2 * STRIDE, to);
        next.load(p, next.block, region + STRIDE);
        score_regions<PACKS>(p, b, tile, region, quad_shift, peaks_too);
        tile = next;
#pragma unroll
        for (int i = 0; i < 2 * HALVES; i++)
            next.block[i] = after.block[i];
    }
}

/* The same for a number of packs that is known when it runs: half tiles of one or two, else whole ones. */
template <bool ALIGNED, int MOST, typename Fill>
__device__ void score_packs(const score_source &p, const batch<MOST> &b, const int32_t *row, uint32_t from,
                            uint32_t to, int packs, int quad_shift, bool peaks_too, Fill fill)
{
    if (packs == 1)
        score_range<1, ALIGNED>(p, b, row, from, to, quad_shift, peaks_too, fill);
    else if (packs == 2)
        score_range<2, ALIGNED>(p, b, row, from, to, quad_shift, peaks_too, fill);
    else if (MOST > 2) /* with three, a fourth is computed whose rows need nothing */
        score_range<MOST, ALIGNED>(p, b, row, from, to, quad_shift, peaks_too, fill);
}

/* Has one of the thread's rows of a run a weight past the fourth head? */
__device__ bool has_further_heads(const score_source &p, uint32_t token, int rows)
{
    bool further = false;
#pragma unroll 1
    for (uint32_t row = threadIdx.x; row < (uint32_t)rows; row += THREADS) {
        row_place at(p, row);
        const float *weights = (const float *)p.weights.at(token + at.of, at.group);
#pragma unroll 4
        for (uint32_t head = 4; head < p.heads; head++)
            further |= weights[head] != 0.0F;
    }
    return further;
}

} // namespace

#endif
