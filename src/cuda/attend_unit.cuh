/*
 * A unit of attention: what attend.cu's kernel is made of below the level of rows. Parameters, copies of cache
 * rows, queries, weights, weighted values. SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CUDA_ATTEND_UNIT_CUH
#define CSA_CUDA_ATTEND_UNIT_CUH

#include "../plan.h"
#include "device/instructions.cuh"
#include "device/views.cuh"

#include <cuda.h>
#include <math.h>

/* A partial result in memory, as products leave it: for each tile of 8 values and lane, heads g and g + 8; and
 * of heads g and g + 8 the maxima and the sums. */
struct csa_record {
    float4 o[CSA_HEAD_SIZE / 8][32];
    float4 sums[8];
};
static_assert(sizeof(csa_record) == CSA_RECORD_BYTES, "plan.h");

struct attend_params {
    CUtensorMap cache; /* kv; used where `mapped` */
    token_source tokens;
    block_map map;
    view active, positions;               /* of rows; absent: they follow from the tokens */
    view query, selected, gate, out, lse; /* of the span's tokens and rows */
    const uint8_t *kv;
    int64_t block_step, group_step, row_step;
    const float *k_scale, *v_scale; /* NULL: 1 */
    uint32_t first, groups, heads, columns;
    float scale;
    int block_shift;                        /* regions of a block */
    bool mapped, kv_aligned, query_aligned; /* the latter two: to 16 bytes */
    int part, parts;                        /* units of one, and of the longest row how many; whole rows: 0 */
    csa_record *records;                    /* [row, part] */
};

