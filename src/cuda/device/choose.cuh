/*
 * Section 5 for one row by one block: the best regions, exactly and stably.
 *
 * Scores are compared as integers that order as section 5 says (larger is better, NaN is 1, nothing is 0). Each
 * thread holds up to four quads of neighbours in registers. Rows that are longer than that are searched level
 * by level: first the peaks, the largest of each 8 (64, 512) neighbouring scores. At least k scores reach the
 * k-th best peak, so what is below it is out of the question: groups whose peaks are above it are listed, and
 * the first k of those whose peak it is (each has a tie, so that no later one can be chosen); fewer than 2k,
 * whose scores the threads hold at the next level.
 *
 * A level: a histogram of the quads' largest keys gives a bound that k keys reach; the keys that reach it, a
 * few more than k mostly, go to shared memory in order. There a histogram gives the bin of the k-th best,
 * another one within that bin, until it holds one key only or so few that they are ranked against each other.
 * Plateaus are bins like others.
 *
 * Chosen ones leave in order: the place of one is the number of chosen ones before it, ties counted up to their
 * share, so that earlier regions win ties.
 *
 * Bound by the length of the instruction stream and a dozen meetings of the block.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CUDA_CHOOSE_CUH
#define CSA_CUDA_CHOOSE_CUH

#include "../../plan.h"
#include "lanes.cuh"

#include <stdint.h>

enum {
    CHOICE_QUADS = 4, /* of a thread */
    CHOICE_VALUES = 4 * CHOICE_QUADS,
    CHOICE_FEW = 32 /* keys that are ranked against each other */
};

/* The best keys: those above `threshold`, and the first `share` of its equals. */
struct best_keys {
    uint32_t threshold, share;
};

template <int THREADS, bool KEPT> struct choice_scratch {
    uint32_t bins[2 * THREADS];
    uint32_t groups[2][2 * THREADS];        /* listed at a level, and at the one before */
    uint16_t held[CHOICE_VALUES * THREADS]; /* places of what reaches the bound, in order, and of NaN */
    float values[KEPT ? CHOICE_VALUES * THREADS : 1]; /* which these are, else they are loaded again */
    uint32_t warps[3][THREADS / 32];
    uint32_t bin, above, within;
    uint32_t few[CHOICE_FEW], few_count;
    best_keys best;
};

/* The scores of a row and, where somebody found them already, the largest of each CSA_PEAK; NULL: not. NaN
 * counts in a peak only where there is nothing else. aligned: both, to 16 bytes. */
struct row_scores {
    const float *scores, *peaks;
    int count;
    bool aligned;
};

/* ---- Keys --------------------------------------------------------------------------------------- */

enum { CSA_NO_KEY = 0, CSA_NAN_KEY = 1 }; /* nothing; below every number */

/* Larger is better; -0 equals +0. */
static __device__ __forceinline__ uint32_t key_of(float score)
{
    uint32_t bits = __float_as_uint(score + 0.0F);
    uint32_t key = bits ^ ((uint32_t)((int)bits >> 31) | 0x80000000);
    return score == score ? key : (uint32_t)CSA_NAN_KEY;
}

/* A number of which the key is the largest that is no larger, for comparisons; NaN and below: -infinity. */
static __device__ __forceinline__ float number_of(uint32_t key)
{
    constexpr uint32_t LEAST = 0x007FFFFF; /* the key of -infinity */
    return __uint_as_float(key & 0x80000000 ? key ^ 0x80000000 : ~max(key, LEAST));
}

/* What a level looks at: the largest of each 1 << log of so many numbers. */
struct level_values {
    const float *numbers;
    int count;
    int log;
    bool aligned;
};

