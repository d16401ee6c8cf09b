/*
 * Section 4: scores of a request's summaries, for all groups, heads and drafts in one pass.
 *
 * A window is a few consecutive tokens; its tokens of one request form a run, and all rows of a run share each
 * summary that is read. Four heads of a row are a quad; four quads are a pack: 16 columns of the matrix
 * product, permuted so that a lane ends up with the four heads of one row and nothing is exchanged. Heads past
 * the fourth are further packs of the same rows, left out where all their weights are zero (they only pad).
 *
 * Work: the windows' tiles of 32 regions in one list, cut evenly over a fixed number of blocks, where the start
 * of a run counts as some tiles. A warp takes half a tile (one or two packs), asking for the next one before it
 * works on it, or a whole one. Its lanes load 16 bytes of a summary each, straight into the registers of the
 * product: both operands number the inner index as the loads do. e4m3 becomes f16 exactly, products are exact,
 * sums are fp32: 16 products of 16 in order, however many rows share them. The queries of a run come to shared
 * memory, as the product wants them, while (half tiles) its first summaries are on their way.
 *
 * Bound by memory for up to four packs: 8 KB of a warp are under way at a time, 8 to 12 warps a multiprocessor.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "score_batch.cuh"

#include "../tokens.h"
#include "device/lanes.cuh"
#include "launch.h"
#include "stages.h"

namespace
{

enum {
    TILE = 32,         /* regions: what blocks are given, and what a warp works on at a time at most */
    START = 6,         /* tiles that the start of a run is worth: who starts another one gets fewer */
    LIST = THREADS,    /* windows listed at a time */
    WINDOW_TOKENS = 16 /* at most */
};

struct score_params : score_source {
    view scores, peaks;      /* of the span's rows; peaks: the largest of each CSA_PEAK neighbours, in a step */
    csa_rows rows;           /* outputs */
    uint32_t window, listed; /* tokens of one, and of those that are listed at a time */
    bool metadata;
};

__device__ void write_metadata(const score_params &p, uint32_t row)
{
    int64_t position = p.tokens.place(p.first + quotient(row, p.groups)).position;
    csa_write_row(&p.rows, row, position >= 0, max(position, (int64_t)0));
}

/* ---- Windows ------------------------------------------------------------------------------------ */

/* What is known of a token, in shared memory. */
struct listed_token {
    int owner;
    uint32_t need; /* regions */
};

/* Windows that are listed at a time: what lies before each one's work, then the total; their tokens. Work is
 * tiles, and the starts of runs. */
struct window_list {
    uint32_t before[LIST + 1], warp_sums[WARPS];
    listed_token tokens[1]; /* as many as there are */
};

__host__ __device__ uint32_t tiles_of(uint32_t regions)
{
    return (regions + TILE - 1) / TILE;
}

__device__ uint32_t work_of(uint32_t regions)
{
    return regions > 0 ? START + tiles_of(regions) : 0;
}

/* The run that starts at a token: where it ends, and the most regions that one of its tokens needs. */
__device__ int find_run(const listed_token *tokens, int start, int count, uint32_t &most)
{
    int end = start;
    most = 0;
    for (; end < count && tokens[end].owner == tokens[start].owner; end++)
        most = max(most, tokens[end].need);
    return end;
}

/* The work of a window's runs. */
__device__ uint32_t window_work(const listed_token *tokens, int count)
{
    uint32_t work = 0, most;
    for (int start = 0; start < count; work += work_of(most))
        start = find_run(tokens, start, count, most);
    return work;
}

/* Lists so many tokens of the span from `first` on. */
__device__ void make_list(const score_params &p, window_list &list, uint32_t first, uint32_t count)
{
    uint32_t i = threadIdx.x, token = i * p.window;
    for (uint32_t k = i; k < count; k += THREADS) {
        token_place place = p.tokens.place(p.first + first + k);
        list.tokens[k] = {place.owner, regions_to_score(p, place)};
    }
    __syncthreads();
    uint32_t before =
        sum_lanes(token < count ? window_work(list.tokens + token, (int)min(count - token, p.window)) : 0);
    if (i % 32 == 31)
        list.warp_sums[i / 32] = before;
    __syncthreads();
#pragma unroll
    for (uint32_t warp = 0; warp < WARPS - 1; warp++)
        before += warp < i / 32 ? list.warp_sums[warp] : 0;
    list.before[i + 1] = before;
    if (i == 0)
        list.before[0] = 0;
    __syncthreads();
}

