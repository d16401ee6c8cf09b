/*
 * Section 5: the best regions of a row, exactly and stably.
 *
 * A cluster of 1 to 8 blocks per row; each block owns a contiguous part of the row's scores and holds it in
 * registers as integers that order as section 5 says (larger is better, NaN is 0). All blocks of a cluster take
 * the same decisions from the same numbers, read from each other's shared memory:
 *
 *   1. the largest key, and a bound that at least k keys reach: the smallest of the maxima of k or more groups;
 *   2. a histogram of 1024 bins, linear in the score between them: most scores lie below the bound and are not
 *      counted, few of the others share a bin. The bin that the k-th best falls into is found by a scan from
 * the top;
 *   3. that bin's keys are gathered and ranked against each other: the k-th best key, and how many of its
 * equals are taken. A bin too full for that (plateaus, outliers that spoil the scale) is cut again, by
 * histograms over the integers themselves, which shrink by 1024 a round until the bin is small or holds one
 * key;
 *   4. chosen entries are written in order: an entry's place is the number of chosen ones before it, ties
 * counted up to their share. Earlier regions win ties since they are counted first.
 *
 * Bound by latency: the loads, five meetings of the cluster, one scan. Rows longer than the registers of a
 * cluster are read again in each pass. SPDX-License-Identifier: Apache-2.0
 */
#include "device/instructions.cuh"
#include "device/views.cuh"
#include "launch.h"
#include "stages.h"

#include <float.h>

