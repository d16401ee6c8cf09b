/*
 * Section 9: copies of the cache, row after row (gather) or block after block (stage).
 *
 * Both number first and copy then. Gather: a warp per row counts its tokens into cu_k, one block turns counts
 * into starts, then a block per 32 list entries finds what stands before them in the row and copies them, a
 * warp per token. Stage: a block per request counts its live blocks into the first column of its table, one
 * block turns counts into starts, a block per request numbers its blocks in the table (-1: none), then a block
 * per table entry copies it or makes it 0. The outputs hold the counts meanwhile: no scratch. Bound by memory.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "../tokens.h"
#include "compat.h"
#include "device/pairs.cuh"
#include "device/scan.cuh"

/* ---- One token, by a warp ----------------------------------------------------------------------- */

/* A key or a value as bf16. */
__device__ static void copy_half(const csa_cache &cache, const char *from, const float *scale, uint16_t *to)
{
    if (cache.kv.dtype == CSA_BF16) {
        uint32_t pairs[CSA_HEAD_SIZE / 64];
        csa_load_pairs<CSA_HEAD_SIZE>((const uint16_t *)from, pairs);
        csa_store_pairs<CSA_HEAD_SIZE>(to, pairs);
        return;
    }
    float factor = scale ? *scale : 1.0F;
    for (int i = csa_lane(); i < CSA_HEAD_SIZE; i += CSA_LANES)
        to[i] = csa_float_to_bf16(csa_e4m3_to_float(((const uint8_t *)from)[i]) * factor);
}

__device__ static void copy_token(const csa_cache &cache, int64_t block, int64_t offset, uint16_t *key,
                                  uint16_t *value)
{
    const char *row = (const char *)csa_at(&cache.kv, block, 0, offset);
    copy_half(cache, row, cache.k_scale, key);
    copy_half(cache, row + CSA_HEAD_SIZE * csa_itemsize(cache.kv.dtype), cache.v_scale, value);
}

/* ---- Gather ------------------------------------------------------------------------------------- */

struct gather_call {
    csa_compat_gather_args args;
    csa_tokens tokens;
    csa_cache cache;
};

/* A row, and the entries of its list that count: [first, columns). */
struct gather_row {
    int64_t row, request, position, first;
};

__device__ static gather_row find_gather_row(const gather_call &call, int64_t row)
{
    int64_t columns = call.args.selected.shape[1];
    int64_t position = csa_token_active(&call.tokens, row) ? csa_token_position(&call.tokens, row) : -1;
    int64_t live = position < 0 ? 0 : position / CSA_REGION + 1;
    return {row, csa_token_owner(&call.tokens, row), position, live < columns ? columns - live : 0};
}

/* Tokens of an entry, and where they are. */
__device__ static int64_t entry_tokens(const gather_call &call, const gather_row &r, int64_t entry,
                                       int64_t *block, int64_t *offset)
{
    if (entry < r.first || entry >= call.args.selected.shape[1])
        return 0;
    int64_t region = ((const int64_t *)csa_at(&call.args.selected, r.row, 0, 0))[entry];
    int64_t count = csa_region_tokens(&call.tokens, &call.cache.kv, r.request, region, r.position, block);
    *offset = count ? region * CSA_REGION % call.cache.kv.shape[2] : 0;
    return count;
}

static __global__ void gather_count_kernel(const __grid_constant__ gather_call call)
{
    int64_t rows = call.args.selected.shape[0], columns = call.args.selected.shape[1], block, offset;
    for (int64_t row = csa_first_warp_item(); row < rows; row += csa_warp_items()) {
        gather_row r = find_gather_row(call, row);
        int64_t count = 0;
        for (int64_t entry = r.first + csa_lane(); entry < columns; entry += CSA_LANES)
            count += entry_tokens(call, r, entry, &block, &offset);
        count = csa_warp_sum(count);
        if (csa_lane() == 0)
            *(int32_t *)csa_at(&call.args.cu_k, row, 0, 0) = (int32_t)count;
    }
}

/* Counts become starts, in place; *total after the last. One block. */
__device__ static int64_t counts_to_starts(const csa_tensor *counts, int64_t rows)
{
    int64_t before = 0;
    for (int64_t tile = 0; tile < rows; tile += CSA_BLOCK_THREADS) {
        int64_t row = tile + threadIdx.x, in_tile;
        int64_t start = before + csa_block_scan(row < rows ? csa_i32(counts, row) : 0, &in_tile);
        before += in_tile;
        if (row < rows)
            *(int32_t *)csa_at(counts, row, 0, 0) = (int32_t)start;
    }
    return before;
}