/* The window in which a place in the list lies: as many end before. */
__device__ uint32_t find_window(const window_list &list, uint32_t at)
{
    uint32_t before = 0;
#pragma unroll
    for (int i = 0; i < LIST; i += 32)
        before += __popc(__ballot_sync(~0U, list.before[i + threadIdx.x % 32 + 1] <= at));
    return before;
}

/* ---- Runs --------------------------------------------------------------------------------------- */

/* The part [from, to) of a run's tiles, for all its rows: `count` tokens from `token` of the span on. */
template <bool ALIGNED, int PACKS>
__device__ void score_run(const score_params &p, batch<PACKS> &b, const listed_token *run, uint32_t token,
                          int count, uint32_t regions, uint32_t from, uint32_t to)
{
    int rows = count * (int)p.groups, quad_shift = 0;
    const int32_t *row = p.map.row(run->owner);
    if (p.heads > 4 && __syncthreads_or(has_further_heads(p, token, rows)))
        quad_shift = p.heads > 8 ? 2 : 1;
    for (int first = 0, here; first < rows; first += here) {
        here = min(rows - first, PACKS * 4 >> quad_shift);
        int packs = (here + 3) / 4 << quad_shift;
        auto place = [&](uint32_t at, uint32_t of, bool real) {
            uint32_t all = token * p.groups + first + at;
            b.need[at] = real ? run[of].need : 0;
            b.scores[at] = real ? (float *)p.scores.at(all) : nullptr;
            b.peaks[at] = real ? (float *)p.peaks.at(all) : nullptr;
        };
        score_packs<ALIGNED>(p, b, row, from * TILE, min(to * TILE, regions), packs, quad_shift, (bool)p.peaks,
                             [&] {
                                 batch_rows rows = {token, (uint32_t)first, (uint32_t)here, packs, quad_shift};
                                 fill_batch<ALIGNED>(p, b, rows, place);
                                 __syncthreads();
                             });
        __syncthreads();
    }
}

/* ALIGNED: summaries and queries, to 16 bytes. */
template <bool ALIGNED, int PACKS>
__global__ void __launch_bounds__(THREADS, PACKS > 2 ? 2 : 3)
    score_kernel(const __grid_constant__ score_params p)
{
    extern __shared__ __align__(16) unsigned char shared[];
    batch<PACKS> &b = *(batch<PACKS> *)shared;
    window_list &list = *(window_list *)(shared + sizeof b);
    start_kernel_behind();
    if (p.metadata)
        for (uint32_t row = blockIdx.x * THREADS + threadIdx.x; row < p.count * p.groups;
             row += gridDim.x * THREADS)
            write_metadata(p, row);
    if (!p.scores)
        return;
    for (uint32_t first = 0; first < p.count; first += p.listed) {
        uint32_t listed = min(p.count - first, p.listed);
        make_list(p, list, first, listed);
        uint32_t total = list.before[LIST], each = total / gridDim.x, further = total - each * gridDim.x;
        uint32_t at = each * blockIdx.x + min(blockIdx.x, further), end = at + each + (blockIdx.x < further);
        while (at < end) {
            uint32_t window = find_window(list, at), begin = list.before[window], most;
            uint32_t window_end = min(list.before[window + 1], end);
            int token = (int)(window * p.window), tokens_end = (int)min(token + p.window, listed);
            for (int stop; token < tokens_end; token = stop) {
                stop = find_run(list.tokens, token, tokens_end, most);
                uint32_t tiles = begin + START, run_end = begin + work_of(most);
                uint32_t from = max(at, tiles), to = min(run_end, window_end);
                if (from < to)
                    score_run<ALIGNED>(p, b, list.tokens + token, first + token, stop - token, most,
                                       from - tiles, to - tiles);
                begin = run_end;
            }
            at = window_end;
        }
        __syncthreads();
    }
}

/* ---- Launching ---------------------------------------------------------------------------------- */

bool mixed_tokens(const csa_tokens &t)
{
    return csa_present(&t.owners) || csa_present(&t.query_start);
}

/* Tokens that share a window: as many as one batch can hold, drafts of a request or neighbours in prefill. */
uint32_t window_size(const score_params &p, bool mixed, int packs)
{
    uint32_t fitting = max(1U, (uint32_t)packs * 4 / p.groups),
             wanted = mixed ? WINDOW_TOKENS : p.tokens.query_len;
    uint32_t size = min(min(wanted, fitting), (uint32_t)WINDOW_TOKENS);
    while (!mixed && wanted % size) /* windows of a request's tokens do not reach into the next's */
        size--;
    return size;
}

