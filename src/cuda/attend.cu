/*
 * Section 6: attention of a row to the tokens of its list, straight from the paged cache.
 *
 * Order of sums, the same however a row is cut: the row's live list entries are taken in units of 8 regions (64
 * tokens), each with a softmax of its own; the 8 units of a piece (64 entries) join in a binary tree; pieces
 * join one after the other. What joins is (m, l, o): the largest logit in base 2, the sum of 2^(logit - m), the
 * values weighted by it.
 *
 * A cluster of 1, 2, 4 or 8 blocks works on a piece, each on an aligned subtree of its units; then each block
 * joins its slice of the 192 values over all blocks, read from their shared memory. A cluster takes a whole
 * row, piece by piece, or (few rows) a single piece: then pieces leave records in the workspace, and the block
 * that finds itself the last of its row and slice joins them.
 *
 * A block has four warps. A unit's 64 cache rows are copied asynchronously into one of two stages, a warp two
 * regions; one stage loads while the other is worked on. Q.K: heads are the product's rows (16, padded), a warp
 * does its own two regions, keys straight from its copies. Maxima are exchanged, weights go to shared memory.
 * P.V: a warp does 48 of the 192 values over all 64 tokens. Rows in shared memory lie 16 bytes apart from a
 * multiple of 128, and tokens are numbered within the products so that no load conflicts. Three meetings of the
 * block a unit.
 *
 * e4m3 caches: codes become f16 exactly; queries become f16 after scaling each head to just below f16's largest
 * value by a power of two, which the logits are relieved of; weights are f16. bf16 caches: all bf16.
 *
 * Bound by memory: two blocks a multiprocessor with 49 KB (bf16) each under way.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "../numeric.h"
#include "device/instructions.cuh"
#include "device/views.cuh"
#include "launch.h"
#include "stages.h"

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

/* ---- A row's result, slice by slice ------------------------------------------------------------- */

/* A thread's share of a slice: one head, every eighth value of SIZE / BLOCKS. */
template <int BLOCKS> struct slice {
    static constexpr int EACH = SIZE / BLOCKS / 8;
    float m, l;
    float o[EACH];

    __device__ static int head()
    {
        return threadIdx.x / 8;
    }
    __device__ static int value(int rank, int i)
    {
        return rank * (SIZE / BLOCKS) + i * 8 + threadIdx.x % 8;
    }

    __device__ void join(float other_m, float other_l, const float (&other_o)[EACH])
    {
        float own, other;
        join_factors(m, l, other_m, other_l, own, other);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            o[i] = fmaf(other_o[i], other, o[i] * own);
    }
};

/* Joins what the blocks of the cluster left at `left`, in a tree. */
template <int BLOCKS> __device__ void join_blocks(const part_result &left, int rank, slice<BLOCKS> &result)
{
    constexpr int EACH = slice<BLOCKS>::EACH;
    slice<BLOCKS> parts[BLOCKS];
    int head = slice<BLOCKS>::head();
#pragma unroll
    for (int of = 0; of < BLOCKS; of++) {
        parts[of].m = __uint_as_float(cluster_load<BLOCKS>(cluster_address<BLOCKS>(&left.m[head], of)));
        parts[of].l = __uint_as_float(cluster_load<BLOCKS>(cluster_address<BLOCKS>(&left.l[head], of)));
#pragma unroll
        for (int i = 0; i < EACH; i++)
            parts[of].o[i] = __uint_as_float(cluster_load<BLOCKS>(
                cluster_address<BLOCKS>(&left.o[head][slice<BLOCKS>::value(rank, i)], of)));
    }
#pragma unroll
    for (int step = 1; step < BLOCKS; step *= 2)
#pragma unroll
        for (int of = 0; of + step < BLOCKS; of += 2 * step)
            parts[of].join(parts[of + step].m, parts[of + step].l, parts[of + step].o);
    result = parts[0];
}

/* What a row's result is multiplied by at the end, for the thread's head. */
struct finish {
    float v_scale;
    uint16_t gate;

