/*
 * A unit of attention: what attend.cu's kernel is made of below the level of rows. Parameters, copies of cache
 * rows, queries, logits, weighted values, joining. SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CUDA_ATTEND_UNIT_CUH
#define CSA_CUDA_ATTEND_UNIT_CUH

#include "../plan.h"
#include "device/instructions.cuh"
#include "device/views.cuh"

#include <math.h>

namespace
{

enum {
    WARPS = 4,
    THREADS = 32 * WARPS,
    HEADS = CSA_MAX_HEADS,
    SIZE = CSA_HEAD_SIZE,
    UNIT = 8,                 /* regions */
    UNITS = CSA_PIECE / UNIT, /* of a piece */
    ROWS = UNIT * CSA_REGION, /* cache rows of a unit */
    SLICE = SIZE / WARPS,     /* values of a warp */
    TILES = SLICE / 8,        /* products of 8 values */
    WEIGHT_PITCH = ROWS + 8,  /* halves */
    MAX_PIECES = (CSA_MAX_TOPK + CSA_PIECE) / CSA_PIECE
};

struct attend_params {
    token_source tokens;
    block_map map;
    view active, positions;               /* of rows; absent: they follow from the tokens */
    view query, selected, gate, out, lse; /* of the span's tokens and rows */
    const uint8_t *kv;
    int64_t block_step, group_step, row_step;
    const float *k_scale, *v_scale; /* NULL: 1 */
    uint32_t first, groups, heads, columns;
    float scale;
    int block_shift;            /* regions of a block */
    bool kv_aligned, kv_packed; /* to 16 bytes; a block's rows without gaps, too */
    bool query_aligned;
    int pieces;         /* of the longest row, where each has clusters of its own; else 0 */
    uint32_t *counters; /* [row, CSA_RECORD_RANKS] */
    float *records;     /* [row, piece, CSA_RECORD_FLOATS] */
};

template <bool FP8> struct layout {
    static constexpr int ROW = FP8 ? CSA_KV_SIZE : 2 * CSA_KV_SIZE; /* bytes of a cache row */
    static constexpr int PITCH = ROW + 16;
    static constexpr int STAGE = ROWS * PITCH;
};

/* What a block leaves for its cluster, in a stage that has been used. */
struct part_result {
    float m[HEADS], l[HEADS];
    float o[HEADS][SIZE];
};

/* A partial result as lanes hold it: heads g and g + 8, TILES products. */
struct partial {
    float m[2], l[2];
    float o[TILES][4];
};

/* Over the four lanes that share heads g and g + 8. */
__device__ __forceinline__ float lanes_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0U, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0U, x, 2));
}

__device__ __forceinline__ float lanes_sum(float x)
{
    x += __shfl_xor_sync(~0U, x, 1);
    return x + __shfl_xor_sync(~0U, x, 2);
}

/* ---- Joining ------------------------------------------------------------------------------------ */

/* Factors of two partial results when they join; m and l become those of the whole. */
__device__ __forceinline__ void join_factors(float &m, float &l, float other_m, float other_l, float &own,
                                             float &other)
{
    float most = fmaxf(m, other_m), base = most == -INFINITY ? 0.0F : most;
    own = exp2_fast(m - base);
    other = exp2_fast(other_m - base);
    l = fmaf(other_l, other, l * own);
    m = most;
}

__device__ __forceinline__ void join(partial &a, const partial &b)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float own, other;
        join_factors(a.m[half], a.l[half], b.m[half], b.l[half], own, other);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; i++)
                a.o[tile][i] = fmaf(b.o[tile][i], other, a.o[tile][i] * own);
    }
}

/* ---- Loading ------------------------------------------------------------------------------------ */

/* A list entry: physical region times 16, and how many of its tokens are seen; 0: none. */
__device__ uint32_t resolve_entry(const attend_params &p, const int32_t *blocks, int64_t region,
                                  int64_t position)
{
    int64_t last = position - region * CSA_REGION; /* the last seen token's offset */
    if (region < 0 || last < 0)
        return 0;
    int block = p.map.entry(blocks, region >> p.block_shift);
    uint32_t within = (uint32_t)region & ((1U << p.block_shift) - 1),
             seen = (uint32_t)min(last, (int64_t)CSA_REGION - 1) + 1;
    return !p.map.valid(block) ? 0 : (((uint32_t)block << p.block_shift | within) << 4) + seen;
}

