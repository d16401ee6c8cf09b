/*
 * Section 4: scores of a request's summaries, for all groups, heads and drafts in one pass.
 *
 * A window is a few consecutive tokens; its tokens of one request form a run, and all rows of a run share each
 * summary that is read. Four heads of a row are a quad; four quads are a pack: 16 columns of the matrix product,
 * permuted so that a lane ends up with the four heads of one row and nothing is exchanged. Heads past the fourth are
 * further packs of the same rows, left out where all their weights are zero (they only pad).
 *
 * Work: the windows' tiles of 32 regions in one list, cut evenly over a fixed number of blocks; a warp takes a tile,
 * and looks up where the next one lies before it works on it.
 * Its lanes load 16 bytes of a summary each, straight into the registers of the product: both operands number the
 * inner index as the loads do. e4m3 becomes f16 exactly, products are exact, sums are fp32: 16 products of 16 in
 * order. The queries of a run lie in shared memory as the product wants them.
 *
 * Bound by memory for up to four packs: 8 KB of a warp are under way at a time, 8 to 12 warps a multiprocessor.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "../tokens.h"
#include "device/instructions.cuh"
#include "device/load.cuh"
#include "launch.h"
#include "stages.h"

namespace {

enum {
    WARPS = 4,
    THREADS = 32 * WARPS,
    TILE = 32,         /* regions of a warp */
    STEPS = 16,        /* of the inner index: 256 / 16 */
    LIST = THREADS,    /* windows listed at a time */
    WINDOW_TOKENS = 16 /* at most */
};

struct score_params {
    csa_tokens tokens;
    csa_tensor summaries, query, weights, scores;
    csa_rows rows; /* outputs; ndim 0: none */
    csa_span span;
    int64_t regions;
    int64_t width; /* a step: rows that rank at most so many are left out; -1: all, and the current region too */
    int window;    /* tokens */
    int block_shift;
    int64_t block_bytes, region_bytes; /* strides of the summaries */
    bool aligned;                      /* summaries and queries, to 16 bytes */
};

/* How many regions of a token are scored. */
__device__ int64_t regions_to_score(const score_params &p, int64_t token)
{
    int64_t position = csa_token_active(&p.tokens, token) ? csa_token_position(&p.tokens, token) : 0;
    int64_t current = position / CSA_REGION;
    if (p.width < 0)
        return current + 1 < p.regions ? current + 1 : p.regions;
    int64_t ranked = current < p.regions ? current : p.regions - 1;
    return ranked > p.width ? ranked : 0;
}

__device__ void write_row_metadata(const score_params &p, int64_t row)
{
    int64_t token = p.span.first + row / p.query.shape[1];
    bool active = csa_token_active(&p.tokens, token);
    int64_t position = active ? csa_token_position(&p.tokens, token) : 0;
    if (csa_present(&p.rows.active))
        *(uint8_t *)csa_at(&p.rows.active, row, 0, 0) = active;
    if (csa_present(&p.rows.positions))
        *(int64_t *)csa_at(&p.rows.positions, row, 0, 0) = position;
    if (csa_present(&p.rows.current))
        *(int64_t *)csa_at(&p.rows.current, row, 0, 0) = position / CSA_REGION;
    if (csa_present(&p.rows.lengths))
        *(int32_t *)csa_at(&p.rows.lengths, row, 0, 0) = (int32_t)(position / CSA_REGION + 1);
    if (csa_present(&p.rows.topk_lengths))
        *(int32_t *)csa_at(&p.rows.topk_lengths, row, 0, 0) = (int32_t)(position / CSA_REGION);
}

/* A window's tokens, in shared memory. */
struct window_tokens {
    int64_t owner[WINDOW_TOKENS];
    int need[WINDOW_TOKENS]; /* regions */
    int count;
};

/* First token after `start` that is of another request. */
__device__ int run_end(const window_tokens &w, int start)
{
    int end = start + 1;
    while (end < w.count && w.owner[end] == w.owner[start])
        end++;
    return end;
}

