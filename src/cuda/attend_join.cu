/*
 * Section 6, its end: joins the records that attend.cu's blocks left of a row's parts and writes the row.
 *
 * A warp has one tile of 8 values, for 16 heads. Parts that are pieces: it joins them one after the other, in a
 * block with the warps of 7 more tiles. Parts that are units: the warps of a block take the pieces of one tile
 * in turn and join their units, and the first warp joins the pieces. Records are read as lanes left them; 8 or
 * 9 are on their way at a time. Bound by the way to the L2 cache and back, twice. SPDX-License-Identifier:
 * Apache-2.0
 */
#include "attend_join.cuh"
#include "attend_result.cuh"

namespace
{

enum {
    PIECE_TILES = 8, /* of a block that joins pieces */
    PIECES = 9,      /* records that are on their way: the pieces of a row of 512 regions and the current one */
    UNIT_WARPS = 16, /* of a block that joins units, at most */
    MAX_PIECES = (CSA_MAX_TOPK + CSA_PIECE) / CSA_PIECE
};

/* Joins `count` records of a tile one after the other, loading so many at once. */
template <int AT_ONCE>
__device__ __forceinline__ void join_records(const csa_record *records, int count, int tile, partial<1> &result)
{
    result.clear();
#pragma unroll 1
    for (int first = 0; first < count; first += AT_ONCE) {
        partial<1> next[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + i < count)
                load_tile(records[first + i], tile, next[i]);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + i < count)
                result.join(next[i]);
    }
}

template <bool FP8>
__global__ void __launch_bounds__(32 * PIECE_TILES) join_pieces_kernel(const __grid_constant__ attend_params p)
{
    int tile = (int)blockIdx.y * PIECE_TILES + (int)threadIdx.x / 32;
    const row_extent at(p, blockIdx.x);
    const finish f(p, at);
    partial<1> result;
    wait_for_kernel_ahead();
    join_records<PIECES>(p.records + (int64_t)at.row * p.parts, (at.units + UNITS - 1) / UNITS, tile, result);
    write_row<FP8>(
        p, at, f, result, [&](int) { return tile; }, tile == 0);
}

template <bool FP8>
__global__ void __launch_bounds__(32 * UNIT_WARPS) join_units_kernel(const __grid_constant__ attend_params p)
{
    __shared__ partial<1> left[MAX_PIECES][32];
    int tile = (int)blockIdx.y, lane = threadIdx.x % 32;
    const row_extent at(p, blockIdx.x);
    const finish f(p, at);
    int pieces = (at.units + UNITS - 1) / UNITS;
    partial<1> result;
    wait_for_kernel_ahead();
#pragma unroll 1
    for (int piece = threadIdx.x / 32; piece < pieces; piece += (int)blockDim.x / 32) {
        join_records<UNITS>(p.records + (int64_t)at.row * p.parts + piece * UNITS,
                            min(at.units - piece * UNITS, (int)UNITS), tile, result);
        left[piece][lane] = result;
    }
    __syncthreads();
    if (threadIdx.x >= 32)
        return;
    result.clear();
#pragma unroll 4
    for (int piece = 0; piece < pieces; piece++)
        result.join(left[piece][lane]);
    write_row<FP8>(
        p, at, f, result, [&](int) { return tile; }, tile == 0);
}

using kernel = void (*)(attend_params);

kernel find_kernel(bool units, bool fp8)
{
    if (units)
        return fp8 ? join_units_kernel<true> : join_units_kernel<false>;
    return fp8 ? join_pieces_kernel<true> : join_pieces_kernel<false>;
}

} // namespace

csa_status csa_cuda_load_join(void)
{
    csa_status status = CSA_OK;
    for (int i = 0; i < 4 && status == CSA_OK; i++)
        status = csa_load("attend: joining", find_kernel(i & 1, i & 2), 0);
    return status;
}

csa_status csa_cuda_join(const csa_context *context, const attend_params &p, bool fp8, int64_t rows,
                         void *stream)
{
    bool units = p.part == 1;
    csa_launch l;
    l.grid = dim3((unsigned)rows, units ? TILES : TILES / PIECE_TILES);
    l.block = dim3(32 * (units ? min((p.parts + UNITS - 1) / UNITS, (int)UNIT_WARPS) : PIECE_TILES));
    l.stream = stream;
    l.overlap = !context->portable;
    return csa_queue("attend: joining", find_kernel(units, fp8), l, p);
}
