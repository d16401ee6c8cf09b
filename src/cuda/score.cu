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
#include "../tokens.h"
#include "device/instructions.cuh"
#include "device/lanes.cuh"
#include "device/views.cuh"
#include "launch.h"
#include "stages.h"

namespace
{

enum {
    WARPS = 4,
    THREADS = 32 * WARPS,
    TILE = 32,         /* regions: what blocks are given, and what a warp works on at a time at most */
    STEPS = 16,        /* of the inner index: 256 / 16 */
    START = 6,         /* tiles that the start of a run is worth: who starts another one gets fewer */
    LIST = THREADS,    /* windows listed at a time */
    WINDOW_TOKENS = 16 /* at most */
};

struct score_params {
    token_source tokens;
    block_map map;
    const uint8_t *summaries;
    int64_t block_step, region_step; /* of the summaries */
    view query, weights, scores;     /* of the span's tokens and rows */
    view peaks;                      /* a step: the largest of each CSA_PEAK neighbours of a row */
    csa_rows rows;                   /* outputs */
    uint32_t first, count;           /* the span */
    uint32_t groups, heads, regions;
    uint32_t window, listed; /* tokens of one, and of those that are listed at a time */
    int width; /* a step: rows that rank at most so many are left out; -1: all, and the current region too */
    int block_shift; /* regions of a block */
    bool metadata;
};

/* How many regions of a token are scored. */
__device__ uint32_t regions_to_score(const score_params &p, const token_place &place)
{
    int64_t current = place.position < 0 ? 0 : place.position / CSA_REGION;
    if (p.width < 0)
        return (uint32_t)min(current + 1, (int64_t)p.regions);
    uint32_t ranked = (uint32_t)min(current, (int64_t)p.regions - 1);
    return (int)ranked > p.width ? ranked : 0;
}

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

/* ---- Batches: rows that share a pass over the summaries ----------------------------------------- */

template <int PACKS> struct batch {
    uint4 query[PACKS][STEPS][32];               /* operand b of both products of a pack */
    float4 weight[PACKS][4];                     /* pack, row of the pack: four heads */
    float *scores[PACKS * 4], *peaks[PACKS * 4]; /* where a row's scores go; NULL: no row */
    uint32_t need[PACKS * 4];
};

/* Rows [first, first + count) of a run that starts at `token` of the span; 1 << quad_shift packs hold a row's
 * heads. */
struct batch_rows {
    uint32_t token, first, count;
    int packs, quad_shift;
};

template <bool ALIGNED> __device__ uint32_t load_word(const uint8_t *q)
{
    return ALIGNED ? *(const uint32_t *)q : q[0] | q[1] << 8 | q[2] << 16 | (uint32_t)q[3] << 24;
}

/* Which of a run's tokens a batch's row is of, and its group. */
struct row_place {
    uint32_t of, group;

    __device__ row_place(const score_params &p, uint32_t row)
        : of(quotient(row, p.groups)), group(row - of * p.groups)
    {
    }
};

/* Loads the queries and weights of a batch's rows, and says where their scores go. */
template <bool ALIGNED, int PACKS>
__device__ void fill_batch(const score_params &p, batch<PACKS> &b, const listed_token *run,
                           const batch_rows &rows)
{
    uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, quads = 1U << rows.quad_shift;
#pragma unroll 1
    for (uint32_t pack = 0; pack < (uint32_t)rows.packs; pack++) {
        uint32_t row = (pack >> rows.quad_shift) * 4 + g / 2, head = (pack & (quads - 1)) * 4 + g % 2;
        row_place at(p, rows.first + row);
        bool low = row < rows.count && head < p.heads, high = row < rows.count && head + 2 < p.heads;
        const uint8_t *query = p.query.at(rows.token + at.of, at.group, head) + t * 16;
#pragma unroll
        for (int i = 0; i < STEPS / WARPS; i++) {
            int step = threadIdx.x / 32 * (STEPS / WARPS) + i, byte = step / 4 * 64 + step % 4 * 4;
            uint32_t a = low ? load_word<ALIGNED>(query + byte) : 0;
            uint32_t c = high ? load_word<ALIGNED>(query + 2 * p.query.step[2] + byte) : 0;
            uint2 lower = e4m3x4_to_f16x4(a), higher = e4m3x4_to_f16x4(c);
            b.query[pack][step][lane] = make_uint4(lower.x, lower.y, higher.x, higher.y);
        }
    }
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < PACKS * 16; i += THREADS) {
        uint32_t row = (i / 16 >> rows.quad_shift) * 4 + i / 4 % 4, head = (i / 16 & (quads - 1)) * 4 + i % 4;
        row_place at(p, rows.first + row);
        bool real = row < rows.count;
        ((float *)b.weight)[i] =
            real && head < p.heads ? ((const float *)p.weights.at(rows.token + at.of, at.group))[head] : 0.0F;
        if (head == 0) {
            uint32_t all = rows.token * p.groups + rows.first + row;
            b.need[row] = real ? run[at.of].need : 0;
            b.scores[row] = real ? (float *)p.scores.at(all) : nullptr;
            b.peaks[row] = real ? (float *)p.peaks.at(all) : nullptr;
        }
    }
}