namespace
{

enum {
    HEADS = CSA_MAX_HEADS,
    SIZE = CSA_HEAD_SIZE,
    UNIT = CSA_UNIT,          /* regions */
    QUAD = CSA_QUAD / UNIT,   /* units */
    UNITS = CSA_PIECE / UNIT, /* of a piece */
    TILES = SIZE / 8          /* products of 8 values */
};

/* Keys or values of a region in shared memory: [chunk][token][16 bytes at a place that depends on the token],
 * as the hardware swizzles boxes of 8 rows. */
template <bool FP8> struct layout {
    static constexpr int HALF_ROW = FP8 ? SIZE : 2 * SIZE; /* bytes of a token's keys or values */
    static constexpr int CHUNK = FP8 ? 64 : 128;           /* bytes of a token in a row of a box */
    static constexpr int CHUNKS = HALF_ROW / CHUNK;
    static constexpr int REGION = CSA_REGION * HALF_ROW;

    /* Where 16 bytes of a token are within a region. */
    __device__ static constexpr int place(int token, int piece)
    {
        constexpr int PIECES = CHUNK / 16;
        int turned = piece % PIECES ^ (FP8 ? token >> 1 & 3 : token);
        return piece / PIECES * CSA_REGION * CHUNK + token * CHUNK + turned * 16;
    }

    /* The token that stands in a column of a product of keys, and in that row of one of values, so that loads
     * do not conflict: a lane's own two, columns 2t and 2t + 1, are t and t + 4 or (e4m3) themselves. */
    __device__ static constexpr int token(int column)
    {
        return FP8 ? column : (column & 1) << 2 | column >> 1;
    }
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

/* ---- Queries ------------------------------------------------------------------------------------ */

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

/* ---- Copies ------------------------------------------------------------------------------------- */

enum { KEYS, VALUES }; /* halves of a unit */

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

/* All threads copy keys or values, those past an entry's seen tokens as zeros: any strides, any address. */
template <bool FP8, int WARPS>
__device__ __noinline__ void copy_half_plainly(const attend_params &p, unsigned char *to,
                                               const uint32_t *entries, uint32_t group, int half)
{
    constexpr int PIECES = layout<FP8>::HALF_ROW / 16;
    const uint8_t *group_kv = p.kv + group * p.group_step + half * layout<FP8>::HALF_ROW;
#pragma unroll 1
    for (int i = threadIdx.x; i < UNIT * CSA_REGION * PIECES; i += 32 * WARPS) {
        int row = i / PIECES, piece = i - row * PIECES, token = row % CSA_REGION;
        uint32_t entry = entries[row / CSA_REGION], physical = entry >> 4;
        const uint8_t *from = group_kv + (physical >> p.block_shift) * p.block_step + piece * 16 +
                              ((physical & ((1U << p.block_shift) - 1)) * CSA_REGION + token) * p.row_step;
        unsigned char *place = to + row / CSA_REGION * layout<FP8>::REGION + layout<FP8>::place(token, piece);
        if (token >= (int)(entry & 15))
            *(uint4 *)place = make_uint4(0, 0, 0, 0);
        else if (p.kv_aligned)
            copy_16(shared_address(place), from);
        else
            *(uint4 *)place = load_16<false>(from);
    }
}

/* Starts to copy keys or values of a unit to what nobody reads any more; entries NULL: there is no unit. */
template <bool FP8, int WARPS>
__device__ __forceinline__ void copy_half(const attend_params &p, unsigned char *to, uint64_t &arrived,
                                          const uint32_t *entries, uint32_t group, int half)
{
    if (!p.mapped) {
        if (entries)
            copy_half_plainly<FP8, WARPS>(p, to, entries, group, half);
        copies_commit();
        return;
    }
    if (!entries)
        return;
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, region = UNIT / WARPS * warp + lane;
    if (warp == 0) {
        uint32_t regions = __popc(__ballot_sync(~0U, lane < UNIT && entries[lane] != 0));
        if (lane == 0)
            barrier_expect(&arrived, regions * layout<FP8>::REGION); /* some may have arrived already */
    }
    uint32_t entry = lane < UNIT / WARPS ? entries[region] : 0, physical = entry >> 4;
    int at[5] = {0, (int)((physical & ((1U << p.block_shift) - 1)) * CSA_REGION), half * layout<FP8>::CHUNKS,
                 (int)group, (int)(physical >> p.block_shift)};
    if (entry != 0)
        copy_box(to + region * layout<FP8>::REGION, &p.cache, at, &arrived);
}

/* The keys or values of a block's unit `number` are there for all threads. */
__device__ __forceinline__ void wait_for_half(const attend_params &p, uint64_t &arrived, int number)
{
    if (p.mapped) {
        barrier_wait(&arrived, number & 1);
        return;
    }
    copies_wait<1>();
    __syncthreads();
}

/* Weights of tokens that are not seen are zero, which only counts if their values are finite. */
template <bool FP8, int WARPS>
__device__ __noinline__ void clear_unseen_values(unsigned char *values, const uint32_t *entries)
{
    constexpr int PIECES = layout<FP8>::REGION / 16, OF_TOKEN = layout<FP8>::CHUNK / 16; /* in a row */
#pragma unroll 4
    for (int i = threadIdx.x; i < UNIT * PIECES; i += 32 * WARPS)
        if (i / OF_TOKEN % CSA_REGION >= (int)(entries[i / PIECES] & 15))
            *(uint4 *)(values + 16 * i) = make_uint4(0, 0, 0, 0);
    order_before_copies();
    __syncthreads();
}

/* The same in two parts, where there is time before values are copied: all, */
template <bool FP8, int WARPS> __device__ __forceinline__ void clear_values(unsigned char *values)
{
#pragma unroll
    for (int i = threadIdx.x * 16; i < UNIT * layout<FP8>::REGION; i += 32 * WARPS * 16)
        *(uint4 *)(values + i) = make_uint4(0, 0, 0, 0);
    order_before_copies();
}

/* and once they have arrived, those of tokens that are not seen of regions that are. */
template <bool FP8, int WARPS>
__device__ __noinline__ void clear_arrived_values(unsigned char *values, const uint32_t *entries)
{
    constexpr int OF_TOKEN = layout<FP8>::CHUNK; /* bytes, in a row */
    int its = (int)(entries[threadIdx.x % UNIT] & 15);
    uint32_t regions = __ballot_sync(~0U, its > 0 && its < (int)CSA_REGION) & ((1 << UNIT) - 1);
    if (regions == 0)
        return;
#pragma unroll 1
    for (; regions != 0; regions &= regions - 1) {
        int region = __ffs((int)regions) - 1, seen = (int)(entries[region] & 15);
#pragma unroll
        for (int i = threadIdx.x * 16; i < layout<FP8>::REGION; i += 32 * WARPS * 16)
            if (i / OF_TOKEN % CSA_REGION >= seen)
                *(uint4 *)(values + region * layout<FP8>::REGION + i) = make_uint4(0, 0, 0, 0);
    }
    order_before_copies();
    __syncthreads();
}

/* ---- Weights ------------------------------------------------------------------------------------ */

/* Of a unit's tokens, for heads g and g + 8: the largest logit in base 2, the sum of 2^(logit - m), and these
 * as the rows of the products with values, 16 tokens a step. */
struct unit_weights {
    float m[2], l[2];
    uint4 rows[UNIT / 2];
};

/* Logits in base 2 of regions whose keys and entries these are; head g: columns 2t, 2t + 1; head g + 8: the
 * same. full: all tokens are seen. */
template <bool FP8, int REGIONS>
__device__ __forceinline__ void find_logits(const unsigned char *keys, const uint32_t *entries,
                                            const queries<FP8> &q, bool full, float (&logits)[REGIONS][4])
{
    using at = layout<FP8>;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, token = at::token(g);
#pragma unroll
    for (int r = 0; r < REGIONS; r++)
        logits[r][0] = logits[r][1] = logits[r][2] = logits[r][3] = 0.0F;
#pragma unroll
    for (int i = 0; i < (FP8 ? 3 : 6); i++) {
        uint4 v[REGIONS];
#pragma unroll
        for (int r = 0; r < REGIONS; r++)
            v[r] = *(const uint4 *)(keys + r * at::REGION + at::place(token, 4 * i + t));
#pragma unroll
        for (int k = 0; k < (FP8 ? 4 : 2); k++) {
            uint4 a = q.a[(FP8 ? 4 : 2) * i + k][lane];
#pragma unroll
            for (int r = 0; r < REGIONS; r++) {
                uint32_t words[4] = {v[r].x, v[r].y, v[r].z, v[r].w};
                if (FP8) {
                    uint2 b = e4m3x4_to_f16x4(words[k]);
                    mma_f16(logits[r], a, b.x, b.y);
                } else {
                    mma_bf16(logits[r], a, words[2 * k % 4], words[(2 * k + 1) % 4]);
                }
            }
        }
    }
    float factor[2] = {q.factor[g], q.factor[g + 8]};
#pragma unroll
    for (int r = 0; r < REGIONS; r++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            logits[r][i] *= factor[i / 2];
    if (full)
        return;
#pragma unroll
    for (int r = 0; r < REGIONS; r++) {
        int seen = (int)(entries[r] & 15);
#pragma unroll
        for (int i = 0; i < 4; i++)
            logits[r][i] = at::token(2 * t + i % 2) < seen ? logits[r][i] : -INFINITY;
    }
}

/* The largest logits of two heads, over the lanes that share them. */
template <int REGIONS>
__device__ __forceinline__ void find_largest(const float (&logits)[REGIONS][4], float (&m)[2])
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        m[half] = -INFINITY;
#pragma unroll
        for (int r = 0; r < REGIONS; r++)
            m[half] = fmaxf(m[half], fmaxf(logits[r][2 * half], logits[r][2 * half + 1]));
        m[half] = lanes_max(m[half]);
    }
}

/* Weights of two regions, a row of the products, and the lane's sums of them. */
template <bool FP8>
__device__ __forceinline__ uint4 weigh_pair(const float (&first)[4], const float (&second)[4],
                                            const float (&m)[2], float (&sums)[2])
{
    uint32_t packed[2][2]; /* region, head */
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float base = m[half] == -INFINITY ? 0.0F : m[half], w[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            w[i] = exp2_fast((i < 2 ? first : second)[2 * half + i % 2] - base);
        sums[half] = ((w[0] + w[1]) + w[2]) + w[3];
        packed[0][half] = FP8 ? pack_f16(w[0], w[1]) : pack_bf16(w[0], w[1]);
        packed[1][half] = FP8 ? pack_f16(w[2], w[3]) : pack_bf16(w[2], w[3]);
    }
    return make_uint4(packed[0][0], packed[0][1], packed[1][0], packed[1][1]);
}

/* Do the warps of a block share the work on a unit's keys? */
template <bool FP8, int WARPS> constexpr bool shares_keys = FP8 || WARPS == 4;

/* If so, what each finds for its regions. */
template <int WARPS, bool SHARES> struct weight_exchange {
};
template <int WARPS> struct weight_exchange<WARPS, true> {
    float m[WARPS][HEADS];
    float2 sums[UNIT / 2][32];
    uint4 rows[UNIT / 2][32];
};

/* Finds the weights of a unit. Two warps do so each for itself where keys are cheap to use, so that nothing is
 * exchanged; e4m3 ones have to be converted, and four warps are for when the time of a unit counts. All have
 * used the keys when it returns. */
template <bool FP8, int WARPS, bool SHARES>
__device__ __forceinline__ void find_weights(weight_exchange<WARPS, SHARES> &exchange,
                                             const unsigned char *keys, const uint32_t *entries,
                                             const queries<FP8> &q, bool full, unit_weights &w)
{
    constexpr int OWN = SHARES ? UNIT / WARPS : UNIT, PAIRS = OWN / 2; /* regions */
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = SHARES ? OWN * warp : 0;
    float logits[OWN][4], sums[UNIT / 2][2];
    find_logits<FP8, OWN>(keys + first * layout<FP8>::REGION, entries + first, q, full, logits);
    find_largest(logits, w.m);
    if constexpr (SHARES) {
        if (lane % 4 == 0) {
            exchange.m[warp][lane / 4] = w.m[0];
            exchange.m[warp][lane / 4 + 8] = w.m[1];
        }
        __syncthreads();
#pragma unroll
        for (int of = 0; of < WARPS; of++) {
            w.m[0] = fmaxf(w.m[0], exchange.m[of][lane / 4]);
            w.m[1] = fmaxf(w.m[1], exchange.m[of][lane / 4 + 8]);
        }
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            int pair = PAIRS * warp + i;
            exchange.rows[pair][lane] = weigh_pair<FP8>(logits[2 * i], logits[2 * i + 1], w.m, sums[i]);
            exchange.sums[pair][lane] = make_float2(sums[i][0], sums[i][1]);
        }
        __syncthreads();
#pragma unroll
        for (int pair = 0; pair < UNIT / 2; pair++) {
            float2 its = exchange.sums[pair][lane];
            w.rows[pair] = exchange.rows[pair][lane];
            sums[pair][0] = its.x, sums[pair][1] = its.y;
        }
    } else {
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++)
            w.rows[pair] = weigh_pair<FP8>(logits[2 * pair], logits[2 * pair + 1], w.m, sums[pair]);
        __syncthreads();
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
        w.l[half] = lanes_sum(((sums[0][half] + sums[1][half]) + sums[2][half]) + sums[3][half]);
}