/* Copies a region's cache rows, those past the first `seen` as zeros; any strides. */
template <bool FP8>
__device__ __noinline__ void load_region_slowly(unsigned char *to, const uint8_t *from, int64_t row_bytes,
                                                bool aligned, int seen)
{
    constexpr int CHUNKS = layout<FP8>::ROW / 16, PITCH = layout<FP8>::PITCH;
    for (int i = threadIdx.x % 32; i < CSA_REGION * CHUNKS; i += 32) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        *(uint4 *)(to + row * PITCH + chunk * 16) = row >= seen ? make_uint4(0, 0, 0, 0)
                                                    : aligned
                                                        ? load_16<true>(from + row * row_bytes + chunk * 16)
                                                        : load_16<false>(from + row * row_bytes + chunk * 16);
    }
}

/* Copies a warp's two regions of a unit into a stage. */
template <bool FP8>
__device__ void load_unit(const attend_params &p, unsigned char *stage, const uint32_t *entries,
                          const uint8_t *group_kv)
{
    constexpr int ROW = layout<FP8>::ROW, PITCH = layout<FP8>::PITCH, COPIES = CSA_REGION * ROW / 512;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int r = 2 * warp; r < 2 * warp + 2; r++) {
        uint32_t entry = entries[r], physical = entry >> 4;
        const uint8_t *from = group_kv + (physical >> p.block_shift) * p.block_step +
                              (physical & ((1U << p.block_shift) - 1)) * CSA_REGION * p.row_step;
        unsigned char *region = stage + r * CSA_REGION * PITCH;
        if ((entry & 15) != CSA_REGION || !p.kv_packed) {
            load_region_slowly<FP8>(region, from, p.row_step, p.kv_aligned, (int)(entry & 15));
            continue;
        }
        uint32_t to = shared_address(region) + (uint32_t)lane * 16;
#pragma unroll
        for (int i = 0; i < COPIES;
             i++) { /* the region is contiguous; in shared memory a row ends with a gap */
            int row = (i * 512 + lane * 16) / ROW;
            copy_16(to + (uint32_t)(i * 512 + row * (PITCH - ROW)), from + lane * 16 + i * 512);
        }
    }
}

/* Queries as the product's rows want them, per step of the inner index and lane: {head g low, head g + 8 low, g
 * high, g + 8 high}, in shared memory; and the factors of the logits. */
template <bool FP8> struct queries {
    uint4 a[12][32];
    float factor[HEADS];

    /* A warp loads heads `half` * 8 to + 7 of a token's group at `from`; keys give 16 bytes at a time, 8 bf16
     * or 16 codes. */
    template <bool ALIGNED> __device__ void load(const attend_params &p, const uint8_t *from, int half)
    {
        uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, head = g + 8 * half, words[24] = {};
        const uint8_t *q = from + head * p.query.step[2] + (FP8 ? t * 32 : t * 16);
#pragma unroll
        for (int i = 0; i < 6; i++) {
            uint4 v = make_uint4(0, 0, 0, 0);
            if (head < p.heads)
                v = load_16<ALIGNED>(q + (FP8 ? i / 2 * 128 + i % 2 * 16 : i * 64));
            words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
        }
        float scale = p.scale * 1.44269504F; /* logits in base 2 */
        if (FP8)
            scale *= (p.k_scale ? *p.k_scale : 1.0F) * to_f16(words);
        if (t == 0)
            factor[head] = scale;
#pragma unroll
        for (int step = 0; step < 12; step++) {
            uint32_t *to = (uint32_t *)&a[step][lane];
            to[half] = words[2 * step];
            to[half + 2] = words[2 * step + 1];
        }
    }

    /* Turns bf16 pairs into f16 pairs times a power of two; returns the inverse of that power. */
    __device__ static float to_f16(uint32_t (&words)[24])
    {
        float most = 0.0F;
#pragma unroll
        for (int i = 0; i < 24; i++)
            most = fmaxf(most, fmaxf(fabsf(__uint_as_float(words[i] << 16)),
                                     fabsf(__uint_as_float(words[i] & 0xFFFF0000))));
        most = lanes_max(most);
        int exponent = (int)(__float_as_uint(most) >> 23) - 127; /* most is in [2^exponent, 2^(exponent + 1)) */
        int shift = exponent == 128 ? 0 : max(-100, min(100, 14 - exponent));
        float up = __uint_as_float((uint32_t)(127 + shift) << 23);
#pragma unroll
        for (int i = 0; i < 24; i++)
            words[i] =
                pack_f16(__uint_as_float(words[i] << 16) * up, __uint_as_float(words[i] & 0xFFFF0000) * up);
        return __uint_as_float((uint32_t)(127 - shift) << 23);
    }
};