namespace
{

enum {
    BINS = 1024,
    MAX_CLUSTER = 8,
    MAX_WARPS = 32,
    MAX_REGIONS = INT32_MAX - 65536, /* indices of what is read past a row's end stay ints */
    FEW = 256                        /* keys of a bin that are ranked against each other */
};

struct select_params {
    view scores, current, selected;
    token_source tokens; /* a step: current regions follow from the tokens of the span */
    uint32_t first, groups;
    bool from_tokens, aligned;
    int regions, width; /* of the scores; most historical regions of a row */
    int cluster_shift;  /* blocks of a row */
    uint32_t *counters; /* of the parts of so many rows, cleared */
    uint32_t split_rows;
};

/* ---- Keys --------------------------------------------------------------------------------------- */

enum { NO_KEY = 0, NAN_KEY = 1 }; /* past the end of a part; below every number */

/* Larger is better; -0 equals +0. */
__device__ uint32_t key_of(float score)
{
    uint32_t bits = __float_as_uint(score + 0.0F);
    uint32_t key = bits ^ ((uint32_t)((int)bits >> 31) | 0x80000000);
    return score == score ? key : NAN_KEY;
}

__device__ float score_of(uint32_t key)
{
    return __uint_as_float(key ^ (~(uint32_t)((int)key >> 31) | 0x80000000));
}

__device__ float finite_score_of(uint32_t key)
{
    float score = score_of(key);
    return score == score ? fminf(fmaxf(score, -FLT_MAX), FLT_MAX) : -FLT_MAX;
}

/* ---- A block's part of a row -------------------------------------------------------------------- */

/* Which of a row's scores are this block's: [first, end); a thread has `fours` times four neighbours. */
struct part {
    const float *scores;
    int first, end, fours;
    bool aligned;
};

__device__ uint4 load_keys(const part &p, int at)
{
    if (p.aligned && at + 3 < p.end) {
        float4 s = *(const float4 *)(p.scores + at);
        return make_uint4(key_of(s.x), key_of(s.y), key_of(s.z), key_of(s.w));
    }
    uint32_t k[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        k[i] = at + i < p.end ? key_of(p.scores[at + i]) : (uint32_t)NO_KEY;
    return make_uint4(k[0], k[1], k[2], k[3]);
}

/* Blocks of THREADS threads. ROUNDS > 0: a thread holds up to 4 * ROUNDS neighbours in registers. 0: four
 * neighbours in each of any number of rounds, read again each time. */
template <int THREADS, int ROUNDS> struct keys {
    static constexpr int ROUND = 4 * THREADS; /* scores a block reads at a time */
    part p;
    uint4 held[ROUNDS > 0 ? ROUNDS : 1];

    __device__ void load()
    {
#pragma unroll
        for (int round = 0; round < ROUNDS; round++)
            held[round] =
                round < p.fours ? load_keys(p, index(round)) : make_uint4(NO_KEY, NO_KEY, NO_KEY, NO_KEY);
    }
    __device__ int index(int round) const
    {
        return p.first +
               (ROUNDS > 0 ? ((int)threadIdx.x * p.fours + round) * 4 : round * ROUND + (int)threadIdx.x * 4);
    }
    __device__ int rounds() const
    {
        return ROUNDS > 0 ? ROUNDS : (p.end - p.first + ROUND - 1) / ROUND;
    }
    __device__ uint4 get(int round) const
    {
        return ROUNDS > 0 ? held[ROUNDS > 0 ? round : 0] : load_keys(p, index(round));
    }

    /* Calls visit(key) for each of the thread's keys, and for NO_KEY past the end. */
    template <typename Visit> __device__ void each(Visit visit) const
    {
#pragma unroll
        for (int round = 0; round < rounds(); round++) {
            uint4 k = get(round);
            visit(k.x);
            visit(k.y);
            visit(k.z);
            visit(k.w);
        }
    }
};

/* ---- What blocks tell each other ---------------------------------------------------------------- */

struct shared_state {
    uint32_t bins[BINS];
    uint32_t few[FEW]; /* this block's keys of the bin */
    uint32_t all[FEW]; /* the cluster's */
    uint32_t warp_low[MAX_WARPS], warp_high[MAX_WARPS];
    uint32_t few_count;
    uint32_t better, ties; /* this block's entries above and at the threshold */
    /* of the block alone */
    uint32_t warps[2][MAX_WARPS];
    uint32_t bin, above, within, threshold, tie_share;
};

struct cluster {
    int blocks, rank;

    __device__ void meet() const
    {
        if (blocks > 1)
            cluster_sync<2>();
        else
            __syncthreads();
    }
    __device__ uint32_t read(const uint32_t *p, int of) const
    {
        return cluster_load<MAX_CLUSTER>(
            cluster_address<MAX_CLUSTER>(p, of)); /* a block alone is a cluster too */
    }
};

__device__ uint32_t warp_scan(uint32_t value)
{
    for (int step = 1; step < 32; step *= 2) {
        uint32_t other = __shfl_up_sync(~0U, value, step);
        value += (int)(threadIdx.x % 32) >= step ? other : 0;
    }
    return value;
}

/* The sum of a value over the threads before, in one meeting; `buffer` alternates. The block's sum is added to
 * total. */
template <int THREADS>
__device__ uint32_t block_scan(shared_state &s, uint32_t value, int buffer, uint32_t &total)
{
    uint32_t own = warp_scan(value), before = own - value;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 31)
        s.warps[buffer][warp] = own;
    __syncthreads();
    uint32_t sums = warp_scan(lane < THREADS / 32 ? s.warps[buffer][lane] : 0);
    if (warp > 0)
        before += __shfl_sync(~0U, sums, warp - 1);
    total += __shfl_sync(~0U, sums, THREADS / 32 - 1);
    return before;
}

/* The cluster's smallest `low` and largest `high`. */
template <int THREADS>
__device__ void reduce_range(shared_state &s, const cluster &c, uint32_t &low, uint32_t &high)
{
    uint32_t least = __reduce_min_sync(~0U, low), most = __reduce_max_sync(~0U, high);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) {
        s.warp_low[warp] = least;
        s.warp_high[warp] = most;
    }
    c.meet();
    low = ~0U;
    high = 0;
    constexpr int WARPS = THREADS / 32;
    for (int i = lane; i < c.blocks * WARPS; i += 32) {
        low = min(low, c.read(&s.warp_low[i % WARPS], i / WARPS));
        high = max(high, c.read(&s.warp_high[i % WARPS], i / WARPS));
    }
    low = __reduce_min_sync(~0U, low);
    high = __reduce_max_sync(~0U, high);
}