    __device__ void load(const attend_params &p, uint32_t token, uint32_t group)
    {
        uint32_t head = threadIdx.x / 8;
        v_scale = p.v_scale ? *p.v_scale : 1.0F;
        gate = p.gate && head < p.heads ? *((const uint16_t *)p.gate.at(token, group) + head) : 0;
    }
};

template <int BLOCKS>
__device__ void write_row(const attend_params &p, uint32_t token, uint32_t group, int rank, const finish &f,
                          const slice<BLOCKS> &result)
{
    uint32_t head = slice<BLOCKS>::head();
    if (head >= p.heads)
        return;
    uint16_t *out = (uint16_t *)p.out.at(token, group, head);
    bool empty = result.l == 0.0F;
    float factor = empty ? 0.0F : 1.0F / result.l * f.v_scale, gate = p.gate ? csa_gate_factor(f.gate) : 1.0F;
#pragma unroll
    for (int i = 0; i < slice<BLOCKS>::EACH; i++) {
        float value = __uint_as_float(pack_bf16(0.0F, result.o[i] * factor)); /* rounded */
        if (p.gate)
            value = __uint_as_float(pack_bf16(0.0F, value * gate));
        out[slice<BLOCKS>::value(rank, i)] = empty ? 0 : (uint16_t)(__float_as_uint(value) >> 16);
    }
    if (p.lse && rank == 0 && threadIdx.x % 8 == 0)
        *((float *)p.lse.at(token, group) + head) =
            empty ? -INFINITY : (result.m + log2f(result.l)) * 0.693147181F;
}

/* Leaves a piece's slice in the workspace; the last of the row's pieces joins all of them into `result`. */
template <int BLOCKS>
__device__ bool join_pieces(const attend_params &p, uint32_t row, int piece, int pieces, int rank, bool &last,
                            slice<BLOCKS> &result)
{
    constexpr int EACH = slice<BLOCKS>::EACH;
    float *records = p.records + (int64_t)row * p.pieces * CSA_RECORD_FLOATS;
    int head = slice<BLOCKS>::head(), sums = HEADS * SIZE + rank * 2 * HEADS;
    float *record = records + piece * CSA_RECORD_FLOATS;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        __stcg(&record[head * SIZE + slice<BLOCKS>::value(rank, i)], result.o[i]);
    if (threadIdx.x % 8 == 0) {
        __stcg(&record[sums + head], result.m);
        __stcg(&record[sums + HEADS + head], result.l);
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        last = atomicAdd(&p.counters[row * CSA_RECORD_RANKS + rank], 1U) == (uint32_t)pieces - 1;
    __syncthreads();
    if (!last)
        return false;
    __threadfence();
    constexpr int AT_ONCE = BLOCKS >= 4 ? 4 : 2; /* loads that do not wait for each other */
    const float *first_sum = records + sums + head,
                *first_value = records + head * SIZE + slice<BLOCKS>::value(rank, 0);
#pragma unroll 1
    for (int first = 0; first < pieces; first += AT_ONCE) {
        slice<BLOCKS> next[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            int offset = (first + i) * CSA_RECORD_FLOATS;
            if (first + i >= pieces)
                continue;
            next[i].m = __ldcg(first_sum + offset);
            next[i].l = __ldcg(first_sum + offset + HEADS);
#pragma unroll
            for (int k = 0; k < EACH; k++)
                next[i].o[k] = __ldcg(first_value + offset + k * 8);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (first + i == 0)
                result = next[i];
            else if (first + i < pieces)
                result.join(next[i].m, next[i].l, next[i].o);
        }
    }
    return true;
}

/* ---- The kernel --------------------------------------------------------------------------------- */

/* Puts a unit's result into the tree of the block's COUNT units; at the last one `result` is the block's. */
template <int COUNT, int LEVEL = 0>
__device__ __forceinline__ void join_units(partial (&waiting)[3], partial &result, int unit)
{
    if constexpr (1 << LEVEL < COUNT) {
        if ((unit >> LEVEL & 1) == 0) {
            waiting[LEVEL] = result;
        } else {
            join(waiting[LEVEL], result);
            result = waiting[LEVEL];
            join_units<COUNT, LEVEL + 1>(waiting, result, unit);
        }
    }
}

/* The block's result when only `live` of its COUNT units have entries: joins what waits in the tree. */
template <int COUNT> __device__ __forceinline__ void join_rest(partial (&waiting)[3], partial &result, int live)
{
    bool any = false;
#pragma unroll
    for (int level = 0; 1 << level < COUNT; level++) {
        if ((live >> level & 1) == 0)
            continue;
        if (any)
            join(waiting[level], result);
        result = waiting[level];
        any = true;
    }
    if (!any) {
        result = partial{};
        result.m[0] = result.m[1] = -INFINITY;
    }
}

/* Joins the blocks' results of a piece and puts it behind those before; `left` is a stage that has been used
 * and may be loaded again, and left, after cluster_wait. */
template <bool FP8, int BLOCKS>
__device__ void join_piece(part_result &left, const partial &own, int rank, bool first, slice<BLOCKS> &result)
{
    int g = threadIdx.x % 32 / 4, warp = threadIdx.x / 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (threadIdx.x < 32 && threadIdx.x % 4 == 0) {
            left.m[g + 8 * half] = own.m[half];
            left.l[g + 8 * half] = own.l[half];
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int k = 0; k < 2; k++)
                left.o[g + 8 * half][warp * SLICE + value_of<FP8>(tile, k)] = own.o[tile][2 * half + k];
    }
    cluster_sync<BLOCKS>();
    slice<BLOCKS> piece;
    join_blocks<BLOCKS>(left, rank, piece);
    if (first)
        result = piece;
    else
        result.join(piece.m, piece.l, piece.o);
    cluster_arrive<BLOCKS>(); /* this block has read what it needs of the others */
}