template <bool FP8, int BLOCKS> struct shared_state {
    __align__(16) unsigned char stage[2][layout<FP8>::STAGE];
    queries<FP8> query;
    __align__(16) uint16_t weights[HEADS][WEIGHT_PITCH];
    float warp_max[WARPS][HEADS], warp_sum[WARPS][HEADS];
    uint32_t entries[MAX_PIECES * CSA_PIECE / BLOCKS]; /* this block's, units in the order they are worked on */
    bool last;
};

/* ---- A unit ------------------------------------------------------------------------------------- */

/* Logits of a warp's two regions, in base 2: region, {head g: tokens t, t + 4; head g + 8: the same}. */
template <bool FP8>
__device__ void find_logits(const unsigned char *stage, const uint32_t *entries, const queries<FP8> &q,
                            float (&logits)[2][4])
{
    constexpr int PITCH = layout<FP8>::PITCH;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    int token = (g & 1) << 2 | g >> 1; /* of column g: neighbours lie four rows apart, in other banks */
    float sums[2][2][4] = {};
    const unsigned char *keys = stage + (2 * warp * CSA_REGION + token) * PITCH + 16 * t;
#pragma unroll
    for (int i = 0; i < (FP8 ? 3 : 6); i++) {
        uint4 v[2];
#pragma unroll
        for (int r = 0; r < 2; r++)
            v[r] = *(const uint4 *)(keys + r * CSA_REGION * PITCH + 64 * i);
#pragma unroll
        for (int w = 0; w < (FP8 ? 4 : 2); w++) {
            uint4 a = q.a[(FP8 ? 4 : 2) * i + w][lane];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                uint32_t words[4] = {v[r].x, v[r].y, v[r].z, v[r].w};
                if (FP8)
                    mma_f16(sums[r][w % 2], a, e4m3x2_to_f16x2(words[w]), e4m3x2_to_f16x2(words[w] >> 16));
                else
                    mma_bf16(sums[r][w], a, words[2 * w % 4], words[(2 * w + 1) % 4]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int seen = (int)(entries[2 * warp + r] & 15);
#pragma unroll
        for (int i = 0; i < 4; i++)
            logits[r][i] =
                t + i % 2 * 4 < seen ? (sums[r][0][i] + sums[r][1][i]) * q.factor[g + i / 2 * 8] : -INFINITY;
    }
}

/* Operand b of the products of a warp's slice over 16 tokens, whose rows start at `rows`.
 *
 * bf16: tile i has values 8i to 8i + 7. e4m3, whose bytes no instruction transposes: tiles 0 to 3 have value
 * 4 * column + tile, tiles 4 and 5 have 32 + 2 * column + (tile - 4); lanes load what they need of two tokens
 * and interleave it. */
template <bool FP8>
__device__ __forceinline__ void load_values(const unsigned char *rows, uint32_t (&b)[TILES][2])
{
    constexpr int PITCH = layout<FP8>::PITCH;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    if (FP8) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const unsigned char *row = rows + (8 * half + 2 * t) * PITCH + SIZE + warp * SLICE;
            const unsigned char *wide = row + 4 * g, *narrow = row + 32 + 2 * g;
            uint32_t first = *(const uint32_t *)wide, second = *(const uint32_t *)(wide + PITCH);
            uint32_t low = __byte_perm(first, second, 0x5140), high = __byte_perm(first, second, 0x7362);
            b[0][half] = e4m3x2_to_f16x2(low);
            b[1][half] = e4m3x2_to_f16x2(low >> 16);
            b[2][half] = e4m3x2_to_f16x2(high);
            b[3][half] = e4m3x2_to_f16x2(high >> 16);
            low = __byte_perm(*(const uint16_t *)narrow, *(const uint16_t *)(narrow + PITCH), 0x5140);
            b[4][half] = e4m3x2_to_f16x2(low);
            b[5][half] = e4m3x2_to_f16x2(low >> 16);
        }
    } else {
        uint32_t row =
            shared_address(rows) + (uint32_t)(lane % 16 * PITCH + 2 * (SIZE + warp * SLICE) + lane / 16 * 16);
#pragma unroll
        for (int tile = 0; tile < TILES; tile += 2) {
            uint32_t m[4];
            load_transposed_4(m, row + 16 * tile);
            b[tile][0] = m[0], b[tile][1] = m[1];
            b[tile + 1][0] = m[2], b[tile + 1][1] = m[3];
        }
    }
}