/* NaN only if there is nothing else; past the end there is -infinity. */
static __device__ __noinline__ float largest_value(level_values v, int value)
{
    int64_t at = (int64_t)value << v.log, end = min(at + ((int64_t)1 << v.log), (int64_t)v.count);
    float most = at < end ? NAN : -INFINITY;
    for (; v.aligned && at % 4 == 0 && at + 4 <= end; at += 4) {
        float4 x = *(const float4 *)(v.numbers + at);
        most = fmaxf(most, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
    }
    for (; at < end; at++)
        most = fmaxf(most, v.numbers[at]);
    return most;
}

static __device__ __forceinline__ float load_value(const level_values &v, int value)
{
    return v.log == 0 ? v.numbers[value] : largest_value(v, value);
}

/* ---- Over the block ----------------------------------------------------------------------------- */

/* What is before, and all there is. */
struct running_sum {
    uint32_t before, all;
};

/* The sums over the warps, of what each one's last lane has. The block meets between two that take the same
 * `buffer`. */
template <int THREADS, bool KEPT>
static __device__ __forceinline__ running_sum sum_warps(choice_scratch<THREADS, KEPT> &s, int buffer,
                                                        uint32_t of_last_lane)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 31)
        s.warps[buffer][warp] = of_last_lane;
    __syncthreads();
    uint32_t of_warp = lane < THREADS / 32 ? s.warps[buffer][lane] : 0;
    return {__reduce_add_sync(~0U, lane < warp ? of_warp : 0), __reduce_add_sync(~0U, of_warp)};
}

/* The sums over the threads before, and over the block. */
template <int THREADS, bool KEPT>
static __device__ __forceinline__ running_sum scan(choice_scratch<THREADS, KEPT> &s, int buffer, uint32_t own)
{
    uint32_t sum = sum_lanes(own);
    running_sum warps = sum_warps(s, buffer, sum);
    return {warps.before + sum - own, warps.all};
}

/* Keys [low, high], of which so many are above, and so many within. */
struct key_range {
    uint32_t low, high, above, within;
};

/* Narrows a range to a bin that has the rank-th best key (from 1); `each` visits the thread's keys. Bins are
 * empty before and after. */
template <int THREADS, bool KEPT, typename Each>
static __device__ __forceinline__ void narrow(choice_scratch<THREADS, KEPT> &s, key_range &range, uint32_t rank,
                                              Each each)
{
    constexpr int LOG = THREADS == 1024 ? 11 : THREADS == 512 ? 10 : THREADS == 256 ? 9 : 8;
    static_assert(2 * THREADS == 1 << LOG, "bins");
    uint32_t low = range.low, span = range.high - range.low;
    int cut = max(0, 32 - LOG - __clz(span));
    each([&](uint32_t key) {
        if (key - low <= span)
            atomicAdd(&s.bins[(key - low) >> cut], 1U);
    });
    __syncthreads();
    int upper = 2 * THREADS - 1 - 2 * (int)threadIdx.x; /* a thread's two bins, from the top */
    uint2 counts = *(uint2 *)&s.bins[upper - 1];
    *(uint2 *)&s.bins[upper - 1] = make_uint2(0, 0);
    running_sum sum = scan(s, 0, counts.x + counts.y);
    uint32_t left = min(rank - range.above, sum.all); /* scores that change meanwhile do no harm */
    if (sum.before < left && left <= sum.before + counts.x + counts.y) {
        bool second = left > sum.before + counts.y;
        s.bin = (uint32_t)(upper - second);
        s.above = sum.before + (second ? counts.y : 0);
        s.within = second ? counts.x : counts.y;
    }
    __syncthreads();
    range.within = 0;
    if (sum.all == 0)
        return;
    range.low = low + (s.bin << cut);
    range.high = range.low + min(range.high - range.low, (1U << cut) - 1);
    range.above += s.above;
    range.within = s.within;
}

/* ---- A level ------------------------------------------------------------------------------------ */

/* A level: so many quads, `each` of a thread, of all values (groups NULL) or, by twos, of listed groups. */
struct level {
    level_values values;
    int all, count, each; /* values of the whole row; quads */
    const uint32_t *groups;

    /* Which of the values the one at a place is. */
    __device__ __forceinline__ int value(int place) const
    {
        return groups ? (int)groups[place / CSA_PEAK] * CSA_PEAK + place % CSA_PEAK : place;
    }
    /* The key of what is held. */
    template <int THREADS, bool KEPT>
    __device__ __forceinline__ uint32_t key(const choice_scratch<THREADS, KEPT> &s, int i) const
    {
        if constexpr (KEPT)
            return key_of(s.values[i]);
        else
            return key_of(load_value(values, value(s.held[i])));
    }
};