__device__ int run_tiles(const window_tokens &w, int start, int end)
{
    int most = 0;
    for (int i = start; i < end; i++)
        most = max(most, w.need[i]);
    return (most + TILE - 1) / TILE;
}

__device__ int window_tiles(const score_params &p, int64_t window)
{
    window_tokens w;
    int64_t first = window * p.window, left = p.span.count - first;
    int tiles = 0, most = 0;
    int64_t owner = -2;
    w.count = (int)(left < p.window ? left : p.window);
    for (int i = 0; i < w.count; i++) {
        int64_t token = p.span.first + first + i, next = csa_token_owner(&p.tokens, token);
        if (next != owner) {
            tiles += (most + TILE - 1) / TILE;
            most = 0;
            owner = next;
        }
        most = max(most, (int)regions_to_score(p, token));
    }
    return tiles + (most + TILE - 1) / TILE;
}

/* What the rows of a batch are: those that share a pass over the summaries. */
template <int PACKS> struct batch {
    uint4 query[PACKS][STEPS][32];  /* operand b of both products of a pack */
    float weight[PACKS][4][4];      /* pack, row of the pack, head */
    float *scores[PACKS * 4];       /* where a row's scores go */
    int need[PACKS * 4];
};

__device__ uint32_t query_word(const score_params &p, int64_t token, int64_t group, int head, int byte)
{
    if (head >= p.query.shape[2])
        return 0;
    const uint8_t *q = (const uint8_t *)csa_at(&p.query, token, group, head) + byte;
    if (p.aligned)
        return *(const uint32_t *)q;
    return q[0] | q[1] << 8 | q[2] << 16 | (uint32_t)q[3] << 24;
}

__device__ float weight_of(const score_params &p, int64_t token, int64_t group, int head)
{
    return head < p.weights.shape[2] ? *(const float *)csa_at(&p.weights, token, group, head) : 0.0F;
}

/* Fills in rows [first, first + 4 * packs / quads) of a run that starts at `token` (counted in the span) and has
 * `rows` rows. */
template <int PACKS>
__device__ void fill_batch(const score_params &p, batch<PACKS> &b, const window_tokens &w, int start, int64_t token,
                           int first, int rows, int packs, int quads)
{
    int groups = (int)p.query.shape[1];
    for (int i = threadIdx.x; i < packs * STEPS * 32; i += THREADS) {
        int pack = i / (STEPS * 32), step = i / 32 % STEPS, lane = i % 32, g = lane / 4, t = lane % 4;
        int row = first + pack / quads * 4 + g / 2, head = pack % quads * 4 + g % 2;
        int byte = step / 4 * 64 + t * 16 + step % 4 * 4;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row < rows) {
            uint32_t low = query_word(p, token + row / groups, row % groups, head, byte);
            uint32_t high = query_word(p, token + row / groups, row % groups, head + 2, byte);
            v = make_uint4(e4m3x2_to_f16x2(low), e4m3x2_to_f16x2(low >> 16), e4m3x2_to_f16x2(high),
                           e4m3x2_to_f16x2(high >> 16));
        }
        b.query[pack][step][lane] = v;
    }
    for (int i = threadIdx.x; i < packs * 16; i += THREADS) {
        int pack = i / 16, row = first + pack / quads * 4 + i / 4 % 4, head = pack % quads * 4 + i % 4;
        b.weight[pack][i / 4 % 4][i % 4] =
            row < rows ? weight_of(p, token + row / groups, row % groups, head) : 0.0F;
    }
    for (int i = threadIdx.x; i < packs / quads * 4; i += THREADS) {
        int row = first + i;
        b.need[i] = row < rows ? w.need[start + row / groups] : 0;
        b.scores[i] = row < rows ? (float *)csa_at(&p.scores, token * groups + row, 0, 0) : nullptr;
    }
}

