/*
 * A unit of attention: what attend.cu's kernel is made of below the level of rows. Parameters, copies of cache
 * rows, queries, logits, weighted values, joining. SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CUDA_ATTEND_UNIT_CUH
#define CSA_CUDA_ATTEND_UNIT_CUH

#include "parts.h"
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
    UNIT = CSA_UNIT,          /* regions */
    UNITS = CSA_UNITS,        /* of a piece */
    OWN = UNIT / WARPS,       /* regions of a warp */
    ROWS = UNIT * CSA_REGION, /* cache rows of a unit */
    SLICE = SIZE / WARPS,     /* values of a warp */
    TILES = SLICE / 8,        /* products of 8 values: 6 */
    WEIGHT_PITCH = ROWS + 8,  /* halves */
    MAX_ENTRIES = (CSA_MAX_TOPK + 1 + UNIT - 1) / UNIT * UNIT
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
    csa_cut cut;
    uint32_t *counters;    /* [row], or [row, 8] for clusters: how many parts are done */
    float4 *records;       /* [row, pieces, 7, THREADS] */
};

template <bool FP8> struct layout {
    static constexpr int ROW = FP8 ? CSA_KV_SIZE : 2 * CSA_KV_SIZE; /* bytes of a cache row */
    static constexpr int STAGE = ROWS * ROW;
    static constexpr int STAGES = FP8 ? 4 : 2; /* some 100 KB: two blocks fit a multiprocessor */
};

/* A partial result as lanes hold it: heads g and g + 8, TILES products. */
struct partial {
    float m[2], l[2];
    float o[TILES][4];
};

__device__ __forceinline__ partial nothing()
{
    partial r = {};
    r.m[0] = r.m[1] = -INFINITY;
    return r;
}

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

/*
 * In shared memory, the eight 16-byte chunks of each 128 bytes of a cache row change places: chunk c of token r
 * of a region lies where chunk c ^ r would. So neither copies of a row nor loads of a column of eight rows
 * conflict.
 */
__device__ __forceinline__ int swizzled(int byte, int token)
{
    return byte ^ token << 4;
}

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
    constexpr int ROW = layout<FP8>::ROW;
    for (int i = threadIdx.x % 32; i < CSA_REGION * ROW / 16; i += 32) {
        int row = i / (ROW / 16), byte = i % (ROW / 16) * 16;
        *(uint4 *)(to + row * ROW + swizzled(byte, row)) = row >= seen ? make_uint4(0, 0, 0, 0)
                                                           : aligned
                                                               ? load_16<true>(from + row * row_bytes + byte)
                                                               : load_16<false>(from + row * row_bytes + byte);
    }
}