/* What a thread has of a level: values by quads, which of the level's values the first of each is (-1:
 * nothing), and each one's largest key. */
struct thread_quads {
    float value[CHOICE_QUADS][4];
    int at[CHOICE_QUADS];
    uint32_t most[CHOICE_QUADS];
};

/* Loads a thread's quads, past the end -infinity; ready() returns once they may be read. */
template <typename Ready>
static __device__ __forceinline__ void load_quads(const level &l, int first, thread_quads &q, Ready ready)
{
    bool plain = l.values.log == 0 && l.values.aligned;
#pragma unroll
    for (int i = 0; i < CHOICE_QUADS; i++) {
        int quad = first + 32 * i;
        q.at[i] = i < l.each && quad < l.count ? l.value(4 * quad) : -1;
    }
    ready();
#pragma unroll
    for (int i = 0; i < CHOICE_QUADS; i++) { /* loads do not wait for each other */
        float4 x = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
        if (plain && q.at[i] >= 0 && q.at[i] <= l.values.count - 4)
            x = *(const float4 *)(l.values.numbers + q.at[i]);
        q.value[i][0] = x.x, q.value[i][1] = x.y, q.value[i][2] = x.z, q.value[i][3] = x.w;
    }
#pragma unroll
    for (int i = 0; i < CHOICE_QUADS; i++) {
        if (i >= l.each) {
            q.most[i] = CSA_NO_KEY;
            continue;
        }
        if (q.at[i] >= 0 && (!plain || q.at[i] > l.values.count - 4))
#pragma unroll
            for (int k = 0; k < 4; k++)
                q.value[i][k] = largest_value(l.values, q.at[i] + k);
        float largest = fmaxf(fmaxf(q.value[i][0], q.value[i][1]), fmaxf(q.value[i][2], q.value[i][3]));
        q.most[i] = q.at[i] < 0 ? (uint32_t)CSA_NO_KEY : key_of(largest);
    }
}

/* A range of keys from a bound that at least `rank` reach, if there are so many, to the largest. */
template <int THREADS, bool KEPT>
static __device__ __forceinline__ key_range find_bound(choice_scratch<THREADS, KEPT> &s, const level &l,
                                                       const thread_quads &q, uint32_t rank)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    bool bounded = (uint32_t)l.count > rank; /* so many reach the smallest of the quads' largest */
    uint32_t low = ~0U, high = 0;
#pragma unroll
    for (int i = 0; i < CHOICE_QUADS; i++) {
        if (i >= l.each)
            continue;
        high = max(high, q.most[i]);
        low = min(low, q.most[i] - 1); /* no key is the largest */
        if (!bounded && q.at[i] >= 0)
#pragma unroll
            for (int k = 0; k < 4; k++)
                low = q.at[i] + k < l.all ? min(low, key_of(q.value[i][k]) - 1) : low;
    }
    low = __reduce_min_sync(~0U, low);
    high = __reduce_max_sync(~0U, high);
    if (lane == 0) {
        s.warps[0][warp] = low;
        s.warps[1][warp] = high;
    }
    __syncthreads();
    key_range range = {__reduce_min_sync(~0U, lane < THREADS / 32 ? s.warps[0][lane] : ~0U) + 1,
                       __reduce_max_sync(~0U, lane < THREADS / 32 ? s.warps[1][lane] : 0U), 0, 0};
    high = range.high;
    if (bounded)
        narrow(s, range, rank, [&](auto visit) {
#pragma unroll
            for (int i = 0; i < CHOICE_QUADS; i++)
                if (i < l.each)
                    visit(q.most[i]);
        });
    return {range.low, high, 0, 0};
}

/* Brings the places of what reaches a bound, as at least `rank` do if there are so many, and of NaN to shared
 * memory, in order; the range of the keys that reach it, and how many are held as `within`. ready() returns
 * once the values may be read. */