/* The largest key, and a key that at least `rank` keys reach: the smallest of the maxima of groups of
 * neighbouring threads, if there are so many groups that all have a key; else the smallest key. */
template <int THREADS, int ROUNDS>
__device__ void find_bounds(shared_state &s, const cluster &c, const keys<THREADS, ROUNDS> &k, int total,
                            uint32_t rank, uint32_t &low, uint32_t &high)
{
    uint32_t least = ~0U, most = NO_KEY;
    k.each([&](uint32_t key) {
        least = min(least, key - 1);
        most = max(most, key);
    });
    int each = ROUNDS > 0 ? 4 * k.p.fours : 4; /* of a thread; the last ones may have fewer */
    int members = min(total / each, c.blocks * THREADS) / (int)rank, group = 1;
    uint32_t best = most;
    for (; 2 * group <= members && group < 32; group *= 2)
        best = max(best, __shfl_xor_sync(~0U, best, group));
    low = members == 0 ? least + 1 : best == NO_KEY ? ~0U : best; /* groups without a key do not count */
    high = most;
    reduce_range<THREADS>(s, c, low, high);
}

/* Finds the bin that the rank-th best (from 1) falls into: s.bin, s.above, s.within. bin_of gives -1 for keys
 * that are not asked for. */
template <int THREADS, int ROUNDS, typename BinOf>
__device__ void find_bin(shared_state &s, const cluster &c, const keys<THREADS, ROUNDS> &k, uint32_t rank,
                         BinOf bin_of)
{
    constexpr int BINS_EACH = BINS / THREADS;
#pragma unroll
    for (int i = 0; i < BINS_EACH; i++)
        s.bins[threadIdx.x + i * THREADS] = 0;
    __syncthreads();
    k.each([&](uint32_t key) {
        int bin = bin_of(key);
        if (bin >= 0)
            atomicAdd(&s.bins[bin], 1U);
    });
    c.meet();
    int upper = BINS - 1 - BINS_EACH * (int)threadIdx.x; /* a thread's bins, from the top */
    uint32_t counts[BINS_EACH] = {}, sum = 0, total = 0;
#pragma unroll 2
    for (int of = 0; of < c.blocks; of++)
#pragma unroll
        for (int i = 0; i < BINS_EACH; i++)
            counts[i] += c.read(&s.bins[upper - i], of);
#pragma unroll
    for (int i = 0; i < BINS_EACH; i++)
        sum += counts[i];
    uint32_t before = block_scan<THREADS>(s, sum, 0, total);
    if (before < rank && rank <= before + sum) {
        int i = 0;
        for (; i < BINS_EACH - 1 && rank > before + counts[i]; i++)
            before += counts[i];
        s.bin = upper - i;
        s.above = before;
        s.within = counts[i];
    }
    __syncthreads();
}

/* Ranks the keys for which `asked` holds, at most FEW in the cluster, against each other: s.threshold is the
 * rank-th best, s.tie_share how many of its equals are taken. */
template <int THREADS, int ROUNDS, typename Asked>
__device__ void rank_few(shared_state &s, const cluster &c, const keys<THREADS, ROUNDS> &k, uint32_t rank,
                         Asked asked)
{
    if (threadIdx.x == 0)
        s.few_count = 0;
    __syncthreads();
    k.each([&](uint32_t key) {
        if (asked(key))
            s.few[atomicAdd(&s.few_count, 1)] = key;
    });
    c.meet();
    uint32_t count = 0;
#pragma unroll 1
    for (int of = 0; of < c.blocks; of++) {
        uint32_t theirs = c.read(&s.few_count, of);
#pragma unroll 1
        for (uint32_t i = threadIdx.x; i < theirs; i += THREADS)
            s.all[count + i] = c.read(&s.few[i], of);
        count += theirs;
    }
    __syncthreads();
    if (threadIdx.x < count) {
        uint32_t own = s.all[threadIdx.x], better = 0, equal = 0;
#pragma unroll 2
        for (uint32_t i = 0; i < count; i++) {
            better += s.all[i] > own;
            equal += s.all[i] == own;
        }
        if (better < rank && rank <= better + equal) { /* equals write the same */
            s.threshold = own;
            s.tie_share = rank - better;
        }
    }
    __syncthreads();
}