template <bool FP8, int BLOCKS>
__global__ void __launch_bounds__(THREADS, 2) attend_kernel(const __grid_constant__ attend_params p)
{
    constexpr int OWN_UNITS = UNITS / BLOCKS, OWN_ENTRIES = OWN_UNITS * UNIT;
    extern __shared__ __align__(16) unsigned char shared[];
    shared_state<FP8, BLOCKS> &s = *(shared_state<FP8, BLOCKS> *)shared;
    uint32_t rank = blockIdx.x % BLOCKS, first_piece = blockIdx.y, row = blockIdx.x / BLOCKS;
    uint32_t token = quotient(row, p.groups), group = row - token * p.groups;
    start_kernel_behind();

    finish f;
    f.load(p, token, group);
    token_place place = p.tokens.place(p.first + token);
    if (p.positions)
        place.position = *p.active.at(row) ? *(const int64_t *)p.positions.at(row) : -1;
    int64_t live = place.position < 0 ? 0 : place.position / CSA_REGION + 1;
    int entries = (int)min(live, (int64_t)p.columns);
    uint32_t pieces = max(1, (entries + CSA_PIECE - 1) / CSA_PIECE);
    if (first_piece >= pieces)
        return;
    if (threadIdx.x < 64) { /* a warp for each eight heads */
        const uint8_t *query = p.query.at(token, group);
        if (p.query_aligned)
            s.query.template load<true>(p, query, threadIdx.x / 32);
        else
            s.query.template load<false>(p, query, threadIdx.x / 32);
    }
    uint32_t end_piece =
        p.pieces > 0 ? first_piece + 1 : pieces; /* units of all pieces but the last are live */
    int last_units = (entries - (int)(pieces - 1) * CSA_PIECE + UNIT - 1) / UNIT - (int)rank * OWN_UNITS;
    last_units = max(0, min(last_units, OWN_UNITS));
    int total = (int)(end_piece - first_piece) * OWN_UNITS - (end_piece == pieces ? OWN_UNITS - last_units : 0);
    const int64_t *list = (const int64_t *)p.selected.at(row) + (p.columns - entries);
    const int32_t *blocks = p.map.row(place.owner);
    const uint8_t *group_kv = p.kv + group * p.group_step;
    wait_for_kernel_ahead();
#pragma unroll 1
    for (int i = threadIdx.x; i < total * UNIT; i += THREADS) {
        int at = (first_piece + i / OWN_ENTRIES) * CSA_PIECE + rank * OWN_ENTRIES + i % OWN_ENTRIES;
        s.entries[i] = at < entries ? resolve_entry(p, blocks, list[at], place.position) : 0;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
        if (i < total)
            load_unit<FP8>(p, s.stage[i], s.entries + i * UNIT, group_kv);
        copies_commit();
    }

    slice<BLOCKS> result;
    partial waiting[3], unit_result, row_result; /* the last one for a block alone, until the end */
    int done = 0;
#pragma unroll 1
    for (uint32_t piece = first_piece; piece < end_piece; piece++) {
        int live = piece == pieces - 1 ? last_units : OWN_UNITS;
#pragma unroll 1
        for (int unit = 0; unit < live; unit++, done++) {
            unsigned char *stage = s.stage[done % 2];
            bool free = BLOCKS == 1 || unit < live - 1; /* else it will hold what the cluster is to read */
            copies_wait<1>();
            attend_unit<FP8, BLOCKS>(s, stage, s.entries + done * UNIT, unit_result);
            __syncthreads(); /* the stage has been used */
            if (free && done + 2 < total)
                load_unit<FP8>(p, stage, s.entries + (done + 2) * UNIT, group_kv);
            copies_commit();
            join_units<OWN_UNITS>(waiting, unit_result, unit);
        }
        if (live < OWN_UNITS)
            join_rest<OWN_UNITS>(waiting, unit_result, live);
        if constexpr (BLOCKS == 1) {
            if (piece > first_piece)
                join(row_result, unit_result);
            else
                row_result = unit_result;
            continue;
        }
        /* Where the latest unit was, or nothing any more; the same in all blocks. */
        unsigned char *used = s.stage[((piece - first_piece + 1) * OWN_UNITS + 1) % 2];
        join_piece<FP8, BLOCKS>(*(part_result *)used, unit_result, rank, piece == first_piece, result);
        if (piece + 1 == end_piece)
            break;
        cluster_wait<BLOCKS>();
        if (done + 1 < total && live > 0)
            load_unit<FP8>(p, used, s.entries + (done + 1) * UNIT, group_kv);
        copies_commit();
    }
    if constexpr (BLOCKS == 1)
        join_piece<FP8, BLOCKS>(*(part_result *)s.stage[0], row_result, 0, true, result);
    if (p.pieces == 0 || pieces == 1 || join_pieces<BLOCKS>(p, row, first_piece, pieces, rank, s.last, result))
        write_row<BLOCKS>(p, token, group, rank, f, result);
    cluster_wait<BLOCKS>(); /* nobody leaves while its results are read */
}