/* Tokens that are listed at a time, at most: the less shared memory, the more loads under way. */
uint32_t most_listed(bool few)
{
    return few ? 256 : LIST * WINDOW_TOKENS;
}

/* Shared memory of a block: a batch of so many packs, and a list of so many tokens. */
size_t shared_bytes(bool few, uint32_t tokens)
{
    return (few ? sizeof(batch<2>) : sizeof(batch<4>)) + offsetof(window_list, tokens) +
           sizeof(listed_token) * tokens;
}

csa_status queue_score(const csa_context *context, score_params &p, bool aligned, bool mixed, void *stream)
{
    uint64_t rows = (mixed ? WINDOW_TOKENS : (uint64_t)p.tokens.query_len) * p.groups;
    bool few = aligned && (rows + 3) / 4 * ((p.heads + 3) / 4) <= 2;
    csa_launch l;
    p.window = window_size(p, mixed, few ? 2 : 4);
    p.listed = min(p.count, min((uint32_t)LIST, most_listed(few) / p.window) * p.window);
    uint64_t windows = (p.count + p.window - 1) / p.window, tiles = windows * (START + tiles_of(p.regions));
    uint64_t most = (uint64_t)context->multiprocessors * (few ? 3 : 2);
    uint64_t blocks = p.metadata ? most : (tiles + 1) / 2; /* two of which a block takes at a time at least */
    l.grid = dim3((unsigned)min(blocks, most));
    l.block = dim3(THREADS);
    l.stream = stream;
    l.shared = shared_bytes(few, p.listed);
    return csa_queue("score",
                     few       ? score_kernel<true, 2>
                     : aligned ? score_kernel<true, 4>
                               : score_kernel<false, 4>,
                     l, p);
}

} // namespace

csa_status csa_cuda_load_score(void)
{
    csa_status status = csa_load("score", score_kernel<true, 2>, shared_bytes(true, most_listed(true)));
    if (status == CSA_OK)
        status = csa_load("score", score_kernel<true, 4>, shared_bytes(false, most_listed(false)));
    if (status == CSA_OK)
        status = csa_load("score", score_kernel<false, 4>, shared_bytes(false, most_listed(false)));
    return status;
}

static csa_status fill_source(score_source &p, const csa_score_args *args, csa_span span, int64_t width)
{
    const csa_tensor &summaries = args->cache->summaries, &scores = args->scores;
    if (csa_present(&scores) && scores.shape[1] > INT32_MAX)
        return csa_cuda_fail(CSA_ERROR_UNSUPPORTED, "scores: %lld regions, at most 2^31 - 1 are supported",
                             (long long)scores.shape[1]);
    csa_status status = csa_cuda_check_rows(args->query.shape[0], args->query.shape[1]);
    if (status != CSA_OK)
        return status;
    p.tokens = csa_token_source(*args->tokens);
    p.map = csa_block_map(args->tokens->block_table, summaries.shape[0]);
    p.summaries = (const uint8_t *)summaries.data;
    p.block_step = csa_view(summaries).step[0];
    p.region_step = csa_view(summaries).step[1];
    p.query = csa_view(args->query);
    p.weights = csa_view(args->weights);
    p.first = (uint32_t)span.first;
    p.count = (uint32_t)args->query.shape[0];
    p.groups = (uint32_t)args->query.shape[1];
    p.heads = (uint32_t)args->query.shape[2];
    p.regions = csa_present(&scores) ? (uint32_t)scores.shape[1] : 0;
    p.width = (int)width;
    while ((1 << p.block_shift) < summaries.shape[1])
        p.block_shift++;
    return CSA_OK;
}

csa_status csa_cuda_score_span(const csa_context *context, const csa_score_args *args, csa_span span,
                               int64_t width, const csa_tensor *peaks)
{
    score_params p = {};
    csa_status status = fill_source(p, args, span, width);
    if (p.regions > 0)
        p.scores = csa_view(args->scores);
    p.peaks = csa_view(*peaks);
    p.metadata = args->rows_out != nullptr;
    if (p.metadata)
        p.rows = *args->rows_out;
    if (status != CSA_OK || p.count == 0 || (!p.metadata && p.regions == 0))
        return status;
    bool aligned = csa_aligned(&args->cache->summaries) && csa_aligned(&args->query);
    return queue_score(context, p, aligned, mixed_tokens(*args->tokens), args->stream);
}

csa_status csa_cuda_score(const csa_context *context, const csa_score_args *args)
{
    csa_tensor none = {};
    return csa_cuda_score_span(context, args, {0, args->query.shape[0]}, -1, &none);
}