/* ---- Values ------------------------------------------------------------------------------------- */

/* Which tiles a warp has of the 24: in pairs, and in fours as far as they go. */
template <int WARPS> __device__ __forceinline__ int warp_tile(int i)
{
    int warp = threadIdx.x / 32;
    return WARPS == 2 ? 12 * warp + i : i < 4 ? 4 * warp + i : 16 + 2 * warp + (i - 4);
}

/* Which value column 2t + i of a tile is. bf16: values 8 tile + column. e4m3, whose bytes no instruction
 * transposes: four tiles share 32 values, of which a column has four in a row, one for each tile. */
template <bool FP8> __device__ __forceinline__ int value_of(int tile, int i)
{
    int column = threadIdx.x % 4 * 2 + i;
    return FP8 ? tile / 4 * 32 + 4 * column + tile % 4 : 8 * tile + column;
}

/* Operand b of the products of some tiles from `tile` on with 16 tokens, regions r and r + 1: of two, which
 * start at an even one, or (e4m3) of the four that share values. */
template <bool FP8, int COUNT>
__device__ __forceinline__ void load_values(const unsigned char *values, int r, int tile,
                                            uint32_t (&b)[COUNT][2])
{
    using at = layout<FP8>;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if (FP8) {
        int byte = tile / 4 * 32 + 4 * g, piece = byte / 16;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const unsigned char *region = values + (r + half) * at::REGION + byte % 16;
            uint32_t first = *(const uint32_t *)(region + at::place(at::token(2 * t), piece)),
                     second = *(const uint32_t *)(region + at::place(at::token(2 * t + 1), piece));
#pragma unroll
            for (int i = 0; i < COUNT; i += 2) {
                uint32_t select = (tile + i) % 4 ? 0x7362 : 0x5140; /* the upper or the lower bytes of each */
                uint2 pairs = e4m3x4_to_f16x4(__byte_perm(first, second, select));
                b[i][half] = pairs.x;
                b[i + 1][half] = pairs.y;
            }
        }
    } else {
        int matrix = lane / 8;
        uint32_t m[4];
        load_transposed_4(m, shared_address(values + (r + matrix % 2) * at::REGION +
                                            at::place(at::token(lane % 8), tile + matrix / 2)));
        b[0][0] = m[0], b[0][1] = m[1];
        b[1][0] = m[2], b[1][1] = m[3];
    }
}