/* ---- Launching ---------------------------------------------------------------------------------- */

using kernel = void (*)(attend_params);

struct variant {
    kernel run;
    size_t shared;
};

/* Kernels for clusters of 1, 2, 4 and 8 blocks. */
template <bool FP8> variant find_variant(int blocks)
{
    switch (blocks) {
    case 8:
        return {attend_kernel<FP8, 8>, sizeof(shared_state<FP8, 8>)};
    case 4:
        return {attend_kernel<FP8, 4>, sizeof(shared_state<FP8, 4>)};
    case 2:
        return {attend_kernel<FP8, 2>, sizeof(shared_state<FP8, 2>)};
    default:
        return {attend_kernel<FP8, 1>, sizeof(shared_state<FP8, 1>)};
    }
}

/* Clusters of 1, 2, 4 and 8 blocks that fit a Hopper of 132 multiprocessors at a time, as it says itself:
 * clusters do not cross its partitions, so that larger ones leave some of it idle. */
const int CLUSTERS_AT_ONCE[] = {264, 132, 62, 30};

/* Blocks per cluster so that `items` pieces or rows are done soonest. A cluster's time is counted in units of
 * work: its share of a piece, one to begin and, if blocks have to meet, one for that. */
int cluster_size(const csa_context *context, int64_t items)
{
    int best = 1;
    int64_t best_time = INT64_MAX;
    for (int blocks = 1, i = 0; blocks <= (context->portable ? 1 : 8); blocks *= 2, i++) {
        int64_t at_once = CLUSTERS_AT_ONCE[i] * (int64_t)context->multiprocessors / 132;
        int64_t waves = (items + at_once - 1) / (at_once > 0 ? at_once : 1);
        int64_t time = waves * (UNITS / blocks + 1 + (blocks > 1));
        if (time < best_time) {
            best_time = time;
            best = blocks;
        }
    }
    return best;
}