template <int THREADS, bool KEPT, typename Ready>
static __device__ __forceinline__ key_range hold_values(choice_scratch<THREADS, KEPT> &s, const level &l,
                                                        uint32_t rank, Ready ready)
{
    int first = (int)threadIdx.x / 32 * l.each * 32 + (int)threadIdx.x % 32; /* quad */
    thread_quads q;
    *(uint2 *)&s.bins[2 * threadIdx.x] = make_uint2(0, 0);
    if (threadIdx.x == 0)
        s.few_count = 0;
    load_quads(l, first, q, ready);
    key_range range = find_bound(s, l, q, rank);
    /* What a warp has leaves quad by quad: a byte for each counts up to this lane. */
    float bound = number_of(range.low);
    uint32_t counts = 0;
#pragma unroll
    for (int i = 0; i < CHOICE_QUADS; i++)
        if (i < l.each && q.at[i] >= 0)
#pragma unroll
            for (int k = 0; k < 4; k++)
                counts += (uint32_t) !(q.value[i][k] < bound) << 8 * i;
    uint32_t sums = sum_lanes(counts), of_warp = __shfl_sync(~0U, sums, 31);
    sums -= counts;
    running_sum warps =
        sum_warps(s, 2, (of_warp & 0xFF) + (of_warp >> 8 & 0xFF) + (of_warp >> 16 & 0xFF) + (of_warp >> 24));
    uint32_t before = warps.before;
    range.within = warps.all;
#pragma unroll
    for (int i = 0; i < CHOICE_QUADS; i++) {
        if (i >= l.each)
            continue;
        uint32_t to = before + (sums >> 8 * i & 0xFF);
        if (counts >> 8 * i & 0xFF)
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (!(q.value[i][k] < bound)) {
                    if (KEPT)
                        s.values[to] = q.value[i][k];
                    s.held[to++] = (uint16_t)((first + 32 * i) * 4 + k);
                }
        before += of_warp >> 8 * i & 0xFF;
    }
    __syncthreads();
    if (bound == -INFINITY) { /* all are held, what stands past the end, too, as the last */
        range.low = CSA_NAN_KEY;
        while (l.value(s.held[range.within - 1]) >= l.all)
            range.within--;
    }
    return range;
}

/* The rank-th best of the held keys, which is one of the few in the range: warps rank them in turn. */
template <int THREADS, bool KEPT>
static __device__ __forceinline__ best_keys rank_few(choice_scratch<THREADS, KEPT> &s, const level &l, int held,
                                                     key_range range, uint32_t rank)
{
    uint32_t lane = threadIdx.x % 32, span = range.high - range.low;
#pragma unroll 1
    for (int i = threadIdx.x; i < held; i += THREADS) {
        uint32_t key = l.key(s, i);
        if (key - range.low <= span)
            s.few[atomicAdd(&s.few_count, 1U) % CHOICE_FEW] = key;
    }
    __syncthreads();
    uint32_t own = lane < range.within ? s.few[lane] : (uint32_t)CSA_NO_KEY;
    rank -= range.above;
#pragma unroll 1
    for (uint32_t of = threadIdx.x / 32; of < range.within; of += THREADS / 32) {
        uint32_t key = s.few[of], better = (uint32_t)__popc(__ballot_sync(~0U, own > key)),
                 equal = __ballot_sync(~0U, own == key);
        bool first = __ffs((int)equal) == (int)of + 1;
        if (lane == 0 && first && better < rank && rank <= better + (uint32_t)__popc(equal)) {
            s.best.threshold = key;
            s.best.share = rank - better;
        }
    }
    __syncthreads();
    return s.best;
}

/* Finds the rank-th best of the held keys. */
template <int THREADS, bool KEPT>
static __device__ __forceinline__ best_keys find_best(choice_scratch<THREADS, KEPT> &s, const level &l,
                                                      key_range range, uint32_t rank)
{
    int held = (int)range.within;
#pragma unroll 1
    for (;;) {
        narrow(s, range, rank, [&](auto visit) {
#pragma unroll 1
            for (int i = threadIdx.x; i < held; i += THREADS)
                visit(l.key(s, i));
        });
        if (range.low == range.high || range.within == 0)
            return {range.low, rank - range.above};
        if (range.within <= CHOICE_FEW)
            return rank_few(s, l, held, range, rank);
    }
}