template <bool ALIGNED> __device__ uint4 load_summary(const uint8_t *p)
{
    return ALIGNED ? load_streaming_16(p) : load_16<false>(p);
}

/* What a lane has of 16 * HALVES summaries: its rows are regions g + 8 i. */
template <bool ALIGNED, int HALVES> struct tile_data {
    uint4 raw[2 * HALVES][4]; /* 64 bytes apart */
    int block[2 * HALVES];    /* as the table says; -1 where none is needed */

    __device__ void find(const score_params &p, const int32_t *row, uint32_t region, uint32_t regions)
    {
#pragma unroll
        for (int i = 0; i < 2 * HALVES; i++) {
            uint32_t own = region + i * 8 + threadIdx.x % 32 / 4;
            block[i] = own < regions ? p.map.entry(row, own >> p.block_shift) : -1;
        }
    }

    __device__ void load(const score_params &p, const int (&found)[2 * HALVES], uint32_t region)
    {
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < 2 * HALVES; i++) {
            uint32_t within = (region + i * 8 + g) & ((1U << p.block_shift) - 1);
            const uint8_t *summary = p.summaries + found[i] * p.block_step + within * p.region_step + t * 16;
            block[i] = found[i];
#pragma unroll
            for (int j = 0; j < 4; j++)
                raw[i][j] =
                    p.map.valid(found[i]) ? load_summary<ALIGNED>(summary + j * 64) : make_uint4(0, 0, 0, 0);
        }
    }
};

/* The largest of each eight regions, which lie in lanes of a row, to its peaks; NaN only where all are. */
template <int HALVES>
__device__ void write_peaks(float (&peaks)[2 * HALVES], float *to, uint32_t region, uint32_t need)
{
    static_assert(CSA_PEAK == 8, "lanes of a row");
    uint32_t g = threadIdx.x % 32 / 4, first = region - g;
    float own = NAN;
#pragma unroll
    for (int i = 0; i < 2 * HALVES; i++) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
            peaks[i] = fmaxf(peaks[i], __shfl_xor_sync(~0U, peaks[i], step));
        own = (int)g == i ? peaks[i] : own;
    }
    if (g < 2 * HALVES && first + g * CSA_PEAK < need)
        to[first / CSA_PEAK + g] = own;
}

/* Scores 16 * HALVES regions for the rows of the first PACKS packs of a batch. */
template <int PACKS, bool ALIGNED, int HALVES, typename Batch>
__device__ void score_regions(const score_params &p, const Batch &b, const tile_data<ALIGNED, HALVES> &tile,
                              uint32_t region, int quad_shift)
{
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, quads = 1 << quad_shift;
    float sums[PACKS][HALVES][2][4] = {}; /* pack, half, heads 0-1 or 2-3 */
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        uint32_t a[HALVES][4];
#pragma unroll
        for (int i = 0; i < 2 * HALVES; i++) {
            uint4 v = tile.raw[i][step / 4];
            uint32_t word = step % 4 == 0 ? v.x : step % 4 == 1 ? v.y : step % 4 == 2 ? v.z : v.w;
            uint2 keys = e4m3x4_to_f16x4(word);
            a[i / 2][i % 2] = keys.x;
            a[i / 2][i % 2 + 2] = keys.y;
        }
#pragma unroll
        for (int pack = 0; pack < PACKS; pack++) {
            uint4 q = b.query[pack][step][lane];
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                uint4 keys = make_uint4(a[half][0], a[half][1], a[half][2], a[half][3]);
                mma_f16(sums[pack][half][0], keys, q.x, q.y);
                mma_f16(sums[pack][half][1], keys, q.z, q.w);
            }
        }
    }
    float chain[2 * HALVES][4] = {}; /* region, head % 4 */
    region += g;
#pragma unroll
    for (int pack = 0; pack < PACKS; pack++) {
        float4 w = b.weight[pack][t];
        int quad = pack & (quads - 1), row = (pack >> quad_shift) * 4 + t;
        uint32_t need = b.need[row];
        float *scores = b.scores[row] + region, peaks[2 * HALVES];
#pragma unroll
        for (int i = 0; i < 2 * HALVES; i++) {
            float weights[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int head = 0; head < 4; head++) {
                float dot = sums[pack][i / 2][head / 2][i % 2 * 2 + head % 2];
                chain[i][head] = fmaf(weights[head], fmaxf(dot, 0.0F), quad ? chain[i][head] : 0.0F);
            }
            float score = ((chain[i][0] + chain[i][1]) + chain[i][2]) + chain[i][3];
            score = p.map.valid(tile.block[i]) ? score + 0.0F : 0.0F; /* never -0: it would tell of padding */
            peaks[i] = region + i * 8 < need ? score : NAN;
            if (quad == quads - 1 && region + i * 8 < need)
                scores[i * 8] = score;
        }
        if (p.peaks && quad == quads - 1)
            write_peaks<HALVES>(peaks, b.peaks[row], region, need);
    }
}