/* Smallest and largest key of the cluster within [from, to]. */
template <int THREADS, int ROUNDS>
__device__ void find_range(shared_state &s, const cluster &c, const keys<THREADS, ROUNDS> &k, uint32_t from,
                           uint32_t to, uint32_t &low, uint32_t &high)
{
    low = ~0U;
    high = 0;
    k.each([&](uint32_t key) {
        if (key >= from && key <= to) {
            low = min(low, key);
            high = max(high, key);
        }
    });
    reduce_range<THREADS>(s, c, low, high);
}

/* The rank-th best key of the row, and how many of its equals belong to the best. */
template <int THREADS, int ROUNDS>
__device__ void find_threshold(shared_state &s, const cluster &c, const keys<THREADS, ROUNDS> &k, int total,
                               uint32_t rank)
{
    uint32_t low, high;
    find_bounds<THREADS, ROUNDS>(s, c, k, total, rank, low, high);
    if (low < high) {
        uint32_t least = low;
        float bottom = finite_score_of(low), scale = (float)BINS / (finite_score_of(high) - bottom);
        auto linear = [=](uint32_t key) { /* rises with the key, whatever the rounding; NaN becomes 0 */
                                          int bin =
                                              min(BINS - 1, max(0, (int)((score_of(key) - bottom) * scale)));
                                          return key >= least ? bin : -1;
        };
        find_bin(s, c, k, rank, linear);
        int bin = (int)s.bin;
        rank -= s.above;
        auto asked = [=](uint32_t key) { return linear(key) == bin; };
        if (s.within <= FEW) {
            rank_few(s, c, k, rank, asked);
            return;
        }
        low = ~0U;
        high = 0;
        k.each([&](uint32_t key) {
            if (asked(key)) {
                low = min(low, key);
                high = max(high, key);
            }
        });
        reduce_range<THREADS>(s, c, low, high);
    }
    while (low < high) {
        int shift = max(0, 32 - __clz(high - low) - 10);
        find_bin(s, c, k, rank,
                 [=](uint32_t key) { return key < low || key > high ? -1 : (int)((key - low) >> shift); });
        uint32_t from = low + (s.bin << shift), to = from + ((1U << shift) - 1);
        rank -= s.above;
        if (to < from || to > high)
            to = high;
        if (s.within <= FEW) {
            rank_few(s, c, k, rank, [=](uint32_t key) { return key >= from && key <= to; });
            return;
        }
        find_range(s, c, k, from, to, low, high);
    }
    if (threadIdx.x == 0) {
        s.threshold = low;
        s.tie_share = rank;
    }
    __syncthreads();
}

/* ---- Writing ------------------------------------------------------------------------------------ */

/* Writes the chosen ones of four neighbours; counts are of what lies before them. */
__device__ void write_four(const uint4 &v, int at, uint32_t threshold, uint32_t share, uint32_t &better,
                           uint32_t &ties, int64_t *entries)
{
    uint32_t four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        bool wins = four[i] > threshold, tied = four[i] == threshold;
        if (wins || (tied && ties < share))
            entries[better + min(ties, share)] = at + i;
        better += wins;
        ties += tied;
    }
}

