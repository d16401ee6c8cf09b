/*
 * Section 9: packed pages of summaries, the schedule over them, and the metadata of their rows.
 *
 * Pages: a block each, a warp per summary. Rows: a warp each, which writes the row's metadata, its page table
 * and, where everything is selected, its list. Schedule: one block over all rows, since a worker's start
 * depends on every length; it takes 256 rows at a time, and the thread of a row writes the workers that start
 * in it. Nothing is rounded, no order shows. Bound by memory; the schedule by its passes over the lengths.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "../format.h"
#include "../tokens.h"
#include "compat.h"
#include "device/scan.cuh"

/* ---- What decode and prefill know of their rows ------------------------------------------------- */

struct rows_call {
    csa_tokens tokens;
    csa_rows rows;
    csa_tensor page_table, selected;
    int64_t count;
};

/* A token of no request has no pages: -1. */
__device__ static void write_pages(const rows_call &call, int64_t row)
{
    int64_t pages = call.page_table.shape[1], owner = csa_token_owner(&call.tokens, row);
    int32_t *entries = (int32_t *)csa_at(&call.page_table, row, 0, 0);
    for (int64_t page = csa_lane(); page < pages; page += CSA_LANES)
        entries[page] = owner < 0 ? -1 : (int32_t)(owner * pages + page);
}

/* Section 5's list where nothing is ranked: regions 0 to current, after padding. */
__device__ static void write_list(const csa_tensor *selected, int64_t row, int64_t current)
{
    int64_t width = selected->shape[1] - 1, *entries = (int64_t *)csa_at(selected, row, 0, 0);
    if (current >= width)
        current = width - 1;
    for (int64_t i = csa_lane(); i <= width; i += CSA_LANES) {
        int64_t region = i - (width - current);
        entries[i] = current >= 0 && region >= 0 ? region : -1;
    }
}

static __global__ void rows_kernel(const __grid_constant__ rows_call call)
{
    for (int64_t row = csa_first_warp_item(); row < call.count; row += csa_warp_items()) {
        bool active = csa_token_active(&call.tokens, row);
        int64_t position = active ? csa_token_position(&call.tokens, row) : 0;
        if (csa_lane() == 0)
            csa_write_row(&call.rows, row, active, position);
        if (csa_present(&call.page_table))
            write_pages(call, row);
        if (csa_present(&call.selected))
            write_list(&call.selected, row, position / CSA_REGION);
    }
}

static csa_status write_rows(const csa_tokens *tokens, const csa_rows *rows, const csa_tensor *page_table,
                             const csa_tensor *selected, int64_t count, void *stream)
{
    rows_call call = {*tokens, {}, *page_table, *selected, count};
    if (rows)
        call.rows = *rows;
    else if (!csa_present(page_table) && !csa_present(selected))
        return CSA_OK;
    return csa_queue_items("compat: rows", rows_kernel, count, CSA_BLOCK_WARPS, stream, call);
}

/* ---- Schedule ----------------------------------------------------------------------------------- */

/* Where workers start: the first `longer` of them have a segment more than the others. */
struct shares {
    int64_t each, longer, workers;
};

__device__ static int64_t start_of(const shares &s, int64_t worker)
{
    return worker * s.each + (worker < s.longer ? worker : s.longer);
}

/* The first worker that starts at this segment or later; 0 < segment < total leads to one. */
__device__ static int64_t first_worker(const shares &s, int64_t segment)
{
    int64_t long_part = s.longer * (s.each + 1);
    if (segment <= long_part)
        return (segment + s.each) / (s.each + 1);
    return s.longer + (segment - long_part + s.each - 1) / s.each;
}

__device__ static int64_t segments(const csa_compat_schedule_args &a, int64_t row)
{
    if (row >= a.lengths.shape[0])
        return 0;
    int64_t length = csa_i32(&a.lengths, row);
    return length > 0 ? (length + CSA_COMPAT_SEGMENT - 1) / CSA_COMPAT_SEGMENT : 0;
}

__device__ static void write_worker(const csa_compat_schedule_args &a, int64_t worker, int64_t row,
                                    int64_t segment)
{
    int32_t *entry = (int32_t *)csa_at(&a.schedule, worker, 0, 0);
    entry[0] = (int32_t)row;
    entry[1] = (int32_t)segment;
}

static __global__ void schedule_kernel(const __grid_constant__ csa_compat_schedule_args a)
{
    int64_t rows = a.lengths.shape[0], workers = a.schedule.shape[0] - 1, mine = 0, before = 0;
    for (int64_t row = threadIdx.x; row < rows; row += CSA_BLOCK_THREADS)
        mine += segments(a, row);
    int64_t total = csa_block_sum(mine);
    const shares s = {total / workers, total % workers, workers};
    for (int64_t tile = 0; tile < rows; tile += CSA_BLOCK_THREADS) {
        int64_t row = tile + threadIdx.x, count = segments(a, row), in_tile;
        int64_t first = before + csa_block_scan(count, &in_tile);
        before += in_tile;
        if (count > 0)
            for (int64_t w = first_worker(s, first); w <= workers && start_of(s, w) < first + count; w++)
                write_worker(a, w, row, start_of(s, w) - first);
    }
    int64_t past = s.each > 0 ? workers : s.longer; /* starts at the end */
    for (int64_t w = past + threadIdx.x; w <= workers; w += CSA_BLOCK_THREADS)
        write_worker(a, w, rows, 0);
}