/* Where a request's summaries lie. */
struct summary_map {
    const int32_t *blocks; /* its row of the block table */
    int columns;           /* 0: it has none */

    __device__ summary_map(const score_params &p, int64_t owner)
    {
        const csa_tensor &table = p.tokens.block_table;
        bool known = owner >= 0 && owner < table.shape[0];
        blocks = (const int32_t *)csa_at(&table, known ? owner : 0, 0, 0);
        columns = known ? (int)min(table.shape[1], (int64_t)INT32_MAX) : 0;
    }

    /* The blocks of the four regions that a lane loads of a tile; -1 where there is none or none is needed. */
    __device__ void find(const score_params &p, int tile, int regions, int (&found)[4]) const
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int region = tile * TILE + i * 8 + (int)(threadIdx.x % 32 / 4), column = region >> p.block_shift;
            found[i] = region < regions && column < columns ? __ldg(blocks + column) : -1;
        }
    }
};

/* Scores a tile of 32 regions for the rows of a batch. */
template <int PACKS>
__device__ void score_tile(const score_params &p, const batch<PACKS> &b, const int (&block)[4], int tile, int packs,
                           int quads)
{
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint4 raw[4][4]; /* region g + 8 i of the tile, 64 bytes each */
    bool mapped[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int within = (i * 8 + g) & ((1 << p.block_shift) - 1); /* a tile starts at a block */
        mapped[i] = block[i] >= 0 && block[i] < p.summaries.shape[0];
        const uint8_t *summary = (const uint8_t *)p.summaries.data + block[i] * p.block_bytes + within * p.region_bytes;
#pragma unroll
        for (int j = 0; j < 4; j++)
            raw[i][j] = mapped[i] ? load_16(summary + j * 64 + t * 16, p.aligned) : make_uint4(0, 0, 0, 0);
    }
    float sums[PACKS][2][2][4] = {}; /* pack, half of the tile, heads 0-1 or 2-3 */
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        uint32_t a[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint4 v = raw[i][step / 4];
            uint32_t word = step % 4 == 0 ? v.x : step % 4 == 1 ? v.y : step % 4 == 2 ? v.z : v.w;
            a[i / 2][i % 2] = e4m3x2_to_f16x2(word);
            a[i / 2][i % 2 + 2] = e4m3x2_to_f16x2(word >> 16);
        }
#pragma unroll
        for (int pack = 0; pack < PACKS; pack++) {
            if (pack >= packs)
                break;
            uint4 q = b.query[pack][step][lane];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                mma_f16(sums[pack][half][0], a[half], q.x, q.y);
                mma_f16(sums[pack][half][1], a[half], q.z, q.w);
            }
        }
    }
    float chain[4][4]; /* region, head % 4 */
#pragma unroll
    for (int pack = 0; pack < PACKS; pack++) {
        if (pack >= packs)
            break;
        float4 w = *(const float4 *)b.weight[pack][t];
        int quad = pack % quads, row = pack / quads * 4 + t;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *low = sums[pack][i / 2][0] + i % 2 * 2, *high = sums[pack][i / 2][1] + i % 2 * 2;
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (quad == 0)
                    chain[i][k] = 0.0F;
            chain[i][0] = fmaf(w.x, fmaxf(low[0], 0.0F), chain[i][0]);
            chain[i][1] = fmaf(w.y, fmaxf(low[1], 0.0F), chain[i][1]);
            chain[i][2] = fmaf(w.z, fmaxf(high[0], 0.0F), chain[i][2]);
            chain[i][3] = fmaf(w.w, fmaxf(high[1], 0.0F), chain[i][3]);
            int region = tile * TILE + i * 8 + g;
            float score = ((chain[i][0] + chain[i][1]) + chain[i][2]) + chain[i][3];
            if (quad == quads - 1 && region < b.need[row])
                b.scores[row][region] = mapped[i] ? score + 0.0F : 0.0F; /* never -0: it would tell of padding */
        }
    }
}