/* Keys above and at the threshold, in the low and the high half. */
__device__ uint32_t count_four(const uint4 &v, uint32_t threshold)
{
    uint32_t better = (v.x > threshold) + (v.y > threshold) + (v.z > threshold) + (v.w > threshold);
    uint32_t ties = (v.x == threshold) + (v.y == threshold) + (v.z == threshold) + (v.w == threshold);
    return better + (ties << 16);
}

/* Writes the chosen regions of this block to their places. */
template <int THREADS, int ROUNDS>
__device__ void write_chosen(shared_state &s, const cluster &c, const keys<THREADS, ROUNDS> &k,
                             int64_t *entries)
{
    uint32_t threshold = s.threshold, share = s.tie_share, better = 0, ties = 0, own = 0, before = 0;
    for (int round = 0; round < (ROUNDS > 0 ? 1 : k.rounds());
         round++) { /* halves hold a round's or a part's counts */
        uint32_t total = 0;
        own = 0;
#pragma unroll
        for (int i = 0; i < (ROUNDS > 0 ? ROUNDS : 1); i++)
            own += count_four(k.get(ROUNDS > 0 ? i : round), threshold);
        before = block_scan<THREADS>(s, own, round % 2, total);
        better += total & 0xFFFF;
        ties += total >> 16;
    }
    if (threadIdx.x == 0) {
        s.better = better;
        s.ties = ties;
    }
    c.meet();
    better = ties = 0;
#pragma unroll 2
    for (int of = 0; of < c.rank; of++) {
        better += c.read(&s.better, of);
        ties += c.read(&s.ties, of);
    }
    if constexpr (ROUNDS > 0) {
        better += before & 0xFFFF;
        ties += before >> 16;
#pragma unroll
        for (int round = 0; round < ROUNDS; round++)
            write_four(k.get(round), k.index(round), threshold, share, better, ties, entries);
    } else {
        for (int round = 0; round < k.rounds(); round++) {
            uint32_t total = 0;
            uint4 v = k.get(round);
            before = block_scan<THREADS>(s, count_four(v, threshold), round % 2, total);
            uint32_t better_here = better + (before & 0xFFFF), ties_here = ties + (before >> 16);
            write_four(v, k.index(round), threshold, share, better_here, ties_here, entries);
            better += total & 0xFFFF;
            ties += total >> 16;
        }
    }
}

/* Everything is chosen: padding, then 0..current. */
template <int THREADS> __device__ void write_all(int64_t *entries, int width, int current)
{
    int padding = width - current; /* current = -1: the whole row */
#pragma unroll 1
    for (int i = threadIdx.x; i <= width; i += THREADS)
        entries[i] = i < padding ? -1 : i - padding;
}

template <int THREADS, int ROUNDS>
__global__ void __launch_bounds__(THREADS) select_kernel(const __grid_constant__ select_params p)
{
    __shared__ shared_state s;
    int blocks = 1 << p.cluster_shift;
    uint32_t row = blockIdx.x >> p.cluster_shift;
    cluster c = {blocks, (int)(blockIdx.x & (blocks - 1))};
    int64_t region;
    start_kernel_behind();
    if (p.from_tokens) {
        region = max(p.tokens.place(p.first + quotient(row, p.groups)).position, (int64_t)0) / CSA_REGION;
        wait_for_kernel_ahead();
    } else {
        region = *(const int64_t *)p.current.at(row);
    }
    int width = p.width, current = (int)max(min(region, (int64_t)p.regions - 1), (int64_t)-1);
    if (row < p.split_rows && c.rank == 0 && threadIdx.x < CSA_RECORD_RANKS)
        p.counters[row * CSA_RECORD_RANKS + threadIdx.x] = 0;
    int64_t *entries = (int64_t *)p.selected.at(row);
    if (current <= width) {
        if (c.rank == 0)
            write_all<THREADS>(entries, width, current);
        return;
    }
    keys<THREADS, ROUNDS> k;
    int each = ((current + blocks - 1) >> p.cluster_shift) + 3 & ~3;
    k.p.scores = (const float *)p.scores.at(row);
    k.p.first = min(each * c.rank, current);
    k.p.end = min(k.p.first + each, current);
    k.p.fours = (each + 4 * THREADS - 1) / (4 * THREADS);
    k.p.aligned = p.aligned;
    k.load();
    find_threshold(s, c, k, current, (uint32_t)width);
    write_chosen(s, c, k, entries);
    if (c.rank == 0 && threadIdx.x == 0)
        entries[width] = current;
    c.meet(); /* nobody leaves while its numbers are read */
}

