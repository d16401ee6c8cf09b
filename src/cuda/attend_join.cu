/*
 * Section 6, its end: joins the records that attend.cu's blocks left of a row's parts and writes the row.
 *
 * A warp has one tile of 8 values, for 16 heads. Parts that are quads or pieces: it joins them in their order,
 * in a block with the warps of 7 more tiles. Parts that are units: the warps of a block take the pieces of one
 * tile in turn and join their units, and the first warp joins the pieces. Records are read as lanes left them;
 * 8 to 10 are on their way at a time. Bound by the way to the L2 cache and back, twice.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "attend_join.cuh"
#include "attend_result.cuh"

namespace
{

enum {
    PART_TILES = 8,  /* of a block that joins quads or pieces */
    PIECES = 9,      /* records that are on their way: the pieces of a row of 512 regions and the current one */
    QUADS = 10,      /* likewise: half the quads of such a row, those of a piece together */
    UNIT_WARPS = 16, /* of a block that joins units, at most */
    MAX_PIECES = (CSA_MAX_TOPK + CSA_PIECE) / CSA_PIECE
};

/* A tile of as many records as there are. */
template <int N>
__device__ __forceinline__ void load_tiles(const csa_record *records, int count, int tile, partial<1> (&to)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        if (i < count)
            load_tile(records[i], tile, to[i]);
}

/* Parts of which `OF_PIECE` are a piece: 2 quads or itself. */
template <bool FP8, int OF_PIECE>
__global__ void __launch_bounds__(32 * PART_TILES) join_parts_kernel(const __grid_constant__ attend_params p)
{
    constexpr int AT_ONCE = OF_PIECE == 2 ? QUADS : PIECES;
    static_assert(AT_ONCE % OF_PIECE == 0, "pieces are joined whole");
    int tile = (int)blockIdx.y * PART_TILES + (int)threadIdx.x / 32;
    const row_extent at(p, blockIdx.x);
    const finish f(p, at);
    const csa_record *records = p.records + (int64_t)at.row * p.parts;
    partial<1> result, next[AT_ONCE];
    result.clear();
    wait_for_kernel_ahead();
#pragma unroll 1
    for (int left = (at.units + p.part - 1) / p.part; left > 0; left -= AT_ONCE, records += AT_ONCE) {
        load_tiles(records, left, tile, next);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i += OF_PIECE) {
            if (OF_PIECE == 2 && i + 1 < left)
                next[i].join(next[i + 1]);
            if (i < left)
                result.join(next[i]);
        }
    }
    write_row<FP8>(
        p, at, f, result, 0, [&](int) { return tile; }, tile == 0);
}

/* Joins the units of a piece into the first: a quad each, and these. */
__device__ __forceinline__ void join_piece(partial<1> (&units)[UNITS], int count)
{
#pragma unroll
    for (int quad = 0; quad < UNITS; quad += QUAD)
#pragma unroll
        for (int i = quad + 1; i < quad + QUAD; i++)
            if (i < count)
                units[quad].join(units[i]);
    if (count > QUAD)
        units[0].join(units[QUAD]);
}

template <bool FP8>
__global__ void __maxnreg__(96) /* else two blocks do not fit */
    join_units_kernel(const __grid_constant__ attend_params p)
{
    __shared__ partial<1, 1> pieces[MAX_PIECES][2][32];
    int tile = (int)blockIdx.y, lane = threadIdx.x % 32;
    const row_extent at(p, blockIdx.x);
    const finish f(p, at);
    int count = (at.units + UNITS - 1) / UNITS;
    wait_for_kernel_ahead();
#pragma unroll 1
    for (int piece = threadIdx.x / 32; piece < count; piece += (int)blockDim.x / 32) {
        int units = min(at.units - piece * UNITS, (int)UNITS);
        partial<1> next[UNITS];
        load_tiles(p.records + (int64_t)at.row * p.parts + piece * UNITS, units, tile, next);
        join_piece(next, units);
#pragma unroll
        for (int half = 0; half < 2; half++)
            pieces[piece][half][lane] = next[0].half(half);
    }
    __syncthreads();
    int half = threadIdx.x / 32; /* a warp for each */
    if (half >= 2)
        return;
    partial<1, 1> result;
    result.clear();
#pragma unroll 4
    for (int piece = 0; piece < count; piece++)
        result.join(pieces[piece][half][lane]);
    write_row<FP8>(
        p, at, f, result, half, [&](int) { return tile; }, tile == 0);
}

using kernel = void (*)(attend_params);

/* For parts of so many units. */
kernel find_kernel(int part, bool fp8)
{
    switch (part) {
    case 1:
        return fp8 ? join_units_kernel<true> : join_units_kernel<false>;
    case QUAD:
        return fp8 ? join_parts_kernel<true, 2> : join_parts_kernel<false, 2>;
    default:
        return fp8 ? join_parts_kernel<true, 1> : join_parts_kernel<false, 1>;
    }
}

} // namespace

csa_status csa_cuda_load_join(void)
{
    csa_status status = CSA_OK;
    for (int part : {1, (int)QUAD, (int)UNITS})
        for (int fp8 = 0; fp8 < 2 && status == CSA_OK; fp8++)
            status = csa_load("attend: joining", find_kernel(part, fp8), 0);
    return status;
}

csa_status csa_cuda_join(const csa_context *context, const attend_params &p, bool fp8, int64_t rows,
                         void *stream)
{
    bool units = p.part == 1;
    csa_launch l;
    l.grid = dim3((unsigned)rows, units ? TILES : TILES / PART_TILES);
    l.block = dim3(32 * (units ? max(2, min((p.parts + UNITS - 1) / UNITS, (int)UNIT_WARPS)) : PART_TILES));
    l.stream = stream;
    l.overlap = !context->portable;
    return csa_queue("attend: joining", find_kernel(p.part, fp8), l, p);
}