static __global__ void gather_start_kernel(const __grid_constant__ csa_tensor cu_k)
{
    int64_t rows = cu_k.shape[0] - 1, total = counts_to_starts(&cu_k, rows);
    if (threadIdx.x == 0)
        *(int32_t *)csa_at(&cu_k, rows, 0, 0) = (int32_t)total;
}

/* The tokens of 32 entries. */
struct gather_tile {
    int64_t block[CSA_LANES], offset[CSA_LANES], before[CSA_LANES];
    int64_t count[CSA_LANES];
};

/* Tokens of a row before entry `first`. */
__device__ static int64_t tokens_before(const gather_call &call, const gather_row &r, int64_t first)
{
    int64_t count = 0, block, offset;
    for (int64_t entry = r.first + threadIdx.x; entry < first; entry += CSA_BLOCK_THREADS)
        count += entry_tokens(call, r, entry, &block, &offset);
    return csa_block_sum(count);
}

/* Fills in the tile from entry `first` on; the whole block calls. */
__device__ static void find_tile(const gather_call &call, const gather_row &r, int64_t first, gather_tile *tile)
{
    int64_t count = 0, block = 0, offset = 0, in_tile, before = tokens_before(call, r, first);
    if (threadIdx.x < CSA_LANES)
        count = entry_tokens(call, r, first + threadIdx.x, &block, &offset);
    before += csa_block_scan(count, &in_tile);
    if (threadIdx.x < CSA_LANES) {
        tile->block[threadIdx.x] = block;
        tile->offset[threadIdx.x] = offset;
        tile->before[threadIdx.x] = before;
        tile->count[threadIdx.x] = count;
    }
    __syncthreads();
}

__device__ static int64_t gather_tiles(const gather_call &call)
{
    return (call.args.selected.shape[1] + CSA_LANES - 1) / CSA_LANES;
}

static __global__ void __launch_bounds__(CSA_BLOCK_THREADS)
    gather_copy_kernel(const __grid_constant__ gather_call call)
{
    __shared__ gather_tile tile;
    const csa_compat_gather_args &a = call.args;
    int64_t tiles = gather_tiles(call), items = a.selected.shape[0] * tiles;
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        gather_row r = find_gather_row(call, item / tiles);
        int64_t start = csa_i32(&a.cu_k, r.row);
        find_tile(call, r, item % tiles * CSA_LANES, &tile);
        for (int i = csa_warp(); i < CSA_LANES * CSA_REGION; i += CSA_BLOCK_WARPS) {
            int entry = i / CSA_REGION, token = i % CSA_REGION;
            int64_t to = start + tile.before[entry] + token;
            if (token < tile.count[entry])
                copy_token(call.cache, tile.block[entry], tile.offset[entry] + token,
                           (uint16_t *)csa_at(&a.key, to, 0, 0), (uint16_t *)csa_at(&a.value, to, 0, 0));
        }
        __syncthreads();
    }
}

csa_status csa_cuda_compat_gather(const csa_context *context, const csa_compat_gather_args *args)
{
    (void)context;
    gather_call call = {*args, *args->tokens, *args->cache};
    int64_t rows = args->selected.shape[0], tiles = (args->selected.shape[1] + CSA_LANES - 1) / CSA_LANES;
    csa_status status = csa_queue_items("compat: gather, counting", gather_count_kernel, rows, CSA_BLOCK_WARPS,
                                        args->stream, call);
    if (status == CSA_OK)
        status =
            csa_queue_items("compat: gather, numbering", gather_start_kernel, 1, 1, args->stream, args->cu_k);
    if (status != CSA_OK)
        return status;
    return csa_queue_items("compat: gather, copying", gather_copy_kernel, rows * tiles, 1, args->stream, call);
}

/* ---- Stage -------------------------------------------------------------------------------------- */

struct stage_call {
    csa_compat_stage_args args;
    csa_tokens tokens;
    csa_cache cache;
};

/* The block of a table entry, -1 if it is not live or not there. */
__device__ static int64_t live_block(const stage_call &call, int64_t request, int64_t column)
{
    if (column >= call.args.staged_table.shape[1] ||
        column * call.cache.kv.shape[2] >= csa_i32(&call.tokens.seq_lens, request))
        return -1;
    return csa_mapped_block(&call.tokens.block_table, request, column, call.cache.kv.shape[0]);
}

__device__ static int32_t *table_entry(const stage_call &call, int64_t request, int64_t column)
{
    return (int32_t *)csa_at(&call.args.staged_table, request, column, 0);
}