/* The part [from, to) of a run's tiles, for all its rows. */
template <int PACKS>
__device__ void score_run(const score_params &p, batch<PACKS> &b, const window_tokens &w, int start, int end,
                          int64_t window_first, int from, int to)
{
    int groups = (int)p.query.shape[1], heads = (int)p.query.shape[2], rows = (end - start) * groups;
    int64_t token = window_first + start;
    int most = 0, further = 0;
    for (int i = start; i < end; i++)
        most = max(most, w.need[i]);
    for (int i = threadIdx.x; i < rows * (heads - 4); i += THREADS) { /* is there a weight past the fourth head? */
        int row = i / (heads - 4);
        further |= weight_of(p, token + row / groups, row % groups, 4 + i % (heads - 4)) != 0.0F;
    }
    int quads = __syncthreads_or(further) ? (heads + 3) / 4 : 1;
    int batch_rows = PACKS / quads * 4;
    summary_map map(p, w.owner[start]);
    for (int first = 0; first < rows; first += batch_rows) {
        int here = min(rows - first, batch_rows), packs = (here + 3) / 4 * quads;
        fill_batch(p, b, w, start, token, first, rows, packs, quads);
        __syncthreads();
        int tile = from + (int)threadIdx.x / 32, block[4], next[4];
        map.find(p, tile, most, block);
        for (; tile < to; tile += WARPS) {
            map.find(p, tile + WARPS, most, next);
            score_tile(p, b, block, tile, packs, quads);
#pragma unroll
            for (int i = 0; i < 4; i++)
                block[i] = next[i];
        }
        __syncthreads();
    }
}

__device__ void load_window(const score_params &p, window_tokens &w, int64_t window)
{
    int64_t first = window * p.window, left = p.span.count - first;
    int count = (int)(left < p.window ? left : p.window), i = threadIdx.x;
    __syncthreads();
    if (i < count) {
        w.owner[i] = csa_token_owner(&p.tokens, p.span.first + first + i);
        w.need[i] = (int)regions_to_score(p, p.span.first + first + i);
    }
    if (i == 0)
        w.count = count;
    __syncthreads();
}

/* Makes the list of what lies before each window from the windows' tiles; the total goes to list[LIST]. */
__device__ void make_list(uint32_t *list, uint32_t tiles)
{
    __shared__ uint32_t warp_sums[WARPS];
    uint32_t before = tiles;
    for (int step = 1; step < 32; step *= 2) {
        uint32_t other = __shfl_up_sync(~0U, before, step);
        before += (int)(threadIdx.x % 32) >= step ? other : 0;
    }
    if (threadIdx.x % 32 == 31)
        warp_sums[threadIdx.x / 32] = before;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS - 1; i++)
        before += i < (int)threadIdx.x / 32 ? warp_sums[i] : 0;
    list[threadIdx.x + 1] = before;
    if (threadIdx.x == 0)
        list[0] = 0;
    __syncthreads();
}

/* The window in which the list's tile lies. */
__device__ int find_window(const uint32_t *list, uint32_t tile)
{
    int low = 0, high = LIST;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (list[middle] <= tile)
            low = middle;
        else
            high = middle;
    }
    return low;
}