/* Weights times values of a unit for a warp's tiles `first` to + COUNT - 1. */
template <bool FP8, int WARPS, int COUNT, typename Take>
__device__ __forceinline__ void weigh_tiles(const unsigned char *values, const unit_weights &w, int first,
                                            Take take)
{
    float sums[COUNT][4] = {};
#pragma unroll
    for (int step = 0; step < UNIT / 2; step++) {
        uint32_t b[COUNT][2];
        load_values<FP8, COUNT>(values, 2 * step, warp_tile<WARPS>(first), b);
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (FP8)
                mma_f16(sums[i], w.rows[step], b[i][0], b[i][1]);
            else
                mma_bf16(sums[i], w.rows[step], b[i][0], b[i][1]);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        take(first + i, sums[i]);
}

/* Weights times values of a unit for each of a warp's tiles, which `take` gets: its number and 4 sums. */
template <bool FP8, int WARPS, typename Take>
__device__ __forceinline__ void weigh_values(const unsigned char *values, const unit_weights &w, Take take)
{
    constexpr int N = TILES / WARPS, GROUP = FP8 ? 4 : 2;
#pragma unroll
    for (int first = 0; first + GROUP <= N; first += GROUP)
        weigh_tiles<FP8, WARPS, GROUP>(values, w, first, take);
    if constexpr (N % GROUP)
        weigh_tiles<FP8, WARPS, N % GROUP>(values, w, N - N % GROUP, take);
}

} // namespace

#endif