static __global__ void stage_count_kernel(const __grid_constant__ stage_call call)
{
    int64_t requests = call.args.staged_table.shape[0], columns = call.args.staged_table.shape[1];
    for (int64_t request = blockIdx.x; request < requests; request += gridDim.x) {
        int64_t count = 0;
        for (int64_t column = threadIdx.x; column < columns; column += CSA_BLOCK_THREADS)
            count += live_block(call, request, column) >= 0;
        count = csa_block_sum(count);
        if (threadIdx.x == 0)
            *table_entry(call, request, 0) = (int32_t)count;
    }
}

/* A table without columns has no counts. */
static __global__ void stage_start_kernel(const __grid_constant__ stage_call call)
{
    const csa_tensor &table = call.args.staged_table;
    int64_t total = table.shape[1] ? counts_to_starts(&table, table.shape[0]) : 0;
    if (threadIdx.x == 0 && csa_present(&call.args.staged_count))
        *(int32_t *)csa_at(&call.args.staged_count, 0, 0, 0) = (int32_t)total;
}

/* Numbers the blocks of a request, as far as there is room. */
static __global__ void stage_number_kernel(const __grid_constant__ stage_call call)
{
    const csa_compat_stage_args &a = call.args;
    int64_t requests = a.staged_table.shape[0], columns = a.staged_table.shape[1], room = a.staged.shape[0];
    for (int64_t request = blockIdx.x; request < requests; request += gridDim.x) {
        int64_t start = *table_entry(call, request, 0);
        __syncthreads(); /* the start's place is the first column's */
        for (int64_t tile = 0; tile < columns; tile += CSA_BLOCK_THREADS) {
            int64_t column = tile + threadIdx.x, block = live_block(call, request, column), in_tile;
            int64_t number = start + csa_block_scan(block >= 0, &in_tile);
            start += in_tile;
            bool fits = block >= 0 && number < room;
            if (column < columns)
                *table_entry(call, request, column) = fits ? (int32_t)number : -1;
            if (fits && csa_present(&a.staged_pages))
                *(int32_t *)csa_at(&a.staged_pages, number, 0, 0) = (int32_t)block;
        }
    }
}

static __global__ void stage_copy_kernel(const __grid_constant__ stage_call call)
{
    const csa_compat_stage_args &a = call.args;
    int64_t columns = a.staged_table.shape[1], entries = a.staged_table.shape[0] * columns;
    for (int64_t entry = blockIdx.x; entry < entries; entry += gridDim.x) {
        int64_t request = entry / columns, column = entry % columns;
        int64_t number = *table_entry(call, request, column), block = live_block(call, request, column);
        __syncthreads(); /* all have read the entry */
        if (number < 0 && threadIdx.x == 0)
            *table_entry(call, request, column) = 0;
        for (int64_t token = csa_warp(); number >= 0 && token < a.staged.shape[2]; token += CSA_BLOCK_WARPS) {
            uint16_t *row = (uint16_t *)csa_at(&a.staged, number, 0, token);
            copy_token(call.cache, block, token, row, row + CSA_HEAD_SIZE);
        }
    }
}

csa_status csa_cuda_compat_stage(const csa_context *context, const csa_compat_stage_args *args)
{
    (void)context;
    stage_call call = {*args, *args->tokens, *args->cache};
    int64_t requests = args->staged_table.shape[0], entries = requests * args->staged_table.shape[1];
    int64_t counted = entries > 0 ? requests : 0;
    csa_status status =
        csa_queue_items("compat: stage, counting", stage_count_kernel, counted, 1, args->stream, call);
    if (status == CSA_OK)
        status = csa_queue_items("compat: stage, numbering", stage_start_kernel, 1, 1, args->stream, call);
    if (status == CSA_OK)
        status = csa_queue_items("compat: stage, table", stage_number_kernel, counted, 1, args->stream, call);
    if (status != CSA_OK)
        return status;
    return csa_queue_items("compat: stage, copying", stage_copy_kernel, entries, 1, args->stream, call);
}

csa_status csa_cuda_load_compat_copy(void)
{
    csa_status status = csa_load("compat: gather, counting", gather_count_kernel, 0);
    if (status == CSA_OK)
        status = csa_load("compat: gather, numbering", gather_start_kernel, 0);
    if (status == CSA_OK)
        status = csa_load("compat: gather, copying", gather_copy_kernel, 0);
    if (status == CSA_OK)
        status = csa_load("compat: stage, counting", stage_count_kernel, 0);
    if (status == CSA_OK)
        status = csa_load("compat: stage, numbering", stage_start_kernel, 0);
    if (status == CSA_OK)
        status = csa_load("compat: stage, table", stage_number_kernel, 0);
    return status == CSA_OK ? csa_load("compat: stage, copying", stage_copy_kernel, 0) : status;
}