csa_status queue_attend(const csa_context *context, attend_params &p, bool fp8, int64_t rows,
                        int64_t split_rows, bool overlap, void *stream)
{
    int64_t whole_pieces =
        max(1U, (p.columns + CSA_PIECE - 2) / CSA_PIECE); /* the current region alone is no work */
    if (rows <= split_rows)
        p.pieces = (int)((p.columns + CSA_PIECE - 1) / CSA_PIECE);
    int blocks = cluster_size(context, p.pieces > 0 ? rows * whole_pieces : rows);
    variant v = fp8 ? find_variant<true>(blocks) : find_variant<false>(blocks);
    csa_launch l;
    l.grid = dim3((unsigned)(rows * blocks), (unsigned)(p.pieces > 0 ? p.pieces : 1));
    l.block = dim3(THREADS);
    l.shared = v.shared;
    l.stream = stream;
    l.cluster = (unsigned)blocks;
    l.overlap = overlap && !context->portable;
    return csa_queue("attend", v.run, l, p);
}

} // namespace

csa_status csa_cuda_load_attend(void)
{
    csa_status status = CSA_OK;
    for (int blocks = 1; blocks <= 8 && status == CSA_OK; blocks *= 2) {
        variant bf16 = find_variant<false>(blocks), fp8 = find_variant<true>(blocks);
        status = csa_load("attend", bf16.run, bf16.shared);
        if (status == CSA_OK)
            status = csa_load("attend", fp8.run, fp8.shared);
    }
    return status;
}

csa_status csa_cuda_attend_span(const csa_context *context, const csa_attend_args *args, csa_span span,
                                const csa_chunk_arrays *scratch, int64_t split_rows)
{
    attend_params p = {};
    if (span.count == 0)
        return CSA_OK;
    const csa_tensor &kv = args->cache->kv;
    p.tokens = csa_token_source(*args->tokens);
    p.map = csa_block_map(args->tokens->block_table, kv.shape[0]);
    if (args->rows) {
        p.active = csa_view(args->rows->active);
        p.positions = csa_view(args->rows->positions);
    }
    p.query = csa_view(args->query);
    p.selected = csa_view(args->selected);
    p.gate = csa_view(args->gate);
    p.out = csa_view(args->out);
    p.lse = csa_view(args->lse);
    p.kv = (const uint8_t *)kv.data;
    p.block_step = csa_view(kv).step[0];
    p.group_step = csa_view(kv).step[1];
    p.row_step = csa_view(kv).step[2];
    if (kv.dtype != CSA_BF16) {
        p.k_scale = args->cache->k_scale;
        p.v_scale = args->cache->v_scale;
    }
    p.first = (uint32_t)span.first;
    p.groups = (uint32_t)args->query.shape[1];
    p.heads = (uint32_t)args->query.shape[2];
    p.columns = (uint32_t)args->selected.shape[1];
    p.scale = args->scale;
    while ((CSA_REGION << p.block_shift) < kv.shape[2])
        p.block_shift++;
    p.kv_aligned = csa_aligned(&kv);
    p.kv_packed = p.kv_aligned && kv.stride[2] == CSA_KV_SIZE;
    p.query_aligned = csa_aligned(&args->query);
    if (scratch) {
        p.counters = scratch->counters;
        p.records = scratch->records;
    }
    if (kv.shape[0] > (int64_t)1 << (28 - p.block_shift))
        return csa_cuda_fail(CSA_ERROR_UNSUPPORTED, "cache.kv: %lld blocks, at most 2^28 regions are supported",
                             (long long)kv.shape[0]);
    int64_t rows = args->query.shape[0] * args->query.shape[1];
    return queue_attend(context, p, kv.dtype != CSA_BF16, rows, scratch ? split_rows : 0, span.overlap,
                        args->stream);
}

csa_status csa_cuda_attend(const csa_context *context, const csa_attend_args *args)
{
    csa_span all = {0, args->query.shape[0], false};
    return csa_cuda_attend_span(context, args, all, nullptr, 0);
}