/* Writes where the best of the held keys stand, in order, to `to`, which has room for `most`; how many they
 * are. */
template <int THREADS, bool KEPT, typename To>
static __device__ __forceinline__ int write_best(choice_scratch<THREADS, KEPT> &s, const level &l, int held,
                                                 best_keys best, To *to, uint32_t most)
{
    int each = (held + THREADS - 1) / THREADS, first = (int)threadIdx.x * each, end = min(first + each, held);
    uint32_t better = 0, ties = 0;
#pragma unroll 1
    for (int i = first; i < end; i++) {
        uint32_t key = l.key(s, i);
        better += key > best.threshold;
        ties += key == best.threshold;
    }
    running_sum sum = scan(s, 1, better | ties << 16); /* two sums at once */
    better = sum.before & 0xFFFF, ties = sum.before >> 16;
#pragma unroll 1
    for (int i = first; i < end; i++) {
        uint32_t key = l.key(s, i);
        bool tied = key == best.threshold;
        uint32_t place = better + min(ties, best.share);
        if (key < best.threshold || (tied && ties >= best.share) || place >= most)
            continue;
        to[place] = (To)l.value(s.held[i]);
        better += !tied;
        ties += tied;
    }
    __syncthreads();
    return (int)min((sum.all & 0xFFFF) + min(sum.all >> 16, best.share), most);
}

/* ---- The whole ---------------------------------------------------------------------------------- */

/* Writes the `rank` best of more regions than that, in order; rank <= THREADS if they do not fit the threads.
 */
template <int THREADS, bool KEPT, typename Ready>
static __device__ void choose_best(choice_scratch<THREADS, KEPT> &s, const row_scores &row, uint32_t rank,
                                   int64_t *entries, Ready ready)
{
    int shift = 0; /* scores of a key, as a power of two */
    while ((row.count - 1) >> shift >= CHOICE_VALUES * THREADS)
        shift += CSA_PEAK_SHIFT;
    level l = {};
    l.count = (((row.count - 1) >> shift) + 4) / 4;
#pragma unroll 1
    for (;; shift -= CSA_PEAK_SHIFT) {
        if (row.peaks && shift >= CSA_PEAK_SHIFT)
            l.values = {row.peaks, (row.count + CSA_PEAK - 1) / CSA_PEAK, shift - CSA_PEAK_SHIFT, row.aligned};
        else
            l.values = {row.scores, row.count, shift, row.aligned};
        l.all = ((row.count - 1) >> shift) + 1;
        l.each = (l.count + THREADS - 1) / THREADS;
        key_range reach = hold_values(s, l, rank, ready);
        int held = (int)reach.within;
        best_keys best = find_best(s, l, reach, rank);
        if (shift == 0) {
            write_best(s, l, held, best, entries, rank);
            return;
        }
        uint32_t *groups = s.groups[shift / CSA_PEAK_SHIFT % 2];
        best.share = rank;
        l.count = 2 * write_best(s, l, held, best, groups, 2 * THREADS);
        l.groups = groups;
    }
}

/* Writes a row's width + 1 columns: padding (-1), then the best `width` of the regions before the current one,
 * row.count (-1: no region at all), and the current one. ready() returns once the scores may be read and the
 * columns written. */
template <int THREADS, bool KEPT, typename Ready>
static __device__ void choose_list(choice_scratch<THREADS, KEPT> &s, const row_scores &row, int width,
                                   int64_t *entries, Ready ready)
{
    int current = row.count;
    if (current > width) {
        choose_best(s, row, (uint32_t)width, entries, ready);
        if (threadIdx.x == 0)
            entries[width] = current;
        return;
    }
    int padding = width - current; /* current = -1: the whole row */
    ready();
#pragma unroll 1
    for (int column = threadIdx.x; column <= width; column += THREADS)
        entries[column] = column < padding ? -1 : column - padding;
}

#endif
