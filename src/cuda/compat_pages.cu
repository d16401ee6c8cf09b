/*
 * Section 9: a selection as lists of 8-token pages, from true positions or from upper bounds.
 *
 * Where rows start is one block's running sum over all rows, 256 at a time; then a warp per row writes what is
 * said of it and its pages. Bound by launches and, with pages, by reading the lists.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "../pages.h"
#include "../tokens.h"
#include "compat.h"
#include "device/scan.cuh"

struct pages_call {
    csa_compat_pages_args args;
    csa_tokens tokens;
    csa_tensor kv; /* absent without pages */
};

/* Pages of a row, wherever they stand. */
__device__ static int64_t needed_pages(const pages_call &call, int64_t row)
{
    if (!csa_token_active(&call.tokens, row))
        return 0;
    int64_t live = csa_token_position(&call.tokens, row) / CSA_REGION + 1;
    return live < call.args.columns ? live : call.args.columns;
}

/* Of those, the pages that have a place in the plan. */
__device__ static int64_t placed_pages(const pages_call &call, int64_t row, int64_t start)
{
    const csa_compat_pages_args &a = call.args;
    int64_t needed = needed_pages(call, row), room = csa_i32(&a.page_indptr, row + 1) - start;
    if (csa_present(&a.pages) && room > a.pages.shape[0] - start)
        room = a.pages.shape[0] - start;
    if (start < 0 || room < 0)
        return 0;
    return needed < room ? needed : room;
}

static __global__ void starts_kernel(const __grid_constant__ pages_call call)
{
    int64_t rows = call.args.page_indptr.shape[0] - 1, before = 0;
    for (int64_t tile = 0; tile <= rows; tile += CSA_BLOCK_THREADS) {
        int64_t row = tile + threadIdx.x, in_tile;
        int64_t start = before + csa_block_scan(row < rows ? needed_pages(call, row) : 0, &in_tile);
        before += in_tile;
        if (row <= rows)
            *(int32_t *)csa_at(&call.args.page_indptr, row, 0, 0) = (int32_t)start;
    }
}

__device__ static int32_t page_of_entry(const pages_call &call, int64_t request, int64_t position,
                                        int64_t region)
{
    int64_t block, per_block = call.kv.shape[2] / CSA_REGION;
    if (!csa_region_tokens(&call.tokens, &call.kv, request, region, position, &block))
        return 0;
    return (int32_t)(block * csa_block_pages(&call.kv) + region % per_block);
}

__device__ static void write_lengths(const pages_call &call, int64_t row, int64_t count)
{
    const csa_compat_pages_args &a = call.args;
    if (csa_present(&a.page_counts))
        *(int32_t *)csa_at(&a.page_counts, row, 0, 0) = (int32_t)count;
    if (csa_present(&a.last_page_len))
        *(int32_t *)csa_at(&a.last_page_len, row, 0, 0) =
            count ? (int32_t)(csa_token_position(&call.tokens, row) % CSA_REGION + 1) : 0;
}

/* The list's last entries. */
__device__ static void write_pages(const pages_call &call, int64_t row, int64_t start, int64_t count)
{
    const csa_compat_pages_args &a = call.args;
    const int64_t *entries = (const int64_t *)csa_at(&a.selected, row, 0, 0) + (a.columns - count);
    int64_t request = csa_token_owner(&call.tokens, row), position = csa_token_position(&call.tokens, row);
    for (int64_t i = csa_lane(); i < count; i += CSA_LANES)
        *(int32_t *)csa_at(&a.pages, start + i, 0, 0) = page_of_entry(call, request, position, entries[i]);
}

static __global__ void pages_kernel(const __grid_constant__ pages_call call)
{
    const csa_compat_pages_args &a = call.args;
    int64_t rows = a.page_indptr.shape[0] - 1;
    for (int64_t row = csa_first_warp_item(); row < rows; row += csa_warp_items()) {
        int64_t start = csa_i32(&a.page_indptr, row), count = placed_pages(call, row, start);
        if (csa_lane() == 0)
            write_lengths(call, row, count);
        if (csa_present(&a.pages))
            write_pages(call, row, start, count);
    }
}

csa_status csa_cuda_compat_pages(const csa_context *context, const csa_compat_pages_args *args)
{
    (void)context;
    pages_call call = {*args, *args->tokens, {}};
    csa_status status = CSA_OK;
    if (csa_present(&args->pages))
        call.kv = args->cache->kv;
    if (!args->planned)
        status = csa_queue_items("compat: page starts", starts_kernel, 1, 1, args->stream, call);
    if (status != CSA_OK)
        return status;
    return csa_queue_items("compat: pages", pages_kernel, args->page_indptr.shape[0] - 1, CSA_BLOCK_WARPS,
                           args->stream, call);
}

csa_status csa_cuda_load_compat_pages(void)
{
    csa_status status = csa_load("compat: page starts", starts_kernel, 0);
    return status == CSA_OK ? csa_load("compat: pages", pages_kernel, 0) : status;
}