static csa_status write_schedule(const csa_tensor *lengths, const csa_tensor *schedule, void *stream)
{
    csa_compat_schedule_args args = {};
    args.lengths = *lengths;
    args.schedule = *schedule;
    return csa_queue_items("compat: schedule", schedule_kernel, 1, 1, stream, args);
}

csa_status csa_cuda_compat_schedule(const csa_context *context, const csa_compat_schedule_args *args)
{
    (void)context;
    return write_schedule(&args->lengths, &args->schedule, args->stream);
}

static csa_status maybe_schedule(const csa_rows *rows, const csa_tensor *schedule, void *stream)
{
    return csa_present(schedule) ? write_schedule(&rows->lengths, schedule, stream) : CSA_OK;
}

/* ---- Packing ------------------------------------------------------------------------------------ */

struct pack_call {
    csa_tokens tokens;
    csa_cache cache;
    csa_tensor packed;
    int64_t regions, pages; /* pages per request */
    int64_t count;          /* tokens */
    bool live_only;
};

/* csa_compat_packed_pages, which the core keeps to itself. */
CSA_INLINE int64_t packed_pages(int64_t regions)
{
    const int64_t together = (int64_t)4 * CSA_COMPAT_PAGE_REGIONS;
    return regions <= 0 ? 0 : ((regions - 1) / together + 1) * 4;
}

/* The pages that the longest of a request's tokens needs; an inactive token has length 1. The whole block
 * calls. */
__device__ static int64_t live_pages(const pack_call &call, int64_t request)
{
    int64_t first = csa_token_first(&call.tokens, request), end = csa_token_first(&call.tokens, request + 1);
    int64_t longest = 1;
    if (end > call.count)
        end = call.count;
    for (int64_t token = (first < 0 ? 0 : first) + threadIdx.x; token < end; token += CSA_BLOCK_THREADS) {
        int64_t length = csa_token_position(&call.tokens, token) / CSA_REGION + 1;
        if (csa_token_active(&call.tokens, token) && length > longest)
            longest = length;
    }
    return packed_pages(csa_block_max(longest));
}

/* One summary, or zeros, by a warp: eight bytes a lane, one by one where they are not aligned. */
__device__ static void copy_summary(uint8_t *to, const uint8_t *from)
{
    if (((uintptr_t)to | (uintptr_t)from) % sizeof(uint64_t) == 0) {
        ((uint64_t *)to)[csa_lane()] = from ? ((const uint64_t *)from)[csa_lane()] : 0;
        return;
    }
    for (int i = csa_lane(); i < CSA_SUMMARY_SIZE; i += CSA_LANES)
        to[i] = from ? from[i] : 0;
}

__device__ static void write_one(uint8_t *to)
{
    const uint32_t one = 0x3F800000; /* the scale 1.0F; pages need no alignment */
    for (int i = 0; i < 4; i++)
        to[i] = (uint8_t)(one >> 8 * i);
}

__device__ static void pack_page(const pack_call &call, int64_t page)
{
    int64_t request = page / call.pages, first = page % call.pages * CSA_COMPAT_PAGE_REGIONS;
    uint8_t *out = (uint8_t *)csa_at(&call.packed, page, 0, 0);
    for (int i = csa_warp(); i < CSA_COMPAT_PAGE_REGIONS; i += CSA_BLOCK_WARPS) {
        const uint8_t *summary = NULL;
        if (first + i < call.regions)
            summary = csa_summary_at(&call.tokens, &call.cache, request, first + i);
        copy_summary(out + i * CSA_SUMMARY_SIZE, summary);
    }
    if (threadIdx.x < CSA_COMPAT_PAGE_REGIONS)
        write_one(out + CSA_PAGE_SCALES + 4 * threadIdx.x);
}

static __global__ void pack_kernel(const __grid_constant__ pack_call call)
{
    for (int64_t page = blockIdx.x; page < call.packed.shape[0]; page += gridDim.x)
        if (!call.live_only || page % call.pages < live_pages(call, page / call.pages))
            pack_page(call, page);
}

csa_status csa_cuda_compat_pack(const csa_context *context, const csa_compat_pack_args *args, int64_t tokens)
{
    (void)context;
    const csa_tensor none = {};
    pack_call call = {*args->tokens, *args->cache,   args->packed, args->regions, packed_pages(args->regions),
                      tokens,        args->live_only};
    csa_status status =
        csa_queue_items("compat: pack", pack_kernel, args->packed.shape[0], 1, args->stream, call);
    if (status == CSA_OK)
        status = write_rows(args->tokens, args->rows_out, &args->page_table, &none, tokens, args->stream);
    return status == CSA_OK ? maybe_schedule(args->rows_out, &args->schedule, args->stream) : status;
}

/* ---- Prefill metadata --------------------------------------------------------------------------- */

csa_status csa_cuda_compat_metadata(const csa_context *context, const csa_compat_metadata_args *args,
                                    int64_t tokens)
{
    (void)context;
    csa_status status =
        write_rows(args->tokens, args->rows_out, &args->page_table, &args->selected, tokens, args->stream);
    return status == CSA_OK ? maybe_schedule(args->rows_out, &args->schedule, args->stream) : status;
}

csa_status csa_cuda_load_compat_pack(void)
{
    csa_status status = csa_load("compat: rows", rows_kernel, 0);
    if (status == CSA_OK)
        status = csa_load("compat: schedule", schedule_kernel, 0);
    return status == CSA_OK ? csa_load("compat: pack", pack_kernel, 0) : status;
}