/* Which of the slice's values a lane's column i of a tile is. */
template <bool FP8> __device__ __forceinline__ int value_of(int tile, int i)
{
    int t = threadIdx.x % 4;
    if (!FP8)
        return 8 * tile + 2 * t + i;
    return tile < 4 ? 8 * t + 4 * i + tile : 32 + 4 * t + 2 * i + (tile - 4);
}

/* Works on a stage that has arrived as far as this thread's copies go. */
template <bool FP8, int BLOCKS>
__device__ void attend_unit(shared_state<FP8, BLOCKS> &s, const unsigned char *stage, const uint32_t *entries,
                            partial &result)
{
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    float logits[2][4], most[2], base[2], sum[2];
    __syncwarp();
    find_logits<FP8>(stage, entries, s.query, logits);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float x = fmaxf(fmaxf(logits[0][2 * half], logits[0][2 * half + 1]),
                        fmaxf(logits[1][2 * half], logits[1][2 * half + 1]));
        x = lanes_max(x);
        if (t == 0)
            s.warp_max[warp][g + 8 * half] = x;
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        most[half] = s.warp_max[0][g + 8 * half];
#pragma unroll
        for (int w = 1; w < WARPS; w++)
            most[half] = fmaxf(most[half], s.warp_max[w][g + 8 * half]);
        base[half] = most[half] == -INFINITY ? 0.0F : most[half];
        sum[half] = 0.0F;
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float weight = exp2_fast(logits[r][i] - base[i / 2]);
            sum[i / 2] += weight;
            uint32_t code = FP8 ? pack_f16(weight, 0.0F) : pack_bf16(weight, 0.0F);
            s.weights[g + i / 2 * 8][(2 * warp + r) * CSA_REGION + t + i % 2 * 4] = (uint16_t)code;
        }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float x = lanes_sum(sum[half]);
        if (t == 0)
            s.warp_sum[warp][g + 8 * half] = x;
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int head = g + 8 * half;
        result.m[half] = most[half];
        result.l[half] =
            ((s.warp_sum[0][head] + s.warp_sum[1][head]) + s.warp_sum[2][head]) + s.warp_sum[3][head];
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            result.o[tile][i] = 0.0F;
#pragma unroll
    for (int step = 0; step < ROWS / 16; step++) {
        uint32_t words[4], b[TILES][2];
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[i] = *(const uint32_t *)&s.weights[g + i % 2 * 8][16 * step + i / 2 * 8 + 2 * t];
        uint4 a = make_uint4(words[0], words[1], words[2], words[3]);
        load_values<FP8>(stage + 16 * step * layout<FP8>::PITCH, b);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            if (FP8)
                mma_f16(result.o[tile], a, b[tile][0], b[tile][1]);
            else
                mma_bf16(result.o[tile], a, b[tile][0], b[tile][1]);
    }
}

} // namespace

#endif