template <int PACKS> __global__ void __launch_bounds__(THREADS, PACKS > 2 ? 2 : 3) score_kernel(score_params p)
{
    extern __shared__ __align__(16) unsigned char shared[];
    batch<PACKS> &b = *(batch<PACKS> *)shared;
    __shared__ uint32_t list[LIST + 1];
    __shared__ window_tokens w;
    start_kernel_behind();
    int64_t rows = p.span.count * p.query.shape[1], windows = (p.span.count + p.window - 1) / p.window;
    for (int64_t row = (int64_t)blockIdx.x * THREADS + threadIdx.x; row < rows; row += (int64_t)gridDim.x * THREADS)
        write_row_metadata(p, row);
    if (!csa_present(&p.scores))
        return;
    for (int64_t base = 0; base < windows; base += LIST) {
        make_list(list, base + threadIdx.x < windows ? window_tiles(p, base + threadIdx.x) : 0);
        uint32_t total = list[LIST], at = (uint32_t)((uint64_t)total * blockIdx.x / gridDim.x),
                 end = (uint32_t)((uint64_t)total * (blockIdx.x + 1) / gridDim.x);
        while (at < end) {
            int window = find_window(list, at);
            uint32_t begin = list[window], window_end = min(list[window + 1], end);
            load_window(p, w, base + window);
            for (int start = 0; start < w.count;) {
                int stop = run_end(w, start), tiles = run_tiles(w, start, stop);
                int from = max(0, (int)(at - begin)), to = min(tiles, (int)(window_end - begin));
                if (from < to)
                    score_run(p, b, w, start, stop, (base + window) * p.window, from, to);
                begin += tiles;
                start = stop;
            }
            at = window_end;
        }
        __syncthreads();
    }
}

/* Tokens that share a window: as many as one batch can hold, drafts of a request or neighbours in prefill. */
int window_size(const score_params &p, int packs)
{
    int64_t fitting = packs * 4 / p.query.shape[1];
    int64_t wanted = csa_present(&p.tokens.owners) || csa_present(&p.tokens.query_start) ? WINDOW_TOKENS
                                                                                        : csa_query_len(&p.tokens);
    int64_t size = wanted < fitting ? wanted : fitting;
    while (wanted % size && wanted < WINDOW_TOKENS) /* windows of a request's tokens do not reach into the next's */
        size--;
    return (int)size;
}

csa_status queue_score(const csa_context *context, score_params &p, void *stream)
{
    int64_t groups = p.query.shape[1], heads = p.query.shape[2];
    bool mixed = csa_present(&p.tokens.owners) || csa_present(&p.tokens.query_start);
    int64_t rows = mixed ? WINDOW_TOKENS : csa_query_len(&p.tokens) * groups;
    bool few = (rows + 3) / 4 * ((heads + 3) / 4) <= 2;
    csa_launch l;
    p.window = window_size(p, few ? 2 : 4);
    l.grid = dim3((unsigned)(context->multiprocessors * (few ? 3 : 2)));
    l.block = dim3(THREADS);
    l.stream = stream;
    l.shared = few ? sizeof(batch<2>) : sizeof(batch<4>);
    return csa_queue("score", few ? score_kernel<2> : score_kernel<4>, l, p);
}

} // namespace

csa_status csa_cuda_load_score(void)
{
    csa_status status = csa_load("score", score_kernel<2>, sizeof(batch<2>));
    return status == CSA_OK ? csa_load("score", score_kernel<4>, sizeof(batch<4>)) : status;
}

csa_status csa_cuda_score_span(const csa_context *context, const csa_score_args *args, csa_span span, int64_t width)
{
    score_params p = {};
    if (span.count == 0)
        return CSA_OK;
    p.tokens = *args->tokens;
    p.summaries = args->cache->summaries;
    p.query = args->query;
    p.weights = args->weights;
    p.scores = args->scores;
    if (args->rows_out)
        p.rows = *args->rows_out;
    p.span = span;
    p.regions = args->scores.shape[1];
    p.width = width;
    while ((1 << p.block_shift) < p.summaries.shape[1])
        p.block_shift++;
    p.block_bytes = p.summaries.stride[0];
    p.region_bytes = p.summaries.stride[1];
    p.aligned = csa_aligned(&p.summaries) && csa_aligned(&p.query);
    if (!args->rows_out && (!csa_present(&p.scores) || p.regions == 0))
        return CSA_OK;
    return queue_score(context, p, args->stream);
}

csa_status csa_cuda_score(const csa_context *context, const csa_score_args *args)
{
    csa_span all = {0, args->query.shape[0]};
    return csa_cuda_score_span(context, args, all, -1);
}