/* Scores regions [from, to) of a run for the rows of a batch, which fill() brings to shared memory, warps in
 * turn: one pack or two leave registers to load the next summaries meanwhile, more share each load of a query
 * between 32 regions. */
template <int PACKS, bool ALIGNED, typename Batch, typename Fill>
__device__ void score_range(const score_params &p, const Batch &b, const int32_t *row, uint32_t from,
                            uint32_t to, int quad_shift, Fill fill)
{
    constexpr int HALVES = PACKS > 2 ? 2 : 1, AT_ONCE = 16 * HALVES, STRIDE = AT_ONCE * WARPS;
    tile_data<ALIGNED, HALVES> tile, next;
    uint32_t region = from + threadIdx.x / 32 * AT_ONCE;
    next.find(p, row, region, to);
    if (PACKS > 2) {
        fill();
        for (; region < to; region += STRIDE) {
            tile.load(p, next.block, region);
            next.find(p, row, region + STRIDE, to);
            score_regions<PACKS>(p, b, tile, region, quad_shift);
        }
        return;
    }
    tile.load(p, next.block, region);
    next.find(p, row, region + STRIDE, to);
    fill(); /* the first summaries are on their way */
    for (; region < to; region += STRIDE) {
        tile_data<ALIGNED, HALVES> after;
        after.find(p, row, region + 2 * STRIDE, to);
        next.load(p, next.block, region + STRIDE);
        score_regions<PACKS>(p, b, tile, region, quad_shift);
        tile = next;
#pragma unroll
        for (int i = 0; i < 2 * HALVES; i++)
            next.block[i] = after.block[i];
    }
}

/* The same for a number of packs that is known when it runs. */
template <bool ALIGNED, int MOST, typename Fill>
__device__ void score_packs(const score_params &p, const batch<MOST> &b, const int32_t *row, uint32_t from,
                            uint32_t to, int packs, int quad_shift, Fill fill)
{
    if (packs == 1)
        score_range<1, ALIGNED>(p, b, row, from, to, quad_shift, fill);
    else if (packs == 2)
        score_range<2, ALIGNED>(p, b, row, from, to, quad_shift, fill);
    else if (MOST > 2) /* with three, a fourth is computed whose rows need nothing */
        score_range<MOST, ALIGNED>(p, b, row, from, to, quad_shift, fill);
}

/* Has one of the thread's rows of a run a weight past the fourth head? */
__device__ bool has_further_heads(const score_params &p, uint32_t token, int rows)
{
    bool further = false;
#pragma unroll 1
    for (uint32_t row = threadIdx.x; row < (uint32_t)rows; row += THREADS) {
        row_place at(p, row);
        const float *weights = (const float *)p.weights.at(token + at.of, at.group);
#pragma unroll 4
        for (uint32_t head = 4; head < p.heads; head++)
            further |= weights[head] != 0.0F;
    }
    return further;
}

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
        score_packs<ALIGNED>(p, b, row, from * TILE, min(to * TILE, regions), packs, quad_shift, [&] {
            fill_batch<ALIGNED>(p, b, run, {token, (uint32_t)first, (uint32_t)here, packs, quad_shift});
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

/* What scoring alone and scoring in a step have in common. */
static csa_status fill_params(score_params &p, const csa_score_args *args)
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
    if (csa_present(&scores) && scores.shape[1] > 0) {
        p.scores = csa_view(scores);
        p.regions = (uint32_t)scores.shape[1];
    }
    p.metadata = args->rows_out != nullptr;
    if (p.metadata)
        p.rows = *args->rows_out;
    p.count = (uint32_t)args->query.shape[0];
    p.groups = (uint32_t)args->query.shape[1];
    p.heads = (uint32_t)args->query.shape[2];
    p.width = -1;
    while ((1 << p.block_shift) < summaries.shape[1])
        p.block_shift++;
    return CSA_OK;
}

static csa_status run(const csa_context *context, score_params &p, const csa_score_args *args)
{
    if (p.count == 0 || (!p.metadata && p.regions == 0))
        return CSA_OK;
    bool aligned = csa_aligned(&args->cache->summaries) && csa_aligned(&args->query);
    return queue_score(context, p, aligned, mixed_tokens(*args->tokens), args->stream);
}

csa_status csa_cuda_score(const csa_context *context, const csa_score_args *args)
{
    score_params p = {};
    csa_status status = fill_params(p, args);
    return status == CSA_OK ? run(context, p, args) : status;
}

csa_status csa_cuda_score_span(const csa_context *context, const csa_score_args *args, csa_span span,
                               int64_t width, const csa_tensor *peaks)
{
    score_params p = {};
    csa_status status = fill_params(p, args);
    p.first = (uint32_t)span.first;
    p.width = (int)width;
    p.peaks = csa_view(*peaks);
    return status == CSA_OK ? run(context, p, args) : status;
}