using kernel = void (*)(select_params);

/* What runs a row of so many regions: small blocks for short rows; a large block, or a cluster of them, that
 * holds the row in registers; else a cluster that reads it again and again. */
struct variant {
    kernel run;
    int threads, cluster_shift;
};

variant find_variant(const csa_context *context, int64_t regions)
{
    constexpr int SMALL = 256 * 4 * 2, LARGE = 1024 * 4 * 4;
    if (regions <= SMALL)
        return {select_kernel<256, 2>, 256, 0};
    if (context->portable)
        return {regions <= LARGE ? select_kernel<1024, 4> : select_kernel<1024, 0>, 1024, 0};
    int shift = 0;
    while (1 << shift < MAX_CLUSTER && regions > (int64_t)LARGE << shift)
        shift++;
    return {regions <= (int64_t)LARGE << shift ? select_kernel<1024, 4> : select_kernel<1024, 0>, 1024, shift};
}

csa_status queue_select(const csa_context *context, select_params &p, int64_t rows, bool overlap, void *stream)
{
    variant v = find_variant(context, p.regions);
    csa_launch l;
    p.cluster_shift = v.cluster_shift;
    l.grid = dim3((unsigned)(rows << v.cluster_shift));
    l.block = dim3((unsigned)v.threads);
    l.stream = stream;
    l.cluster = 1U << v.cluster_shift;
    l.overlap = overlap && !context->portable;
    return csa_queue("select", v.run, l, p);
}

} // namespace

csa_status csa_cuda_load_select(void)
{
    csa_status status = csa_load("select", select_kernel<256, 2>, 0);
    if (status == CSA_OK)
        status = csa_load("select", select_kernel<1024, 4>, 0);
    return status == CSA_OK ? csa_load("select", select_kernel<1024, 0>, 0) : status;
}

static csa_status fill_params(select_params &p, const csa_select_args *args)
{
    if (args->scores.shape[1] > MAX_REGIONS)
        return csa_cuda_fail(CSA_ERROR_UNSUPPORTED, "scores: %lld regions, at most %d are supported",
                             (long long)args->scores.shape[1], MAX_REGIONS);
    p.scores = csa_view(args->scores);
    p.selected = csa_view(args->selected);
    p.aligned = csa_aligned(&args->scores);
    p.regions = (int)args->scores.shape[1];
    p.width = (int)args->selected.shape[1] - 1;
    return CSA_OK;
}

csa_status csa_cuda_select(const csa_context *context, const csa_select_args *args)
{
    select_params p = {};
    csa_status status = fill_params(p, args);
    if (status != CSA_OK || args->scores.shape[0] == 0)
        return status;
    p.current = csa_view(args->current);
    return queue_select(context, p, args->scores.shape[0], false, args->stream);
}

csa_status csa_cuda_select_span(const csa_context *context, const csa_select_args *args,
                                const csa_tokens *tokens, csa_span span, uint32_t *counters, int64_t split_rows)
{
    select_params p = {};
    csa_status status = fill_params(p, args);
    if (status != CSA_OK || span.count == 0)
        return status;
    p.tokens = csa_token_source(*tokens);
    p.first = (uint32_t)span.first;
    p.groups = (uint32_t)(args->scores.shape[0] / span.count);
    p.from_tokens = true;
    p.counters = counters;
    p.split_rows = (uint32_t)split_rows;
    return queue_select(context, p, args->scores.shape[0], span.overlap, args->stream);
}
