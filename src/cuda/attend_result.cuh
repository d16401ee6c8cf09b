/*
 * Results of attention: what partial ones are, how they join, how a row's is written.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CUDA_ATTEND_RESULT_CUH
#define CSA_CUDA_ATTEND_RESULT_CUH

#include "../numeric.h"
#include "attend_unit.cuh"

namespace
{

/* ---- Rows --------------------------------------------------------------------------------------- */

/* A row, and how much of its list is live: the last `entries` of its columns. */
struct row_extent {
    uint32_t row, token, group; /* token: of the span */
    token_place place;
    int entries, units;

    __device__ __forceinline__ row_extent(const attend_params &p, uint32_t row) : row(row)
    {
        token = quotient(row, p.groups);
        group = row - token * p.groups;
        place = p.tokens.place(p.first + token);
        if (p.positions)
            place.position = *p.active.at(row) ? *(const int64_t *)p.positions.at(row) : -1;
        int64_t seen = place.position < 0 ? 0 : place.position / CSA_REGION + 1;
        entries = (int)min(seen, (int64_t)p.columns);
        units = (entries + UNIT - 1) / UNIT;
    }
};

/* ---- Joining ------------------------------------------------------------------------------------ */

/* Maxima and sums of heads g and g + 8, or of one of them. */
template <int HALVES> struct head_sums {
    float m[HALVES], l[HALVES];

    __device__ __forceinline__ void clear()
    {
#pragma unroll
        for (int half = 0; half < HALVES; half++)
            m[half] = -INFINITY, l[half] = 0.0F;
    }
    /* Becomes those of both; `own` and `other` are what the values of each are multiplied by. */
    __device__ __forceinline__ void join(const head_sums &next, float (&own)[HALVES], float (&other)[HALVES])
    {
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            float most = fmaxf(m[half], next.m[half]), base = most == -INFINITY ? 0.0F : most;
            own[half] = exp2_fast(m[half] - base);
            other[half] = exp2_fast(next.m[half] - base);
            l[half] = fmaf(next.l[half], other[half], l[half] * own[half]);
            m[half] = most;
        }
    }
};

template <int HALVES>
__device__ __forceinline__ void join_values(float (&o)[2 * HALVES], const float (&next)[2 * HALVES],
                                            const float (&own)[HALVES], const float (&other)[HALVES])
{
#pragma unroll
    for (int i = 0; i < 2 * HALVES; i++)
        o[i] = fmaf(next[i], other[i / 2], o[i] * own[i / 2]);
}

/* A warp's share of a result: N tiles, for heads g and g + 8 or one of them. */
template <int N, int HALVES = 2> struct __align__(16) partial
{
    head_sums<HALVES> sums;
    float o[N][2 * HALVES];

    __device__ __forceinline__ void clear()
    {
        sums.clear();
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int k = 0; k < 2 * HALVES; k++)
                o[i][k] = 0.0F;
    }
    __device__ __forceinline__ void join(const partial &next)
    {
        float own[HALVES], other[HALVES];
        sums.join(next.sums, own, other);
#pragma unroll
        for (int i = 0; i < N; i++)
            join_values(o[i], next.o[i], own, other);
    }
    /* Of heads g or g + 8 alone. */
    __device__ __forceinline__ partial<N, 1> half(int half) const
    {
        partial<N, 1> its;
        its.sums.m[0] = sums.m[half], its.sums.l[0] = sums.l[half];
#pragma unroll
        for (int i = 0; i < N; i++)
            its.o[i][0] = o[i][2 * half], its.o[i][1] = o[i][2 * half + 1];
        return its;
    }
};

/* ---- Writing ------------------------------------------------------------------------------------ */

/* What a row's result is multiplied by at the end, for heads g and g + 8; 1 where there is no such thing. */
struct finish {
    float v_scale, gate[2];

    __device__ __forceinline__ finish(const attend_params &p, const row_extent &at)
    {
        v_scale = p.v_scale ? *p.v_scale : 1.0F;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t head = threadIdx.x % 32 / 4 + 8 * half;
            gate[half] = p.gate && head < p.heads
                             ? csa_gate_factor(*((const uint16_t *)p.gate.at(at.token, at.group) + head))
                             : 1.0F;
        }
    }
};

/* Writes a row's N tiles, which `tile_of` names, of heads g + 8 * first and (two halves) g + 8; the log-sum-exp
 * too if told so. */
template <bool FP8, int N, int HALVES, typename TileOf>
__device__ __forceinline__ void write_row(const attend_params &p, const row_extent &at, const finish &f,
                                          const partial<N, HALVES> &result, int first, TileOf tile_of, bool lse)
{
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        uint32_t head = threadIdx.x % 32 / 4 + 8 * (first + half);
        float gate = first + half ? f.gate[1] : f.gate[0];
        if (head >= p.heads)
            continue;
        uint16_t *out = (uint16_t *)p.out.at(at.token, at.group, head);
        float m = result.sums.m[half], l = result.sums.l[half];
        bool empty = l == 0.0F;
        float factor = empty ? 0.0F : 1.0F / l * f.v_scale;
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                float value =
                    __uint_as_float(pack_bf16(0.0F, result.o[i][2 * half + k] * factor)); /* rounded */
                value = __uint_as_float(pack_bf16(0.0F, value * gate));
                out[value_of<FP8>(tile_of(i), k)] = empty ? 0 : (uint16_t)(__float_as_uint(value) >> 16);
            }
        if (p.lse && lse && threadIdx.x % 4 == 0)
            *((float *)p.lse.at(at.token, at.group) + head) = empty ? -INFINITY : (m + log2f(l)) * 0.693147181F;
    }
}

/* ---- Records ------------------------------------------------------------------------------------ */

__device__ __forceinline__ void load_tile(const csa_record &from, int tile, partial<1> &to)
{
    int lane = threadIdx.x % 32;
    float4 sums = __ldcg(&from.sums[lane / 4]), o = __ldcg(&from.o[tile][lane]);
    to.sums.m[0] = sums.x, to.sums.m[1] = sums.y, to.sums.l[0] = sums.z, to.sums.l[1] = sums.w;
    to.o[0][0] = o.x, to.o[0][1] = o.y, to.o[0][2] = o.z, to.o[0][3] = o.w;
}

template <int N, typename TileOf>
__device__ __forceinline__ void store_record(csa_record &to, const partial<N> &from, TileOf tile_of)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < N; i++)
        __stcg(&to.o[tile_of(i)][lane], make_float4(from.o[i][0], from.o[i][1], from.o[i][2], from.o[i][3]));
    if (threadIdx.x < 32 && lane % 4 == 0)
        __stcg(&to.sums[lane / 4], make_float4(from.sums.m[0], from.sums.m[1], from.sums.l[0], from.sums.l[1]));
}

} // namespace

#endif