/* Copies a warp's regions of a unit into a stage. */
template <bool FP8>
__device__ __forceinline__ void load_unit(const attend_params &p, unsigned char *stage, const uint32_t *entries,
                                          const uint8_t *group_kv)
{
    constexpr int ROW = layout<FP8>::ROW;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
    for (int r = OWN * warp; r < OWN * (warp + 1); r++) {
        uint32_t entry = entries[r], physical = entry >> 4;
        const uint8_t *from = group_kv + (physical >> p.block_shift) * p.block_step +
                              (physical & ((1U << p.block_shift) - 1)) * CSA_REGION * p.row_step;
        unsigned char *region = stage + r * CSA_REGION * ROW;
        if ((entry & 15) != CSA_REGION || !p.kv_packed) {
            load_region_slowly<FP8>(region, from, p.row_step, p.kv_aligned, (int)(entry & 15));
            continue;
        }
        uint32_t to = shared_address(region);
        from += lane * 16;
#pragma unroll
        for (int i = 0; i < CSA_REGION * ROW / 512;
             i++) { /* lanes before `first` are still in the row of i * 512 */
            int row = i * 512 / ROW, first = ((row + 1) * ROW - i * 512) / 16;
            if (first < 32)
                row += lane >= first;
            copy_16(to + (uint32_t)(i * 512 + swizzled(lane * 16, row)), from + i * 512);
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

template <bool FP8> struct shared_state {
    __align__(16) unsigned char stage[layout<FP8>::STAGES][layout<FP8>::STAGE];
    queries<FP8> query;
    __align__(16) uint16_t weights[HEADS][WEIGHT_PITCH]; /* of columns, see token_of */
    __align__(16) float warp_max[HEADS][WARPS], warp_sum[HEADS][WARPS];
    uint32_t entries[MAX_ENTRIES]; /* this block's, as resolve_entry makes them */
    bool last;
};

/* ---- A unit ------------------------------------------------------------------------------------- */

/* Which token of a region a column of the products is: neighbours are four apart, so that their chunks do not
 * meet. */
__device__ __forceinline__ int token_of(int column)
{
    return (column & 1) << 2 | column >> 1;
}

/* Where a lane finds its operands, in bytes. The compiler would work them out for every unit. */
template <bool FP8> struct lane_places {
    int key;                /* of a stage: its token's first chunk; the next one is at key ^ 64 */
    int value[FP8 ? 4 : 3]; /* of a stage: what load_values reads of the first regions */
    int sums;               /* of warp_max, warp_sum: head g */
    int weight;             /* of the weights: what the warp's products read */

    __device__ __forceinline__ lane_places()
    {
        constexpr int ROW = layout<FP8>::ROW;
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
        key = (OWN * warp * CSA_REGION + token_of(g)) * ROW + swizzled(16 * t, token_of(g));
        if (FP8) {
            int slice = SIZE + warp * SLICE;
#pragma unroll
            for (int second = 0; second < 2; second++) {
                int token = t + 4 * second;
                value[second] = token * ROW + swizzled(slice + 4 * g, token);
                value[2 + second] = token * ROW + swizzled(slice + 32 + 2 * g, token);
            }
        } else {
            int token = token_of(lane & 7), row = (lane & 8) + token;
#pragma unroll
            for (int i = 0; i < 3; i++)
                value[i] = row * ROW + swizzled(2 * (SIZE + warp * SLICE) + 32 * i + lane / 16 * 16, token);
        }
        sums = g * WARPS * (int)sizeof(float);
        weight = (lane % 16 * WEIGHT_PITCH + lane / 16 * 8) * 2;
        keep(key);
        keep(sums);
        keep(weight);
#pragma unroll
        for (int i = 0; i < (FP8 ? 4 : 3); i++)
            keep(value[i]);
    }
    static __device__ __forceinline__ void keep(int &x)
    {
        asm volatile("" : "+r"(x));
    }
};

/* Logits of a warp's regions, in base 2: {head g: columns 2t, 2t + 1; head g + 8: the same}. */
template <bool FP8>
__device__ __forceinline__ void find_logits(const unsigned char *stage, const lane_places<FP8> &own,
                                            const uint32_t *entries, const queries<FP8> &q,
                                            float (&logits)[OWN][4])
{
    constexpr int LOADS = FP8 ? 3 : 6, STEPS = 12, EACH = STEPS / LOADS, REGION = CSA_REGION * layout<FP8>::ROW;
    int lane = threadIdx.x % 32, t = lane % 4;
    float sums[OWN][2][4] = {};
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        uint4 k[OWN];
#pragma unroll
        for (int r = 0; r < OWN; r++)
            k[r] = *(const uint4 *)(stage + (i % 2 ? own.key ^ 64 : own.key) + i / 2 * 128 + r * REGION);
#pragma unroll
        for (int step = 0; step < EACH; step++) {
            uint4 a = q.a[EACH * i + step][lane];
#pragma unroll
            for (int r = 0; r < OWN; r++) {
                uint32_t words[4] = {k[r].x, k[r].y, k[r].z, k[r].w};
                if (FP8)
                    mma_f16(sums[r][step % 2], a, e4m3x2_to_f16x2(words[step]),
                            e4m3x2_to_f16x2(words[step] >> 16));
                else
                    mma_bf16(sums[r][step], a, words[2 * step % 4], words[(2 * step + 1) % 4]);
            }
        }
    }
    const float *factor = (const float *)((const char *)q.factor + own.sums / WARPS);
    float factors[2] = {factor[0], factor[8]};
#pragma unroll
    for (int r = 0; r < OWN; r++) {
        int seen = (int)(entries[r] & 15);
#pragma unroll
        for (int i = 0; i < 4; i++)
            logits[r][i] = t + i % 2 * 4 < seen ? (sums[r][0][i] + sums[r][1][i]) * factors[i / 2] : -INFINITY;
    }
}

/* Operand b of the products of a warp's slice over two regions, the first of them at `rows`.
 *
 * bf16: tile i has values 8i to 8i + 7. e4m3, whose bytes no instruction transposes: tiles 0 to 3 have value
 * 4 * column + tile, tiles 4 and 5 have 32 + 2 * column + (tile - 4); lanes load what they need of two tokens
 * and interleave it. */
template <bool FP8>
__device__ __forceinline__ void load_values(const unsigned char *rows, const lane_places<FP8> &own,
                                            uint32_t (&b)[TILES][2])
{
    if (FP8) {
#pragma unroll
        for (int region = 0; region < 2; region++) {
            const unsigned char *at = rows + region * CSA_REGION * layout<FP8>::ROW;
            uint32_t first = *(const uint32_t *)(at + own.value[0]),
                     second = *(const uint32_t *)(at + own.value[1]);
            uint32_t low = __byte_perm(first, second, 0x5140), high = __byte_perm(first, second, 0x7362);
            b[0][region] = e4m3x2_to_f16x2(low);
            b[1][region] = e4m3x2_to_f16x2(low >> 16);
            b[2][region] = e4m3x2_to_f16x2(high);
            b[3][region] = e4m3x2_to_f16x2(high >> 16);
            low = __byte_perm(*(const uint16_t *)(at + own.value[2]),
                              *(const uint16_t *)(at + own.value[FP8 ? 3 : 2]), 0x5140);
            b[4][region] = e4m3x2_to_f16x2(low);
            b[5][region] = e4m3x2_to_f16x2(low >> 16);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 3; i++) {
            uint32_t m[4];
            load_transposed_4(m, shared_address(rows) + (uint32_t)own.value[i]);
            b[2 * i][0] = m[0], b[2 * i][1] = m[1];
            b[2 * i + 1][0] = m[2], b[2 * i + 1][1] = m[3];
        }
    }
}

/* Which of the slice's values a lane's column i of a tile is. */
template <bool FP8> __device__ __forceinline__ int value_of(int t, int tile, int i)
{
    if (!FP8)
        return 8 * tile + 2 * t + i;
    return tile < 4 ? 8 * t + 4 * i + tile : 32 + 4 * t + 2 * i + (tile - 4);
}

/* Works on a stage that has arrived as far as this thread's copies go, and adds it to `result`. */
template <bool FP8>
__device__ __forceinline__ void attend_unit(shared_state<FP8> &s, const lane_places<FP8> &own,
                                            const unsigned char *stage, const uint32_t *entries,
                                            partial &result)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32;
    float logits[OWN][4], kept[2];
    float4 *max_of_head = (float4 *)((char *)s.warp_max + own.sums),
           *sum_of_head = (float4 *)((char *)s.warp_sum + own.sums);
    __syncwarp();
    find_logits<FP8>(stage, own, entries + OWN * warp, s.query, logits);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float x = lanes_max(fmaxf(fmaxf(logits[0][2 * half], logits[0][2 * half + 1]),
                                  fmaxf(logits[1][2 * half], logits[1][2 * half + 1])));
        if (t == 0)
            ((float *)&max_of_head[8 * half])[warp] = x;
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float4 x = max_of_head[8 * half];
        float most = fmaxf(result.m[half], fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
        float base = most == -INFINITY ? 0.0F : most, sum = 0.0F;
        kept[half] = exp2_fast(result.m[half] - base);
        result.m[half] = most;
#pragma unroll
        for (int r = 0; r < OWN; r++) {
            float first = exp2_fast(logits[r][2 * half] - base),
                  second = exp2_fast(logits[r][2 * half + 1] - base);
            *(uint32_t *)&s.weights[g + 8 * half][(OWN * warp + r) * CSA_REGION + 2 * t] =
                FP8 ? pack_f16(first, second) : pack_bf16(first, second);
            sum += first + second;
        }
        sum = lanes_sum(sum);
        if (t == 0)
            ((float *)&sum_of_head[8 * half])[warp] = sum;
    }
    __syncthreads();
    uint32_t weights = shared_address(s.weights) + (uint32_t)own.weight;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float4 x = sum_of_head[8 * half];
        result.l[half] = fmaf(result.l[half], kept[half], (x.x + x.y) + (x.z + x.w));
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            result.o[tile][2 * half] *= kept[half];
            result.o[tile][2 * half + 1] *= kept[half];
        }
    }
#pragma unroll
    for (int step = 0; step < ROWS / 16; step++) {
        uint32_t b[TILES][2];
        uint4 a = load_matrix_4(weights + (uint32_t)(16 * step) * 2);
        load_values<FP8>(stage + 16 * step * layout<FP8>::ROW, own, b);
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
